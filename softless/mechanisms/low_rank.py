"""Scored attention of low rank: queries and keys meet in m tokens that stand for all, m much less than N.

    W = A_1 A_2 ... A_r,    A_1 [N, m],  A_r [m, M]            the N x M product is formed only to be looked at
    o = A_1 (A_2 ... (A_r v))                                   cost N m d

Each of the m mixes tokens of all times, so none of these is causal. The scores are not those of pairs, so none
takes a bias on pairs. What the key mask hides has a column of zeros in A_r.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from softless.algebra.state import keep
from softless.errors import ArgumentError
from softless.mechanisms.base import Call, Mechanism, repeat_heads


@dataclass(frozen=True)
class LowRank(Mechanism):
    """A subclass says `factors`."""

    family: ClassVar[str] = "scored"
    form: ClassVar[str] = "low rank"

    def lacks(self, is_causal: bool) -> str | None:
        return "mixes all tokens before it weighs them" if is_causal else None

    def default_scale(self, head_dim: int) -> float | None:
        return head_dim**-0.5

    def factors(self, q: Tensor, k: Tensor, call: Call) -> Sequence[Tensor]:
        """A_1 [B, H, N, m] to A_r [B, H, m, M], for k with as many heads as q."""
        raise NotImplementedError

    def weights(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return reduce(torch.matmul, self.factors(q, repeat_heads(k, q.shape[1]), call))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        out = repeat_heads(v, q.shape[1])
        for factor in reversed(self.factors(q, repeat_heads(k, q.shape[1]), call)):
            out = factor @ out
        return out


def real_queries(q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor | None]:
    """With as many queries as keys, query i is token i: zeros where that is padding, and the mask that says so."""
    if call.key_mask is None or q.shape[2] != k.shape[2]:
        return q, None
    return keep(q, call.key_mask[:, None]), call.key_mask


def pooled(x: Tensor, count: int, mask: Tensor | None, grid: tuple[int, int] | None) -> Tensor:
    """Runtime of x as a matrix [B, 1, count, N]: over the cells of a picture, or over runs of a sequence."""
    return segments(x, count, mask) if grid is None else cells(x, count, mask, grid)


def check_cells(option: str, count: int, grid: tuple[int, int] | None) -> None:
    """Refuse a number of means that does not cut a picture."""
    if grid is not None and math.isqrt(count) ** 2 != count:
        raise ArgumentError(f"{option} {count} is not a square, and a picture {grid} is cut into p x p cells")


def cells(x: Tensor, count: int, mask: Tensor | None, grid: tuple[int, int]) -> Tensor:
    """Runtime of the p x p cells of a picture, p^2 = count, as a matrix [B, 1, count, N]; B is 1 without a mask.

    Row a of the cells has rows floor(a h / p) to ceil((a + 1) h / p) - 1 of the picture's h, and columns alike:
    adaptive pooling. The picture is the last h w tokens; those before it are in no cell. Runtime are over real tokens,
    and a cell without any has a row of zeros.
    """
    side, outside = math.isqrt(count), x.shape[2] - grid[0] * grid[1]

    def bands(length: int) -> Tensor:
        """Which of a side's tokens are in which row of cells [p, length]."""
        place, a = torch.arange(length, device=x.device), torch.arange(side, device=x.device)[:, None]
        return (place >= a * length // side) & (place < -(-(a + 1) * length // side))

    down, across = bands(grid[0]), bands(grid[1])
    member = (down[:, None, :, None] & across[None, :, None, :]).flatten(2).flatten(0, 1)  # [count, h w]
    member = F.pad(member, (outside, 0))[None]
    member = member if mask is None else member & mask[:, None]
    return (member.to(x.dtype) / member.sum(-1, keepdim=True).clamp(min=1))[:, None]


def segments(x: Tensor, count: int, mask: Tensor | None) -> Tensor:
    """Runtime of `count` runs of consecutive real tokens of x, as a matrix [B, 1, count, N]; B is 1 without a mask.

    Of n real tokens the r-th is in run floor(r count / n): padding, wherever it is, moves no one. With n < count
    some runs are empty, and their rows are zero.
    """
    real = torch.ones(1, x.shape[2], dtype=torch.bool, device=x.device) if mask is None else mask
    run = (real.cumsum(-1) - 1) * count // real.sum(-1, keepdim=True).clamp(min=1)
    member = (run[:, None] == torch.arange(count, device=x.device)[:, None]) & real[:, None]  # [B, count, N]
    return (member.to(x.dtype) / member.sum(-1, keepdim=True).clamp(min=1))[:, None]
