"""Kernelized attention: a feature map for q, a feature map for k, and a reader. The algebra does the rest.

    o_i = read(phi(q_i), observe(phi(k_j), v_j for the j that i may see))

Queries that share a key head share its state: [B, G, H/G, N, .] reads [B, G, 1, d, e].
"""

from functools import partial
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from softless import algebra
from softless.algebra import Gains, direct
from softless.algebra.modes import eager, readable, recording
from softless.algebra.state import Log, State, check_continues, merge, observe
from softless.errors import ArgumentError
from softless.mechanisms.base import Call, Mechanism, repeat_heads

BLOCK = 320  # tokens, where states are merged: reading a state takes more temporary tensors than the direct way
LONG = 1024  # tokens from which on a call that needs no gradient runs in blocks


class Kernelized(Mechanism):
    """A subclass defines `features_q`, `features_k` and `reader`. Features depend on one token only."""

    family: ClassVar[str] = "kernelized"
    cost: ClassVar[str] = "O(N d^2)"
    carries_state: ClassVar[bool] = True
    reader: ClassVar[str]  # divide | subtract | channel | none
    chunk: ClassVar[int] = algebra.CHUNK
    places: ClassVar[bool] = False  # whether features depend on where in the sequence a token is
    signed: ClassVar[bool] = False  # whether features may be negative, so that the mass of a division may cancel

    def features_q(self, q: Tensor, call: Call) -> Tensor | Log:
        """Return phi(q) [B, H, N, D]."""
        raise NotImplementedError

    def features_k(self, k: Tensor, call: Call) -> Tensor | Log:
        """Return phi(k) [B, G, M, D], or [B, H, M, D] where it differs by query head."""
        return self.features_q(k, call)

    def default_scale(self, head_dim: int) -> float | None:
        return 1.0 if self.reader == "none" else None

    @property
    def rows_sum_to_one(self) -> bool:  # type: ignore[override]
        return self.reader != "none"

    def weights(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        k = repeat_heads(k, q.shape[1])
        phi_q, phi_k = self.features_q(q, call), self.features_k(k, call)
        _check_widths(phi_q, phi_k)
        gain = self._gain(phi_q, call)
        return algebra.weights(phi_q, phi_k, self.reader, gain, call.visible(q, k), signed=self.signed)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        if call.is_causal:
            return self._causal(q, k, v, None, call)
        if eager() and max(q.shape[2], k.shape[2]) > LONG and not self.places and readable(v):
            out = self._in_blocks(q, k, v, call)
            if out is not None:
                return out
        phi_q, (phi_k, values, mask) = self._queries(q, v, call), self._keys(q, k, v, call)
        _check_widths(phi_q, phi_k)
        gain = self._gain(phi_q, call)
        return _ungroup(algebra.parallel(phi_q, phi_k, values, self.reader, gain, mask, signed=self.signed))

    def attend_with_state(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None, call: Call
    ) -> tuple[Tensor, State]:
        seen = observe(*self._keys(q, k, v, call))
        check_continues(state, seen)
        after = seen if state is None else merge(state, seen)
        if q.shape[2] == 0:
            return q.new_zeros(*q.shape[:3], v.shape[3]), after
        if q.shape[2] == k.shape[2] == 1:
            return Kernelized.attend_to_state(self, q, k, v, after, call), after
        return self._causal(q, k, v, state, call), after

    def attend_to_state(self, q: Tensor, k: Tensor, v: Tensor, state: State, call: Call) -> Tensor:
        """Return the output where every query sees all tokens of a state; k and v belong to the queries."""
        return _ungroup(self._read(self._queries(q, v, call), state, call))

    def _in_blocks(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | None:
        """Return the output with features of one block of tokens at a time, or None if gradients are recorded.

        The states of all blocks of keys are merged, where there is no more direct way.
        """
        first = self.features_q(q[:, :, :1], call), self.features_k(k[:, :, :1], call)
        _check_widths(*first)
        if recording(q, k, v, *call.inputs.values(), *(phi.value if isinstance(phi, Log) else phi for phi in first)):
            return None
        logs = [isinstance(phi, Log) for phi in first]
        plain = q.shape[1] == k.shape[1] == v.shape[1] and call.key_mask is None and not any(logs)
        if plain and self.reader in direct.READS and not self.signed:
            maps: Any = (partial(phi, call=call) for phi in (self.features_q, self.features_k))
            out = direct.in_blocks(q, k, v, self.reader, call.scale, *maps)
            if out is not None:
                return out
        state = None
        for at in _blocks(k.shape[2], 2 * BLOCK):
            mask = None if call.key_mask is None else call.key_mask[:, at]
            seen = observe(*self._keys(q, k[:, :, at], v[:, :, at], call._replace(key_mask=mask)))
            state = seen if state is None else merge(state, seen)
        assert state is not None
        out = q.new_empty(*q.shape[:3], v.shape[3])
        for at in _blocks(q.shape[2], BLOCK):
            phi_q = self._queries(q[:, :, at], v, call)
            rows = self._read(phi_q, state, call, shifted=logs[1])
            out[:, :, at] = _ungroup(rows)
            del phi_q, rows  # or they would be there while the next features are made
        return out

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, state: State | None, call: Call) -> Tensor:
        """Compute causal attention. The last query is aligned with the last key; missing keys are masked padding."""
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
        phi_q, (phi_k, values, mask) = self._queries(q, v, call), self._keys(q, k, v, call)
        _check_widths(phi_q, phi_k)
        return _ungroup(self._chunked(phi_q, phi_k, values, mask, state, call))

    def _read(self, phi_q: Tensor | Log, state: State, call: Call, *, shifted: bool = True) -> Tensor:
        gain = self._gain(phi_q, call)
        return algebra.read(phi_q, state, self.reader, gain, shifted=shifted, signed=self.signed)

    def _chunked(
        self,
        phi_q: Tensor | Log,
        phi_k: Tensor | Log,
        values: Tensor,
        mask: Tensor | None,
        state: State | None,
        call: Call,
    ) -> Tensor:
        gain = self._gain(phi_q, call)
        return algebra.chunked(phi_q, phi_k, values, self.reader, gain, mask, state, self.chunk, signed=self.signed)

    def _gain(self, phi_q: Tensor | Log, call: Call) -> float | Gains:
        """Return the factor of the correlation."""
        return call.scale

    def _queries(self, q: Tensor, v: Tensor, call: Call) -> Tensor | Log:
        return _group(self.features_q(q, call), v.shape[1], q.shape[1])

    def _keys(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor | Log, Tensor, Tensor | None]:
        """Return (phi(k), v, mask), with a dimension for the queries that share a key head."""
        groups, heads = v.shape[1], q.shape[1]
        mask = None if call.key_mask is None else call.key_mask[:, None]  # [B, 1, M]
        if groups == heads:
            return self.features_k(k, call), v, mask
        return _group(self.features_k(k, call), groups, heads), v[:, :, None], None if mask is None else mask[:, None]


def _blocks(tokens: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, tokens, size)]


