"""Efficient Attention (Shen et al. 2018, arXiv 1812.01243) and A2-Nets: one softmax over channels, one over tokens.

    efficient   o_i = sum_c softmax_c(q_i) sum_j [e^{k_jc} / sum_l e^{k_lc}] v_j

There is one normalizer per channel, so rows sum to one without another division. In the causal form both sums over
tokens run up to i.

    a2          G = A softmax_tokens(B)^T,  Z = G softmax_channels(V)         Chen et al. 2018, arXiv 1810.11579, eq. 3

Double attention gathers G from all tokens and then distributes it to each token. With q = V, k = B and v = A it is the
same function, published without a causal form. Some ports take the softmax over the batch; the paper does not.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from softless.algebra.kernel_spec import KernelSpec
from softless.algebra.state import Log
from softless.mechanisms.base import Call
from softless.mechanisms.kernelized import Kernelized


@dataclass(frozen=True)
class Efficient(Kernelized):
    name: ClassVar[str] = "efficient"
    formula: ClassVar[str] = "softmax_channels(q) . (softmax_tokens(k)^T v)"
    paper: ClassVar[str] = "Shen et al. 2018, arXiv 1812.01243"
    reader: ClassVar[str] = "channel"

    def kernel_spec(self, scale: float) -> KernelSpec:
        return KernelSpec("softmax", "exp", self.reader)

    def features_q(self, q: Tensor, call: Call) -> Tensor:
        return q.softmax(-1)

    def features_k(self, k: Tensor, call: Call) -> Log:
        return Log(k)


@dataclass(frozen=True)
class A2(Efficient):
    name: ClassVar[str] = "a2"
    formula: ClassVar[str] = "gather v by softmax_tokens(k), distribute it by softmax_channels(q)"
    paper: ClassVar[str] = "Chen et al. 2018, arXiv 1810.11579"
    carries_state: ClassVar[bool] = False

    def lacks(self, is_causal: bool) -> str | None:
        return "gathers from all tokens before any reads: the causal form is 'efficient'" if is_causal else None
