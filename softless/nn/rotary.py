"""Rotary positions (Su et al. 2021, arXiv 2104.09864): q and k are rotated by an angle that grows with position.

    angle_c(i)   = i base^(-2 c / d),                     c = 0 .. d/2 - 1, i the position of a token
    rotated(x)_i = [x1 cos - x2 sin;  x2 cos + x1 sin],   x1 the first half of the channels, x2 the second

Channel c is paired with channel c + d/2, as in GPT-NeoX and Llama (the half-rotation convention), not with its
neighbor. The product of two rotated vectors depends on their positions only through the difference:
rotated(q)_i . rotated(k)_j is a function of q, k and i - j.

Shapes: B batch, N tokens, d channels of a head.
"""

import numbers
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from softless.algebra.precision import widen
from softless.errors import ArgumentError, shown
from softless.validation import LARGEST


def rotate(
    x: Float[Tensor, "b heads n d"], positions: Int[Tensor, "*#b n"], base: float = 10_000.0
) -> Float[Tensor, "b heads n d"]:
    """Rotate queries or keys by their positions [N] or [B, 1, N]. Angles are computed in float32 or wider."""
    wide, half = widen(x), x.shape[-1] // 2
    channels = torch.arange(half, device=x.device, dtype=wide.dtype)
    angles = positions[..., None] * base ** (-channels / half)  # [..., N, d / 2]
    cos, sin = angles.cos(), angles.sin()
    first, second = wide[..., :half], wide[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def token_positions(
    x: Float[Tensor, "b n c"], key_mask: Bool[Tensor, "b n"] | None = None, seen: Int[Tensor, "*b"] | None = None
) -> Int[Tensor, "*b n"]:
    """Number the tokens from 0, after the `seen` ones of earlier calls: [N], or [B, 1, N] where rows differ.

    Only real tokens count, so that padding does not move the tokens after it. Packed sequences, T tokens in
    all, each start at 0: [T].
    """
    if x.is_nested:
        packed: Any = x.contiguous()
        lengths, starts = packed.offsets().diff(), packed.offsets()[:-1]
        if seen is not None:
            starts = starts - seen.flatten(1)[:, 0]
        return torch.arange(len(packed.values()), device=x.device) - starts.repeat_interleave(lengths)
    positions = torch.arange(x.shape[1], device=x.device) if key_mask is None else (key_mask.cumsum(1) - 1)[:, None]
    return positions if seen is None else positions + seen.flatten(1)[:, :1, None]  # heads have all seen as many


def check_rotary(rotary: Any, head_dim: int) -> float | None:
    """Return the base of the rotation, or None without one."""
    if rotary is False:
        return None
    base = 10_000.0 if rotary is True else rotary
    if isinstance(base, bool) or not isinstance(base, numbers.Real) or not 1 < cast(float, base) <= LARGEST:
        raise ArgumentError(f"rotary is {shown(rotary)} and must be True, False or a base above 1")
    if head_dim % 2:
        raise ArgumentError(
            f"rotary={shown(rotary)} rotates pairs of channels, and the head dimension {head_dim} is odd"
        )
    return float(base)
