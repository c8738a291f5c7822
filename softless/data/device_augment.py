"""Augmentation where the model is: a whole batch at a time, without a loop over images or a wait for the device.

    change   crop, flip, RandAugment     uint8 -> uint8
    finish   normalize, erase            uint8 -> float32

Every image draws its own crop, operations and amounts from one `torch.Generator` on the pixels' device.

RandAugment gives each image one of fifteen operations, or with probability 1/2 none, several times over. Images are
dealt into slots by a random permutation, and the slots of an operation lie side by side: so each operation is computed
once, on its own images alone, and each image has each operation with the same probability. Operations and amounts are
those of timm's "rand-m9-mstd0.5-inc1", the paper's.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from softless.data import device_color as color
from softless.data import device_shape as shape
from softless.data.augment import Augment

Pixels = UInt8[Tensor, "b 3 h w"]
Draws = Float[Tensor, "b"]
COLORS: dict[str, Callable[[Pixels, Draws, Draws], Pixels]] = {  # of pixels, level from 0 to 1, and sign
    "AutoContrast": lambda x, _level, _sign: color.autocontrast(x),
    "Equalize": lambda x, _level, _sign: color.equalize(x),
    "Invert": lambda x, _level, _sign: color.invert(x),
    "PosterizeIncreasing": lambda x, level, _sign: color.posterize(x, 4 - (4 * level).int()),
    "SolarizeIncreasing": lambda x, level, _sign: color.solarize(x, 256 - (256 * level).int()),
    "SolarizeAdd": lambda x, level, _sign: color.solarize_add(x, (110 * level).int()),
    "ColorIncreasing": lambda x, level, sign: color.color(x, _factor(level, sign)),
    "ContrastIncreasing": lambda x, level, sign: color.contrast(x, _factor(level, sign)),
    "BrightnessIncreasing": lambda x, level, sign: color.brightness(x, _factor(level, sign)),
    "SharpnessIncreasing": lambda x, level, sign: color.sharpness(x, _factor(level, sign)),
}
SHAPES: dict[str, Callable[[Draws, tuple[int, int]], shape.Maps]] = {  # of level times sign, and (height, width)
    "Rotate": lambda amount, size: shape.turns(30 * amount, size),
    "ShearX": lambda amount, _size: shape.shears(0.3 * amount, 0 * amount),
    "ShearY": lambda amount, _size: shape.shears(0 * amount, 0.3 * amount),
    "TranslateXRel": lambda amount, size: shape.moves(0.45 * size[1] * amount, 0 * amount),
    "TranslateYRel": lambda amount, size: shape.moves(0 * amount, 0.45 * size[0] * amount),
}


def change(pixels: Pixels, augment: Augment, generator: torch.Generator) -> Pixels:
    """Everything that is done to bytes."""
    if augment.crop == "resized":
        pixels = _resized(pixels, augment.area, generator)
    elif augment.crop == "padded":
        rows, columns = (
            torch.randint(
                -augment.padding, augment.padding + 1, (len(pixels),), generator=generator, device=pixels.device
            )
            for _ in range(2)
        )
        pixels = shape.shift(pixels, rows, columns)
    if augment.flip:
        pixels = shape.flip(pixels, _uniform(pixels, generator) < augment.flip)
    for _ in range(augment.operations):
        pixels = rand_augment(pixels, augment, generator)
    return pixels


def finish(pixels: Pixels, augment: Augment, generator: torch.Generator | None = None) -> Float[Tensor, "b 3 h w"]:
    """What a model sees: normalized and, with a generator, erased in places."""
    mean, std = (_constants(values, pixels.device)[:, None, None] for values in (augment.mean, augment.std))
    seen = (pixels / 255 - mean) / std
    if generator is None or not augment.erase:
        return seen
    aspect = _uniform(pixels, generator, *shape.ERASED_ASPECT)
    place = torch.stack([_uniform(pixels, generator) for _ in range(2)], -1)
    hole = shape.rectangles(_uniform(pixels, generator, *shape.ERASED), aspect, place, _size(pixels))
    hole &= (_uniform(pixels, generator) < augment.erase)[:, None, None]
    noise = torch.randn(seen.shape, generator=generator, device=seen.device)
    return torch.where(hole[:, None], noise, seen)


def rand_augment(pixels: Pixels, augment: Augment, generator: torch.Generator) -> Pixels:
    """One operation for half of the images."""
    count, device, kinds = len(pixels), pixels.device, len(COLORS) + len(SHAPES)
    each = -(-count // (2 * kinds))  # slots of an operation; as many slots in all leave an image as it is
    used = each * kinds
    slot = torch.rand(2 * used, generator=generator, device=device).argsort()[:count]  # of each image
    image = torch.zeros(2 * used, dtype=torch.int64, device=device).scatter(0, slot, torch.arange(count, device=device))
    normal = torch.randn(used, generator=generator, device=device)
    level = ((augment.magnitude + augment.magnitude_std * normal) / 10).clamp(0, 1)
    sign = torch.randint(0, 2, (used,), generator=generator, device=device).mul(2).sub(1).float()
    done = operate(pixels[image[:used]], level, sign, _constants(augment.mean, device).mul(255).round())
    return torch.where((slot < used)[:, None, None, None], done[slot.clamp(max=used - 1)], pixels)


def operate(pixels: Pixels, level: Draws, sign: Draws, fill: Float[Tensor, "3"]) -> Pixels:
    """The operations in the order of the tables, each on its equal share of the images; all shapes are one warp."""
    each = len(pixels) // (len(COLORS) + len(SHAPES))
    shares = zip(*(x.split(each) for x in (pixels, level, sign)), strict=True)
    colored = [do(*next(shares)) for do in COLORS.values()]
    maps = [do(levels * signs, _size(pixels)) for do, (_, levels, signs) in zip(SHAPES.values(), shares, strict=True)]
    return torch.cat([*colored, shape.warp(pixels[each * len(COLORS) :], torch.cat(maps), fill)])


def _resized(pixels: Pixels, area: tuple[float, float], generator: torch.Generator) -> Pixels:
    share, aspect = _uniform(pixels, generator, *area), _uniform(pixels, generator, *shape.ASPECT)
    place = torch.stack([_uniform(pixels, generator) for _ in range(2)], -1)
    maps = shape.crops(share, aspect, place, _size(pixels))
    return shape.warp(pixels, maps, torch.zeros(3, device=pixels.device), mode="bicubic")


def _constants(values: tuple[float, ...], device: torch.device) -> Float[Tensor, "c"]:
    """Written by the device: a copy from the host would wait for it."""
    return torch.stack([torch.full((), value, device=device) for value in values])


def _uniform(pixels: Tensor, generator: torch.Generator, low: float = 0.0, high: float = 1.0) -> Draws:
    return low + (high - low) * torch.rand(len(pixels), generator=generator, device=pixels.device)


def _factor(level: Draws, sign: Draws) -> Draws:
    return (1 + 0.9 * sign * level).clamp(min=0.1)


def _size(pixels: Tensor) -> tuple[int, int]:
    return pixels.shape[2], pixels.shape[3]
