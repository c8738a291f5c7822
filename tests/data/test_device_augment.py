"""Augmentation of a batch: each image as a plain computation on it alone says, and as often as it should."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from timm.data import auto_augment

from softless.data import device_augment as shape
from softless.data.augment import IMAGENET_MEAN, IMAGENET_STD, PLAIN, Augment
from softless.data.device_augment import COLORS, SHAPES, change, finish, operate, rand_augment
from tests.data.pictures import pixels

NAMES = (*COLORS, *SHAPES)
FILL = torch.tensor([124.0, 116.0, 104.0])


def pictures(count: int, height: int = 12, width: int = 10) -> torch.Tensor:
    return torch.stack([torch.from_numpy(pixels(s, height, width).transpose(2, 0, 1).copy()) for s in range(count)])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_operations_are_those_of_timm():
    assert set(NAMES) == set(auto_augment._RAND_INCREASING_TRANSFORMS)


def bilinear(image: np.ndarray, x: float, y: float, fill: np.ndarray) -> np.ndarray:
    """Value between the centers of pixels, `fill` outside; image [H, W, 3]."""
    height, width = image.shape[:2]
    total = np.zeros(3)
    left, top = math.floor(x - 0.5), math.floor(y - 0.5)
    for row, column in ((top, left), (top, left + 1), (top + 1, left), (top + 1, left + 1)):
        weight = (1 - abs(x - 0.5 - column)) * (1 - abs(y - 0.5 - row))
        inside = 0 <= row < height and 0 <= column < width
        total += weight * (image[row, column] if inside else fill)
    return total


@given(data=st.data())
def test_warp_interpolates_bilinearly_at_the_mapped_place(data):
    x = pictures(2, 7, 6)
    numbers = data.draw(st.lists(st.floats(-1.5, 1.5, width=32), min_size=12, max_size=12))
    maps = torch.tensor(numbers).view(2, 2, 3) * torch.tensor([1.0, 1.0, 4.0])
    found = shape.warp(x, maps, FILL)
    for i in range(2):
        image = x[i].permute(1, 2, 0).numpy().astype(float)
        (a, b, c), (d, e, f) = maps[i].double().tolist()
        for row in range(7):
            for column in range(6):
                u, v = column + 0.5, row + 0.5
                expected = bilinear(image, a * u + b * v + c, d * u + e * v + f, FILL.double().numpy())
                assert np.abs(found[i, :, row, column].numpy() - expected).max() <= 0.5 + 1e-2


def timms(name: str, image: Image.Image, level: float, sign: float) -> np.ndarray:
    """The operation as timm would do it with this level and this sign."""
    hparams = {"translate_pct": 0.45}
    args = auto_augment.LEVEL_TO_ARG[name]
    before, random.random = random.random, lambda: 1.0 if sign < 0 else 0.0
    try:
        arguments = args(10 * level, hparams) if args else ()
    finally:
        random.random = before
    options = {"fillcolor": tuple(FILL.int().tolist()), "resample": Image.Resampling.BILINEAR}
    return np.asarray(auto_augment.NAME_TO_OP[name](image, *arguments, **options)).transpose(2, 0, 1)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("level", [0.0, 0.3, 0.9])
def test_each_operation_matches_timm_on_each_image(level, sign):
    """Colors to a level; shapes away from the border, where Pillow interpolates with nothing and we with the fill."""
    x = pictures(2 * len(NAMES), 20, 24)
    found = operate(x, torch.full((len(x),), level), torch.full((len(x),), sign), FILL)
    for i in range(len(x)):
        name = NAMES[i // 2]
        expected = timms(name, Image.fromarray(x[i].permute(1, 2, 0).numpy()), level, sign)
        apart = np.abs(found[i].numpy().astype(int) - expected.astype(int))
        if name in COLORS:
            assert apart.max() <= 1, name
        else:
            assert (apart.max(0) <= 1).mean() > 0.9, name


def test_a_padded_crop_is_a_crop_of_the_padded_image():
    x = pictures(64)
    rows, columns = torch.randint(-3, 4, (2, 64))
    found = shape.shift(x, rows, columns)
    for i in range(64):
        padded = np.pad(x[i].numpy(), ((0, 0), (3, 3), (3, 3)))
        top, left = 3 + int(rows[i]), 3 + int(columns[i])
        assert np.array_equal(found[i].numpy(), padded[:, top : top + 12, left : left + 10])


def test_crops_lie_inside_and_have_their_share_and_aspect():
    share, aspect = torch.rand(500) * 0.7 + 0.05, torch.rand(500) * 0.5 - 0.25
    maps = shape.crops(share, aspect, torch.rand(500, 2), (12, 10))
    wide, tall, left, top = maps[:, 0, 0], maps[:, 1, 1], maps[:, 0, 2], maps[:, 1, 2]
    assert bool(((left >= 0) & (left + 10 * wide <= 10.001) & (top >= 0) & (top + 12 * tall <= 12.001)).all())
    whole = (wide < 1) & (tall < 1)
    assert whole.float().mean() > 0.8
    torch.testing.assert_close((wide * tall)[whole], share[whole])
    torch.testing.assert_close((wide / tall).log()[whole], aspect[whole])
    assert maps[:, 0, 1].abs().max() == maps[:, 1, 0].abs().max() == 0


def test_a_crop_of_everything_is_the_image():
    x, one = pictures(3), torch.ones(3)
    maps = shape.crops(one, 0 * one, torch.rand(3, 2), (12, 10))
    assert torch.equal(shape.warp(x, maps, torch.zeros(3), "bicubic"), x)


def test_flipping_is_from_left_to_right():
    x = pictures(4)
    found = shape.flip(x, torch.tensor([True, False, True, False]))
    assert torch.equal(found[0], x[0].flip(-1))
    assert torch.equal(found[1], x[1])


@given(data=st.data())
def test_a_rectangle_has_its_share_and_lies_anywhere_it_fits(data):
    share = torch.tensor([data.draw(st.floats(0.02, 1 / 3))])
    aspect = torch.tensor([data.draw(st.floats(*shape.ERASED_ASPECT))])
    place = torch.tensor([[data.draw(st.floats(0, 0.99)), data.draw(st.floats(0, 0.99))]])
    hole = shape.rectangles(share, aspect, place, (40, 40))[0]
    rows, columns = hole.any(1).nonzero().flatten(), hole.any(0).nonzero().flatten()
    assert int(hole.sum()) == len(rows) * len(columns)  # a rectangle
    tall, wide = (share.sqrt() * (sign * aspect / 2).exp() * 40 for sign in (1, -1))
    assert len(rows) == min(40, round(tall.item()))
    assert len(columns) == min(40, round(wide.item()))


def test_finish_normalizes_pixels():
    x = pictures(3)
    found = finish(x, Augment())
    mean, std = torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD)
    for i in range(3):
        expected = ((x[i].double().permute(1, 2, 0) / 255 - mean) / std).permute(2, 0, 1)
        torch.testing.assert_close(found[i].double(), expected, atol=1e-6, rtol=1e-6)
    assert found.dtype == torch.float32


def test_erasing_fills_rectangles_with_noise_at_the_given_rate():
    x = torch.full((2000, 3, 10, 10), 7, dtype=torch.uint8)
    plain, found = finish(x, Augment()), finish(x, Augment(erase=0.25), generator())
    changed = (found != plain).any(1)  # [B, H, W]
    erased = changed.flatten(1).any(1)
    assert abs(erased.float().mean() - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 2000)
    assert 0.02 < changed[erased].float().mean() < 1 / 3
    noise = found[changed[:, None].expand_as(found)]
    assert abs(noise.mean()) < 0.05
    assert abs(noise.std() - 1) < 0.05
    assert torch.equal(found[~erased], plain[~erased])


def test_every_image_has_every_operation_equally_often(monkeypatch):
    """Which operation an image got is written into its pixels."""
    for number, name in enumerate(NAMES, 1):
        if name in COLORS:
            monkeypatch.setitem(COLORS, name, lambda x, _level, _sign, number=number: torch.full_like(x, number))
        else:
            monkeypatch.setitem(SHAPES, name, lambda a, _size, number=number: shape.moves(number + 0 * a, 0 * a))
    monkeypatch.setattr(
        shape, "warp", lambda x, maps, _fill: maps[:, 0, 2].to(torch.uint8).view(-1, 1, 1, 1).expand_as(x)
    )
    draws, counts = generator(1), torch.zeros(7, 16)
    for _ in range(1000):
        found = rand_augment(torch.zeros(7, 3, 1, 1, dtype=torch.uint8), Augment(), draws)
        counts[torch.arange(7), found[:, 0, 0, 0].long()] += 1
    share = counts / 1000
    assert abs(share[:, 0] - 1 / 2).max() < 4.5 * math.sqrt(1 / 4 / 1000)
    assert abs(share[:, 1:] - 1 / 30).max() < 4.5 * math.sqrt(1 / 30 / 1000)


def test_levels_follow_magnitude_and_its_standard_deviation(monkeypatch):
    seen = []
    monkeypatch.setattr(shape, "operate", lambda x, level, sign, fill: seen.append((level, sign, fill)) or x)
    rand_augment(torch.zeros(6000, 3, 1, 1, dtype=torch.uint8), Augment(magnitude=5.0, magnitude_std=1.0), generator())
    ((level, sign, fill),) = seen
    assert abs(level.mean() - 0.5) < 0.01
    assert abs(level.std() - 0.1) < 0.01
    assert abs(sign.mean()) < 0.1
    assert set(sign.tolist()) == {-1.0, 1.0}
    assert fill.tolist() == [124.0, 116.0, 104.0]


@pytest.mark.parametrize("crop", ["resized", "padded", "none"])
@pytest.mark.parametrize("count", [1, 2, 31])
def test_everything_is_drawn_from_the_generator(crop, count):
    x, augment = pictures(count, 16, 16), Augment(crop=crop)
    torch.manual_seed(0)
    first = finish(change(x, augment, (draws := generator(3))), augment, draws)
    torch.manual_seed(1)
    again = finish(change(x, augment, (draws := generator(3))), augment, draws)
    other = finish(change(x, augment, (draws := generator(4))), augment, draws)
    assert torch.equal(first, again)
    assert first.shape == (count, 3, 16, 16)
    assert not torch.equal(first, other)


def test_the_plain_augmentation_changes_no_pixel():
    x = pictures(5)
    assert torch.equal(change(x, PLAIN, generator()), x)


def test_half_of_the_images_are_flipped():
    x = torch.arange(2, dtype=torch.uint8).view(1, 1, 1, 2).expand(2000, 3, 1, 2)
    found = change(x, Augment(crop="none", operations=0), generator())[:, 0, 0, 0]
    assert abs(found.float().mean() - 0.5) < 4 * math.sqrt(0.25 / 2000)
