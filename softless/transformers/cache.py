"""The state of a layer inside the cache of transformers: its size does not depend on the tokens seen.

    update      notes how many tokens came, and hands keys and values on: only the new tokens are attended with
    attend      reads the state, then absorbs the new tokens
    crop        takes the last tokens back, as if they had never come

A layer remembers its last tokens in up to two segments, each with the state before it. A state that is taken back is
made again by the same calls from that state, so it is the same to the last bit. A call of more than `KEPT` tokens is
remembered by its last `KEPT` tokens only.

In a static cache a state keeps its memory, so that a compiled step finds it where it was, and a CUDA graph may write
to it. Nothing is remembered there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from softless.algebra.state import AnyState
from softless.errors import ArgumentError, UnsupportedError
from softless.functional import attention_with_state
from softless.mechanisms import Mechanism

KEPT = 64  # tokens that can be taken back


class Arrivals(NamedTuple):
    """The tokens of one call, without their queries."""

    heads: int
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    inputs: Mapping[str, Tensor]

    def cut(self, mechanism: Mechanism, begin: int, end: int) -> "Arrivals":
        """Return the tokens from `begin` to `end`."""
        mask = None if self.key_mask is None else self.key_mask[:, begin:end]
        inputs = {name: x[:, :, begin:end] if name in mechanism.token_inputs else x for name, x in self.inputs.items()}
        return Arrivals(self.heads, self.k[:, :, begin:end], self.v[:, :, begin:end], mask, inputs)

    def copied(self, mechanism: Mechanism) -> "Arrivals":
        """Return these tokens in memory of their own: a part of a long call would keep all of it."""
        mask = None if self.key_mask is None else self.key_mask.clone()
        inputs = {name: x.clone() if name in mechanism.token_inputs else x for name, x in self.inputs.items()}
        return Arrivals(self.heads, self.k.clone(), self.v.clone(), mask, inputs)


@dataclass
class Segment:
    """Tokens that can be taken back, and the state before them."""

    before: AnyState | None
    calls: list[Arrivals] = field(default_factory=list)
    count: int = 0

    def add(self, tokens: Arrivals) -> None:
        self.calls.append(tokens)
        self.count += tokens.k.shape[2]


class StateLayer(CacheLayerMixin):
    """One layer of a cache that holds a State instead of keys and values."""

    is_sliding, is_croppable, supports_early_init = False, True, False

    def __init__(self, mechanism: Mechanism, *, room: int | None = None, slides: bool = False):
        """`room` is how many tokens fit in the other layers of a static cache, and whether they `slide` on.

        Masks are as long as that.
        """
        super().__init__()
        self.mechanism, self.room, self.slides, self.is_initialized = mechanism, room, slides, False
        self.is_compileable = room is not None
        self.state: AnyState | None = None
        self.seen: int | Tensor = 0
        self.segments: list[Segment] = []
        self.refused: str | None = None

    def refuse(self, reason: str) -> None:
        """Let later calls raise: what came so far is no past to go on from."""
        self.refused = reason

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the first call makes the state."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Count new tokens, and return them as they are."""
        if self.refused is not None:
            raise UnsupportedError(f"the cache cannot go on: {self.refused}")
        if not self.is_initialized:
            self.batch_size, self.device, self.is_initialized = key_states.shape[0], key_states.device, True
            if self.is_compileable:
                self.seen = torch.zeros((), dtype=torch.int64, device=key_states.device)
                stay(self.seen)
        if key_states.shape[0] != self.batch_size:
            raise ArgumentError(
                f"the cache holds {self.batch_size} sequences, and this call has {key_states.shape[0]}: "
                "use a new cache, or reorder its rows"
            )
        if isinstance(self.seen, Tensor):
            self.seen.add_(key_states.shape[2])
        else:
            self.seen += key_states.shape[2]
        return key_states, value_states

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the output of new tokens, and absorb them."""
        new = Arrivals(q.shape[1], k, v, key_mask, inputs)
        if self.is_compileable:
            out, state = self._after(self.state, q, new)
            self._put(state, k)
            return out
        more = k.shape[2] - KEPT
        if more <= 0:
            self._remember(new)
            out, self.state = self._after(self.state, q, new)
            return out
        parts = []
        for begin, end in ((0, more), (more, k.shape[2])):
            tokens = new.cut(self.mechanism, begin, end)
            if begin:
                self.segments = [Segment(self.state)]
                self.segments[0].add(tokens.copied(self.mechanism))
            out, self.state = self._after(self.state, q[:, :, begin:end], tokens)
            parts.append(out)
        return torch.cat(parts, 2)

    def _after(self, state: AnyState | None, q: Tensor | None, tokens: Arrivals) -> tuple[Tensor, AnyState]:
        _heads, k, v, key_mask, inputs = tokens
        if q is None:  # only the state is wanted
            q = k.new_zeros(k.shape[0], tokens.heads, *k.shape[2:])
        return attention_with_state(q, k, v, self.mechanism, state, key_mask=key_mask, inputs=inputs)

    def _remember(self, new: Arrivals) -> None:
        if not self.segments or self.segments[-1].count >= KEPT:
            self.segments = [*self.segments[-1:], Segment(self.state)]
        self.segments[-1].add(new)

    def _put(self, state: AnyState, like: Tensor) -> None:
        """Write a state where the last one is."""
        if self.state is None:
            n = state.n.expand(like.shape[0], *state.n.shape[1:])
            self.state = type(state)(n.clone(), *(part.clone() for part in state[1:]))
            stay(*self.state)
        else:
            for buffer, part in zip(self.state, state, strict=True):
                buffer.copy_(part)

    def get_seq_length(self) -> int:
        """Return how many tokens came, padding among them."""
        return self.seen  # type: ignore[return-value]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many tokens a mask covers, and where it begins."""
        if self.room is None:
            return self.seen + query_length, 0  # type: ignore[return-value]
        if not self.slides:
            return self.room, 0
        past = self.seen - self.room + 1
        return self.room + query_length - 1, past.clamp(min=0) if isinstance(past, Tensor) else max(past, 0)  # type: ignore[return-value]

    def get_max_length(self) -> int:
        """Return -1: there is no most."""
        return -1

    get_max_cache_shape = get_max_length

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens; their number is negative, as in all caches of transformers."""
        left = -int(tokens_to_remove)  # some versions of transformers pass a tensor
        if left < 0:
            raise ArgumentError(f"crop({-left}) is positive: crop(-{-left}) takes back the last {-left} tokens")
        if self.is_compileable and left:
            raise UnsupportedError("a static cache remembers no tokens to take back: use a dynamic one")
        remembered = sum(segment.count for segment in self.segments)
        if left > remembered:
            raise ArgumentError(
                f"crop({int(tokens_to_remove)}) takes back {left} tokens, and the layer remembers the last {remembered}"
            )
        if left == 0:
            return
        assert isinstance(self.seen, int)
        self.seen -= left
        while self.segments[-1].count < left:
            left -= self.segments.pop().count
        segment = self.segments.pop()
        self._replay(segment, segment.count - left)

    def _replay(self, segment: Segment, count: int) -> None:
        """Set the state to that after the first `count` tokens of a segment, and remember them."""
        self.state = segment.before
        again = Segment(segment.before)
        for call in segment.calls:
            tokens = call.k.shape[2]
            if count >= tokens:
                again.add(call)
            elif count > 0:
                again.add(call.cut(self.mechanism, 0, count))
            count -= tokens
        for call in again.calls:
            _, self.state = self._after(self.state, None, call)
        if again.calls:
            self.segments.append(again)

    def rows(self, index: Tensor) -> None:
        """Keep these sequences, in this order; what came before cannot be taken back any more."""
        if self.state is not None:
            self.state, self.segments = self.state.rows(index.to(self.device)), []
            self.batch_size = len(index)
            if self.is_compileable:
                stay(*self.state)

    reorder_cache = batch_select_indices = rows

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        if self.state is not None:
            self.rows(torch.arange(self.batch_size, device=self.device).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget all tokens. A static state keeps its memory."""
        if self.is_compileable and self.state is not None:
            assert isinstance(self.seen, Tensor)
            self.seen.zero_()
            for part in self.state:
                part.zero_()
            return
        self.state, self.seen, self.segments, self.is_initialized = None, 0, [], False
        self.refused = None

    def offload(self) -> None:
        """Move the state to the CPU."""
        self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Move the state back."""
        if self.is_initialized:
            self._move(self.device)

    def _move(self, device: torch.device) -> None:
        if self.state is not None:
            self.state = type(self.state)(*(part.to(device, non_blocking=True) for part in self.state))

    @property
    def nbytes(self) -> int:
        """The bytes of the state and of the tokens that can be taken back."""
        states = [self.state, *(segment.before for segment in self.segments)]
        calls = [call for segment in self.segments for call in segment.calls]
        tensors = [part for state in states if state is not None for part in state]
        names = self.mechanism.token_inputs
        tensors += [x for call in calls for x in (call.k, call.v, *(call.inputs[name] for name in names))]
        memory = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
        return sum(memory.values())


def stay(*tensors: Tensor) -> None:
    """Tell torch.compile that tensors keep their memory. Otherwise it captures no step that writes to them."""
    if not torch.compiler.is_compiling():
        for tensor in tensors:
            torch._dynamo.mark_static_address(tensor)


def state_layer(cache: Cache, index: int, mechanism: Mechanism) -> StateLayer:
    """Return the state of a layer in a cache; an empty layer of another kind gives way to it."""
    while len(cache.layers) <= index:
        kind = cache.layer_class_to_replicate
        if kind is None:
            raise ArgumentError(f"the cache has {len(cache.layers)} layers, and the model has a layer {index}")
        cache.layers.append(kind())
    layer = cache.layers[index]
    if isinstance(layer, StateLayer):
        if layer.mechanism != mechanism:
            raise ArgumentError(
                f"layer {index} of the cache holds a state of '{layer.mechanism.name}', and the model has "
                f"'{mechanism.name}' there: a cache belongs to one model"
            )
        return layer
    if layer.get_seq_length() > 0:
        raise ArgumentError(
            f"layer {index} of the cache holds keys and values, and the model has '{mechanism.name}' there: a cache "
            "belongs to one model"
        )
    room = layer.get_max_length() if layer.is_compileable else None
    cache.layers[index] = new_layer = StateLayer(mechanism, room=room, slides=layer.is_sliding)
    return new_layer
