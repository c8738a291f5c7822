"""Attention through m landmarks that stand for all tokens: Nystromformer, SOFT and agent attention.

    nystrom   q~, k~ = means of m runs of consecutive queries and keys             Xiong et al. 2021, arXiv 2102.03902
              o      = softmax(s q k~^T)  A^+  softmax(s q~ k^T) v,     A = softmax(s q~ k~^T),   s = d^-1/2
              A^+    by 6 steps  Z <- 1/4 Z (13 I - A Z (15 I - A Z (7 I - A Z))),  from Z = A^T / |A|_1

    soft      g(a, b) = e^{-s |a - b|^2 / 2},   s = d^-1/2                         Lu et al. 2021, arXiv 2110.11945
              L       = means of m runs of consecutive keys
              o       = g(q, L) (g(L, L) + 0.01 I)^-1 g(L, k) v

    agent     a = means of m runs of consecutive queries                           Han et al. 2023, arXiv 2312.08874
              o = softmax(s q a^T) softmax(s a k^T) v,      s = d^-1/2

In a picture (`grid=`), soft and agent take the means of p x p cells with p^2 = m; class tokens are in no cell. Runs
count real tokens only. The convolutions of v and the agent biases of the papers belong to the module around the
attention.

nystrom: a sequence of no more than m keys is its own landmarks and gets exact softmax attention. |A|_1 is computed per
head; the authors take the largest of the batch, which makes the samples of a batch depend on each other. Rows sum to
one as far as the steps have converged.

soft: with k = q, as published, the weights are symmetric, and a module uses one projection for both. The weights have
no normalizer and do not sum to one. The authors make L with a strided convolution and invert by 20 Newton steps; here
the inverse and its gradient are exact.

agent: both matrices have rows that sum to one, and so has their product.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from softless.errors import ArgumentError
from softless.mechanisms.base import Call
from softless.mechanisms.low_rank import LowRank, check_cells, pooled, real_queries, segments
from softless.mechanisms.scored import MOST_STAND_INS, MOST_STEPS, check_count, softmax


@dataclass(frozen=True)
class Nystrom(LowRank):
    name: ClassVar[str] = "nystrom"
    formula: ClassVar[str] = "softmax(q k~^T) softmax(q~ k~^T)^+ softmax(q~ k^T) v,  q~ and k~ landmarks"
    paper: ClassVar[str] = "Xiong et al. 2021, arXiv 2102.03902"
    mixes_queries: ClassVar[bool] = True
    rows_sum_to_one: ClassVar[bool] = False

    landmarks: int = 64
    steps: int = 6

    def __post_init__(self) -> None:
        check_count("landmarks", self.landmarks, most=MOST_STAND_INS)
        check_count("steps", self.steps, most=MOST_STEPS)

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
    """Return the pseudo-inverse of matrices [..., m, m] whose rows sum to one or are zero."""
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    norm = a.sum(-2).amax(-1)[..., None, None]
    z = a.mT / torch.where(norm > 0, norm, 1.0)
    for _ in range(steps):
        az = a @ z
        z = 0.25 * z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az)))
    return z


RIDGE = 0.01


@dataclass(frozen=True)
class Soft(LowRank):
    name: ClassVar[str] = "soft"
    formula: ClassVar[str] = "g(q, L) (g(L, L) + 0.01 I)^-1 g(L, k) v,  g Gaussian, L landmarks"
    paper: ClassVar[str] = "Lu et al. 2021, arXiv 2110.11945"
    shares_keys: ClassVar[bool] = True
    rows_sum_to_one: ClassVar[bool] = False
    reads_grid: ClassVar[bool] = True

    landmarks: int = 49

    def __post_init__(self) -> None:
        check_count("landmarks", self.landmarks, most=MOST_STAND_INS)

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
    """Return g(a, b): [..., N, d], [..., M, d] -> [..., N, M]."""
    squares = a.square().sum(-1, keepdim=True) + b.square().sum(-1, keepdim=True).mT
    return (-0.5 * scale * (squares - 2 * a @ b.mT).clamp(min=0)).exp()


@dataclass(frozen=True)
class Agent(LowRank):
    name: ClassVar[str] = "agent"
    formula: ClassVar[str] = "softmax(q a^T / sqrt(d)) softmax(a k^T / sqrt(d)) v,  a means of queries"
    paper: ClassVar[str] = "Han et al. 2023, arXiv 2312.08874"
    mixes_queries: ClassVar[bool] = True
    reads_grid: ClassVar[bool] = True

    agents: int = 49

    def __post_init__(self) -> None:
        check_count("agents", self.agents, most=MOST_STAND_INS)

    def check(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
        check_cells("agents", self.agents, call.grid)

    def factors(self, q: Tensor, k: Tensor, call: Call) -> Sequence[Tensor]:
        real_q, mask = real_queries(q, k, call)
        means = pooled(q, self.agents, mask, call.grid)
        used = (means > 0).any(-1, keepdim=True)  # [B, 1, m, 1]
        agents = call.scale * (means @ real_q)
        return softmax(q @ agents.mT, used.mT), softmax(agents @ k.mT, used & call.visible(q, k))
