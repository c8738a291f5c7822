"""Kernelized attention: a feature map for q, a feature map for k, and a reader. The algebra does the rest.

    o_i = read(phi(q_i), observe(phi(k_j), v_j for the j that i may see))

Queries that share a key head share its state: [B, G, H/G, N, .] reads [B, G, 1, d, e].
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from softless import algebra
from softless.algebra import Gains, direct
from softless.algebra.modes import eager, readable, recording
from softless.algebra.state import Log, State, check_continues, merge, observe
from softless.errors import ArgumentError
from softless.mechanisms.base import Call, Mechanism, repeat_heads

BLOCK = 256  # tokens, where states are merged: reading a state takes more temporary tensors than the direct way
WIDE = (torch.float32, torch.float64)
LONG = 1024  # tokens from which on a call that needs no gradient runs in blocks


BlockMap = Callable[[slice], Tensor | Log]


class Kernelized(Mechanism):
    """A subclass defines `features_q`, `features_k` and `reader`. Features depend on one token only."""

    family: ClassVar[str] = "kernelized"
    cost: ClassVar[str] = "O(N d^2)"
    carries_state: ClassVar[bool] = True
    reader: ClassVar[str]  # divide | subtract | channel | none
    chunk: ClassVar[int] = algebra.CHUNK
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
        if is_long(q, k, v) and (out := self._in_blocks(q, k, v, call)) is not None:
            return out
        phi_q, (phi_k, values, mask) = self._queries(q, v, call), self._keys(q, k, v, call)
        _check_widths(phi_q, phi_k)
        gain = self._gain(phi_q, call)
        return _ungroup(algebra.parallel(phi_q, phi_k, values, self.reader, gain, mask, signed=self.signed))

    def shortcut(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> direct.Steps | None:
        """Return the steps of short calls on a CPU."""
        maps, shapes, divides = self.maps(), [q.shape, k.shape, v.shape], self.reader == "divide"
        if maps is None or not q.is_cpu or q.dtype not in WIDE or self.reader not in direct.READS:
            return None
        if call.is_causal or call.key_mask is not None or q.shape[1] != k.shape[1] or (divides and self.signed):
            return None
        fits = min(map(min, shapes)) > 0 and max(q.shape[2], k.shape[2]) <= LONG
        return direct.steps(self.reader, call.scale, k.shape[2], *maps) if fits else None

    def maps(self) -> tuple[direct.FeatureMap, direct.FeatureMap] | None:
        """Return the feature maps of q and k, if they are the same functions in every call, without inputs."""
        return None

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

    def _block_maps(self, q: Tensor, k: Tensor, call: Call) -> tuple[BlockMap, BlockMap]:
        """Return functions from a slice to the features of the queries, and of the keys, that are there."""
        return lambda at: self.features_q(q[:, :, at], call), lambda at: self.features_k(k[:, :, at], call)

    def _in_blocks(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | None:
        """Return the output with features of one block of tokens at a time, or None if gradients are recorded.

        The states of all blocks of keys are merged, where there is no more direct way.
        """
        phi_q, phi_k = self._block_maps(q, k, call)
        first = phi_q(slice(1)), phi_k(slice(1))
        _check_widths(*first)
        if recording(q, k, v, *call.inputs.values(), *(phi.value if isinstance(phi, Log) else phi for phi in first)):
            return None
        logs = [isinstance(phi, Log) for phi in first]
        narrow = min(1.0, q.shape[3] / _width(first[0]))  # blocks of wide features have fewer tokens
        plain = q.shape[1] == k.shape[1] == v.shape[1] and call.key_mask is None and not any(logs)
        if plain and self.reader in direct.READS and not self.signed:
            maps: Any = {"phi_q": phi_q, "phi_k": phi_k}
            size = math.ceil(narrow * direct.BLOCK)
            out = direct.in_blocks(q.shape[2], v, self.reader, call.scale, size=size, **maps)
            if out is not None:
                return out
        state, size = None, math.ceil(narrow * BLOCK)
        for at in direct.blocks(k.shape[2], 2 * size):
            mask = None if call.key_mask is None else call.key_mask[:, at]
            seen = observe(*self._values(phi_k(at), v[:, :, at], q.shape[1], mask))
            state = seen if state is None else merge(state, seen)
        assert state is not None
        read = self._reader(state, _group(first[0], v.shape[1], q.shape[1]), call, shifted=logs[1])
        out = q.new_empty(*q.shape[:3], v.shape[3])
        for at in direct.blocks(q.shape[2], size):
            rows = read(_group(phi_q(at), v.shape[1], q.shape[1]))
            out[:, :, at] = _ungroup(rows)
            del rows  # or they would be there while the next features are made
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

    def _read(self, phi_q: Tensor | Log, state: State, call: Call) -> Tensor:
        return self._reader(state, phi_q, call)(phi_q)

    def _reader(
        self, state: State, like: Tensor | Log, call: Call, *, shifted: bool = True
    ) -> Callable[[Tensor | Log], Tensor]:
        """Return the function that answers queries whose features are `like` these from a state."""
        gain = self._gain(like, call)
        return lambda phi_q: algebra.read(phi_q, state, self.reader, gain, shifted=shifted, signed=self.signed)

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
        return self._values(self.features_k(k, call), v, q.shape[1], call.key_mask)

    def _values(
        self, phi_k: Tensor | Log, v: Tensor, heads: int, key_mask: Tensor | None
    ) -> tuple[Tensor | Log, Tensor, Tensor | None]:
        """Return (phi(k), v, mask), with a dimension for the queries that share a key head."""
        mask = None if key_mask is None else key_mask[:, None]  # [B, 1, M]
        if v.shape[1] == heads:
            return phi_k, v, mask
        return _group(phi_k, v.shape[1], heads), v[:, :, None], None if mask is None else mask[:, None]


def is_long(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether a call runs in blocks of tokens if it needs no gradient: not under torch.compile, and on a CPU."""
    return eager() and max(q.shape[2], k.shape[2]) > LONG and readable(v)


def token_by_token(change: Callable[..., Tensor], out: Tensor, *others: Tensor) -> Tensor:
    """Return change(out, *others), for a function of one token each. A long output that needs no gradient is changed
    in place, block by block.
    """
    if not is_long(out, out, out) or recording(out, *others):
        return change(out, *others)
    for rows in zip(*(x.split(BLOCK, 2) for x in (out, *others)), strict=True):
        rows[0].copy_(change(*rows))
    return out


def _check_widths(phi_q: Tensor | Log, phi_k: Tensor | Log) -> None:
    """Raise if two feature maps of the user return different numbers of features."""
    if _width(phi_q) != _width(phi_k):
        raise ArgumentError(
            f"phi makes {_width(phi_q)} features and phi_k makes {_width(phi_k)}: they must make equally many"
        )


def _width(phi: Tensor | Log) -> int:
    return (phi.value if isinstance(phi, Log) else phi).shape[-1]


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
