"""Augmentation on a CUDA device: what the CPU computes, and never a wait for the device."""

import pytest
import torch

from softless.data.augment import Augment
from softless.data.device_augment import COLORS, SHAPES, change, finish, operate
from softless.data.loading import DeviceLoader
from softless.data.reading import Batch
from softless.data.sampler import ResumableSampler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),  # said once in a process
]

KINDS = len(COLORS) + len(SHAPES)


def test_each_operation_is_that_of_the_cpu():
    """To a gray level: a product may be contracted, and a place interpolated in another order."""
    x = torch.randint(0, 256, (4 * KINDS, 3, 32, 32), dtype=torch.uint8)
    level, sign, fill = (
        torch.rand(len(x)),
        torch.randint(0, 2, (len(x),)) * 2.0 - 1,
        torch.tensor([124.0, 116.0, 104.0]),
    )
    found = operate(*(part.cuda() for part in (x, level, sign, fill))).cpu()
    apart = (found.int() - operate(x, level, sign, fill).int()).abs()
    assert apart.max() <= 1
    assert (apart > 0).float().mean() < 0.01


@pytest.mark.parametrize("crop", ["resized", "padded"])
def test_nothing_waits_for_the_device(crop):
    x = torch.randint(0, 256, (256, 3, 32, 32), dtype=torch.uint8, device="cuda")
    augment, generator = Augment(crop=crop), torch.Generator("cuda").manual_seed(0)
    finish(change(x, augment, generator), augment, generator)
    torch.cuda.set_sync_debug_mode("error")
    try:
        seen = finish(change(x, augment, generator), augment, generator)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert seen.shape == x.shape


def test_a_seed_gives_the_same_pixels_again():
    data = Batch(
        torch.randint(0, 256, (1000, 3, 32, 32), dtype=torch.uint8, device="cuda"),
        torch.zeros(1000, dtype=torch.int64, device="cuda"),
        torch.arange(1000, device="cuda"),
    )

    def epoch() -> list[Batch]:
        sampler = ResumableSampler(1000, seed=0)
        return list(DeviceLoader(data, batch=64, sampler=sampler, train=True, augment=Augment(crop="padded")))

    for first, again in zip(epoch(), epoch(), strict=True):
        assert torch.equal(first.pixels, again.pixels)
        assert torch.equal(first.ids, again.ids)
