"""cosFormer (Qin et al. 2022, arXiv 2202.08791, eq. 10): near tokens weigh more, by a cosine that splits into features.

    s_ij = relu(q_i).relu(k_j) cos(pi (i - j) / 2M)          o_i = sum_j s_ij v_j / sum_j s_ij

    phi(x_i) = [relu(x_i) sin(pi i / 2M), relu(x_i) cos(pi i / 2M)]        cos(a - b) = sin a sin b + cos a cos b

i and j count tokens from 1, without padding: the place of key j is the number of real keys up to j, and a query has the
place of its own key. Only without causality and with N != M are the queries a sequence of their own, from 1 to N.

M is the option `length`. With length=None it is the length of each sequence, as published. Then one more token changes
every weight, so there is no causal form and no state. No weight is negative up to a distance of M, and longer sequences
have no answer: a call with more than M tokens raises. A stream that becomes longer raises on a CPU. A GPU would have to
wait at every token to check this, and torch.compile would break the graph, so outputs after M tokens are NaN there. A
query whose features are all zero reads the mean.
"""

from dataclasses import dataclass
from math import pi
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from softless.algebra.modes import readable
from softless.algebra.state import State
from softless.errors import ArgumentError
from softless.mechanisms.base import Call
from softless.mechanisms.kernelized import BlockMap, Kernelized, is_long


@dataclass(frozen=True)
class Cosformer(Kernelized):
    name: ClassVar[str] = "cosformer"
    formula: ClassVar[str] = "linear of relu(q).relu(k_j) cos(pi (i - j) / 2M), M = length"
    paper: ClassVar[str] = "Qin et al. 2022, arXiv 2202.08791"
    reader: ClassVar[str] = "divide"
    places: ClassVar[bool] = True
    pairs_tokens: ClassVar[bool] = True

    length: int | None = None  # None: the length of each sequence

    def __post_init__(self) -> None:
        if self.length is not None and (type(self.length) is not int or self.length < 1):
            raise ArgumentError(f"length {self.length!r} is not a number of tokens, at least 1, or None")

    @property
    def carries_state(self) -> bool:  # type: ignore[override]
        return self.length is not None

    def lacks(self, is_causal: bool) -> str | None:
        if not is_causal or self.length is not None:
            return None
        return (
            "weighs by the length of the sequence, which the future decides: set the length, "
            "mechanism('cosformer', length=M)"
        )

    def check(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
        self._check_fits(max(q.shape[2], k.shape[2]))

    def _check_fits(self, tokens: int) -> None:
        if self.length is not None and tokens > self.length:
            raise ArgumentError(f"{tokens} tokens are more than cosformer's length {self.length}")

    def features_q(self, q: Tensor, call: Call) -> Tensor:
        return q  # features already, each from its token and its place

    def weights(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return super().weights(*self._placed(q, k, call, None), call)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        if not call.is_causal and is_long(q, k, v) and (out := self._in_blocks(q, k, v, call)) is not None:
            return out
        return super().attend(*self._placed(q, k, call, None), v, call)

    def _block_maps(self, q: Tensor, k: Tensor, call: Call) -> tuple[BlockMap, BlockMap]:
        at_q, at_k, length = self._places(q, k, call)
        return (
            lambda at: _turned(q[:, :, at], at_q[:, at], length),
            lambda at: _turned(k[:, :, at], at_k[:, at], length),
        )

    def attend_with_state(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None, call: Call
    ) -> tuple[Tensor, State]:
        return super().attend_with_state(*self._placed(q, k, call, state), v, state, call)

    def _placed(self, q: Tensor, k: Tensor, call: Call, state: State | None) -> tuple[Tensor, Tensor]:
        """Return phi(q) and phi(k)."""
        at_q, at_k, length = self._places(q, k, call)
        if state is not None:
            before = state.n.flatten(1)[:, :1]  # [B, 1]
            at_q, at_k = at_q + before, at_k + before
            if at_k.numel() and readable(at_k):
                self._check_fits(int(at_k.max()))
        return _turned(q, at_q, length), _turned(k, at_k, length)

    def _places(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Return the places of the queries [b, N] and keys [b, M], and the length [b, 1]; b is 1 without padding."""
        queries, keys = q.shape[2], k.shape[2]
        at_k = torch.arange(1, keys + 1, device=k.device)[None] if call.key_mask is None else call.key_mask.cumsum(-1)
        if call.is_causal or queries == keys:
            missing = queries - keys
            at_q = F.pad(at_k, (missing, 0)) if missing > 0 else at_k[:, -missing:]
        else:
            at_q = torch.arange(1, queries + 1, device=k.device)[None]
        if self.length is not None:
            return at_q, at_k, torch.full_like(at_k[:, :1], self.length)
        ends = [places[:, -1:] for places in (at_q, at_k)]
        return at_q, at_k, torch.maximum(*ends).clamp(min=1)


def _turned(x: Tensor, place: Tensor, length: Tensor) -> Tensor:
    """[relu(x) sin, relu(x) cos]: [B, H, N, d] -> [B, H, N, 2d]."""
    angle = torch.where(place <= length, pi / 2 * place.to(x.dtype) / length, torch.nan)[:, None, :, None]
    x = x.relu()
    return torch.cat([x * angle.sin(), x * angle.cos()], -1)
