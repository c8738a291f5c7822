"""Count what a call costs before it runs: FLOPs, the least memory traffic, the weights, the state.

    flops    matrix products, as torch's FlopCounterMode counts them in the real call: 2 m n k for [m, k] @ [k, n].
             Causal softmax counts the full square; fused kernels skip up to half of it.
    floor    q, k, v read once and o written once: (2 B H N d + 2 B G M d) bytes(dtype). With the backward pass, 11
             tensors instead of 4: q, k, v and do are read again, and dq, dk, dv are written
    weights  an explicit weight matrix: B H N M numbers in the dtype it is computed in (hydra: one matrix per channel)
    state    what `attention_with_state` carries from token to token; it does not grow with N

The call runs on fake tensors, which have a shape, a dtype and a device, but no data.
"""

from dataclasses import asdict, dataclass, fields, replace
from functools import cache, partial
from math import ceil
from typing import Any, Self, TypedDict

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from softless import backends
from softless.algebra import CHUNK
from softless.algebra.precision import widen
from softless.errors import ArgumentError, UnsupportedError
from softless.functional import attention, attention_weights, attention_with_state
from softless.mechanisms import Call, Mechanism, resolve
from softless.mechanisms.hydra import Hydra
from softless.stopwatch import shortage
from softless.validation import resolve_scale

SCHEMA = "softless.explain/1"
LARGEST_TENSOR = 2**58  # numbers: beyond, byte counts overflow 64 bits
EXPLICIT_COPIES = 6  # weight-sized tensors alive at once in the explicit form, measured with `threshold`

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

    @classmethod
    def of(cls, q: Tensor, k: Tensor) -> Self:
        """Return the shape of a call with these tensors."""
        batch, heads, queries, head_dim = q.shape
        return cls(batch, heads, queries, head_dim, keys=k.shape[2], kv_heads=k.shape[1])

    @property
    def sizes(self) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
        """The size of q, and that of k and v."""
        of_keys = self.batch, self.kv_heads, self.keys, self.head_dim
        return (self.batch, self.heads, self.queries, self.head_dim), of_keys

    def __str__(self) -> str:
        return f"shape {self.batch},{self.heads},{self.queries},{self.head_dim} with {self.keys} keys"


@dataclass(frozen=True, kw_only=True)
class Terms:
    """One call, whatever the mechanism: its shape, dtype and device. `backend` is used by softless alone."""

    shape: Shape
    is_causal: bool = False
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    backend: str = "auto"

    @property
    def grouped(self) -> bool:
        return self.shape.kv_heads != self.shape.heads


@dataclass(frozen=True)
class Cost:
    """Counts of one call. `weight_bytes` is what an explicit matrix would take, whether the call forms it or not."""

    form: str
    flops: int
    floor_bytes: int
    weight_bytes: int
    state_bytes: int | None


class CallExplanation(TypedDict):
    """The JSON document of `softless explain MECHANISM`; sizes are in bytes."""

    schema: str
    mechanism: str
    formula: str
    family: str
    options: dict[str, object]
    shape: dict[str, int]  # the fields of Shape
    causal: bool
    dtype: str
    device: str
    backend: str
    backend_reason: str
    cost: dict[str, Any]  # the fields of Cost
    softmax: dict[str, Any]  # the same for softmax
    ratio: dict[str, float]  # "flops": the mechanism's / softmax's
    crossover_tokens: int | None  # from this N = M on, the mechanism takes fewer FLOPs than softmax
    notes: list[str]


