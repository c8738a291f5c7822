"""Augment a batch of images on the device, with no loop over images and no wait for the device.

    change   crop, flip, RandAugment     uint8 -> uint8
    finish   normalize, erase            uint8 -> float32

Each image draws its own crop, operations and amounts from one `torch.Generator` on the device of the pixels.

RandAugment changes each image several times in a row, each time by one of fifteen operations, or with probability 1/2
by none. A random permutation deals the images into slots, and the slots of one operation lie side by side. So each
operation runs once, on its own images only, and each image gets each operation with the same probability. The
operations and their amounts are those of timm's "rand-m9-mstd0.5-inc1", which the paper uses.

The color operations do to a batch what Pillow does to one image, each image with its own amount. Four of them blend an
image with a poorer one, as `PIL.ImageEnhance` does:

    poorer + amount (image - poorer)        brightness  black             sharpness  smoothed
                                            contrast    its mean gray     color      its grays

The operations that move pixels use a *map* [B, 2, 3]: for each point of the new image it gives the point of the old
image to read, in pixels from the upper left corner:

    x_old = a x + b y + c        y_old = d x + e y + f

Places are pixel centers, x + 1/2, and values between them are interpolated. Places outside the image read `fill`.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped, UInt8
from torch import Tensor

from softless.data.augment import Augment

Pixels = UInt8[Tensor, "b 3 h w"]
AnyPixels = Shaped[Tensor, "b c h w"]
Amounts = Float[Tensor, "b"]
Levels = Int[Tensor, "b"]
Maps = Float[Tensor, "b 2 3"]
Size = Sequence[int]  # height, width

ASPECT = (math.log(3 / 4), math.log(4 / 3))  # of a resized crop
ERASED, ERASED_ASPECT = (0.02, 1 / 3), (math.log(0.3), math.log(1 / 0.3))


def brightness(pixels: Pixels, amount: Amounts) -> Pixels:
    return _blend(torch.zeros_like(pixels), pixels, amount)


def contrast(pixels: Pixels, amount: Amounts) -> Pixels:
    gray = _gray(pixels)
    count = gray[0].numel()
    mean = (2 * gray.sum((1, 2, 3), keepdim=True) + count) // (2 * count)  # [b, 1, 1, 1], rounded
    return _blend(mean, pixels, amount)


def color(pixels: Pixels, amount: Amounts) -> Pixels:
    return _blend(_gray(pixels), pixels, amount)


def sharpness(pixels: Pixels, amount: Amounts) -> Pixels:
    """Blend with the weighted mean of 3 x 3 neighbors; the middle counts 5 of 13, and the border stays as it is."""
    if min(pixels.shape[2:]) < 3:
        return pixels
    values, poorer = pixels.float(), pixels.clone()
    around = F.avg_pool2d(values, 3, 1, divisor_override=1)  # a sum
    poorer[:, :, 1:-1, 1:-1] = ((around + 4 * values[:, :, 1:-1, 1:-1]) / 13 + 0.5).to(torch.uint8)
    return _blend(poorer, pixels, amount)


def posterize(pixels: Pixels, bits: Levels) -> Pixels:
    """Keep the upper bits of each value."""
    return pixels & (256 - (256 >> bits)).to(torch.uint8)[:, None, None, None]


def solarize(pixels: Pixels, threshold: Levels) -> Pixels:
    """Invert the values at or above a threshold."""
    return torch.where(pixels < threshold[:, None, None, None], pixels, 255 - pixels)


def solarize_add(pixels: Pixels, added: Levels) -> Pixels:
    """Lighten the values that are darker than gray."""
    lighter = (pixels + added[:, None, None, None]).clamp(max=255).to(torch.uint8)
    return torch.where(pixels < 128, lighter, pixels)


def autocontrast(pixels: Pixels) -> Pixels:
    """Spread each channel from 0 to 255."""
    low, high = (extreme(pixels, (2, 3), keepdim=True).int() for extreme in (torch.amin, torch.amax))  # [b, 3, 1, 1]
    spread = (pixels.int() - low) * 255 // (high - low).clamp(min=1)
    return torch.where(high > low, spread, pixels).to(torch.uint8)


def equalize(pixels: Pixels) -> Pixels:
    """Make the levels of each channel equally common.

    Level x becomes (step / 2 + pixels below x) / step, with a step of 1/255 of the pixels below the highest level.
    """
    rows = pixels.flatten(2).flatten(0, 1)  # [3b, h w]
    levels = torch.arange(256, dtype=torch.uint8, device=pixels.device).repeat(len(rows), 1)
    below = torch.searchsorted(rows.sort(-1).values, levels)  # [3b, 256]
    step = below.gather(1, rows.amax(-1, keepdim=True).long()) // 255
    table = ((step // 2 + below) // step.clamp(min=1)).clamp(max=255)
    equal = torch.where(step > 0, table, levels).gather(1, rows.long())
    return equal.to(torch.uint8).view_as(pixels)


def flip(pixels: AnyPixels, chosen: Bool[Tensor, "b"]) -> AnyPixels:
    """Flip the chosen images from left to right."""
    return torch.where(chosen[:, None, None, None], pixels.flip(-1), pixels)


def shift(pixels: AnyPixels, rows: Int[Tensor, "b"], columns: Int[Tensor, "b"]) -> AnyPixels:
    """Read pixel (y, x) from (y + rows, x + columns), and 0 beyond the border: a crop of the padded image."""
    height, width = pixels.shape[2:]
    y = rows[:, None] + torch.arange(height, device=pixels.device)  # [b, h]
    x = columns[:, None] + torch.arange(width, device=pixels.device)  # [b, w]
    inside = ((y >= 0) & (y < height))[:, :, None] & ((x >= 0) & (x < width))[:, None, :]
    place = y.clamp(0, height - 1)[:, :, None] * width + x.clamp(0, width - 1)[:, None, :]  # [b, h, w]
    moved = pixels.flatten(2).gather(2, place.flatten(1)[:, None].expand(-1, pixels.shape[1], -1))
    return torch.where(inside[:, None], moved.view_as(pixels), 0)


def warp(pixels: AnyPixels, maps: Maps, fill: Float[Tensor, "c"], mode: str = "bilinear") -> AnyPixels:
    """Return the images as seen through their maps."""
    height, width = pixels.shape[2:]
    y, x = (torch.arange(side, device=pixels.device) + 0.5 for side in (height, width))
    by_x, by_y, start = maps[..., None, None].unbind(2)  # each [b, 2, 1, 1]; not a product of matrices: TF32 may be on
    x_old, y_old = (by_x * x + by_y * y[:, None] + start).unbind(1)  # each [b, h, w]
    places, shade = torch.stack([2 * x_old / width - 1, 2 * y_old / height - 1], -1), fill[:, None, None]
    seen = F.grid_sample(pixels.float() - shade, places, mode=mode, align_corners=False) + shade
    return seen.round().clamp(0, 255).to(pixels.dtype)


def crops(share: Amounts, log_aspect: Amounts, place: Float[Tensor, "b 2"], size: Size) -> Maps:
    """Return maps of crops with this share of the area, cut to fit; a place from 0 to 1 is relative to the room."""
    height, width = size
    tall = ((share / log_aspect.exp()).sqrt()).clamp(max=1)
    wide = ((share * log_aspect.exp()).sqrt()).clamp(max=1)
    zero = torch.zeros_like(share)
    return _maps(wide, zero, place[:, 1] * (1 - wide) * width, zero, tall, place[:, 0] * (1 - tall) * height)


def shears(along_x: Amounts, along_y: Amounts) -> Maps:
    zero, one = torch.zeros_like(along_x), torch.ones_like(along_x)
    return _maps(one, along_x, zero, along_y, one, zero)


def moves(by_x: Amounts, by_y: Amounts) -> Maps:
    """Return maps that move an image by these numbers of pixels."""
    zero, one = torch.zeros_like(by_x), torch.ones_like(by_x)
    return _maps(one, zero, by_x, zero, one, by_y)


def turns(degrees: Amounts, size: Size) -> Maps:
    """Return maps that turn an image counterclockwise around its middle."""
    middle_y, middle_x = size[0] / 2, size[1] / 2
    cos, sin = torch.deg2rad(degrees).cos(), torch.deg2rad(degrees).sin()
    x = middle_x - cos * middle_x + sin * middle_y
    y = middle_y - sin * middle_x - cos * middle_y
    return _maps(cos, -sin, x, sin, cos, y)


def rectangles(share: Amounts, log_aspect: Amounts, place: Float[Tensor, "b 2"], size: Size) -> Bool[Tensor, "b h w"]:
    """Return True inside rectangles with this share of the area; a place from 0 to 1 is relative to the room."""
    inside = []
    for axis, stretch in ((0, log_aspect / 2), (1, -log_aspect / 2)):
        side = size[axis]
        long = (share.sqrt() * stretch.exp() * side).round().clamp(max=side)  # [b]
        first = (place[:, axis] * (side - long + 1)).floor()
        at = torch.arange(side, device=share.device)
        inside.append((at >= first[:, None]) & (at < (first + long)[:, None]))
    return inside[0][:, :, None] & inside[1][:, None, :]


COLORS: dict[str, Callable[[Pixels, Amounts, Amounts], Pixels]] = {  # of pixels, level from 0 to 1, and sign
    "AutoContrast": lambda x, _level, _sign: autocontrast(x),
    "Equalize": lambda x, _level, _sign: equalize(x),
    "Invert": lambda x, _level, _sign: 255 - x,
    "PosterizeIncreasing": lambda x, level, _sign: posterize(x, 4 - (4 * level).int()),
    "SolarizeIncreasing": lambda x, level, _sign: solarize(x, 256 - (256 * level).int()),
    "SolarizeAdd": lambda x, level, _sign: solarize_add(x, (110 * level).int()),
    "ColorIncreasing": lambda x, level, sign: color(x, _factor(level, sign)),
    "ContrastIncreasing": lambda x, level, sign: contrast(x, _factor(level, sign)),
    "BrightnessIncreasing": lambda x, level, sign: brightness(x, _factor(level, sign)),
    "SharpnessIncreasing": lambda x, level, sign: sharpness(x, _factor(level, sign)),
}
SHAPES: dict[str, Callable[[Amounts, Size], Maps]] = {  # of level times sign, and (height, width)
    "Rotate": lambda amount, size: turns(30 * amount, size),
    "ShearX": lambda amount, _size: shears(0.3 * amount, 0 * amount),
    "ShearY": lambda amount, _size: shears(0 * amount, 0.3 * amount),
    "TranslateXRel": lambda amount, size: moves(0.45 * size[1] * amount, 0 * amount),
    "TranslateYRel": lambda amount, size: moves(0 * amount, 0.45 * size[0] * amount),
}


def change(pixels: Pixels, augment: Augment, generator: torch.Generator) -> Pixels:
    """Crop, flip and apply RandAugment."""
    if augment.crop == "resized":
        share, aspect = _uniform(pixels, generator, *augment.area), _uniform(pixels, generator, *ASPECT)
        maps = crops(share, aspect, _places(pixels, generator), pixels.shape[2:])
        pixels = warp(pixels, maps, torch.zeros(3, device=pixels.device), mode="bicubic")
    elif augment.crop == "padded":
        most, count, device = augment.padding, len(pixels), pixels.device
        rows, columns = (torch.randint(-most, most + 1, (count,), generator=generator, device=device) for _ in range(2))
        pixels = shift(pixels, rows, columns)
    if augment.flip:
        pixels = flip(pixels, _uniform(pixels, generator) < augment.flip)
    for _ in range(augment.operations):
        pixels = rand_augment(pixels, augment, generator)
    return pixels


def normalize(pixels: Pixels, *statistics: tuple[float, ...]) -> Float[Tensor, "b 3 h w"]:
    """Subtract the mean of each channel, and divide by the standard deviation; both count in shares of 255."""
    mean, std = (_constants(values, pixels.device)[:, None, None] for values in statistics)
    return (pixels / 255 - mean) / std


def finish(pixels: Pixels, augment: Augment, generator: torch.Generator | None = None) -> Float[Tensor, "b 3 h w"]:
    """Normalize pixels for a model and, with a generator, erase random rectangles."""
    seen = normalize(pixels, augment.mean, augment.std)
    if generator is None or not augment.erase:
        return seen
    aspect, place = _uniform(pixels, generator, *ERASED_ASPECT), _places(pixels, generator)
    hole = rectangles(_uniform(pixels, generator, *ERASED), aspect, place, pixels.shape[2:])
    hole &= (_uniform(pixels, generator) < augment.erase)[:, None, None]
    noise = torch.randn(seen.shape, generator=generator, device=seen.device)
    return torch.where(hole[:, None], noise, seen)


def rand_augment(pixels: Pixels, augment: Augment, generator: torch.Generator) -> Pixels:
    """Apply one operation to half of the images."""
    count, device, kinds = len(pixels), pixels.device, len(COLORS) + len(SHAPES)
    used = kinds * -(-count // (2 * kinds))  # slots with an operation; equally many slots leave an image as it is
    slot = torch.rand(2 * used, generator=generator, device=device).argsort()[:count]  # of each image
    image = torch.zeros(2 * used, dtype=torch.int64, device=device).scatter(0, slot, torch.arange(count, device=device))
    normal = torch.randn(used, generator=generator, device=device)
    level = ((augment.magnitude + augment.magnitude_std * normal) / 10).clamp(0, 1)
    sign = torch.randint(0, 2, (used,), generator=generator, device=device).mul(2).sub(1).float()
    changed = operate(pixels[image[:used]], level, sign, _constants(augment.mean, device).mul(255).round())
    return torch.where((slot < used)[:, None, None, None], changed[slot.clamp(max=used - 1)], pixels)


def operate(pixels: Pixels, level: Amounts, sign: Amounts, fill: Float[Tensor, "3"]) -> Pixels:
    """Apply each operation of the tables, in order, to an equal share of the images; one warp serves all SHAPES."""
    share = len(pixels) // (len(COLORS) + len(SHAPES))
    shares = zip(*(x.split(share) for x in (pixels, level, sign)), strict=True)
    colored = [do(*next(shares)) for do in COLORS.values()]
    size = pixels.shape[2:]
    maps = [do(levels * signs, size) for do, (_, levels, signs) in zip(SHAPES.values(), shares, strict=True)]
    return torch.cat([*colored, warp(pixels[share * len(COLORS) :], torch.cat(maps), fill)])


def _blend(poorer: Tensor, pixels: Pixels, amount: Amounts) -> Pixels:
    poorer = poorer.float()
    return (poorer + amount[:, None, None, None] * (pixels.float() - poorer)).clamp(0, 255).to(torch.uint8)


def _gray(pixels: Pixels) -> Int[Tensor, "b 1 h w"]:
    """Return the grays of ITU-R 601-2 in sixteen bits, as Pillow computes them."""
    red, green, blue = pixels.int().split(1, 1)
    return (19595 * red + 38470 * green + 7471 * blue + 32768) >> 16


def _maps(*entries: Amounts) -> Maps:
    return torch.stack(entries, -1).view(-1, 2, 3)


def _constants(values: tuple[float, ...], device: torch.device) -> Float[Tensor, "c"]:
    """Return the values as a tensor that the device writes itself: a copy from the host would wait for the device."""
    return torch.stack([torch.full((), value, device=device) for value in values])


def _uniform(pixels: Tensor, generator: torch.Generator, low: float = 0.0, high: float = 1.0) -> Amounts:
    return low + (high - low) * torch.rand(len(pixels), generator=generator, device=pixels.device)


def _places(pixels: Tensor, generator: torch.Generator) -> Float[Tensor, "b 2"]:
    return torch.stack([_uniform(pixels, generator) for _ in range(2)], -1)


def _factor(level: Amounts, sign: Amounts) -> Amounts:
    return (1 + 0.9 * sign * level).clamp(min=0.1)
