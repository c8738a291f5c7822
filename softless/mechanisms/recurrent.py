"""Recurrent attention: a memory S [d, e] that each token changes, not only by adding to it.

    S_t = step(S_{t-1}, k_t, v_t)          o_t = scale S_t^T q_t

Recurrent attention is always causal. Padding does not change the memory. In a State the memory is the co-moment, and
the means are zero, so the reader `none` reads it.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from softless import algebra
from softless.algebra.state import State, check_continues
from softless.mechanisms.base import Call, Mechanism


class Recurrent(Mechanism):
    """A subclass defines `weights_in_order` and `go_through`, for as many queries as keys."""

    family: ClassVar[str] = "recurrent"
    cost: ClassVar[str] = "O(N d^2)"
    carries_state: ClassVar[bool] = True
    rows_sum_to_one: ClassVar[bool] = False
    chunk: ClassVar[int] = algebra.CHUNK

    def default_scale(self, head_dim: int) -> float:
        return 1.0

    def lacks(self, is_causal: bool) -> str | None:
        return None if is_causal else "goes through tokens in their order: its only form is is_causal=True"

    def weights_in_order(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        """Return the explicit weights [B, H, N, N] for `scale` 1."""
        raise NotImplementedError

    def go_through(self, q: Tensor, k: Tensor, v: Tensor, memory: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Return the output [B, H, N, e] for `scale` 1, and the memory after the last token."""
        raise NotImplementedError

    def memory_heads(self, q: Tensor, k: Tensor) -> tuple[int, ...]:
        """Return the leading dimensions of the memory: one memory per key head."""
        return (*k.shape[:2], 1) if k.shape[1] != q.shape[1] else tuple(k.shape[:2])

    def weights(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        queries, keys = q.shape[2], k.shape[2]
        q, k, _, call = self._aligned(q, k, k, call)
        return call.scale * self.weights_in_order(q, k, call)[..., -queries:, -keys:]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        return self.attend_with_state(q, k, v, None, call)[0]

    def attend_with_state(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None, call: Call
    ) -> tuple[Tensor, State]:
        empty = _empty(self.memory_heads(q, k), k, v)
        check_continues(state, empty)
        state, queries = empty if state is None else state, q.shape[2]
        if k.shape[2] == 0:
            return q.new_zeros(*q.shape[:3], v.shape[3]), state
        heads = (1,) * (state.comoment.ndim - 3)
        seen = torch.tensor(k.shape[2], device=k.device) if call.key_mask is None else call.key_mask.sum(-1)
        q, k, v, call = self._aligned(q, k, v, call)
        out, memory = self.go_through(q, k, v, state.comoment, call)
        out = call.scale * out[:, :, out.shape[2] - queries :]
        return out, state._replace(n=state.n + seen.reshape(-1, *heads), comoment=memory)

    def _aligned(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor, Call]:
        """Pad q, or k and v, in front to as many queries as keys, so that the last query belongs to the last key."""
        missing = k.shape[2] - q.shape[2]
        if missing >= 0:
            return (F.pad(q, (0, 0, missing, 0)) if missing else q), k, v, call
        k, v = F.pad(k, (0, 0, -missing, 0)), F.pad(v, (0, 0, -missing, 0))
        mask = k.new_ones(k.shape[0], k.shape[2] + missing).bool() if call.key_mask is None else call.key_mask
        inputs = {name: F.pad(x, (-missing, 0)) if name in self.token_inputs else x for name, x in call.inputs.items()}
        return q, k, v, call._replace(key_mask=F.pad(mask, (-missing, 0), value=False), inputs=inputs)


def _empty(heads: tuple[int, ...], k: Tensor, v: Tensor) -> State:
    """Return the state of no tokens."""
    d, e = k.shape[3], v.shape[3]
    count = torch.zeros((1,) * len(heads), dtype=torch.int64, device=k.device)
    return State(count, *(k.new_zeros(*heads, *size) for size in ((d,), (e,), (d, e), (d,))))
