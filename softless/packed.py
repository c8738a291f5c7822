"""Sequences of different lengths in one call, one after the other in memory: PyTorch's jagged nested tensors.

    q, k, v [B, H, j, d], where j is each sequence's own length       as `F.scaled_dot_product_attention` takes them
    attention(q, k, v)_b = attention(q_b, k_b, v_b)                   whatever the other sequences are

Where padding changes nothing, sequences are padded once, to the longest, and the padding is masked. It stands after the
tokens; before them where a sequence's queries and keys differ in number and its last query must stay at its last key
(causal). Elsewhere each sequence has a call of its own: pictures, and differing numbers of queries and keys for a
mechanism that mixes queries or gives each a key of its own.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softless.algebra.state import State
from softless.errors import ArgumentError
from softless.mechanisms import Mechanism, resolve


class Pack(NamedTuple):
    """The sequences of one nested tensor [B, H, j, ...]."""

    values: Tensor  # [T, H, ...], the tokens of all of them
    offsets: Tensor  # [B + 1], where each starts, and where the last one ends
    lengths: list[int]

    def padded(self, real: Tensor) -> Tensor:
        """[B, H, N, ...]: a token wherever `real` [B, N] is true, zeros elsewhere."""
        room = self.values.new_zeros(*real.shape, *self.values.shape[1:])
        return room.masked_scatter(real.view(*real.shape, *(1,) * (room.ndim - 2)), self.values).transpose(1, 2)

    def alone(self) -> list[Tensor]:
        """Each sequence [1, H, n, ...]."""
        return [each[None].transpose(1, 2) for each in self.values.split(self.lengths)]

    def real(self, *, last: bool = False) -> Tensor:
        """Where the tokens stand in a batch as long as the longest: in the first places or the last, bool [B, N]."""
        longest, device = max(self.lengths, default=0), self.values.device
        place, count = torch.arange(longest, device=device), torch.tensor(self.lengths, device=device)[:, None]
        return place >= longest - count if last else place < count


class Sequences(NamedTuple):
    """All that a call says of its tokens; `inputs` are the ones that every token shares."""

    q: Pack
    k: Pack
    v: Pack
    token_inputs: dict[str, Pack]
    inputs: dict[str, Tensor]

    @property
    def square(self) -> bool:
        """Whether each has as many queries as keys."""
        return self.q.lengths == self.k.lengths

    def batch(self, *, last: bool = False) -> dict[str, Any]:
        """The arguments of one call for all of them."""
        real = self.k.real(last=last)
        tensors = {"q": self.q.padded(self.q.real(last=last)), "k": self.k.padded(real), "v": self.v.padded(real)}
        inputs = self.inputs | {name: pack.padded(real) for name, pack in self.token_inputs.items()}
        return {**tensors, "inputs": inputs, "key_mask": real if len(set(self.k.lengths)) > 1 else None}

    def each(self) -> list[dict[str, Any]]:
        """The arguments of a call for each."""
        rows = zip(*(pack.alone() for pack in (*self[:3], *self.token_inputs.values())), strict=True)
        return [
            {"q": q, "k": k, "v": v, "inputs": self.inputs | dict(zip(self.token_inputs, others, strict=True))}
            for q, k, v, *others in rows
        ]

    def unpadded(self, out: Tensor, *, last: bool = False) -> Tensor:
        """The output [B, H, N, e] of one call for all, as q is packed."""
        return nested(out.transpose(1, 2)[self.q.real(last=last)], self.q.offsets)


def nested(values: Tensor, offsets: Tensor) -> Tensor:
    """Tokens [T, H, d] of all sequences as one nested tensor [B, H, j, d]."""
    return torch.nested.nested_tensor_from_jagged(values, offsets).transpose(1, 2)


def among(*tensors: object) -> bool:
    """Whether any is a nested tensor."""
    return any(isinstance(x, Tensor) and x.is_nested for x in tensors)


def attend(
    attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mechanism: str | Mechanism, **call: Any
) -> Tensor:
    """`attention`, which takes one batch, of packed sequences."""
    if call.pop("bias") is not None:
        raise ArgumentError("bias was given with packed sequences, which have no N x M scores in common: leave it out")
    made = resolve(mechanism)
    sequences = read(q, k, v, made, call.pop("inputs"), call.pop("key_mask"))
    if call["grid"] is None and (sequences.square or not (made.mixes_queries or made.pairs_tokens)):
        last = call["is_causal"] and not sequences.square
        return sequences.unpadded(attention(**sequences.batch(last=last), mechanism=made, **call), last=last)
    outputs = [attention(**each, mechanism=made, **call)[0].transpose(0, 1) for each in sequences.each()]
    return nested(torch.cat(outputs), sequences.q.offsets)


def attend_with_state(
    attention_with_state: Callable[..., tuple[Tensor, State]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mechanism: str | Mechanism,
    state: State | None,
    **call: Any,
) -> tuple[Tensor, State]:
    """The same going on from a state, which has a row for each sequence."""
    made = resolve(mechanism)
    sequences = read(q, k, v, made, call.pop("inputs"), call.pop("key_mask"))
    if not sequences.square:
        raise ArgumentError(
            f"q and k have sequences of {sequences.q.lengths} and {sequences.k.lengths} tokens: packed, every token "
            f"that a state takes in needs its query"
        )
    out, state = attention_with_state(**sequences.batch(), mechanism=made, state=state, **call)
    return sequences.unpadded(out), state


def read(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mechanism: Mechanism,
    inputs: Mapping[str, Tensor] | None,
    key_mask: Tensor | None,
) -> Sequences:
    """Refuse what does not fit together, in one sentence."""
    if key_mask is not None:
        raise ArgumentError("key_mask was given with packed sequences, which have no padding to hide: leave it out")
    given = inputs or {}
    theirs = [name for name in mechanism.token_inputs if name in given]
    packs = {name: pack(name, x) for name, x in (("q", q), ("k", k), ("v", v))}
    packs |= {name: pack(f"input '{name}'", given[name], 3) for name in theirs}
    if len(packs["q"].lengths) != len(packs["k"].lengths):
        counts = " and ".join(f"{name} {len(packs[name].lengths)}" for name in "qk")
        raise ArgumentError(f"the numbers of packed sequences must be equal, and are: {counts}")
    for name in ("v", *theirs):
        if packs[name].lengths != packs["k"].lengths:
            raise ArgumentError(
                f"k and {name} have sequences of {packs['k'].lengths} and {packs[name].lengths} tokens, and must have "
                f"the same lengths"
            )
    shared = {name: x for name, x in given.items() if name not in theirs}
    return Sequences(packs["q"], packs["k"], packs["v"], {name: packs[name] for name in theirs}, shared)


def pack(name: str, x: Tensor, ndim: int = 4) -> Pack:
    """The sequences of a nested tensor [B, H, j, d], or [B, H, j] with `ndim` 3."""
    if not among(x):
        raise ArgumentError(
            f"{name} is not nested and others of this call are: pack all, torch.nested.nested_tensor(sequences, "
            f"layout=torch.jagged), or none"
        )
    if x.layout != torch.jagged:
        raise ArgumentError(f"{name} is a nested tensor of layout {x.layout} and must be of layout torch.jagged")
    shape = "[batch, heads, j, dim]" if ndim == 4 else "[batch, heads, j]"
    if x.ndim != ndim or type(x.shape[2]) is int:
        raise ArgumentError(
            f"{name} is a nested tensor {list(x.shape)} and must be {shape}, j the tokens of each sequence"
        )
    whole: Any = x.transpose(1, 2).contiguous()  # [B, j, H, ...], without holes
    return Pack(whole.values(), whole.offsets(), whole.offsets().diff().tolist())
