"""Regression attention: a query reads the best linear predictor of v from k.

    w_ij = 1/n + (g/n) (phi(q_i) - k_mean)^T (K + r I)^-1 (phi(k_j) - k_mean)        K the covariance of phi(k)

    ridge     r = ridge trace(K) / d, or ridge / n with relative=False
    learned_ridge   softplus of one number per head, instead of `ridge`
    gain      g = d^-1/2 ("dim") or 1 ("one"); the argument `scale` of a call replaces it
    center    False reads phi(q) instead of phi(q) - k_mean

`softless.algebra.regression` has the formulas and what they tend to. A ridge relative to the trace needs all keys, so
the causal form needs relative=False. There, decoding solves a system of d equations for each token, whatever has been
seen before.
"""

from dataclasses import dataclass
from math import isfinite
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from softless.algebra import regression
from softless.algebra.kernel_spec import KernelSpec
from softless.algebra.state import Log, State, check_continues, merge, observe
from softless.errors import ArgumentError, check_choice
from softless.mechanisms.base import Call, repeat_heads
from softless.mechanisms.kernelized import _group, _ungroup
from softless.mechanisms.linear import FeatureMapped


@dataclass(frozen=True)
class Regress(FeatureMapped):
    name: ClassVar[str] = "regress"
    formula: ClassVar[str] = "v_mean + g (q - k_mean)^T (K + r I)^-1 C"
    cost: ClassVar[str] = "O(N d^2 + d^3)"
    paper: ClassVar[str] = "Garnelo & Czarnecki 2023, arXiv 2305.10203"
    reader: ClassVar[str] = "regress"

    ridge: float = 0.1
    learned_ridge: bool = False
    gain: str = "dim"  # dim: d^-1/2 | one
    center: bool = True
    relative: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if "exp" in (self.phi, self.phi_k):
            raise ArgumentError("phi 'exp' is kept as its logarithm, and regress needs the features themselves")
        check_choice("gain", self.gain, ("dim", "one"))
        for option in ("center", "relative", "learned_ridge"):
            if not isinstance(getattr(self, option), bool):
                raise ArgumentError(f"{option} {getattr(self, option)!r} is not True or False")
        if not (self.ridge >= 0 and isfinite(self.ridge)):
            raise ArgumentError(f"ridge {self.ridge} is not a finite number from 0 on")

    @property
    def carries_state(self) -> bool:  # type: ignore[override]
        return not self.relative

    def lacks(self, is_causal: bool) -> str | None:
        if is_causal and self.relative:
            return "has a ridge relative to the trace of all keys, so its causal form needs relative=False"
        return None

    def kernel_spec(self, scale: float) -> KernelSpec | None:
        return None

    def default_scale(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.gain == "dim" else 1.0

    def input_shapes(self, heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        return super().input_shapes(heads, head_dim) | ({"ridge": (heads,)} if self.learned_ridge else {})

    def initialize(self, name: str, tensor: Tensor) -> None:
        if name == "ridge":
            torch.nn.init.constant_(tensor, -2.25)  # softplus(-2.25) = 0.1
        else:
            super().initialize(name, tensor)

    def weights(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        phi_q, phi_k = _tensor(self.features_q(q, call)), _tensor(self.features_k(k, call))
        phi_k = repeat_heads(phi_k, q.shape[1])
        return regression.weights(
            phi_q,
            phi_k,
            self._ridge(call, q.dtype),
            call.scale,
            call.visible(q, k),
            relative=self.relative,
            centered=self.center,
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        if call.is_causal:
            return self._causal(q, k, v, None, call)
        state = observe(*self._keys(q, k, v, call))
        return self._read(q, v.shape[1], state, call)

    def attend_with_state(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None, call: Call
    ) -> tuple[Tensor, State]:
        """Absorb one token after the other, and read after each."""
        seen = observe(*self._keys(q, k, v, call))
        check_continues(state, seen)
        outputs = []
        for at in range(k.shape[2]):
            mask = None if call.key_mask is None else call.key_mask[:, at : at + 1]
            token = slice(at, at + 1)
            new = observe(*self._keys(q, k[:, :, token], v[:, :, token], call._replace(key_mask=mask)))
            state = new if state is None else merge(state, new)
            outputs.append(self._read(q[:, :, token], v.shape[1], state, call))
        if not outputs:
            return q.new_zeros(*q.shape[:3], v.shape[3]), seen if state is None else state
        assert state is not None
        return torch.cat(outputs, 2), state

    def attend_to_state(self, q: Tensor, k: Tensor, v: Tensor, state: State, call: Call) -> Tensor:
        return self._read(q, v.shape[1], state, call)

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, state: State | None, call: Call) -> Tensor:
        """Compute causal attention. The last query is aligned with the last key."""
        past = k.shape[2] - q.shape[2]
        if past > 0:
            mask = None if call.key_mask is None else call.key_mask[:, :past]
            seen = observe(*self._keys(q, k[:, :, :past], v[:, :, :past], call._replace(key_mask=mask)))
            state = seen if state is None else merge(state, seen)
            k, v = k[:, :, past:], v[:, :, past:]
            call = call._replace(key_mask=None if call.key_mask is None else call.key_mask[:, past:])
        elif past < 0:
            mask = k.new_ones(k.shape[0], k.shape[2]).bool() if call.key_mask is None else call.key_mask
            call = call._replace(key_mask=F.pad(mask, (-past, 0), value=False))
            k, v = F.pad(k, (0, 0, -past, 0)), F.pad(v, (0, 0, -past, 0))
        return self.attend_with_state(q, k, v, state, call)[0]

    def _keys(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor | Log, Tensor, Tensor | None]:
        """Return (phi(k), [v, phi(k)], mask)."""
        phi_k, values, mask = super()._keys(q, k, v, call)
        return phi_k, regression.with_keys(_tensor(phi_k), values), mask

    def _read(self, q: Tensor, groups: int, state: State, call: Call) -> Tensor:
        phi_q = _tensor(_group(self.features_q(q, call), groups, q.shape[1]))
        ridge = self._ridge(call, q.dtype)
        if isinstance(ridge, Tensor) and groups != q.shape[1]:
            ridge = ridge.unflatten(0, (groups, -1))
        out = regression.read(phi_q, state, ridge, call.scale, relative=self.relative, centered=self.center)
        return _ungroup(out)

    def _ridge(self, call: Call, dtype: torch.dtype) -> float | Tensor:
        return F.softplus(call.inputs["ridge"].to(dtype)) if self.learned_ridge else self.ridge


def _tensor(phi: Tensor | Log) -> Tensor:
    assert isinstance(phi, Tensor), "no feature map of regress is a logarithm"
    return phi
