"""Efficient Attention (Shen et al. 2018): one softmax over channels, one over tokens.

    o_i = sum_c softmax_c(q_i) sum_j [e^{k_jc} / sum_l e^{k_lc}] v_j

One normalizer a channel, so rows sum to one with no division left to do. The causal form keeps the
normalizers running: at each i both sums over tokens go up to i.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from softless.algebra.recipe import Recipe
from softless.algebra.state import Log
from softless.mechanisms.base import Call
from softless.mechanisms.kernelized import Kernelized


@dataclass(frozen=True)
class Efficient(Kernelized):
    name: ClassVar[str] = "efficient"
    formula: ClassVar[str] = "softmax_channels(q) . (softmax_tokens(k)^T v)"
    reader: ClassVar[str] = "channel"

    def recipe(self, scale: float) -> Recipe:
        return Recipe("softmax", "exp", self.reader)

    def features_q(self, q: Tensor, call: Call) -> Tensor:
        return q.softmax(-1)

    def features_k(self, k: Tensor, call: Call) -> Log:
        return Log(k)
