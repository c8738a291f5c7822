"""How kernels see tensors, key masks and States in memory. Offsets are 64-bit.

Rows     q [B, H, N, d] as a pointer and three strides: only the last dimension must be contiguous, so a packed
         projection is read in place
packs    q [1, H, T, d] holds all sequences of a packed batch, one after the other. `offsets` [B + 1] says where each
         starts. A kernel then takes the first row of a sequence for b, and steps from row to row for x.batch
Mask     key_mask [B, N] as a pointer and two strides, or None
record   a State, or the gradient of one, as one row of float32 numbers per head:
         comoment D x E | k_mean D | v_mean E | shift D | n        padded to a multiple of 32, so that rows are aligned
         Regression observes [v, phi(k)] as values (`algebra.regression.with_keys`), so its E is e + D there
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from softless.kernels.common.arithmetic import rounded

SCAN = tl.constexpr(1024)  # tokens that `first_visible` looks at together
FLOOR = tl.constexpr(-3e38)  # below every logarithm, and finite: FLOOR - FLOOR is 0


class Rows(NamedTuple):
    """A [batch, heads, tokens, dim] tensor, as a kernel argument."""

    at: Any
    batch: int
    head: int
    token: int


def rows(x: Tensor, *, packed: bool = False) -> Rows:
    assert x.ndim == 4, f"rows need [batch, heads, tokens, dim], got {list(x.shape)}"
    assert x.stride(3) == 1 or x.shape[3] == 1, "the operators call `dense` first"
    batch, head, token = x.stride()[:3]
    return Rows(x, token if packed else batch, head, token)


def dense(x: Tensor) -> Tensor:
    """Return x, copied only if its last dimension is not contiguous: kernels take all other strides as they are."""
    return x if x.stride(-1) == 1 else x.contiguous()


def output_like(q: Tensor, e: int) -> Tensor:
    """Allocate [B, H, N, e], in memory as [B, N, H, e] if q is, so that [B, N, H e] is a view."""
    batch, heads, tokens, _ = q.shape
    if heads > 1 and q.stride(1) < q.stride(2):
        return q.new_empty(batch, tokens, heads, e).transpose(1, 2)
    return q.new_empty(batch, heads, tokens, e)


class Packs(NamedTuple):
    """The sequences of a packed batch."""

    q_offsets: Tensor
    k_offsets: Tensor
    longest_q: int
    longest_k: int
    multiple: int  # a divisor of every length


def rows_of(packs: Packs | None, *tensors: Tensor) -> tuple[Rows, ...]:
    return tuple(rows(x, packed=packs is not None) for x in tensors)


def sequences(x: Tensor, packs: Packs | None, longest: int) -> int:
    """Return how many sequences of the longest length have as many tokens as x."""
    return x.shape[0] if packs is None else -(-x.shape[2] // max(longest, 1))


def packs_of(
    q_offsets: Tensor | None, k_offsets: Tensor | None, longest_q: int, longest_k: int, multiple: int = 1
) -> Packs | None:
    """Return the packs of an operator's arguments, or None if the batch is dense."""
    if q_offsets is None or k_offsets is None:
        return None
    return Packs(q_offsets, k_offsets, longest_q, longest_k, multiple)


@triton.jit
def sequence(offsets, b, tokens):
    """(b, tokens) of a dense batch; (first row, length) of sequence b of a packed one, which has `tokens` in all."""
    if offsets is None:
        return b, tokens
    else:
        first = tl.load(offsets + b).to(tl.int64)
        return first, (tl.load(offsets + b + 1) - first).to(tl.int32)


@triton.jit
def line(offsets, b, h, H, tokens, LINES: tl.constexpr):
    """Where a sequence's numbers start in [B, H, LINES, tokens]; b is that of `sequence`."""
    if offsets is None:
        return (b * H + h) * LINES * tokens
    else:
        return h * LINES * tokens + b


@triton.jit
def spot(x, b, h, tokens, columns):
    """Addresses of a tile; b and h are int64."""
    return x.at + b * x.batch + h * x.head + tokens.to(tl.int64)[:, None] * x.token + columns[None, :]


@triton.jit
def load(x, b, h, tokens, columns, here, FULL: tl.constexpr = False):
    """A tile [tokens, columns] in float32; 0, without reading, where `here` is False. FULL: it is True everywhere."""
    if FULL:
        return tl.load(spot(x, b, h, tokens, columns)).to(tl.float32)
    else:
        return tl.load(spot(x, b, h, tokens, columns), mask=here, other=0.0).to(tl.float32)


@triton.jit
def store(x, b, h, tokens, columns, here, values, FULL: tl.constexpr = False):
    """Write a tile, rounded to the tensor's dtype."""
    values = rounded(values, x.at.dtype.element_ty)
    if FULL:
        tl.store(spot(x, b, h, tokens, columns), values)
    else:
        tl.store(spot(x, b, h, tokens, columns), values, mask=here)


