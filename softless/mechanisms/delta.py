"""The delta rule and its exact flow: each token first erases part of what the memory holds for its key.

    delta   S_t = S_{t-1} - beta_t k^_t (k^_t^T S_{t-1}) + beta_t k^_t v_t^T                k^ = k/|k|
            Schlag et al. 2021, arXiv 2102.11174; chunked: Yang et al. 2024, arXiv 2406.06484
    efla    S_t = S_{t-1} - alpha_t k_t (k_t^T S_{t-1}) + alpha_t k_t v_t^T                 EFLA, arXiv 2512.12602
            alpha_t = (1 - e^{-beta_t |k_t|^2}) / |k_t|^2

    o_t = S_t^T q_t

beta is an input with one number per token and key head [B, G, M]; a module predicts it as sigmoid(w.x + b). efla solves
dS/dt = -k k^T S + k v^T exactly over a time of beta, so no beta and no key makes it unstable. The length of a key acts
as a gate, so keys are not normalized. With unit keys both are one rule that erases a and writes gain v:

    delta   a = beta                      gain = beta
    efla    a = 1 - e^{-beta |k|^2}       gain = beta |k| (1 - e^-x)/x,  x = beta |k|^2

A zero key neither erases nor writes.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from softless.algebra import delta
from softless.algebra.feature_maps import unit
from softless.algebra.kernel_spec import KernelSpec
from softless.mechanisms.base import Call, repeat_heads
from softless.mechanisms.recurrent import Recurrent


@dataclass(frozen=True)
class Delta(Recurrent):
    name: ClassVar[str] = "delta"
    formula: ClassVar[str] = "S^T q,  S <- S - beta k^ (k^^T S - v^T), k^ = k/|k|"
    paper: ClassVar[str] = "Schlag et al. 2021, arXiv 2102.11174"
    token_inputs: ClassVar[tuple[str, ...]] = ("beta",)

    def kernel_spec(self, scale: float) -> KernelSpec:
        return KernelSpec("identity", "identity", self.name, scale=scale)

    def strengths(self, length: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """Return (a, gain) for keys of this length: [B, G, N, 1]."""
        return beta, beta

    def weights_in_order(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        key, erase, gain = (repeat_heads(x, q.shape[1]) for x in self._keys(k, call))
        return delta.weights(q, key, erase, gain)

    def go_through(self, q: Tensor, k: Tensor, v: Tensor, memory: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        key, erase, gain = self._keys(k, call)
        write = gain * v
        if k.shape[1] != q.shape[1]:  # queries that share a key head share its memory
            q = q.unflatten(1, (k.shape[1], -1))
            key, write, erase = key[:, :, None], write[:, :, None], erase[:, :, None]
        if k.shape[2] == 1:
            out, memory = delta.recurrent(q, key, write, erase, memory)
        else:
            out, memory = delta.chunked(q, key, write, erase, memory, min(self.chunk, k.shape[2]))
        return (out if out.ndim == 4 else out.flatten(1, 2)), memory

    def _keys(self, k: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Return (k^, a, gain)."""
        beta = call.inputs["beta"].to(k.dtype)
        if call.key_mask is not None:
            beta = torch.where(call.key_mask[:, None], beta, 0.0)
        key = unit(k)
        return key, *self.strengths((k * key).sum(-1, keepdim=True), beta[..., None])


@dataclass(frozen=True)
class Efla(Delta):
    name: ClassVar[str] = "efla"
    formula: ClassVar[str] = "S^T q,  S <- S - alpha k (k^T S - v^T), alpha = (1 - e^{-beta |k|^2})/|k|^2"
    paper: ClassVar[str] = "Lei et al. 2025, arXiv 2512.12602"

    def strengths(self, length: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        x = beta * length.square()
        return -torch.expm1(-x), beta * length * _decline(x)


def _decline(x: Tensor) -> Tensor:
    """Return (1 - e^-x)/x, which is 1 at 0. Below 1/16 it is a series, whose derivative does not cancel."""
    small = x.abs() < 1 / 16
    near, far = torch.where(small, x, 0.0), torch.where(small, 1.0, x)
    series = torch.ones_like(x)
    for n in range(10, 1, -1):
        series = 1 - near / n * series
    return torch.where(small, series, -torch.expm1(-far) / far)
