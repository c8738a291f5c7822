"""Attention on packed sequences: several sequences of different lengths in one of PyTorch's jagged nested tensors.

    q, k, v [B, H, j, d], where j is each sequence's own length       as `F.scaled_dot_product_attention` takes them
    attention(q, k, v)_b = attention(q_b, k_b, v_b)                   sequences do not see each other

The kernels read the sequences where they are. Without kernels, the sequences are usually padded to the longest, and one
call with a key mask runs all of them. Padding follows the tokens. If the call is causal and has different numbers of
queries and keys, padding comes first, so that the last query stays aligned with the last key. Each sequence has a call
of its own if padding would change the result: with a picture, or with different numbers of queries and keys for
mechanisms that mix queries or pair each query with a key.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils.weak import WeakTensorKeyDictionary

from softless import backends, routes
from softless.algebra.modes import is_watched, recording
from softless.algebra.precision import autocast
from softless.algebra.state import AnyState
from softless.errors import ArgumentError
from softless.mechanisms import Mechanism, resolve

LENGTHS = WeakTensorKeyDictionary()


class PackedTensor(NamedTuple):
    """The sequences of one nested tensor [B, H, j, ...]."""

    values: Tensor  # [T, H, ...], the tokens of all sequences, with any strides
    offsets: Tensor  # [B + 1], where each sequence starts, and where the last one ends
    lengths: list[int]

    def padded(self, real: Tensor) -> Tensor:
        """Return [B, H, N, ...]: tokens where `real` [B, N] is true, zeros elsewhere."""
        zeros = self.values.new_zeros(*real.shape, *self.values.shape[1:])
        return zeros.masked_scatter(real.view(*real.shape, *(1,) * (zeros.ndim - 2)), self.values).transpose(1, 2)

    def alone(self) -> list[Tensor]:
        """Return each sequence as [1, H, n, ...]."""
        return [sequence[None].transpose(1, 2) for sequence in self.values.split(self.lengths)]

    def real(self, *, last: bool = False) -> Tensor:
        """Return bool [B, N], True for tokens and False for padding, which follows them, or precedes them if `last`."""
        longest, device = max(self.lengths, default=0), self.values.device
        place, count = torch.arange(longest, device=device), torch.tensor(self.lengths, device=device)[:, None]
        return place >= longest - count if last else place < count


class Sequences(NamedTuple):
    """The tensors of a call. `token_inputs` belong to tokens, `inputs` are shared by all of them."""

    q: PackedTensor
    k: PackedTensor
    v: PackedTensor
    token_inputs: dict[str, PackedTensor]
    inputs: dict[str, Tensor]

    @property
    def square(self) -> bool:
        """Whether every sequence has as many queries as keys."""
        return self.q.lengths == self.k.lengths

    def batch(self, *, last: bool = False) -> dict[str, Any]:
        """Return the arguments of one call for all sequences."""
        real = self.k.real(last=last)
        tensors = {"q": self.q.padded(self.q.real(last=last)), "k": self.k.padded(real), "v": self.v.padded(real)}
        inputs = self.inputs | {name: pack.padded(real) for name, pack in self.token_inputs.items()}
        return {**tensors, "inputs": inputs, "key_mask": real if len(set(self.k.lengths)) > 1 else None}

    def one_by_one(self) -> list[dict[str, Any]]:
        """Return the arguments of one call per sequence."""
        rows = zip(*(pack.alone() for pack in (*self[:3], *self.token_inputs.values())), strict=True)
        return [
            {"q": q, "k": k, "v": v, "inputs": self.inputs | dict(zip(self.token_inputs, others, strict=True))}
            for q, k, v, *others in rows
        ]

    def unpadded(self, out: Tensor, *, last: bool = False) -> Tensor:
        """Pack the output [B, H, N, e] of one call for all sequences as q is packed."""
        return nested(out.transpose(1, 2)[self.q.real(last=last)], self.q.offsets)


def nested(values: Tensor, offsets: Tensor) -> Tensor:
    """Return the tokens [T, H, d] of all sequences as one nested tensor [B, H, j, d]."""
    return torch.nested.nested_tensor_from_jagged(values, offsets).transpose(1, 2)


def among(*tensors: object) -> bool:
    """Whether any argument is a nested tensor."""
    for x in tensors:  # noqa: SIM110, a generator would take twice as long
        if type(x) is NestedTensor or (isinstance(x, Tensor) and x.is_nested):
            return True
    return False


def attend(
    attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mechanism: str | Mechanism, **call: Any
) -> Tensor:
    """Run `attention`, which takes a dense batch, on packed sequences."""
    if call.pop("bias") is not None:
        raise ArgumentError("bias was passed with packed sequences, which have no common N x M scores: leave it out")
    inputs, key_mask = call.pop("inputs"), call.pop("key_mask")
    if not inputs and key_mask is None and call["grid"] is None:
        out = _in_place(q, k, v, mechanism, call["is_causal"], call["scale"], call["backend"])
        if out is not None:
            return out
    mechanism = resolve(mechanism)
    sequences = read(q, k, v, mechanism, inputs, key_mask)
    if call["grid"] is None and (sequences.square or not (mechanism.mixes_queries or mechanism.pairs_tokens)):
        last = call["is_causal"] and not sequences.square
        return sequences.unpadded(attention(**sequences.batch(last=last), mechanism=mechanism, **call), last=last)
    outputs = [attention(**one, mechanism=mechanism, **call)[0].transpose(0, 1) for one in sequences.one_by_one()]
    return nested(torch.cat(outputs), sequences.q.offsets)


def _in_place(
    q: Tensor, k: Tensor, v: Tensor, mechanism: str | Mechanism, is_causal: bool, scale: float | None, backend: str
) -> Tensor | None:
    """Return the output of the kernels, or None where they do not run."""
    if is_watched() or not _are_plain(q, k, v):
        return None
    q, k, v = autocast(q, k, v)
    packs: Any = q, k, v
    if backend not in ("auto", "triton") or (backend == "auto" and not backends.on_gpu(packs[0]._values)):
        return None
    of_q, of_k, of_v = (x._offsets for x in packs)
    if len(of_q) != len(of_k) or not _agree(of_k, of_v) or (is_causal and not _agree(of_q, of_k)):
        return None
    recorded = recording(*packs)
    tokens = [x._values.detach()[None] for x in packs]  # [1, H, T, d]
    call: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "backend": backend}
    route, _ = routes.find(tokens[0], tokens[1], tokens[2], mechanism, **call)
    lengths = lengths_of(of_q), lengths_of(of_k)
    operation = backends.packed_operator(route, tokens, (of_q, of_k), lengths, recorded=recorded)
    if operation is None:
        return None
    return _OnKernels.apply(*packs, *operation) if recorded else _nested(operation[0].planned(*operation[1])[0], of_q)


def _agree(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors with these offsets have sequences of the same lengths."""
    return a is b or lengths_of(a) == lengths_of(b)


