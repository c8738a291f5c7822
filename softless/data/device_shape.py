"""Operations on a batch that move or remove pixels, each image in its own way.

A *map* [B, 2, 3] takes a place of the new image to its place in the old one, in pixels from the upper left corner:

    x_old = a x + b y + c        y_old = d x + e y + f

What comes from outside is `fill`. Places are those of pixel centers, x + 1/2, and values between them are interpolated.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

Batch = Shaped[Tensor, "b c h w"]
Maps = Float[Tensor, "b 2 3"]

ASPECT = (math.log(3 / 4), math.log(4 / 3))  # of a resized crop
ERASED, ERASED_ASPECT = (0.02, 1 / 3), (math.log(0.3), math.log(1 / 0.3))


def flip(pixels: Batch, chosen: Bool[Tensor, "b"]) -> Batch:
    """From left to right."""
    return torch.where(chosen[:, None, None, None], pixels.flip(-1), pixels)


def shift(pixels: Batch, rows: Int[Tensor, "b"], columns: Int[Tensor, "b"]) -> Batch:
    """Pixel (y, x) is that of (y + rows, x + columns), and 0 beyond the border: a crop of the padded image."""
    height, width = pixels.shape[2:]
    y = rows[:, None] + torch.arange(height, device=pixels.device)  # [b, h]
    x = columns[:, None] + torch.arange(width, device=pixels.device)  # [b, w]
    inside = ((y >= 0) & (y < height))[:, :, None] & ((x >= 0) & (x < width))[:, None, :]
    place = y.clamp(0, height - 1)[:, :, None] * width + x.clamp(0, width - 1)[:, None, :]  # [b, h, w]
    moved = pixels.flatten(2).gather(2, place.flatten(1)[:, None].expand(-1, pixels.shape[1], -1))
    return torch.where(inside[:, None], moved.view_as(pixels), 0)


def warp(pixels: Batch, maps: Maps, fill: Float[Tensor, "c"], mode: str = "bilinear") -> Batch:
    """The image seen through a map."""
    height, width = pixels.shape[2:]
    y, x = (torch.arange(side, device=pixels.device) + 0.5 for side in (height, width))
    by_x, by_y, start = maps[..., None, None].unbind(2)  # each [b, 2, 1, 1]; not a product of matrices: TF32 may be on
    x_old, y_old = (by_x * x + by_y * y[:, None] + start).unbind(1)  # each [b, h, w]
    places, color = torch.stack([2 * x_old / width - 1, 2 * y_old / height - 1], -1), fill[:, None, None]
    seen = F.grid_sample(pixels.float() - color, places, mode=mode, align_corners=False) + color
    return seen.round().clamp(0, 255).to(pixels.dtype)


def crops(
    share: Float[Tensor, "b"], log_aspect: Float[Tensor, "b"], place: Float[Tensor, "b 2"], size: tuple[int, int]
) -> Maps:
    """Maps of crops of a share of the area, at a place from 0 to 1 of where they fit; one that does not fit is cut."""
    height, width = size
    tall = ((share / log_aspect.exp()).sqrt()).clamp(max=1)
    wide = ((share * log_aspect.exp()).sqrt()).clamp(max=1)
    zero = torch.zeros_like(share)
    top, left = place[:, 0] * (1 - tall) * height, place[:, 1] * (1 - wide) * width
    return torch.stack([wide, zero, left, zero, tall, top], -1).view(-1, 2, 3)


def shears(along_x: Float[Tensor, "b"], along_y: Float[Tensor, "b"]) -> Maps:
    zero, one = torch.zeros_like(along_x), torch.ones_like(along_x)
    return torch.stack([one, along_x, zero, along_y, one, zero], -1).view(-1, 2, 3)


def moves(by_x: Float[Tensor, "b"], by_y: Float[Tensor, "b"]) -> Maps:
    """In pixels."""
    zero, one = torch.zeros_like(by_x), torch.ones_like(by_x)
    return torch.stack([one, zero, by_x, zero, one, by_y], -1).view(-1, 2, 3)


def turns(degrees: Float[Tensor, "b"], size: tuple[int, int]) -> Maps:
    """Counterclockwise around the middle."""
    middle_y, middle_x = size[0] / 2, size[1] / 2
    cos, sin = torch.deg2rad(degrees).cos(), torch.deg2rad(degrees).sin()
    x = middle_x - cos * middle_x + sin * middle_y
    y = middle_y - sin * middle_x - cos * middle_y
    return torch.stack([cos, -sin, x, sin, cos, y], -1).view(-1, 2, 3)


def rectangles(
    share: Float[Tensor, "b"], log_aspect: Float[Tensor, "b"], place: Float[Tensor, "b 2"], size: tuple[int, int]
) -> Bool[Tensor, "b h w"]:
    """True inside rectangles of a share of the area, at a place from 0 to 1 of where they fit."""
    inside = []
    for axis, stretch in ((0, log_aspect / 2), (1, -log_aspect / 2)):
        side = size[axis]
        long = (share.sqrt() * stretch.exp() * side).round().clamp(max=side)  # [b]
        first = (place[:, axis] * (side - long + 1)).floor()
        at = torch.arange(side, device=share.device)
        inside.append((at >= first[:, None]) & (at < (first + long)[:, None]))
    return inside[0][:, :, None] & inside[1][:, None, :]
