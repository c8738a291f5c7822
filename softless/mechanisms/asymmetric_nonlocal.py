"""Asymmetric non-local attention (Zhu et al. 2019, arXiv 1908.07678): a pyramid of means in place of the keys.

    k~, v~ = means of k and v: for each m of the pyramid, of m runs of consecutive tokens
             of a picture (`grid=`), of p x p cells, p^2 = m: p = 1, 3, 6, 8 in the paper
    o      = softmax(q k~^T / sqrt(d)) v~

Tokens before the picture stand for themselves. Runs are counted among real tokens, and empty ones, or empty cells, are
left out. The weights, softmax(...) times the means, have rows that sum to one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from softless.errors import ArgumentError
from softless.mechanisms.base import Call
from softless.mechanisms.low_rank import LowRank, check_cells, pooled
from softless.mechanisms.scored import MOST_STAND_INS, check_count, softmax


@dataclass(frozen=True)
class AsymmetricNonLocal(LowRank):
    name: ClassVar[str] = "asymmetric_nonlocal"
    formula: ClassVar[str] = "softmax(q k~^T / sqrt(d)) v~,  k~ and v~ a pyramid of means"
    cost: ClassVar[str] = "O(N m d)"
    paper: ClassVar[str] = "Zhu et al. 2019, arXiv 1908.07678"

    reads_grid: ClassVar[bool] = True

    pyramid: tuple[int, ...] = (1, 9, 36, 64)

    def __post_init__(self) -> None:
        if not isinstance(self.pyramid, tuple) or not self.pyramid:
            raise ArgumentError(f"pyramid {self.pyramid!r} is not a tuple of whole numbers such as (1, 9, 36, 64)")
        for level in self.pyramid:
            check_count("pyramid", level, most=MOST_STAND_INS)

    def check(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
        for level in self.pyramid:
            check_cells("pyramid", level, call.grid)

    def factors(self, q: Tensor, k: Tensor, call: Call) -> Sequence[Tensor]:
        levels = [pooled(k, level, call.key_mask, call.grid) for level in self.pyramid]
        if call.grid is not None:
            levels.append(outside(k, call.key_mask, call.grid))
        means = torch.cat(levels, -2)  # [B, 1, sum of the pyramid and what is not in the picture, M]
        used = (means > 0).any(-1)[..., None, :]
        return softmax(call.scale * (q @ (means @ k).mT), used), means


def outside(k: Tensor, mask: Tensor | None, grid: tuple[int, int]) -> Tensor:
    """The real tokens before the picture, each its own mean [B, 1, outside, M]."""
    eye = torch.eye(k.shape[2] - grid[0] * grid[1], k.shape[2], dtype=k.dtype, device=k.device)[None, None]
    return eye if mask is None else torch.where(mask[:, None, None], eye, 0.0)
