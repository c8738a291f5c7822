"""A State as kernels keep it: one row of float32 numbers a head.

    comoment D x E | k_mean D | v_mean E | shift D | n          rounded up to 32 numbers, so that rows are aligned

A gradient of a State has the same layout.
"""

import triton
import triton.language as tl

FLOOR = tl.constexpr(-3e38)  # below every logarithm, and finite: FLOOR - FLOOR is 0


def numbers(d: int, e: int) -> int:
    """Length of a record."""
    return -(-(d * e + 2 * d + e + 1) // 32) * 32


@triton.jit
def write_state(at, n, k_mean, v_mean, comoment, shift, D: tl.constexpr, E: tl.constexpr):
    """Store a State at a record's address."""
    columns, channels = tl.arange(0, comoment.shape[0]), tl.arange(0, comoment.shape[1])
    within = (columns < D)[:, None] & (channels < E)[None, :]
    tl.store(at + columns[:, None] * E + channels[None, :], comoment, mask=within)
    tl.store(at + D * E + columns, k_mean, mask=columns < D)
    tl.store(at + D * E + D + channels, v_mean, mask=channels < E)
    tl.store(at + D * E + D + E + columns, shift, mask=columns < D)
    tl.store(at + D * E + 2 * D + E, n)
    fill(at, D, E)


@triton.jit
def fill(at, D: tl.constexpr, E: tl.constexpr):
    """Zeros after a record's last number: no memory that nobody wrote is left in it."""
    SIZE: tl.constexpr = D * E + 2 * D + E + 1
    spare = SIZE + tl.arange(0, 32)
    tl.store(at + spare, tl.zeros((32,), tl.float32), mask=spare < (SIZE + 31) // 32 * 32)


@triton.jit
def read_state(at, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr):
    """(n, k_mean, v_mean, comoment, shift), zero beyond D and E."""
    columns, channels = tl.arange(0, BD), tl.arange(0, BE)
    within = (columns < D)[:, None] & (channels < E)[None, :]
    comoment = tl.load(at + columns[:, None] * E + channels[None, :], mask=within, other=0.0)
    k_mean = tl.load(at + D * E + columns, mask=columns < D, other=0.0)
    v_mean = tl.load(at + D * E + D + channels, mask=channels < E, other=0.0)
    shift = tl.load(at + D * E + D + E + columns, mask=columns < D, other=0.0)
    return tl.load(at + D * E + 2 * D + E), k_mean, v_mean, comoment, shift
