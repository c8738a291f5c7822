"""Regression attention: a query reads the best linear predictor of v from k.

    w_ij = p_j + g p_j (phi(q_i) - k_mean)^T (K + r I)^-1 (phi(k_j) - k_mean)      K the covariance of phi(k), p_j = 1/n

    ridge       lam, or "learned": softplus of one number per head
    relative    r = lam trace(K) / d, or r = lam / n with relative=False
    gain        g = d^-1/2 ("dim"), 1 ("one") or "learned": d^-1/2 times one number per head
    center      False reads phi(q) instead of phi(q) - k_mean
    weighting   "query": p_j = softmax_j(q_mean.k_j / sqrt d) instead of 1/n, in the means and in K as well

The argument `scale` of a call replaces d^-1/2 or 1. `softless.algebra.regression` has the formulas and what they tend
to.

A ridge relative to the trace of all keys, and the mean of all queries, know the future. So the causal form needs
relative=False and no weighting. Decoding solves d equations for each token, whatever has been seen before. Many tokens
are solved for at once, by conjugate gradients (`softless.algebra.conjugate`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from softless.algebra import conjugate, regression
from softless.algebra.kernel_spec import KernelSpec
from softless.algebra.state import Log, State, observe
from softless.errors import ArgumentError, check_choice, shown
from softless.mechanisms.base import Call, repeat_heads
from softless.mechanisms.kernelized import _check_widths, _ungroup, is_long, per_head
from softless.mechanisms.linear import FeatureMapped
from softless.mechanisms.low_rank import real_queries
from softless.mechanisms.scored import softmax

LEARNED = "learned"


@dataclass(frozen=True)
class Regress(FeatureMapped):
    name: ClassVar[str] = "regress"
    formula: ClassVar[str] = "v_mean + g (q - k_mean)^T (K + r I)^-1 C"
    paper: ClassVar[str] = "Garnelo et al. 2023, arXiv 2305.10203"
    reader: ClassVar[str] = "regress"
    chunk: ClassVar[int] = 32

    ridge: float | str = 0.1  # or learned
    gain: str = "dim"  # dim: d^-1/2 | one | learned
    center: bool = True
    relative: bool = True
    weighting: str | None = None  # None | query

    def __post_init__(self) -> None:
        super().__post_init__()
        if "exp" in (self.phi, self.phi_k):
            raise ArgumentError("phi 'exp' is kept as its logarithm, and regress needs the features themselves")
        number = isinstance(self.ridge, int | float) and not isinstance(self.ridge, bool)
        if self.ridge != LEARNED and not (number and 0 <= float(self.ridge) < float("inf")):
            raise ArgumentError(f"ridge {shown(self.ridge)} is not a finite number from 0 on, or 'learned'")
        check_choice("gain", self.gain, ("dim", "one", LEARNED))
        check_choice("weighting", self.weighting, (None, "query"))

    @property
    def carries_state(self) -> bool:  # type: ignore[override]
        return self.lacks(True) is None

    @property
    def mixes_queries(self) -> bool:  # type: ignore[override]
        return self.weighting is not None

    def lacks(self, is_causal: bool) -> str | None:
        if is_causal and self.weighting is not None:
            return "weighs keys by the mean of all queries, so its causal form needs weighting=None"
        if is_causal and self.relative:
            return "has a ridge relative to the trace of all keys, so its causal form needs relative=False"
        return None

    def kernel_spec(self, scale: float) -> KernelSpec | None:
        """Return the names for the kernels if the ridge is relative and every token counts the same."""
        spec = super().kernel_spec(scale)
        if spec is None or self.weighting is not None or not self.relative:
            return None
        return spec._replace(ridge=0.0 if isinstance(self.ridge, str) else float(self.ridge), centered=self.center)

    def kernel_factors(self, call: Call) -> Tensor | None:
        if LEARNED not in (self.ridge, self.gain):
            return None
        ridge, gain = (call.inputs[name].float() if name in call.inputs else None for name in ("ridge", "gain"))
        if isinstance(self.ridge, str):
            assert ridge is not None
            return torch.stack([F.softplus(ridge), torch.ones_like(ridge) if gain is None else gain], -1)
        assert gain is not None
        return torch.stack([torch.full_like(gain, float(self.ridge)), gain], -1)

    def default_scale(self, head_dim: int) -> float:
        return 1.0 if self.gain == "one" else head_dim**-0.5

    def input_shapes(self, heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        learned = [name for name in ("ridge", "gain") if getattr(self, name) == LEARNED]
        return super().input_shapes(heads, head_dim) | dict.fromkeys(learned, (heads,))

    def initialize(self, name: str, tensor: Tensor) -> None:
        if name in ("ridge", "gain"):
            torch.nn.init.constant_(tensor, -2.25 if name == "ridge" else 1.0)  # softplus(-2.25) = 0.1
        else:
            super().initialize(name, tensor)

    def weights(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        k, visible = repeat_heads(k, q.shape[1]), call.visible(q, k)
        phi_q, phi_k = _tensor(self.features_q(q, call)), _tensor(self.features_k(k, call))
        _check_widths(phi_q, phi_k)
        shares = None if self.weighting is None else _shares(q, k, call)[..., None, :]  # [B, H, 1, M]
        factors = self._ridge(phi_q, call), self._factor(phi_q, call)
        options = {"relative": self.relative, "centered": self.center}
        return regression.weights(phi_q, phi_k, *factors, visible, shares, **options)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        if call.is_causal:
            return self._causal(q, k, v, None, call)
        if self.weighting is None and is_long(q, k, v) and (out := self._in_blocks(q, k, v, call)) is not None:
            return out
        if self.weighting is not None:
            k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        phi_q, (phi_k, values, mask) = self._queries(q, v, call), self._keys(q, k, v, call)
        _check_widths(phi_q, phi_k)
        if self.weighting is None:
            return _ungroup(self._read(phi_q, observe(phi_k, values, mask), call))
        n = call.visible(q, k).sum(-1)[..., 0]  # [B, 1]
        state = regression.observe_shares(_tensor(phi_k), values, _shares(q, k, call), n)
        return self._read(phi_q, state, call)

    def _values(
        self, phi_k: Tensor | Log, v: Tensor, heads: int, key_mask: Tensor | None
    ) -> tuple[Tensor | Log, Tensor, Tensor | None]:
        """Return (phi(k), [v, phi(k)], mask)."""
        phi_k, values, mask = super()._values(phi_k, v, heads, key_mask)
        return phi_k, regression.with_keys(_tensor(phi_k), values), mask

    def _reader(
        self, state: State, like: Tensor | Log, call: Call, *, shifted: bool = True
    ) -> Callable[[Tensor | Log], Tensor]:
        factors = self._ridge(like, call), self._factor(like, call)
        answer = regression.reader(state, *factors, relative=self.relative, centered=self.center)
        return lambda phi_q: answer(_tensor(phi_q))

    def _chunked(
        self,
        phi_q: Tensor | Log,
        phi_k: Tensor | Log,
        values: Tensor,
        mask: Tensor | None,
        state: State | None,
        call: Call,
    ) -> Tensor:
        queries, keys = _tensor(phi_q), _tensor(phi_k)
        ridge, gain = (regression.per_matrix(x, 1) for x in (self._ridge(queries, call), self._factor(queries, call)))
        return conjugate.chunked(queries, keys, values, ridge, gain, mask, state, self.chunk, centered=self.center)

    def _ridge(self, phi_q: Tensor | Log, call: Call) -> float | Tensor:
        if isinstance(self.ridge, str):
            return F.softplus(per_head(call.inputs["ridge"], phi_q))
        return self.ridge

    def _factor(self, phi_q: Tensor | Log, call: Call) -> float | Tensor:
        return call.scale * per_head(call.inputs["gain"], phi_q) if self.gain == LEARNED else call.scale


def _shares(q: Tensor, k: Tensor, call: Call) -> Tensor:
    """Return the share of each key [B, H, M], for k with as many heads as q."""
    real, mask = real_queries(q, k, call)
    count = q.shape[2] if mask is None else mask.sum(-1).clamp(min=1)[:, None, None]
    mean = real.sum(2) / count  # [B, H, d]
    scores = (k @ mean[..., None])[..., 0] * q.shape[3] ** -0.5
    return softmax(scores, call.visible(q, k)[..., 0, :])


def _tensor(phi: Tensor | Log) -> Tensor:
    assert isinstance(phi, Tensor), "no feature map of regress is a logarithm"
    return phi
