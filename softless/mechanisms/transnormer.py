"""TransNormer (Qin et al. 2022, arXiv 2210.10340): linear attention with a norm in place of the denominator.

    o_i = norm(sum_j phi(q_i).phi(k_j) v_j)         norm(x) = sqrt(C) x/|x| over all C = H e channels of a token

    t1  phi(x) = elu(x)           t2  phi(x) = elu(x) + 1

The published network has `diagonal` in the first half of its layers and this in the second. The explicit weights are
those before the norm; a zero row stays zero.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from softless.algebra.feature_maps import elu, unit
from softless.algebra.state import State
from softless.errors import ArgumentError
from softless.mechanisms.base import Call
from softless.mechanisms.kernelized import Kernelized


def norm(x: Tensor) -> Tensor:
    """Mean square 1 over the heads and channels of each token."""
    return unit(x, (1, 3)) * (x.shape[1] * x.shape[3]) ** 0.5


def check_variant(variant: str) -> None:
    """t1 and t2 are the two networks of the paper."""
    if variant not in ("t1", "t2"):
        raise ArgumentError(f"variant {variant!r} is not 't1' or 't2'")


@dataclass(frozen=True)
class TransNormer(Kernelized):
    name: ClassVar[str] = "transnormer"
    formula: ClassVar[str] = "norm(sum_j phi(q).phi(k_j) v_j), phi(x) = elu(x) or elu(x) + 1"
    cost: ClassVar[str] = "O(N d^2)"
    paper: ClassVar[str] = "Qin et al. 2022, arXiv 2210.10340"
    reader: ClassVar[str] = "none"

    variant: str = "t2"  # t1 | t2

    def __post_init__(self) -> None:
        check_variant(self.variant)

    def default_scale(self, head_dim: int) -> None:
        return None

    def features_q(self, q: Tensor, call: Call) -> Tensor:
        return elu(q) if self.variant == "t2" else F.elu(q)

    def combine(self, weights: Tensor, v: Tensor, call: Call) -> Tensor:
        return norm(super().combine(weights, v, call))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        return norm(super().attend(q, k, v, call))

    def attend_with_state(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None, call: Call
    ) -> tuple[Tensor, State]:
        out, state = super().attend_with_state(q, k, v, state, call)
        return norm(out), state

    def attend_to_state(self, q: Tensor, k: Tensor, v: Tensor, state: State, call: Call) -> Tensor:
        return norm(super().attend_to_state(q, k, v, state, call))
