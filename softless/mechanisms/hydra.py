"""Hydra attention (Bolya et al. 2022): as many heads as features.

    o_i = q^_i * sum_j k^_j * v_j          elementwise; q^ = q/|q|, k^ = k/|k| over all H d channels

There is no normalizer: the output is a sum over tokens and grows with their number. Where all queries see the same
keys, the sum is one product with a row of ones; causal sums are running sums. Hydra has one weight matrix per channel,
not one per head: A^c_ij = q^_ic k^_jc, so `attention_weights` returns [B, H d, N, M].
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from softless.algebra.direct import BLOCK
from softless.algebra.feature_maps import unit
from softless.algebra.modes import recording
from softless.algebra.state import State
from softless.errors import UnsupportedError
from softless.mechanisms.base import Call, repeat_heads
from softless.mechanisms.kernelized import Kernelized, is_long


@dataclass(frozen=True)
class Hydra(Kernelized):
    name: ClassVar[str] = "hydra"
    formula: ClassVar[str] = "q^ * sum_j k^_j * v_j, channel by channel"
    cost: ClassVar[str] = "O(N d)"
    paper: ClassVar[str] = "Bolya et al. 2022, arXiv 2209.07484"
    reader: ClassVar[str] = "none"

    def features_q(self, q: Tensor, call: Call) -> Tensor:
        return q  # unit vectors already, spread to heads of width one

    def matrices(self, heads: int, head_dim: int) -> int:
        return heads * head_dim

    def check(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
        if v.shape[3] != q.shape[3]:
            raise UnsupportedError(
                f"hydra multiplies channel by channel: v has {v.shape[3]} channels per head, q has {q.shape[3]}"
            )

    def weights(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        q, k, _ = _spread(q, k, k)
        return super().weights(q, k, call)

    def combine(self, weights: Tensor, v: Tensor, call: Call) -> Tensor:
        heads = weights.shape[1] // v.shape[3]
        return _gather(super().combine(weights, _channels(repeat_heads(v, heads)), call), heads)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        if call.is_causal:
            return call.scale * _unit(q) * _running(_unit(k) * v, q.shape[2], call.key_mask)
        seen = k.new_ones(1, k.shape[2]) if call.key_mask is None else call.key_mask.to(k.dtype)[:, None, None]
        if is_long(q, k, v) and not recording(q, k, v):
            return _in_blocks(q, k, v, seen, call.scale)
        return call.scale * _unit(q) * (seen @ (_unit(k) * v))  # [B, H, N, d] * [B, H, 1, d]

    def attend_with_state(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None, call: Call
    ) -> tuple[Tensor, State]:
        out, state = super().attend_with_state(*_spread(q, k, v), state, call)
        return _gather(out, q.shape[1]), state

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, state: State | None, call: Call) -> Tensor:
        """As in `attend`, with heads of width one and the sum of the tokens before."""
        total = _running(k * v, q.shape[2], call.key_mask)
        if state is not None:
            total = total + state.comoment + (state.n[..., None] * state.k_mean * state.v_mean)[..., None, :]
        return call.scale * q * total

    def attend_to_state(self, q: Tensor, k: Tensor, v: Tensor, state: State, call: Call) -> Tensor:
        return _gather(super().attend_to_state(*_spread(q, k, v), state, call), q.shape[1])


def _unit(x: Tensor) -> Tensor:
    return unit(x, (1, 3))  # over all channels of a token


def _running(x: Tensor, queries: int, key_mask: Tensor | None) -> Tensor:
    """Return the sum of all tokens up to each of the last `queries` ones, [B, H, N, d]; hidden tokens add nothing."""
    if key_mask is not None:
        x = x * key_mask.to(x.dtype)[:, None, :, None]
    return F.pad(x, (0, 0, max(0, queries - x.shape[2]), 0)).cumsum(2)[:, :, -queries:]


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Return the output without gradients, with unit vectors of one block of tokens at a time."""
    keys = zip(k.split(BLOCK, 2), v.split(BLOCK, 2), seen.split(BLOCK, -1), strict=True)
    total = scale * sum(real @ (_unit(some) * values) for some, values, real in keys)
    out = torch.empty_like(q)
    for queries, rows in zip(q.split(BLOCK, 2), out.split(BLOCK, 2), strict=True):
        torch.mul(_unit(queries), total, out=rows)
    return out


def _spread(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return unit q and k, and v, each as H d heads of width one."""
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    return _channels(_unit(q)), _channels(_unit(k)), _channels(v)


def _channels(x: Tensor) -> Tensor:
    return x.transpose(2, 3).flatten(1, 2)[..., None]  # [B, H, N, d] -> [B, H d, N, 1]


def _gather(x: Tensor, heads: int) -> Tensor:
    return x.squeeze(-1).unflatten(1, (heads, -1)).transpose(2, 3)  # [B, H d, N, 1] -> [B, H, N, d]