def _are_plain(*tensors: Any) -> bool:
    """Whether all are jagged tensors [B, H, j, d] without holes. Their public methods take longer than the kernels."""
    for x in tensors:
        if type(x) is not NestedTensor or x._lengths is not None or x._ragged_idx != 2 or x._values.ndim != 3:
            return False
    return True


def _nested(tokens: Tensor, offsets: Tensor) -> Tensor:
    """Return tokens [1, H, T, d] as a nested tensor [B, H, j, d]."""
    return NestedTensor(tokens[0], offsets, _ragged_idx=2)


class _OnKernels(torch.autograd.Function):
    """An operator of the kernels on nested tensors; their own derivatives would take longer than the kernels."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, operator: Any, arguments: tuple[Any, ...]) -> Tensor:
        out = operator.function.forward(ctx, *arguments)
        ctx.operator, ctx.outputs, ctx.offsets = operator, len(out), [x._offsets for x in (q, k, v)]
        return _nested(out[0], q._offsets)

    @staticmethod
    def backward(ctx: Any, d_out: Any) -> tuple[Tensor | None, ...]:
        gradients = ctx.operator.function.backward(ctx, d_out._values[None], *[None] * (ctx.outputs - 1))
        return *map(_nested, gradients[:3], ctx.offsets), None, None


def attend_with_state(
    attention_with_state: Callable[..., tuple[Tensor, AnyState]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mechanism: str | Mechanism,
    state: AnyState | None,
    **call: Any,
) -> tuple[Tensor, AnyState]:
    """Run `attention_with_state` on packed sequences. The state has one row per sequence."""
    mechanism = resolve(mechanism)
    sequences = read(q, k, v, mechanism, call.pop("inputs"), call.pop("key_mask"))
    if not sequences.square:
        raise ArgumentError(
            f"q and k have sequences of {sequences.q.lengths} and {sequences.k.lengths} tokens: in packed sequences, "
            f"every token needs its query"
        )
    out, state = attention_with_state(**sequences.batch(), mechanism=mechanism, state=state, **call)
    return sequences.unpadded(out), state


def read(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mechanism: Mechanism,
    inputs: Mapping[str, Tensor] | None,
    key_mask: Tensor | None,
) -> Sequences:
    """Check that the packed tensors of a call fit together."""
    if key_mask is not None:
        raise ArgumentError("key_mask was passed with packed sequences, which have no padding to hide: leave it out")
    tensors = inputs or {}
    per_token = [name for name in mechanism.token_inputs if name in tensors]
    packs = {name: pack(name, x) for name, x in (("q", q), ("k", k), ("v", v))}
    packs |= {name: pack(f"input '{name}'", tensors[name], 3) for name in per_token}
    if len(packs["q"].lengths) != len(packs["k"].lengths):
        counts = " and ".join(f"{name} {len(packs[name].lengths)}" for name in "qk")
        raise ArgumentError(f"the numbers of packed sequences must be equal, and are: {counts}")
    for name in ("v", *per_token):
        if packs[name].lengths != packs["k"].lengths:
            raise ArgumentError(
                f"k and {name} have sequences of {packs['k'].lengths} and {packs[name].lengths} tokens, and must have "
                f"the same lengths"
            )
    shared = {name: x for name, x in tensors.items() if name not in per_token}
    return Sequences(packs["q"], packs["k"], packs["v"], {name: packs[name] for name in per_token}, shared)


def pack(name: str, x: Tensor, ndim: int = 4) -> PackedTensor:
    """Return the sequences of a nested tensor [B, H, j, d], or [B, H, j] with `ndim` 3."""
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
    tokens: Any = x
    if tokens.lengths() is not None:  # there are holes between the sequences
        tokens = x.transpose(1, 2).contiguous().transpose(1, 2)
    return PackedTensor(tokens.values().transpose(0, 1), tokens.offsets(), lengths_of(tokens.offsets()))


def lengths_of(offsets: Tensor) -> list[int]:
    """Return the lengths of sequences. On a GPU, reading them waits for it, so they are read once."""
    version, lengths = LENGTHS.get(offsets, (None, []))
    if version != offsets._version:
        version, lengths = offsets._version, offsets.diff().tolist()
        LENGTHS[offsets] = version, lengths
    return lengths
