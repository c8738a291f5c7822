"""Focused linear attention (FLatten, Han et al. 2023): powers sharpen a feature's direction.

    phi(x) = f_p(relu(x) + 1e-6),   f_p(x) = x^p |x| / |x^p|        norms over all H d channels, p = 3
    o_i = sum_j phi(q_i).phi(k_j) v_j / sum_j phi(q_i).phi(k_j)

With `learned_scale` the features are divided by softplus(scale), scale [H, d], before f_p. The
position table on k and the depthwise convolution of v in the published module are layers. f_p is homogeneous, so x is
divided by its largest entry first, and x^p cannot overflow.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from softless.errors import ArgumentError
from softless.mechanisms.base import Call, repeat_heads
from softless.mechanisms.kernelized import Kernelized


@dataclass(frozen=True)
class Focused(Kernelized):
    name: ClassVar[str] = "focused"
    formula: ClassVar[str] = "linear with phi(x) = x^p |x| / |x^p| of relu(x)"
    paper: ClassVar[str] = "Han et al. 2023, arXiv 2308.00442"
    reader: ClassVar[str] = "divide"

    p: float = 3.0
    learned_scale: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.p <= 16:
            raise ArgumentError(f"p {self.p} is not between 1 and 16")

    def input_shapes(self, heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        return {"scale": (heads, head_dim)} if self.learned_scale else {}

    def initialize(self, name: str, tensor: Tensor) -> None:
        tensor.zero_()

    def features_q(self, q: Tensor, call: Call) -> Tensor:
        x = q.relu() + 1e-6
        if self.learned_scale:
            x = x / F.softplus(call.inputs["scale"].to(x.dtype))[:, None, :]
        largest = x.detach().amax((1, 3), keepdim=True)
        x = x / largest
        length, power = _norm(x), x**self.p
        del x  # or it would be there beside the features
        return power * (largest * (length / _norm(power)))

    def features_k(self, k: Tensor, call: Call) -> Tensor:
        return self.features_q(repeat_heads(k, call.inputs["scale"].shape[0]) if self.learned_scale else k, call)


def _norm(x: Tensor) -> Tensor:
    return x.square().sum((1, 3), keepdim=True).sqrt()
