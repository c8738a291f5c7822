"""The color operations of RandAugment on a batch, each image with its own amount: what Pillow does to one image.

Pixels are uint8 [B, 3, H, W] and stay so. The first five mix an image with a poorer one, as `PIL.ImageEnhance` does:

    poorer + amount (image - poorer)        brightness  black             sharpness  smoothed
                                            contrast    its mean gray     color      its grays
    posterize      keeps the upper bits                       solarize      inverts from a threshold up
    autocontrast   spreads each channel from 0 to 255         solarize_add  lightens what is darker than gray
    equalize       makes each channel's levels equally common
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor

Pixels = UInt8[Tensor, "b 3 h w"]
Amounts = Float[Tensor, "b"]
Levels = Int[Tensor, "b"]


def brightness(pixels: Pixels, amount: Amounts) -> Pixels:
    return _mix(torch.zeros_like(pixels), pixels, amount)


def contrast(pixels: Pixels, amount: Amounts) -> Pixels:
    gray = _gray(pixels)
    count = gray[0].numel()
    mean = (2 * gray.sum((1, 2, 3), keepdim=True) + count) // (2 * count)  # [b, 1, 1, 1], rounded
    return _mix(mean, pixels, amount)


def color(pixels: Pixels, amount: Amounts) -> Pixels:
    return _mix(_gray(pixels), pixels, amount)


def sharpness(pixels: Pixels, amount: Amounts) -> Pixels:
    """The poorer image is the weighted mean of 3x3 neighbors, the middle counting 5 of 13; borders have none."""
    if min(pixels.shape[2:]) < 3:
        return pixels
    values, poorer = pixels.float(), pixels.clone()
    around = F.avg_pool2d(values, 3, 1, divisor_override=1)  # a sum
    poorer[:, :, 1:-1, 1:-1] = ((around + 4 * values[:, :, 1:-1, 1:-1]) / 13 + 0.5).to(torch.uint8)
    return _mix(poorer, pixels, amount)


def posterize(pixels: Pixels, bits: Levels) -> Pixels:
    return pixels & (256 - (256 >> bits)).to(torch.uint8)[:, None, None, None]


def solarize(pixels: Pixels, threshold: Levels) -> Pixels:
    return torch.where(pixels < threshold[:, None, None, None], pixels, 255 - pixels)


def solarize_add(pixels: Pixels, added: Levels) -> Pixels:
    lighter = (pixels + added[:, None, None, None]).clamp(max=255).to(torch.uint8)
    return torch.where(pixels < 128, lighter, pixels)


def invert(pixels: Pixels) -> Pixels:
    return 255 - pixels


def autocontrast(pixels: Pixels) -> Pixels:
    low, high = (extreme(pixels, (2, 3), keepdim=True).int() for extreme in (torch.amin, torch.amax))  # [b, 3, 1, 1]
    spread = (pixels.int() - low) * 255 // (high - low).clamp(min=1)
    return torch.where(high > low, spread, pixels).to(torch.uint8)


def equalize(pixels: Pixels) -> Pixels:
    """Level x becomes (step / 2 + pixels below x) / step, with a step of 1/255 of the pixels below the highest."""
    rows = pixels.flatten(2).flatten(0, 1)  # [3b, h w]
    levels = torch.arange(256, dtype=torch.uint8, device=pixels.device).repeat(len(rows), 1)
    below = torch.searchsorted(rows.sort(-1).values, levels)  # [3b, 256]
    step = below.gather(1, rows.amax(-1, keepdim=True).long()) // 255
    table = ((step // 2 + below) // step.clamp(min=1)).clamp(max=255)
    equal = torch.where(step > 0, table, levels).gather(1, rows.long())
    return equal.to(torch.uint8).view_as(pixels)


def _mix(poorer: Tensor, pixels: Pixels, amount: Amounts) -> Pixels:
    poorer = poorer.float()
    return (poorer + amount[:, None, None, None] * (pixels.float() - poorer)).clamp(0, 255).to(torch.uint8)


def _gray(pixels: Pixels) -> Int[Tensor, "b 1 h w"]:
    """ITU-R 601-2, in sixteen bits, as Pillow has it."""
    red, green, blue = pixels.int().split(1, 1)
    return (19595 * red + 38470 * green + 7471 * blue + 32768) >> 16