def explain_call(mechanism: Mechanism, terms: Terms, *, options: dict[str, object]) -> CallExplanation:
    """Count one call and the same call with softmax. A mechanism that only has a causal form is counted in it."""
    causal = terms.is_causal or mechanism.lacks(is_causal=False) is not None
    terms, dtype = replace(terms, is_causal=causal), str(terms.dtype).removeprefix("torch.")
    backend, reason = chosen(mechanism, terms)
    own, softmax = cost(mechanism, terms), cost(resolve("softmax"), terms)
    notes = ["FLOPs are those of matrix products; exponentials and sums are not counted."]
    if causal:
        notes.append("Causal softmax counts the whole square; a fused kernel skips up to half of it.")
    keeps_dtype = backend == "triton" or (mechanism.fused_on_gpu and terms.device == "cuda")
    if dtype in ("bfloat16", "float16") and not keeps_dtype:
        notes.append(f"{mechanism.name} computes {dtype} in float32 and rounds once, at the end.")
    if "no CUDA device" not in reason and chosen(mechanism, terms, ask=True)[0] != backend:
        notes.append("auto does not use the kernels here: backend='triton' runs them.")
    return {
        "schema": SCHEMA,
        "mechanism": mechanism.name,
        "formula": mechanism.formula,
        "family": mechanism.family,
        "options": options,
        "shape": asdict(terms.shape),
        "causal": causal,
        "dtype": dtype,
        "device": terms.device,
        "backend": backend,
        "backend_reason": reason,
        "cost": asdict(own),
        "softmax": asdict(softmax),
        "ratio": {"flops": own.flops / softmax.flops},
        "crossover_tokens": crossover(mechanism, terms),
        "notes": notes,
    }


def option_values(mechanism: Mechanism) -> dict[str, object]:
    """Return the options of a mechanism; a function is written as the one that the command line uses."""
    values = {field.name: getattr(mechanism, field.name) for field in fields(mechanism)}
    return {name: "exp(q.k/sqrt(d))" if callable(value) else value for name, value in values.items()}


def form(mechanism: Mechanism, is_causal: bool) -> str:
    """Return how plain torch computes a mechanism: with a state, parallel or chunked, or in its own form."""
    if mechanism.family in ("kernelized", "recurrent"):
        return CHUNKED if is_causal else PARALLEL
    return mechanism.form


def chosen(mechanism: Mechanism, terms: Terms, *, ask: bool = False) -> tuple[str, str]:
    """Return the backend that `auto` would choose and the reason; with `ask`, the kernels wherever they can run."""
    if terms.device == "cpu":
        return "torch", "the tensors are on the CPU"
    q, k = (torch.empty(size, dtype=terms.dtype, device="meta") for size in terms.shape.sizes)
    call = Call(is_causal=terms.is_causal, scale=resolve_scale(None, mechanism, terms.shape.head_dim))
    reason = backends.refusal(mechanism, call, q, k, k, torch.device(terms.device), ask=ask)
    if reason:
        return "torch", reason
    return "triton", backends.evidence(mechanism, call, terms.dtype, torch.device(terms.device))


def cost(mechanism: Mechanism, terms: Terms) -> Cost:
    """Count one call of `attention` without running it."""
    shape, is_causal = terms.shape, terms.is_causal
    counted = flops(mechanism, terms)
    with FakeTensorMode():
        q, k, v, inputs = _tensors(mechanism, replace(terms, shape=replace(shape, queries=1, keys=1)))
        grid = picture(mechanism, 1)
        row = attention_weights(widen(q), widen(k), mechanism, inputs=inputs, is_causal=is_causal, grid=grid)
        weight_bytes = row.numel() * shape.queries * shape.keys * row.element_size()
        try:
            _, state = attention_with_state(q, k, v, mechanism, inputs=inputs)
            state_bytes = sum(part.numel() * part.element_size() for part in state)
        except UnsupportedError:
            state_bytes = None
    return Cost(form(mechanism, is_causal), counted, floor_bytes(terms), weight_bytes, state_bytes)


def floor_bytes(terms: Terms, *, backward: bool = False) -> int:
    """Return the fewest bytes that a call moves: 4 tensors forward, 11 with the backward pass."""
    shape, (of_queries, of_keys) = terms.shape, (5, 6) if backward else (2, 2)
    rows = of_queries * shape.heads * shape.queries + of_keys * shape.kv_heads * shape.keys
    return shape.batch * rows * shape.head_dim * terms.dtype.itemsize


def weights_shortage(mechanism: Mechanism, terms: Terms) -> str | None:
    """Say that a call forms weights that do not fit in memory, so that the system would kill the process.

    Return None if they fit. The reference backend forms weights for every mechanism.
    """
    if terms.backend != "reference" and form(mechanism, terms.is_causal) != EXPLICIT:
        return None
    shape = terms.shape
    matrices = shape.batch * mechanism.matrices(shape.heads, shape.head_dim)
    needed = EXPLICIT_COPIES * matrices * shape.queries * shape.keys * max(4, terms.dtype.itemsize)
    missing = shortage(needed, terms.device)
    return missing and f"forms weights of {missing}"


