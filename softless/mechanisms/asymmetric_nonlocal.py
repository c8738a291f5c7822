"""Asymmetric non-local attention (Zhu et al. 2019, arXiv 1908.07678): a pyramid of means in place of the keys.

    k~, v~ = means of k and v over runs of consecutive tokens: p runs for each p of the pyramid
    o      = softmax(q k~^T / sqrt(d)) v~

The paper pools pictures, p x p cells for p = 1, 3, 6, 8; here a sequence is pooled, p runs each. Runs are counted
among real tokens, and empty ones are left out. The weights, softmax(...) times the means, have rows that sum to one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from softless.errors import ArgumentError
from softless.mechanisms.base import Call
from softless.mechanisms.low_rank import LowRank, segments
from softless.mechanisms.scored import check_count, softmax


@dataclass(frozen=True)
class AsymmetricNonLocal(LowRank):
    name: ClassVar[str] = "asymmetric_nonlocal"
    formula: ClassVar[str] = "softmax(q k~^T / sqrt(d)) v~,  k~ and v~ a pyramid of means"

    pyramid: tuple[int, ...] = (1, 9, 36, 64)

    def __post_init__(self) -> None:
        if not isinstance(self.pyramid, tuple) or not self.pyramid:
            raise ArgumentError(f"pyramid {self.pyramid!r} is not a tuple of whole numbers such as (1, 9, 36, 64)")
        for level in self.pyramid:
            check_count("pyramid", level)

    def factors(self, q: Tensor, k: Tensor, call: Call) -> Sequence[Tensor]:
        means = torch.cat(
            [segments(k, level, call.key_mask) for level in self.pyramid], -2
        )  # [B, 1, sum of the pyramid, M]
        used = (means > 0).any(-1)[..., None, :]
        return softmax(call.scale * (q @ (means @ k).mT), used), means
