"""SOFT (Lu et al. 2021, arXiv 2110.11945): a Gaussian kernel in place of softmax, through m landmarks.

    g(a, b) = e^{-s |a - b|^2 / 2},   s = d^-1/2
    L       = means of m runs of consecutive keys; of a picture (`grid=`), of p x p cells of keys, p^2 = m
    o       = g(q, L) (g(L, L) + 0.01 I)^-1 g(L, k) v

With k = q, as published, the weights are symmetric; a module projects one for both. They have no normalizer and do
not sum to one. The authors draw L from a strided convolution and invert by 20 Newton steps; here the inverse is exact,
and so is its gradient. Their convolution of v is left to the module around it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from softless.errors import ArgumentError
from softless.mechanisms.base import Call
from softless.mechanisms.low_rank import LowRank, check_cells, pooled
from softless.mechanisms.scored import MOST_STAND_INS, check_count

RIDGE = 0.01


@dataclass(frozen=True)
class Soft(LowRank):
    name: ClassVar[str] = "soft"
    formula: ClassVar[str] = "g(q, L) (g(L, L) + 0.01 I)^-1 g(L, k) v,  g Gaussian, L landmarks"
    cost: ClassVar[str] = "O(N m d)"
    paper: ClassVar[str] = "Lu et al. 2021, arXiv 2110.11945"
    shares_keys: ClassVar[bool] = True
    reads_grid: ClassVar[bool] = True

    landmarks: int = 49

    def __post_init__(self) -> None:
        check_count("landmarks", self.landmarks, most=MOST_STAND_INS)

    @property
    def rows_sum_to_one(self) -> bool:
        return False

    def check(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
        if call.scale <= 0:
            raise ArgumentError(f"scale {call.scale} is not positive, and soft's Gaussian falls with it")
        check_cells("landmarks", self.landmarks, call.grid)

    def factors(self, q: Tensor, k: Tensor, call: Call) -> Sequence[Tensor]:
        means = pooled(k, self.landmarks, call.key_mask, call.grid)
        used = (means > 0).any(-1, keepdim=True)
        marks = means @ k
        middle = (marks.sum(-2, keepdim=True) / used.sum(-2, keepdim=True).clamp(min=1)).detach()
        q, k, marks = q - middle, k - middle, marks - middle  # as far apart as before, and with more digits
        eye = torch.eye(self.landmarks, dtype=q.dtype, device=q.device)
        center = torch.where(used & used.mT, gaussian(marks, marks, call.scale), eye) + RIDGE * eye
        left = torch.where(used.mT, gaussian(q, marks, call.scale), 0.0)
        right = torch.where(used & call.visible(q, k), gaussian(marks, k, call.scale), 0.0)
        return left, torch.linalg.inv_ex(center).inverse, right


def gaussian(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """[..., N, d], [..., M, d] -> [..., N, M]"""
    squares = a.square().sum(-1, keepdim=True) + b.square().sum(-1, keepdim=True).mT
    return (-0.5 * scale * (squares - 2 * a @ b.mT).clamp(min=0)).exp()
