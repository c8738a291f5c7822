"""Nystromformer (Xiong et al. 2021, arXiv 2102.03902): softmax attention through m landmarks.

    q~, k~ = means of m runs of consecutive queries and keys
    o      = softmax(s q k~^T)  A^+  softmax(s q~ k^T) v,     A = softmax(s q~ k~^T),   s = d^-1/2
    A^+    by 6 steps  Z <- 1/4 Z (13 I - A Z (15 I - A Z (7 I - A Z))),  from Z = A^T / |A|_1

Runs are counted among real tokens. A sequence of no more than m keys is its own landmarks, and gets softmax attention
itself. |A|_1 is that of each head (the authors take the largest of the batch, so that samples know each other).
Rows sum to one as far as the steps have converged. The authors' convolution of v is left to the module around it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from softless.mechanisms.base import Call
from softless.mechanisms.low_rank import LowRank, real_queries, segments
from softless.mechanisms.scored import MOST_STAND_INS, MOST_STEPS, check_count, softmax


@dataclass(frozen=True)
class Nystrom(LowRank):
    name: ClassVar[str] = "nystrom"
    formula: ClassVar[str] = "softmax(q k~^T) softmax(q~ k~^T)^+ softmax(q~ k^T) v,  q~ and k~ landmarks"
    cost: ClassVar[str] = "O(N m d)"
    paper: ClassVar[str] = "Xiong et al. 2021, arXiv 2102.03902"
    mixes_queries: ClassVar[bool] = True

    landmarks: int = 64
    steps: int = 6

    def __post_init__(self) -> None:
        check_count("landmarks", self.landmarks, most=MOST_STAND_INS)
        check_count("steps", self.steps, most=MOST_STEPS)

    @property
    def rows_sum_to_one(self) -> bool:
        return False

    def factors(self, q: Tensor, k: Tensor, call: Call) -> Sequence[Tensor]:
        real_q, mask = real_queries(q, k, call)
        means_q = segments(q, self.landmarks, mask)
        means_k = segments(k, self.landmarks, call.key_mask)
        used_q, used_k = ((means > 0).any(-1, keepdim=True) for means in (means_q, means_k))  # [B, 1, m, 1]
        real = (means_k > 0).any(-2, keepdim=True)  # [B, 1, 1, M]
        few = real.sum(-1, keepdim=True) <= self.landmarks
        k = call.scale * k
        q_marks, k_marks = means_q @ real_q, means_k @ k
        center = softmax(q_marks @ k_marks.mT, used_q & used_k.mT)
        right = softmax(q_marks @ k.mT, used_q & real)
        middle = torch.eye(self.landmarks, dtype=q.dtype, device=q.device)
        return (
            softmax(q @ k_marks.mT, used_k.mT),
            torch.where(few, middle, pseudo_inverse(center, self.steps)),
            torch.where(few, means_k, right),
        )


def pseudo_inverse(a: Tensor, steps: int) -> Tensor:
    """Of row-stochastic matrices [..., m, m], or with rows of zeros."""
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    norm = a.sum(-2).amax(-1)[..., None, None]
    z = a.mT / torch.where(norm > 0, norm, 1.0)
    for _ in range(steps):
        az = a @ z
        z = 0.25 * z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az)))
    return z