@cache
def flops(mechanism: Mechanism, terms: Terms) -> int:
    """Return the FLOPs of the matrix products in one call of `attention`."""
    _check(terms.shape)
    counted = MISSED | RUNNING if isinstance(mechanism, Hydra) else MISSED
    with FakeTensorMode(), FlopCounterMode(display=False, custom_mapping=counted) as counter:
        q, k, v, inputs = _tensors(mechanism, terms)
        grid = picture(mechanism, terms.shape.queries)
        attention(q, k, v, mechanism, inputs=inputs, is_causal=terms.is_causal, grid=grid, backend="torch")
    return counter.get_total_flops()


def _pairs(q: torch.Size, k: torch.Size, v: torch.Size, *_: object, **__: object) -> int:
    """Return the FLOPs of two products with all pairs of tokens."""
    return 2 * q.numel() // q[3] * k[2] * (q[3] + v[3])


def _solutions(matrix: torch.Size, right: torch.Size, *_: object, **__: object) -> int:
    """Return the FLOPs of solving with matrices [..., d, d] for [..., d, m]: a factorization, and two substitutions."""
    d = matrix[-1]
    return matrix.numel() // d**2 * (2 * d**3 // 3 + 2 * d**2 * right[-1])


def _running_sum(x: torch.Size, *_: object, **__: object) -> int:
    """Return the FLOPs of a running sum: those of a product with a row of ones, which it is where nothing is causal."""
    return 2 * x.numel()


RUNNING = {torch.ops.aten.cumsum: _running_sum}
MISSED = {  # torch does not count these
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _pairs,
    torch.ops.aten._linalg_solve_ex: _solutions,
}


def picture(mechanism: Mechanism, tokens: int) -> tuple[int, int] | None:
    """Return the tokens as a picture of one row, for a mechanism that needs a picture."""
    return (1, tokens) if mechanism.needs_grid else None


def crossover(mechanism: Mechanism, terms: Terms) -> int | None:
    """Return the N = M from which a mechanism takes fewer FLOPs than softmax; None if that never happens.

    Let r(N) = flops / softmax_flops. If the mechanism costs b N, then N r(N) is the answer from any N. Chunks make
    the cost a staircase; on one step of it N sqrt(r(N)) is the answer, and for a cost of b N + c it halves the error.
    So the first few steps use N r(N) and the others N sqrt(r(N)).
    """

    def ratio(tokens: int) -> float:
        shape = replace(terms.shape, batch=1, queries=tokens, keys=tokens)
        here = Terms(shape=shape, is_causal=terms.is_causal)
        return flops(mechanism, here) / flops(resolve("softmax"), here)

    tokens = 4096
    for power in (1.0,) * 3 + (0.5,) * 9:
        before, tokens = tokens, min(max(1, ceil(tokens * ratio(tokens) ** power)), 2**20)
        if tokens == before:
            break  # the remaining steps would not move either
    return tokens if ratio(2 * tokens) < 1 else None


def _tensors(mechanism: Mechanism, terms: Terms) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    of_queries, of_keys = terms.shape.sizes
    empty = partial(torch.empty, dtype=terms.dtype, device=terms.device)
    q, k, v = empty(of_queries), empty(of_keys), empty(of_keys)
    return q, k, v, {name: empty(size) for name, size in mechanism.needed(q, k).items()}


def _check(shape: Shape) -> None:
    """Refuse a shape whose byte counts overflow. The largest tensors: weights per channel, or pairs per token."""
    tokens, dim = max(shape.queries, shape.keys, CHUNK), shape.head_dim
    largest = shape.batch * max(shape.heads, shape.kv_heads) * tokens * max(tokens, dim**2) * dim
    if largest > LARGEST_TENSOR:
        size = f"{shape} and {shape.kv_heads} key heads"
        raise ArgumentError(f"{size} could make a tensor of {largest:.1e} numbers; 64 bits count to 2.9e+17")