@triton.jit
def keep(values, here, other, FULL: tl.constexpr = False):
    """`other` where `here` is False."""
    if FULL:
        return values
    else:
        return tl.where(here, values, other)


class Mask(NamedTuple):
    """A key mask [batch, tokens] as a kernel argument."""

    at: Any
    batch: int
    token: int


def mask_of(key_mask: Tensor | None) -> Mask | None:
    return None if key_mask is None else Mask(key_mask, *key_mask.stride())


@triton.jit
def real(mask, b, tokens, here):
    """Which tokens are real, among those where `here` is True."""
    if mask is None:
        return here
    else:
        return tl.load(mask.at + b * mask.batch + tokens.to(tl.int64) * mask.token, mask=here, other=0) != 0


@triton.jit
def visible(mask, b, tokens, stop):
    """Which tokens are real and before `stop`."""
    return real(mask, b, tokens, tokens < stop)


@triton.jit
def first_visible(mask, b, start, stop):
    """The first real token from `start` on, or `stop` if there is none."""
    if mask is None:
        return tl.minimum(start, stop)
    else:
        first = stop
        for at in range(start, stop, SCAN):
            tokens = at + tl.arange(0, SCAN)
            first = tl.minimum(first, tl.min(tl.where(visible(mask, b, tokens, stop), tokens, stop), 0))
        return first


def numbers(d: int, e: int) -> int:
    """Return the length of a record."""
    return -(-(d * e + 2 * d + e + 1) // 32) * 32


@triton.jit
def write_state(at, n, k_mean, v_mean, comoment, shift, D: tl.constexpr, E: tl.constexpr, MORE: tl.constexpr = 0):
    """Store a State at a record's address. MORE columns of the values stay as they are: see `write_spread`."""
    ROW: tl.constexpr = E + MORE
    columns, channels = tl.arange(0, comoment.shape[0]), tl.arange(0, comoment.shape[1])
    within = (columns < D)[:, None] & (channels < E)[None, :]
    tl.store(at + columns[:, None] * ROW + channels[None, :], comoment, mask=within)
    tl.store(at + D * ROW + columns, k_mean, mask=columns < D)
    tl.store(at + D * ROW + D + channels, v_mean, mask=channels < E)
    tl.store(at + D * ROW + D + ROW + columns, shift, mask=columns < D)
    tl.store(at + D * ROW + 2 * D + ROW, n)
    fill(at, D, ROW)


@triton.jit
def write_spread(at, k_mean, spread, D: tl.constexpr, E: tl.constexpr):
    """Store the covariance of the keys in a record whose last D values are the keys themselves."""
    columns = tl.arange(0, spread.shape[0])
    within = (columns < D)[:, None] & (columns < D)[None, :]
    tl.store(at + columns[:, None] * (E + D) + E + columns[None, :], spread, mask=within)
    tl.store(at + D * (E + D) + D + E + columns, k_mean, mask=columns < D)


@triton.jit
def fill(at, D: tl.constexpr, E: tl.constexpr):
    """Write zeros after a record's last number, so that no part of it stays uninitialized."""
    SIZE: tl.constexpr = D * E + 2 * D + E + 1
    spare = SIZE + tl.arange(0, 32)
    tl.store(at + spare, tl.zeros((32,), tl.float32), mask=spare < (SIZE + 31) // 32 * 32)


@triton.jit
def read_state(at, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, MORE: tl.constexpr = 0):
    """(n, k_mean, v_mean, comoment, shift), zero beyond D and E."""
    ROW: tl.constexpr = E + MORE
    columns, channels = tl.arange(0, BD), tl.arange(0, BE)
    within = (columns < D)[:, None] & (channels < E)[None, :]
    comoment = tl.load(at + columns[:, None] * ROW + channels[None, :], mask=within, other=0.0)
    k_mean = tl.load(at + D * ROW + columns, mask=columns < D, other=0.0)
    v_mean = tl.load(at + D * ROW + D + channels, mask=channels < E, other=0.0)
    shift = tl.load(at + D * ROW + D + ROW + columns, mask=columns < D, other=0.0)
    return tl.load(at + D * ROW + 2 * D + ROW), k_mean, v_mean, comoment, shift


@triton.jit
def read_square(at, ROW: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """A D x D matrix whose rows are ROW numbers apart, [BD, BD], zero beyond D."""
    columns = tl.arange(0, BD)
    within = (columns < D)[:, None] & (columns < D)[None, :]
    return tl.load(at + columns[:, None] * ROW + columns[None, :], mask=within, other=0.0)


@triton.jit
def write_square(at, matrix, D: tl.constexpr):
    """Store a D x D matrix row by row, and zeros up to a multiple of 32 numbers."""
    columns, spare = tl.arange(0, matrix.shape[0]), D * D + tl.arange(0, 32)
    within = (columns < D)[:, None] & (columns < D)[None, :]
    tl.store(at + columns[:, None] * D + columns[None, :], matrix, mask=within)
    tl.store(at + spare, tl.zeros((32,), tl.float32), mask=spare < (D * D + 31) // 32 * 32)
