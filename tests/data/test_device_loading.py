"""Batches of a set on the device are those of the sampler, and resuming within a group changes no pixel."""

import pytest
import torch

from softless.data.augment import PLAIN, Augment
from softless.data.device_augment import finish
from softless.data.loading import AHEAD, DeviceLoader
from softless.data.reading import Batch
from softless.data.sampler import ResumableSampler
from softless.errors import ArgumentError

COUNT = 203
HEAVY = Augment(crop="padded", padding=2)


@pytest.fixture(scope="module")
def data():
    pixels = torch.randint(0, 256, (COUNT, 3, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Batch(pixels, torch.arange(COUNT) % 5, 1000 + torch.arange(COUNT))


def batches(data, *, state=None, rank=0, ranks=1, batch=10, train=True, augment=HEAVY, repeats=1):
    sampler = ResumableSampler(COUNT, seed=3, rank=rank, ranks=ranks, shuffle=train, repeats=repeats)
    sampler.load_state_dict(state or {"epoch": 1, "position": 0})
    return DeviceLoader(data, batch=batch, sampler=sampler, train=train, augment=augment)


def same(a, b) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) for one, two in zip(a, b, strict=True) for x, y in zip(one, two, strict=True)
    )


def test_an_epoch_follows_the_order_of_the_sampler(data):
    loader = batches(data)
    order = list(loader.sampler)
    found = list(loader)
    assert len(found) == len(batches(data)) == 20 > AHEAD
    assert torch.cat([batch.ids for batch in found]).tolist() == [1000 + i for i in order[:200]]
    assert torch.cat([batch.labels for batch in found]).tolist() == [i % 5 for i in order[:200]]
    assert {tuple(batch.pixels.shape) for batch in found} == {(10, 3, 6, 6)}
    assert loader.sampler.state_dict() == {"epoch": 1, "position": 200}


@pytest.mark.parametrize("ranks", [1, 2])
def test_resuming_after_any_batch_gives_the_other_batches_bit_for_bit(data, ranks):
    whole = list(batches(data, rank=ranks - 1, ranks=ranks))
    for done in range(len(whole) + 1):
        first = batches(data, rank=ranks - 1, ranks=ranks)
        kept = [batch for _, batch in zip(range(done), first, strict=False)]
        rest = list(batches(data, rank=ranks - 1, ranks=ranks, state=first.sampler.state_dict()))
        assert same(kept + rest, whole)


def test_three_ranks_resume_the_position_of_two(data):
    before = [batches(data, rank=rank, ranks=2) for rank in range(2)]
    passed = [batch.ids for loader in before for _, batch in zip(range(3), loader, strict=False)]
    (position,) = {loader.sampler.position for loader in before}
    state = {"epoch": 1, "position": position}
    later = [batch.ids for rank in range(3) for batch in batches(data, rank=rank, ranks=3, state=state)]
    seen = torch.cat(passed + later).tolist()
    assert len(seen) == len(set(seen)) == 60 + 3 * (143 // 3 // 10 * 10)


def test_epochs_and_ranks_are_augmented_differently(data):
    first = list(batches(data))
    assert not same(first, list(batches(data, state={"epoch": 2, "position": 0})))
    still = {int(i): p for batch in first for i, p in zip(batch.ids, batch.pixels, strict=True)}
    other = list(batches(data, rank=1, ranks=2))
    alike = [
        torch.equal(still[int(i)], p) for b in other for i, p in zip(b.ids, b.pixels, strict=True) if int(i) in still
    ]
    assert sum(alike) < len(alike) / 2


def test_a_test_epoch_has_every_image_once_and_normalized(data):
    found = list(batches(data, train=False))
    assert torch.cat([batch.ids for batch in found]).tolist() == data.ids.tolist()
    assert torch.equal(torch.cat([batch.pixels for batch in found]), finish(data.pixels, HEAVY))
    assert len(found[-1].ids) == 3


def test_repeats_of_an_image_differ(data):
    found = list(batches(data, repeats=2, batch=20))
    pixels = torch.cat([batch.pixels for batch in found]).unflatten(0, (-1, 2))
    assert (pixels[:, 0] != pixels[:, 1]).flatten(1).any(1).float().mean() > 0.9


def test_a_batch_or_sampler_that_does_not_fit_is_refused(data):
    says = (
        "a batch of 102 on each of 2 ranks needs 204 images, and an epoch has 203: set a batch of at most 203 over all"
    )
    with pytest.raises(ArgumentError, match=says):
        batches(data, ranks=2, batch=102)
    with pytest.raises(ArgumentError, match="made for 7 images, and the set has 203"):
        DeviceLoader(data, batch=1, sampler=ResumableSampler(7, seed=0), train=True, augment=PLAIN)
