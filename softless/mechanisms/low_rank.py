"""Scored attention of low rank: queries and keys meet in m tokens that stand for all, m much less than N.

    W = A_1 A_2 ... A_r,    A_1 [N, m],  A_r [m, M]            the N x M product is formed only by `weights`
    o = A_1 (A_2 ... (A_r v))                                   cost N m d

Each of the m tokens mixes tokens of all times, so none of these mechanisms is causal. There are no scores of pairs, so
none takes a bias. A key that the key mask hides has a column of zeros in A_r.
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
    """A mechanism of low rank. A subclass defines `factors`."""

    family: ClassVar[str] = "scored"
    form: ClassVar[str] = "low rank"
    cost: ClassVar[str] = "O(N m d)"

    def lacks(self, is_causal: bool) -> str | None:
        return "mixes all tokens before it weighs them" if is_causal else None

    def default_scale(self, head_dim: int) -> float | None:
        return head_dim**-0.5

    def factors(self, q: Tensor, k: Tensor, call: Call) -> Sequence[Tensor]:
        """Return A_1 [B, H, N, m] to A_r [B, H, m, M], for k with as many heads as q."""
        raise NotImplementedError

    def weights(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return reduce(torch.matmul, self.factors(q, repeat_heads(k, q.shape[1]), call))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        out = repeat_heads(v, q.shape[1])
        for factor in reversed(self.factors(q, repeat_heads(k, q.shape[1]), call)):
            out = factor @ out
        return out


def real_queries(q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor | None]:
    """Return q with zeros in the padding, and its mask. With as many queries as keys, query i is token i."""
    if call.key_mask is None or q.shape[2] != k.shape[2]:
        return q, None
    return keep(q, call.key_mask[:, None]), call.key_mask


def pooled(x: Tensor, count: int, mask: Tensor | None, grid: tuple[int, int] | None) -> Tensor:
    """Return the matrix [B, 1, count, N] that takes the means of x over cells of a picture or runs of a sequence."""
    return segments(x, count, mask) if grid is None else cells(x, count, mask, grid)


def check_cells(option: str, count: int, grid: tuple[int, int] | None) -> None:
    """Raise if a picture cannot be cut into this number of cells."""
    if grid is not None and math.isqrt(count) ** 2 != count:
        raise ArgumentError(f"{option} {count} is not a square, and a picture {grid} is cut into p x p cells")


def cells(x: Tensor, count: int, mask: Tensor | None, grid: tuple[int, int]) -> Tensor:
    """Return the means over the p x p cells of a picture, p^2 = count, as a matrix [B, 1, count, N].

    Row a of the cells has rows floor(a h / p) to ceil((a + 1) h / p) - 1 of the picture's h, and columns alike:
    adaptive pooling. The picture is the last h w tokens; those before it are in no cell. Means are over real tokens,
    and a cell without a real token has a row of zeros. B is 1 without a mask.
    """
    side, outside = math.isqrt(count), x.shape[2] - grid[0] * grid[1]

    def bands(length: int) -> Tensor:
        """Return which tokens of a side are in which row of cells [p, length]."""
        place, a = torch.arange(length, device=x.device), torch.arange(side, device=x.device)[:, None]
        return (place >= a * length // side) & (place < -(-(a + 1) * length // side))

    down, across = bands(grid[0]), bands(grid[1])
    member = (down[:, None, :, None] & across[None, :, None, :]).flatten(2).flatten(0, 1)  # [count, h w]
    member = F.pad(member, (outside, 0))[None]
    member = member if mask is None else member & mask[:, None]
    return (member.to(x.dtype) / member.sum(-1, keepdim=True).clamp(min=1))[:, None]


def segments(x: Tensor, count: int, mask: Tensor | None) -> Tensor:
    """Return the means over `count` runs of consecutive real tokens of x, as a matrix [B, 1, count, N].

    Of n real tokens the r-th is in run floor(r count / n), so padding does not move a token to another run. With
    n < count some runs are empty, and their rows are zero. B is 1 without a mask.
    """
    real = torch.ones(1, x.shape[2], dtype=torch.bool, device=x.device) if mask is None else mask
    run = (real.cumsum(-1) - 1) * count // real.sum(-1, keepdim=True).clamp(min=1)
    member = (run[:, None] == torch.arange(count, device=x.device)[:, None]) & real[:, None]  # [B, count, N]
    return (member.to(x.dtype) / member.sum(-1, keepdim=True).clamp(min=1))[:, None]
