"""What a call costs before it runs: FLOPs, the least memory traffic, the weights, the state.

    flops    matrix products, as torch's FlopCounterMode counts them in the real call: 2 m n k for [m, k] @ [k, n].
             A causal softmax counts the whole square; fused kernels skip up to half of it.
    floor    q, k, v read once and o written once: (2 B H N d + 2 B G M d) bytes(dtype)
    weights  an explicit weight matrix, B H N M numbers in the dtype it is computed in (hydra: one a channel)
    state    what `attention_with_state` carries from token to token; it does not grow with N

The call runs on fake tensors: they have a shape, a dtype and a device, and no data.
"""

from dataclasses import dataclass, replace
from functools import cache
from math import ceil

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from softless import backends
from softless.algebra import CHUNK
from softless.backends import widen
from softless.errors import ArgumentError, UnsupportedError
from softless.functional import attention, attention_weights, attention_with_state
from softless.mechanisms import Call, Mechanism, mechanism
from softless.validation import resolve_scale

LARGEST_TENSOR = 2**58  # numbers: beyond, byte counts overflow 64 bits

FUSED, EXPLICIT, BLOCKS, LOW_RANK = "SDPA", "explicit weights", "blocks", "low rank"
PARALLEL, CHUNKED = "parallel state", "chunked state"


@dataclass(frozen=True)
class Shape:
    """q [batch, heads, queries, head_dim]; k and v [batch, kv_heads, keys, head_dim]."""

    batch: int
    heads: int
    queries: int
    head_dim: int
    keys: int
    kv_heads: int


@dataclass(frozen=True)
class Cost:
    """Counts of one call. `weight_bytes` says what an explicit matrix takes, formed or not."""

    form: str
    flops: int
    floor_bytes: int
    weight_bytes: int
    state_bytes: int | None


def form(made: Mechanism, is_causal: bool) -> str:
    """How plain torch computes it: a state, parallel or chunked, or what a scored mechanism says of itself."""
    if made.family in ("kernelized", "recurrent"):
        return CHUNKED if is_causal else PARALLEL
    return made.form


def chosen(
    made: Mechanism, shape: Shape, *, is_causal: bool, dtype: torch.dtype, device: str, ask: bool = False
) -> tuple[str, str]:
    """(backend, reason): what `auto` would run, and why; with `ask`, the kernels wherever they can run."""
    if device == "cpu":
        return "torch", "the tensors are on the CPU"
    q = torch.empty(shape.batch, shape.heads, shape.queries, shape.head_dim, dtype=dtype, device="meta")
    k = torch.empty(shape.batch, shape.kv_heads, shape.keys, shape.head_dim, dtype=dtype, device="meta")
    call = Call(is_causal=is_causal, scale=resolve_scale(None, made, shape.head_dim))
    reason = backends.refusal(made, call, q, k, k, torch.device(device), ask=ask)
    return ("torch", reason) if reason else ("triton", "the kernels take this call")


def cost(
    made: Mechanism,
    shape: Shape,
    *,
    is_causal: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Cost:
    """Count one call of `attention` without running it."""
    counted = flops(made, shape, is_causal=is_causal, dtype=dtype, device=device)
    read_written = 2 * shape.heads * shape.queries + 2 * shape.kv_heads * shape.keys
    with FakeTensorMode():
        q, k, v, inputs = _tensors(made, replace(shape, queries=1, keys=1), dtype, device)
        row = attention_weights(widen(q), widen(k), made, inputs=inputs, is_causal=is_causal, grid=picture(made, 1))
        return Cost(
            form(made, is_causal),
            counted,
            shape.batch * shape.head_dim * read_written * dtype.itemsize,
            row.numel() * shape.queries * shape.keys * row.element_size(),
            _state_bytes(made, q, k, v, inputs),
        )


@cache
def flops(
    made: Mechanism,
    shape: Shape,
    *,
    is_causal: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> int:
    """FLOPs of the matrix products in one call of `attention`."""
    _check(shape)
    with FakeTensorMode(), FlopCounterMode(display=False, custom_mapping=MISSED) as counter:
        q, k, v, inputs = _tensors(made, shape, dtype, device)
        grid = picture(made, shape.queries)
        attention(q, k, v, made, inputs=inputs, is_causal=is_causal, grid=grid, backend="torch")
    return counter.get_total_flops()


def _pairs(q: torch.Size, k: torch.Size, v: torch.Size, *_: object, **__: object) -> int:
    """Two products with all pairs of tokens."""
    return 2 * q.numel() // q[3] * k[2] * (q[3] + v[3])


MISSED = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _pairs}  # by the counter of torch 2.11


def picture(made: Mechanism, tokens: int) -> tuple[int, int] | None:
    """Tokens as a picture of one row, for a mechanism that reads one."""
    return (1, tokens) if made.needs_grid else None


def crossover(made: Mechanism, shape: Shape, *, is_causal: bool = False) -> int | None:
    """The N = M from which it costs fewer FLOPs than softmax; None if that never happens.

    With r(N) = flops / softmax_flops: where the mechanism costs b N, N r(N) is the answer from any N. Chunks make
    the cost a staircase, and on one step N sqrt(r(N)) is; where it costs b N + c, that halves the error. So: walk by
    the first, settle by the second.
    """
    softmax = mechanism("softmax")

    def ratio(tokens: int) -> float:
        here = replace(shape, batch=1, queries=tokens, keys=tokens)
        return flops(made, here, is_causal=is_causal) / flops(softmax, here, is_causal=is_causal)

    tokens = 4096
    for power in (1.0,) * 3 + (0.5,) * 9:
        before, tokens = tokens, min(max(1, ceil(tokens * ratio(tokens) ** power)), 2**20)
        if tokens == before:
            break  # the steps that are left stay here too
    return tokens if ratio(2 * tokens) < 1 else None


def _tensors(
    made: Mechanism, shape: Shape, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    q = torch.empty(shape.batch, shape.heads, shape.queries, shape.head_dim, dtype=dtype, device=device)
    k, v = (
        torch.empty(shape.batch, shape.kv_heads, shape.keys, shape.head_dim, dtype=dtype, device=device) for _ in "kv"
    )
    needed = made.needed(q, k)
    return q, k, v, {name: torch.empty(size, dtype=dtype, device=device) for name, size in needed.items()}


def _state_bytes(made: Mechanism, q: Tensor, k: Tensor, v: Tensor, inputs: dict[str, Tensor]) -> int | None:
    try:
        _, state = attention_with_state(q, k, v, made, inputs=inputs)
    except UnsupportedError:
        return None
    return sum(part.numel() * part.element_size() for part in state)


def _check(shape: Shape) -> None:
    """No mechanism makes a larger tensor than this one: a weight matrix a channel, or a state of pairs a token."""
    tokens, dim = max(shape.queries, shape.keys, CHUNK), shape.head_dim
    largest = shape.batch * max(shape.heads, shape.kv_heads) * tokens * max(tokens, dim**2) * dim
    if largest > LARGEST_TENSOR:
        raise ArgumentError(
            f"{_describe(shape)} could make a tensor of {largest:.1e} numbers; 64 bits count to 2.9e+17"
        )


def _describe(shape: Shape) -> str:
    size = f"shape {shape.batch},{shape.heads},{shape.queries},{shape.head_dim}"
    return f"{size} with {shape.keys} keys and {shape.kv_heads} key heads"
