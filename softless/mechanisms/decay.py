"""Attention with a memory that fades, at one rate per head: Lightning attention and retention.

    S_t = e^-slope S_{t-1} + k_t v_t^T          o_t = S_t^T q_t = sum_{j <= t} e^{-slope (t - j)} q_t.k_j v_j

    lightning   slope_h = 2^(-8h/H),  h = 1 .. H            TransNormerLLM, arXiv 2307.14995; Lightning-2, 2401.04658
    retention   e^-slope_h = 1 - 2^(-5-h),  h = 0 .. H - 1  RetNet (Sun et al. 2023), arXiv 2307.08621

`factor` multiplies the slopes: TransNormerLLM gives layer l of L the factor 1 - l/(L - 1) + 1e-5. There
is no scale and no denominator: the published modules put silu before q, k and v, and a norm and a gate after. Padding
does not count in t - j, so nothing fades during padding. Each query head has its own rate and so its own memory.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from softless.algebra import fading
from softless.errors import ArgumentError, check_choice
from softless.mechanisms.base import Call, repeat_heads
from softless.mechanisms.recurrent import Recurrent

MOST_FACTOR = 1_000_000  # at this factor a token remembers only itself; far beyond it, slopes overflow


@dataclass(frozen=True)
class Decay(Recurrent):
    name: ClassVar[str] = "decay"
    formula: ClassVar[str] = "sum_{j<=i} e^{-slope (i - j)} q.k_j v_j, one slope per head"
    paper: ClassVar[str] = "Qin et al. 2023, arXiv 2307.14995"

    slopes: str = "lightning"  # lightning | retention
    factor: float = 1.0

    def __post_init__(self) -> None:
        check_choice("slopes", self.slopes, ("lightning", "retention"))
        if not 0 <= self.factor <= MOST_FACTOR:
            raise ArgumentError(f"factor {self.factor} is not a number from 0 to {MOST_FACTOR:,}")

    def memory_heads(self, q: Tensor, k: Tensor) -> tuple[int, ...]:
        return tuple(q.shape[:2])

    def weights_in_order(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return fading.weights(q, repeat_heads(k, q.shape[1]), self._slope(q), _kept(k, call))

    def go_through(self, q: Tensor, k: Tensor, v: Tensor, memory: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        return fading.chunked(q, k, v, self._slope(q), _kept(k, call), memory, min(self.chunk, k.shape[2]))

    def _slope(self, q: Tensor) -> Tensor:
        """Return one slope per head [H]."""
        heads = q.shape[1]
        h = torch.arange(heads, device=q.device, dtype=torch.float64)
        slope = 2 ** (-8 * (h + 1) / heads) if self.slopes == "lightning" else -torch.log1p(-(2 ** (-5 - h)))
        return (self.factor * slope).to(q.dtype)


def _kept(k: Tensor, call: Call) -> Tensor:
    return torch.ones_like(k[:1, 0, :, 0], dtype=torch.bool) if call.key_mask is None else call.key_mask
