"""Each color operation on a batch is what Pillow does to each image, level for level."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps

from softless.data import device_augment as color
from softless.data.device_augment import COLORS
from tests.data.pictures import pixels


def batch(kind: str) -> torch.Tensor:
    """Pictures, noise, flat and nearly flat images, extremes."""
    shape = (5, 3, 9, 11)
    if kind == "pictures":
        return torch.stack([torch.from_numpy(pixels(seed, 9, 11).transpose(2, 0, 1).copy()) for seed in range(5)])
    if kind == "flat":
        return torch.arange(0, 250, 50, dtype=torch.uint8).view(5, 1, 1, 1).expand(shape).clone()
    top = {"noise": 256, "two levels": 2}[kind]
    return torch.randint(0, top, shape, dtype=torch.uint8) * (255 if top == 2 else 1)


invert = partial(COLORS["Invert"], _level=None, _sign=None)
KINDS = ("pictures", "noise", "flat", "two levels")
AMOUNTS = torch.tensor([0.1, 0.55, 1.0, 1.45, 1.9])


def image_of(x: torch.Tensor) -> Image.Image:
    return Image.fromarray(x.permute(1, 2, 0).numpy())


def each(x: torch.Tensor, operation) -> np.ndarray:
    """One image after the other, by Pillow: [B, 3, H, W]."""
    return np.stack([np.asarray(operation(image_of(one), i)).transpose(2, 0, 1) for i, one in enumerate(x)])


def levels_apart(found: torch.Tensor, expected: np.ndarray) -> int:
    assert found.dtype == torch.uint8
    return int(np.abs(found.numpy().astype(int) - expected.astype(int)).max())


ENHANCE = {
    "brightness": ImageEnhance.Brightness,
    "contrast": ImageEnhance.Contrast,
    "color": ImageEnhance.Color,
    "sharpness": ImageEnhance.Sharpness,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ENHANCE)
def test_enhancements_match_pillow(name, kind):
    """Both truncate one float32 product; a compiler may contract it, which is one level where it lies on an integer."""
    x = batch(kind)
    found = getattr(color, name)(x, AMOUNTS)
    expected = each(x, lambda image, i: ENHANCE[name](image).enhance(AMOUNTS[i].item()))
    assert levels_apart(found, expected) <= 1
    assert (found.numpy() == expected).mean() > 0.99


@pytest.mark.parametrize("kind", KINDS)
def test_lookup_tables_match_pillow(kind):
    x = batch(kind)
    amounts = torch.tensor([1, 2, 4, 7, 8])
    pairs = {
        "posterize": (color.posterize(x, amounts), lambda image, i: ImageOps.posterize(image, int(amounts[i]))),
        "solarize": (color.solarize(x, 32 * amounts), lambda image, i: ImageOps.solarize(image, 32 * int(amounts[i]))),
        "invert": (invert(x), lambda image, _: ImageOps.invert(image)),
        "equalize": (color.equalize(x), lambda image, _: ImageOps.equalize(image)),
    }
    for name, (found, operation) in pairs.items():
        assert levels_apart(found, each(x, operation)) == 0, name


def spread(channel: np.ndarray) -> np.ndarray:
    low, high = int(channel.min()), int(channel.max())
    if high == low:
        return channel
    return np.array([[(int(value) - low) * 255 // (high - low) for value in row] for row in channel], np.uint8)


@pytest.mark.parametrize("kind", KINDS)
def test_autocontrast_spreads_each_channel(kind):
    """Exact here; Pillow's table is of truncated floats, and may lie a level below."""
    x = batch(kind)
    found = color.autocontrast(x)
    assert np.array_equal(found.numpy(), np.stack([[spread(channel) for channel in image] for image in x.numpy()]))
    assert levels_apart(found, each(x, lambda image, _: ImageOps.autocontrast(image))) <= 1


def test_solarize_add_lightens_dark_pixels():
    x = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(3, 3, 16, 16)
    found = color.solarize_add(x, torch.tensor([0, 60, 110]))
    for i, added in enumerate((0, 60, 110)):
        expected = [min(255, value + added) if value < 128 else value for value in range(256)]
        assert found[i, 0].flatten().tolist() == expected


def test_posterize_to_no_bits_is_black_and_to_all_bits_is_the_image():
    x = batch("noise")
    assert color.posterize(x, torch.zeros(5, dtype=torch.int64)).sum() == 0
    assert torch.equal(color.posterize(x, torch.full((5,), 8)), x)
    assert torch.equal(color.solarize(x, torch.full((5,), 256)), x)


def test_sharpness_leaves_an_image_too_small_to_smooth():
    x = torch.randint(0, 256, (2, 3, 2, 9), dtype=torch.uint8)
    assert torch.equal(color.sharpness(x, torch.tensor([0.1, 1.9])), x)


@given(data=st.data())
def test_an_operation_on_an_image_does_not_depend_on_its_batch(data):
    x = torch.randint(0, 256, (4, 3, 5, 6), dtype=torch.uint8)
    amount = torch.tensor(data.draw(st.lists(st.floats(0.125, 1.875, width=32), min_size=4, max_size=4)))
    one = slice(data.draw(st.integers(0, 3)), None)
    for name in ENHANCE:
        whole = getattr(color, name)(x, amount)
        assert torch.equal(whole[one], getattr(color, name)(x[one], amount[one]))
    for operation in (color.equalize, color.autocontrast, invert):
        assert torch.equal(operation(x)[one], operation(x[one]))
