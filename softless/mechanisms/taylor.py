"""Taylor attention: the first terms of the exponential as a feature map.

    order 1   sim = 1 + q^.k^                 q^ = q/|q|, so sim lies in [0, 2]       (Su 2020)
    order 2   sim = 1 + a + a^2/2             a = q.k/sqrt(d), never below 1/2        (2209.04881, 2312.04927)

    psi(x) = [1, x, {x_a x_b sqrt(2 - [a=b]) / sqrt(2) : a <= b}]     with |x| = 1, or x / d^(1/4)

A zero vector has no direction and gives every key the same weight. A query that is opposite to every key has no mass
and reads the mean; `softless.algebra.readers` defines when rounding leaves no mass. Order 2 has 1 + d + d(d+1)/2
features.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from softless.algebra.feature_maps import unit
from softless.algebra.kernel_spec import KernelSpec
from softless.errors import ArgumentError
from softless.mechanisms.base import Call
from softless.mechanisms.kernelized import Kernelized


@dataclass(frozen=True)
class Taylor(Kernelized):
    name: ClassVar[str] = "taylor"
    formula: ClassVar[str] = "sim = 1 + q^.k^ (order 1), 1 + a + a^2/2 (order 2)"
    paper: ClassVar[str] = "Su 2020, spaces.ac.cn/archives/7546"
    reader: ClassVar[str] = "divide"
    signed: ClassVar[bool] = True

    order: int = 1
    normalize: bool | None = None  # None: True for order 1, False for order 2

    def __post_init__(self) -> None:
        if self.order not in (1, 2):
            raise ArgumentError(f"order {self.order!r} is not 1 or 2")
        if self.normalize not in (None, True, False):
            raise ArgumentError(f"normalize {self.normalize!r} is not True, False or None")
        if self.order == 1 and self.normalize is False:
            raise ArgumentError("normalize=False needs order 2: 1 + q.k is negative where q.k < -1")

    def kernel_spec(self, scale: float) -> KernelSpec | None:
        return KernelSpec("unit", "unit", self.reader, constant=True) if self.order == 1 else None

    def features_q(self, q: Tensor, call: Call) -> Tensor:
        x = q * q.shape[-1] ** -0.25 if self.order == 2 and not self.normalize else unit(q)
        first = F.pad(x, (1, 0), value=1.0)  # [1, x]
        return first if self.order == 1 else torch.cat([first, _pairs(x)], -1)


def _pairs(x: Tensor) -> Tensor:
    """[..., d] -> [..., d(d+1)/2] with pairs(q).pairs(k) = (q.k)^2 / 2."""
    a, b = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
    return x[..., a] * x[..., b] * torch.where(a == b, 0.5, 1.0).to(x.dtype).sqrt()
