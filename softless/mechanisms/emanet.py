"""EMANet (Li et al. 2019, arXiv 1907.13426): attention through a few bases that expectation maximization finds.

    z_jb = softmax over bases b of mu_b.k_j        how much of token j is base b
    r_bj = z_jb / sum_j z_jb                       each base's share of the tokens
    mu_b = sum_j r_bj k_j / |sum_j r_bj k_j|       the bases anew; 3 rounds, from `bases`
    o_i  = sum_b z_ib sum_j r_bj v_j / |sum_j r_bj k_j|           z_i from q_i, with the bases of the last round

With q = k = v, as published, o is the reconstruction of x from its bases. The authors treat z, r and mu as constants in
the backward pass. `detach=True` does the same, so that gradients reach only v. A module draws `bases` once and moves
them in training as the authors do: bases <- 0.9 bases + 0.1 mu, with mu a mean over the batch.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from softless.algebra.feature_maps import unit
from softless.mechanisms.base import Call
from softless.mechanisms.low_rank import LowRank
from softless.mechanisms.scored import MOST_STAND_INS, MOST_STEPS, check_count

MOMENTUM = 0.9


@dataclass(frozen=True)
class EMANet(LowRank):
    name: ClassVar[str] = "emanet"
    formula: ClassVar[str] = "softmax_b(q mu^T) r v / |r k|,  mu bases of k by expectation maximization"
    paper: ClassVar[str] = "Li et al. 2019, arXiv 1907.13426"
    moves_inputs: ClassVar[bool] = True
    rows_sum_to_one: ClassVar[bool] = False

    bases: int = 64
    rounds: int = 3
    detach: bool = True

    def __post_init__(self) -> None:
        check_count("bases", self.bases, most=MOST_STAND_INS)
        check_count("rounds", self.rounds, most=MOST_STEPS)

    def input_shapes(self, heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        return {"bases": (heads, self.bases, head_dim)}

    def draw(self, heads: int, head_dim: int, generator: Generator | None = None) -> dict[str, Tensor]:
        """Return random bases of length 1, all directions equally likely."""
        shape = self.input_shapes(heads, head_dim)["bases"]
        return {"bases": unit(torch.randn(shape, generator=generator))}

    def default_scale(self, head_dim: int) -> float | None:
        return 1.0

    def factors(self, q: Tensor, k: Tensor, call: Call) -> Sequence[Tensor]:
        with torch.no_grad() if self.detach else nullcontext():
            before, share, mean = self._rounds(k, call)
            length = mean.norm(dim=-1, keepdim=True)
            gain = torch.where(length > 0, 1 / torch.where(length > 0, length, 1.0), 0.0)
            return (call.scale * (q @ before.mT)).softmax(-1), gain * share

    def moved(self, k: Tensor, call: Call) -> dict[str, Tensor]:
        """Return the bases moved toward the mean over the samples that have a token."""
        mu, old = unit(self._rounds(k, call)[2]), call.inputs["bases"].to(k.dtype)
        has_tokens = call.visible(k, k).any(-1, keepdim=True).expand(len(k), -1, -1, -1)  # [B, 1, 1, 1]
        mean = torch.where(has_tokens, mu, 0.0).sum(0) / has_tokens.sum(0).clamp(min=1)
        return {"bases": torch.where(has_tokens.any(0), MOMENTUM * old + (1 - MOMENTUM) * mean, old)}

    def _rounds(self, k: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Return the bases before the last round, the share of each base in the tokens, and the new means."""
        mu, hidden = call.inputs["bases"].to(k.dtype), ~call.visible(k, k)  # [B, 1, 1, M]
        for _ in range(self.rounds):
            before, share = mu, (call.scale * (mu @ k.mT)).log_softmax(-2)  # [B, H, bases, M]
            share = torch.where(hidden, torch.finfo(k.dtype).min, share).softmax(-1)
            share = torch.where(hidden, 0.0, share)
            mean = share @ k
            mu = unit(mean)
        return before, share, mean
