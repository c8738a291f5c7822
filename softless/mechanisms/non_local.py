"""The non-local block's pairings (Wang et al. 2017, arXiv 1711.07971).

    pairing   softmax         e^{s_ij} / sum_j e^{s_ij},           s_ij = scale theta_i.phi_j + bias_ij
              dot             s_ij / n
              concatenation   ReLU(w.[theta_i, phi_j]) / n         w a head, learned; bias is added to the ReLU

theta is q, phi is k, and n counts the keys that i may see. scale is d^-1/2 with softmax, as in the authors' code (the
paper has none), and 1 with the others. Only softmax has rows that sum to one. The block pools phi and g first: give it
fewer keys than queries.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from softless.errors import ArgumentError
from softless.mechanisms.base import Call
from softless.mechanisms.scored import Scored, softmax

PAIRINGS = ("softmax", "dot", "concatenation")


@dataclass(frozen=True)
class NonLocal(Scored):
    name: ClassVar[str] = "nonlocal"
    formula: ClassVar[str] = "softmax as in softmax, or theta.phi / n, or ReLU(w.[theta, phi]) / n"
    cost: ClassVar[str] = "O(N^2 d)"
    paper: ClassVar[str] = "Wang et al. 2017, arXiv 1711.07971"

    pairing: str = "softmax"

    def __post_init__(self) -> None:
        if self.pairing not in PAIRINGS:
            raise ArgumentError(f"pairing {self.pairing!r} is not one of {', '.join(PAIRINGS)}")

    def input_shapes(self, heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (heads, 2 * head_dim)} if self.pairing == "concatenation" else {}

    def default_scale(self, head_dim: int) -> float | None:
        return head_dim**-0.5 if self.pairing == "softmax" else 1.0

    @property
    def rows_sum_to_one(self) -> bool:
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
