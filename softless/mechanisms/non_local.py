"""Non-local attention: the pairings of the non-local block, and a version with a pyramid of means.

    nonlocal              Wang et al. 2017, arXiv 1711.07971
      softmax             e^{s_ij} / sum_j e^{s_ij},           s_ij = scale theta_i.phi_j + bias_ij
      dot                 s_ij / n
      concatenation       ReLU(w.[theta_i, phi_j]) / n         one learned w per head; bias is added to the ReLU

theta is q, phi is k, and n is the number of keys that i may see. With softmax the scale is d^-1/2, as in the authors'
code (the paper has no scale); with the other pairings it is 1. Only softmax has rows that sum to one. The published
block pools phi and g first: pass fewer keys than queries for that.

    asymmetric_nonlocal   Zhu et al. 2019, arXiv 1908.07678
      k~, v~              means of k and v: for each m of the pyramid, of m runs of consecutive tokens;
                          in a picture (`grid=`), of p x p cells with p^2 = m; the paper has p = 1, 3, 6, 8
      o                   softmax(q k~^T / sqrt(d)) v~

Tokens before the picture are kept as they are. Runs count real tokens only, and runs or cells without a real token are
left out. The weights, softmax(...) times the means, have rows that sum to one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from softless.errors import ArgumentError, check_choice
from softless.mechanisms.base import Call
from softless.mechanisms.low_rank import LowRank, check_cells, pooled
from softless.mechanisms.scored import MOST_STAND_INS, Scored, check_count, softmax


@dataclass(frozen=True)
class NonLocal(Scored):
    name: ClassVar[str] = "nonlocal"
    formula: ClassVar[str] = "softmax as in softmax, or theta.phi / n, or ReLU(w.[theta, phi]) / n"
    paper: ClassVar[str] = "Wang et al. 2017, arXiv 1711.07971"

    pairing: str = "softmax"

    def __post_init__(self) -> None:
        check_choice("pairing", self.pairing, ("softmax", "dot", "concatenation"))

    def input_shapes(self, heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (heads, 2 * head_dim)} if self.pairing == "concatenation" else {}

    def default_scale(self, head_dim: int) -> float | None:
        return head_dim**-0.5 if self.pairing == "softmax" else 1.0

    @property
    def rows_sum_to_one(self) -> bool:  # type: ignore[override]
        return self.pairing == "softmax"

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        if self.pairing != "concatenation":
            return super().scores(q, k, call)
        of_q, of_k = call.inputs["weight"].to(q.dtype)[:, None].chunk(2, -1)  # [H, 1, d]
        return call.scale * (q @ of_q.mT + (k @ of_k.mT).mT).relu()

    def rule(self, scores: Tensor, visible: Tensor) -> Tensor:
        if self.pairing == "softmax":
            return softmax(scores, visible)
        return torch.where(visible, scores, 0.0) / visible.sum(-1, keepdim=True).clamp(min=1)


@dataclass(frozen=True)
class AsymmetricNonLocal(LowRank):
    name: ClassVar[str] = "asymmetric_nonlocal"
    formula: ClassVar[str] = "softmax(q k~^T / sqrt(d)) v~,  k~ and v~ a pyramid of means"
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
    """Return the matrix [B, 1, outside, M] that takes each real token before the picture as it is."""
    eye = torch.eye(k.shape[2] - grid[0] * grid[1], k.shape[2], dtype=k.dtype, device=k.device)[None, None]
    return eye if mask is None else torch.where(mask[:, None, None], eye, 0.0)
