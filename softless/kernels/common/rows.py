"""Tensors as kernels see them: a pointer and three strides. Offsets are 64-bit; the last dimension is contiguous.

q [B, H, N, d]   ->   Rows(at, batch, head, token)      any strides: a packed projection is read in place
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from softless.kernels.common.arithmetic import rounded


class Rows(NamedTuple):
    """A [batch, heads, tokens, dim] tensor, as a kernel argument."""

    at: Any
    batch: int
    head: int
    token: int


def rows(x: Tensor) -> Rows:
    assert x.ndim == 4, f"rows need [batch, heads, tokens, dim], got {list(x.shape)}"
    assert x.stride(3) == 1 or x.shape[3] == 1, "the operators call `dense` first"
    return Rows(x, *x.stride()[:3])


def dense(x: Tensor) -> Tensor:
    """x, copied only if its last dimension is not contiguous: kernels take every other stride as it is."""
    return x if x.stride(-1) == 1 else x.contiguous()


def output_like(q: Tensor, e: int) -> Tensor:
    """An empty [B, H, N, e], its tokens outermost where q's are: [B, N, H e] is then a view."""
    batch, heads, tokens, _ = q.shape
    if heads > 1 and q.stride(1) < q.stride(2):
        return q.new_empty(batch, tokens, heads, e).transpose(1, 2)
    return q.new_empty(batch, heads, tokens, e)


@triton.jit
def spot(x, b, h, tokens, columns):
    """Addresses of a tile; b and h are int64."""
    return x.at + b * x.batch + h * x.head + tokens.to(tl.int64)[:, None] * x.token + columns[None, :]


@triton.jit
def load(x, b, h, tokens, columns, here, FULL: tl.constexpr = False):
    """A tile [tokens, columns] in float32; 0 where `here` is False, which is not read. FULL: it is True everywhere."""
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
