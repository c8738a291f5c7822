"""Exact softmax over near tokens and linear attention over far ones, under one denominator.

    o_i = (sum_near e^{s_ij - m_i} v_j + c sum_far phi(q_i).phi(k_j) v_j)
          / (sum_near e^{s_ij - m_i} + c sum_far phi(q_i).phi(k_j))

    near(i)   the last `window` tokens up to i, and the `first` tokens of the sequence
              not causal: the tokens less than `window` away from i on both sides, and the `first` ones;
              neighborhood=k: the k x k tokens of the picture around i instead of the window
    far(i)    every other token that i sees
    s_ij      scale q_i.k_j, scale = d^-1/2
    m_i       the largest score of near(i)
    phi(x)    sqrt(f/2) [softmax(W x), softmax(-W x)], positive and bounded            Hedgehog, arXiv 2402.04347
    c         e^gain, one learned gain per head

This is the attention of LoLCATs (Zhang et al. 2024, arXiv 2410.10254), with the first tokens near as well.

m_i is part of the definition. The largest near token has weight 1, and far tokens are weighed against it. m_i does not
cancel, as it does in a softmax, because far weights are not divided by e^{m_i}. It depends only on tokens that i sees.
The factor sqrt(f/2) makes phi(q).phi(k) = 1 for flat features, so c says what a far token weighs at first.

maps="shared" learns one W per head, and maps="separate" one for q and one for k; they start as the identity.
maps="identity" learns none. W has f rows: `features`, or as many as the head has channels.

Hidden tokens do not count: windows and the first tokens are those of the sequence without them. A hidden query gives
zeros. A query without near tokens reads linear attention, where c cancels; so window=0 and first=0 are linear attention
with these features, and a window of all tokens is softmax. Where all weights underflow, the output is zero.

The state of a stream has constant size: the State of the far tokens, and the near tokens themselves.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from softless.algebra import near, near_around, near_causal
from softless.algebra.kernel_spec import MOST_FEATURES, NEAR, KernelSpec
from softless.algebra.modes import eager, recording
from softless.algebra.near_around import Tiles
from softless.algebra.near_causal import Reach
from softless.algebra.state import NearState, check_continues
from softless.errors import ArgumentError, check_choice
from softless.mechanisms.base import Call, Mechanism, repeat_heads
from softless.mechanisms.scored import MOST_STAND_INS, check_count, check_square

TILE = 8  # rows and columns of a picture that are read at once
AT_ONCE = 512  # tokens
START = -2.0  # the first gain: a far token starts as one whose score is 2 below the largest near score


@dataclass(frozen=True)
class NearFar(Mechanism):
    name: ClassVar[str] = "nearfar"
    family: ClassVar[str] = "kernelized"
    formula: ClassVar[str] = "near: sum e^{s - m} v, far: c sum phi(q).phi(k) v, over the sum of both weights"
    cost: ClassVar[str] = "O(N (w d + d^2))"
    paper: ClassVar[str] = "Zhang et al. 2024, arXiv 2410.10254"
    places: ClassVar[bool] = True
    pairs_tokens: ClassVar[bool] = True

    window: int = 64
    first: int = 4
    maps: str = "shared"  # shared | separate | identity
    features: int | None = None  # None: as many as channels
    neighborhood: int | None = None  # rows and columns of a picture

    def __post_init__(self) -> None:
        check_count("window", self.window, least=0, most=MOST_STAND_INS)
        check_count("first", self.first, least=0, most=MOST_STAND_INS)
        check_choice("maps", self.maps, ("shared", "separate", "identity"))
        if self.features is not None:
            check_count("features", self.features, most=MOST_STAND_INS)
            if self.maps == "identity":
                raise ArgumentError(f"features {self.features} is the size of a learned map, and maps is 'identity'")
        if self.neighborhood is not None:
            check_count("neighborhood", self.neighborhood)
            if self.neighborhood % 2 == 0:
                raise ArgumentError(
                    f"neighborhood {self.neighborhood} is even, and a token is in the middle of its own"
                )
            if self.window != type(self).window:
                raise ArgumentError(f"window {self.window} is not read beside neighborhood {self.neighborhood}")

    @property
    def carries_state(self) -> bool:  # type: ignore[override]
        return self.neighborhood is None

    @property
    def reads_grid(self) -> bool:  # type: ignore[override]
        return self.neighborhood is not None

    needs_grid = reads_grid

    @property
    def chunk(self) -> int:
        """How many queries make a chunk. It reads as many keys before it, so a narrow window wants short chunks."""
        return 32 if self.window <= 32 else 64

    def lacks(self, is_causal: bool) -> str | None:
        if is_causal and self.neighborhood is not None:
            return (
                f"has neighborhood={self.neighborhood} of a picture, which has no order: its causal form has a window"
            )
        return None

    def check(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
        check_square(self.name, q, k, call)

    def default_scale(self, head_dim: int) -> float:
        return head_dim**-0.5

    def kernel_spec(self, scale: float) -> KernelSpec | None:
        if self.neighborhood is not None or (self.features or 0) > MOST_FEATURES:
            return None
        return KernelSpec(self.maps, self.maps, NEAR, scale=scale)

    def input_shapes(self, heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        shape = heads, self.features or head_dim, head_dim
        learned = {"shared": ("map",), "separate": ("map_q", "map_k"), "identity": ()}[self.maps]
        return {"gain": (heads,)} | dict.fromkeys(learned, shape)

    def initialize(self, name: str, tensor: Tensor) -> None:
        if name == "gain":
            tensor.fill_(START)
        else:  # the identity, again from its first row on where there are more features than channels
            rows = torch.arange(tensor.shape[1], device=tensor.device) % tensor.shape[2]
            tensor.copy_(torch.eye(tensor.shape[2], dtype=tensor.dtype, device=tensor.device)[rows])

    def weights(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
        k = repeat_heads(k, heads)
        real = _real(k, call)
        place = real.cumsum(-1)[:, None]
        own, alive = (
            F.pad(x, (queries - keys, 0)) if queries > keys else x[..., keys - queries :]
            for x in (place, real[:, None])
        )
        seen = call.visible(q, k) & alive[..., None]
        if self.neighborhood is None:
            close = (own[..., :, None] - place[..., None, :]).abs() < self.window
        else:
            assert call.grid is not None
            row, column = (
                x.flatten()
                for x in torch.meshgrid(*(torch.arange(side, device=q.device) for side in call.grid), indexing="ij")
            )
            apart = torch.maximum((row[:, None] - row).abs(), (column[:, None] - column).abs())
            close = apart <= self.neighborhood // 2
        close = seen & (close | (place <= self.first)[..., None, :])
        phi_q, phi_k = self._features(q, call, "q"), self._features(k, call, "k")
        return near.weights(call.scale * (q @ k.mT), phi_q, phi_k, self._gain(q, call), close, seen & ~close)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        most = k.shape[2]
        if call.is_causal:
            reach = Reach(min(self.window, most), min(self.first, most))
            return self._go_through(q, k, v, None, call, reach, continues=False)[0]
        return self._around(q, k, v, call)

    def attend_with_state(
        self, q: Tensor, k: Tensor, v: Tensor, state: NearState | None, call: Call
    ) -> tuple[Tensor, NearState]:
        return self._go_through(q, k, v, state, call, Reach(self.window, self.first))

    def _go_through(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: NearState | None,
        call: Call,
        reach: Reach,
        *,
        continues: bool = True,
    ) -> tuple[Tensor, NearState]:
        """Compute causal attention. The last query is aligned with the last key; missing keys are hidden padding."""
        queries, past = q.shape[2], k.shape[2] - q.shape[2]
        real = None if call.key_mask is None else call.key_mask
        if past < 0:
            real = F.pad(_real(k, call), (-past, 0), value=False)
            k, v, past = F.pad(k, (0, 0, -past, 0)), F.pad(v, (0, 0, -past, 0)), 0
        q, k, v = _grouped(q, k, v)
        nothing = near_causal.empty(k[..., :0, :], v[..., :0, :], self._features(k[..., :0, :], call, "k"), reach)
        check_continues(state, nothing)
        state = nothing if state is None else state
        if past > 0:
            before = None if real is None else real[:, :past]
            state = self._step(None, k[..., :past, :], v[..., :past, :], before, state, call, reach)[1]
            k, v, real = k[..., past:, :], v[..., past:, :], None if real is None else real[:, past:]
        if queries == 1 and continues:
            phi_q, phi_k = partial(self._features, call=call, of="q"), partial(self._features, call=call, of="k")
            gain = self._gain(q.to(k.dtype), call)
            seen = None if real is None else real.view(-1, *[1] * (k.ndim - 3))
            out, state = near_causal.step(q.to(k.dtype), k, v, phi_q, phi_k, gain, state, reach, call.scale, seen)
            return out.flatten(1, -3).to(q.dtype), state
        if queries == 0:
            return v.new_zeros(*q.shape[:-1], v.shape[-1]).flatten(1, -3), state
        size = None if call.near is not None and not continues else self._at_once(q, k, v, call)
        if size is None:
            out, state = self._step(q, k, v, real, state, call, reach, continues=continues)
            return out.flatten(1, -3), state
        pieces = []
        for start in range(0, queries, size):
            at = slice(start, start + size)
            piece = q[..., at, :], k[..., at, :], v[..., at, :], None if real is None else real[:, at]
            out, state = self._step(*piece, state, call, reach, continues=continues or at.stop < queries)
            pieces.append(out)
        return torch.cat(pieces, -2).flatten(1, -3), state

    def _step(
        self,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        real: Tensor | None,
        state: NearState,
        call: Call,
        reach: Reach,
        *,
        continues: bool = True,
    ) -> tuple[Tensor, NearState]:
        """Return the output of the queries of these tokens, if there are any, and the state after them."""
        tokens = near.Compact(real, k)
        k, v = tokens.first_real(k), tokens.first_real(v)
        held = near_causal.hold(state, k, v, tokens.count, reach)
        after = state
        if continues or call.near is None:
            phi_k = self._features(held.k[..., : k.shape[-2], :], call, "k")
            after = near_causal.absorb(state, held, phi_k, reach) if continues else state
        if q is None:
            return v, after
        q = tokens.first_real(q)
        if call.near is None:
            phi_q, gain = self._features(q, call, "q"), self._gain(q, call)
            out = near_causal.attend(call.scale * q, held, phi_q, phi_k, gain, state, reach, self.chunk)
        else:
            maps = (call.inputs.get("map", call.inputs.get(f"map_{of}")) for of in "qk")
            out = call.near(q.flatten(1, -3), held, *maps, call.inputs["gain"], state, reach, call.scale)
            out = out.view(*q.shape[:-1], -1)
        return tokens.back(out), after

    def _around(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Compute attention where every query sees every token."""
        real, count = call.key_mask, k.shape[2]
        q, k, v = _grouped(q, k, v)
        tokens = near.Compact(real if self.neighborhood is None else None, k)
        q, k, v = (tokens.first_real(x) for x in (q, k, v))
        if self.neighborhood is None:
            tiles = Tiles((count, 1), (min(self.chunk, count), 1), (min(self.window, count), 1))
        else:
            assert call.grid is not None
            half = min(self.neighborhood // 2 + 1, max(call.grid))
            tiles = Tiles(call.grid, (min(TILE, call.grid[0]), min(TILE, call.grid[1])), (half, half))
        is_real = torch.arange(count, device=k.device) < tokens.count[..., None]
        if self.neighborhood is not None and real is not None:
            is_real = real.view(real.shape[0], *[1] * (k.ndim - 3), count)
        phi_q, phi_k = partial(self._features, call=call, of="q"), partial(self._features, call=call, of="k")
        gain, at_once = self._gain(q, call), self._at_once(q, k, v, call)
        out = near_around.attend(q, k, v, phi_q, phi_k, gain, is_real, self.first, call.scale, tiles, at_once)
        out = tokens.back(out)
        out = torch.where(is_real[..., None], out, 0.0) if self.neighborhood is not None else out
        return out.flatten(1, -3)

    def _at_once(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> int | None:
        """Return how many tokens to compute at once where no gradients are recorded, or None for all."""
        if recording(q, k, v, *call.inputs.values()) or not eager():
            return None
        return AT_ONCE if q.is_cpu else 64 * AT_ONCE

    def _features(self, x: Tensor, call: Call, of: str) -> Tensor:
        """Return phi(x) of queries or keys [B, H, N, d] or [B, G, ., N, d]."""
        if self.maps != "identity":
            matrix = call.inputs["map" if self.maps == "shared" else f"map_{of}"].to(x.dtype)
            x = x @ _per_head(matrix, x).mT
        x = torch.stack([x, -x], -2).softmax(-1).flatten(-2)
        return (x.shape[-1] / 4) ** 0.5 * x

    def _gain(self, q: Tensor, call: Call) -> Tensor:
        return _per_head(call.inputs["gain"].to(q.dtype), q)[..., None, None]


def _real(k: Tensor, call: Call) -> Tensor:
    """Return which tokens are real [B or 1, M]."""
    return torch.ones_like(k[:1, 0, :, 0], dtype=torch.bool) if call.key_mask is None else call.key_mask


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, H, N, d] -> [B, G, H/G, N, d], and [B, G, 1, M, .], where queries share key heads."""
    if q.shape[1] == k.shape[1]:
        return q, k, v
    return q.unflatten(1, (k.shape[1], -1)), k[:, :, None], v[:, :, None]


def _per_head(x: Tensor, like: Tensor) -> Tensor:
    """[H, ...] -> [G, H/G, ...] where queries share key heads."""
    return x if like.ndim == 4 else x.unflatten(0, (like.shape[1], -1))
