"""Threshold attention: a first-order exponential on the scores near a row's maximum.

With x = s - m (m the row's largest score, R its range) and kept set I = {x > -tau}, rho = min(tau, R):

    expansion   max      1 + x                                    the published choice
                mean     1 + s - mean_I(s)
                minimax  a + b x, b = (1 - e^-rho)/rho, a = (1 + b - b ln b)/2      best line on [-rho, 0]
    tail        drop     0                                        the published choice
                mean     (e^-tau - e^-R)/(R - tau)                e^x averaged over [-R, -tau]

    o_i = sum_j w_ij v_j / sum_j w_ij

The filter bounds the error of the kept weights and drops the others. Once the scores have unit variance, (max, drop) is
further from softmax than uniform weights are; (minimax, mean) is much closer. With tau > 1 weights can be negative and
their sum can cross zero. Gradients flow through m and R.
"""

from dataclasses import dataclass
from math import exp
from typing import ClassVar

import torch
from torch import Tensor

from softless.errors import ArgumentError, check_choice
from softless.mechanisms.scored import Scored


@dataclass(frozen=True)
class Threshold(Scored):
    name: ClassVar[str] = "threshold"
    formula: ClassVar[str] = "sum_I (1 + s_j - max s) v_j / sum_I (1 + s_j - max s),  I: s > max s - tau"
    paper: ClassVar[str] = "Analyzing Linear Attention as a First-Order Approximation of Softmax, 2024"

    tau: float = 1.0
    expansion: str = "max"
    tail: str = "drop"

    def __post_init__(self) -> None:
        if not self.tau > 0:
            raise ArgumentError(f"tau {self.tau} is not positive")
        check_choice("expansion", self.expansion, ("max", "mean", "minimax"))
        check_choice("tail", self.tail, ("drop", "mean"))

    def rule(self, scores: Tensor, visible: Tensor) -> Tensor:
        x, kept, spread = self.keep(scores, visible)
        weight = torch.where(kept, self._expand(x, kept, spread), 0.0)
        if self.tail == "mean":
            weight = torch.where(visible & ~kept, self._tail(spread), weight)
        mass = weight.sum(-1, keepdim=True)
        even = visible / visible.sum(-1, keepdim=True).clamp(min=1).to(weight.dtype)
        return torch.where(mass != 0, weight / torch.where(mass != 0, mass, 1.0), even)

    def keep(self, scores: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (scores minus the maximum of the row, which are kept, the range of the row, 0 without keys)."""
        limit = torch.finfo(scores.dtype).max
        top = torch.where(visible, scores, -limit).amax(-1, keepdim=True)
        low = torch.where(visible, scores, limit).amin(-1, keepdim=True)
        seen = visible.any(-1, keepdim=True)
        x = torch.where(visible & seen, scores - top, 0.0)
        return x, visible & (x > -self.tau), torch.where(seen, top - low, 0.0)

    def _expand(self, x: Tensor, kept: Tensor, spread: Tensor) -> Tensor:
        if self.expansion == "max":
            return 1 + x
        if self.expansion == "mean":
            return 1 + x - torch.where(kept, x, 0.0).sum(-1, keepdim=True) / kept.sum(-1, keepdim=True).clamp(min=1)
        rho = spread.clamp(max=self.tau)
        b = torch.where(rho > 0, -torch.expm1(-rho) / torch.where(rho > 0, rho, 1.0), 1.0)
        return (1 + b - b * b.log()) / 2 + b * x

    def _tail(self, spread: Tensor) -> Tensor:
        gap = (spread - self.tau).clamp(min=0)
        return exp(-self.tau) * torch.where(gap > 0, -torch.expm1(-gap) / torch.where(gap > 0, gap, 1.0), 1.0)