def _check_widths(phi_q: Tensor | Log, phi_k: Tensor | Log) -> None:
    """Raise if two feature maps of the user return different numbers of features."""
    width_q = (phi_q.value if isinstance(phi_q, Log) else phi_q).shape[-1]
    width_k = (phi_k.value if isinstance(phi_k, Log) else phi_k).shape[-1]
    if width_q != width_k:
        raise ArgumentError(f"phi makes {width_q} features and phi_k makes {width_k}: they must make equally many")


def _group(phi: Tensor | Log, groups: int, heads: int) -> Tensor | Log:
    """[B, H, N, D] -> [B, G, H/G, N, D] where queries share key heads."""
    if groups == heads:
        return phi
    return Log(phi.value.unflatten(1, (groups, -1))) if isinstance(phi, Log) else phi.unflatten(1, (groups, -1))


def per_head(x: Tensor, phi_q: Tensor | Log) -> Tensor:
    """[H] -> [G, H/G] where queries share key heads, in the dtype of the queries."""
    value = phi_q.value if isinstance(phi_q, Log) else phi_q
    return (x if value.ndim == 4 else x.unflatten(0, value.shape[1:3])).to(value.dtype)


def _ungroup(out: Tensor) -> Tensor:
    return out if out.ndim == 4 else out.flatten(1, 2)
