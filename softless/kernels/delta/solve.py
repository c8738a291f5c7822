"""How much each token of the delta rule erases and writes, and the inverse that turns a chunk into products.

    delta   a = beta              gain = beta
    efla    a = 1 - e^-x          gain = a / |k| = beta |k| D(x)          x = beta |k|^2,  D(x) = (1 - e^-x)/x

Below x = 1/2, where the quotient would cancel, D is the sum of its series, sum_n (-x)^n / (n+1)!. The derivatives, with
flow = (a/gain) da + dgain:

    delta   dbeta = flow                    efla   dbeta = e^-x |k| flow          d|k| = 2 beta e^-x flow - beta D dgain

The inverse of a chunk:

    A = stril(diag(a) k^ k^^T)          T = (I + A)^-1          k^ = k/|k|; 0 where |k| < 2^-126

Blocks of 16 are solved by forward substitution, row by row, all blocks at the same time. Then products join two blocks
into one of twice the size, until the chunk is one block:

    (I + [A1 0; C A2])^-1 = [T1 0; -T2 C T1  T2]

Substitution is the recurrence in coordinates of the keys: no number in it is larger than what is erased.

    scalars [P, 3, N]              1/|k|, a and gain of each token; 0 for hidden tokens
    solved  [P, chunks, L, L]      T, in numbers of 11 bits or more: its entries are at most max(a)
"""

import triton
import triton.language as tl

from softless.kernels.common.arithmetic import factor, precise, product
from softless.kernels.common.launch import SIZES
from softless.kernels.common.rows import load, visible

NEAR = tl.constexpr(0.5)
TERMS = tl.constexpr(11)  # x^11 / 12! is 1e-12
GONE = tl.constexpr(100.0)  # e^-100 is 0 in float32
TINY = tl.constexpr(1e-30)
FAR = tl.constexpr(2.0**60)  # longer keys have no gradient through e^-x, and their squares are finite
ROWS = tl.constexpr(16)  # of a block that is solved row by row
SMALLEST = tl.constexpr(1 << 23)  # 2^-126, as bits
LARGEST = tl.constexpr(252 << 23)  # 2^125: its inverse is a normal number too
SHORTEST = tl.constexpr(2.0**-126)  # the inverse of a shorter key would overflow
TWICE_ONE = tl.constexpr(254 << 23)  # the bits of 2^n and of 2^-n add up to this


@triton.jit
def series(x):
    """D for x < NEAR."""
    term = tl.zeros_like(x) + 1.0
    total = term
    for n in tl.static_range(1, TERMS):
        term = term * x * (-1.0 / (n + 1))
        total += term
    return total


@triton.jit
def gate(length, beta, RULE: tl.constexpr):
    """(a, gain) of keys of this length."""
    if RULE == "delta":
        return beta, beta
    else:
        tl.static_assert(RULE == "efla")
        x = beta * length * length
        near = series(tl.minimum(x, NEAR))
        erased = 1.0 - tl.exp(-tl.minimum(x, GONE))
        written = erased / tl.where(x < NEAR, 1.0, length)
        return tl.where(x < NEAR, x * near, erased), tl.where(x < NEAR, beta * length * near, written)


@triton.jit
def gate_gradient(d_erase, d_gain, d_write, gain, length, beta, RULE: tl.constexpr):
    """(dbeta, d|k|) from the gradients of a and gain; d_write is a da + gain dgain, whose terms do not cancel."""
    ratio = length
    if RULE == "delta":
        ratio = tl.zeros_like(length) + 1.0
    nonzero = tl.abs(gain) > TINY
    flow = tl.where(nonzero, d_write / tl.where(nonzero, gain, 1.0), ratio * d_erase + d_gain)
    if RULE == "delta":
        return flow, tl.zeros_like(length)
    else:
        x = beta * length * length
        left = tl.exp(-tl.minimum(x, GONE))
        decline = tl.where(
            x < NEAR, beta * series(tl.minimum(x, NEAR)), (1.0 - left) / tl.where(x < NEAR, 1.0, length * length)
        )
        return left * tl.minimum(length, FAR) * flow, 2.0 * beta * left * flow - decline * d_gain


@triton.jit
def inverted(x):
    """1/x, and 0 for 0."""
    return tl.where(x == 0, 0.0, 1.0 / tl.where(x == 0, 1.0, x))


@triton.jit
def scaled(keys):
    """(keys divided by a power of two near their largest entry, their length, that power): no square overflows."""
    largest = tl.max(tl.abs(keys), 1)
    bits = largest.to(tl.int32, bitcast=True) & (255 << 23)
    bits = tl.minimum(tl.maximum(bits, SMALLEST), LARGEST)
    keys = keys * (-(bits - TWICE_ONE)).to(tl.float32, bitcast=True)[:, None]
    return keys, tl.sqrt(tl.sum(keys * keys, 1)), bits.to(tl.float32, bitcast=True)


@triton.jit
def solve_blocks(matrix, CHUNK: tl.constexpr):
    """(I + stril(matrix))^-1 of every diagonal block, zeros elsewhere."""
    BLOCKS: tl.constexpr = CHUNK // ROWS
    block, row = tl.arange(0, BLOCKS), tl.arange(0, ROWS)
    same = block[:, None, None, None] == block[None, None, :, None]
    corner = tl.sum(tl.where(same, tl.reshape(matrix, (BLOCKS, ROWS, BLOCKS, ROWS)), 0.0), 2)
    solved = tl.where((row[None, :, None] == row[None, None, :]) & (block[:, None, None] >= 0), 1.0, 0.0)
    for i in range(1, ROWS):
        here = (row == i)[None, :, None]
        line = tl.sum(tl.where(here & (row < i)[None, None, :], corner, 0.0), 1)
        known = tl.sum(line[:, :, None] * solved, 1)
        solved = tl.where(here, solved - known[:, None, :], solved)
    spread = tl.where(same, tl.reshape(solved, (BLOCKS, ROWS, 1, ROWS)), 0.0)
    return tl.reshape(spread, (CHUNK, CHUNK))


@triton.jit
def join(matrix, solved, SIZE: tl.constexpr, CHUNK: tl.constexpr, DTYPE: tl.constexpr):
    """The inverses of blocks of twice the SIZE, from those of blocks of SIZE."""
    i, j = tl.arange(0, CHUNK)[:, None] // SIZE, tl.arange(0, CHUNK)[None, :] // SIZE
    zero = tl.zeros((CHUNK, CHUNK), tl.float32)
    below = tl.where((i // 2 == j // 2) & (i > j), matrix, 0.0)
    return solved - precise(solved, precise(below, solved, zero, DTYPE), zero, DTYPE)


@triton.jit
def solve(matrix, CHUNK: tl.constexpr, DTYPE: tl.constexpr):
    """(I + stril(matrix))^-1 of a chunk."""
    solved = solve_blocks(matrix, CHUNK)
    if CHUNK > 16:
        solved = join(matrix, solved, 16, CHUNK, DTYPE)
    if CHUNK > 32:
        solved = join(matrix, solved, 32, CHUNK, DTYPE)
    return solved


@triton.jit(do_not_specialize=SIZES)
def solve_kernel(k, beta, mask, scalars, solved, groups, tokens, chunks, D: tl.constexpr, BD: tl.constexpr,
                 CHUNK: tl.constexpr, RULE: tl.constexpr):  # fmt: skip
    """One program per chunk and key head."""
    DTYPE: tl.constexpr = k.at.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    chunk, p = program % chunks, program // chunks
    b, g = p // groups, p % groups
    dims, steps = tl.arange(0, BD), tl.arange(0, CHUNK)
    here = (chunk * CHUNK).to(tl.int32) + steps
    seen = visible(mask, b, here, tokens)
    keys, length, power = scaled(load(k, b, g, here, dims, seen[:, None] & (dims < D)[None, :]))
    strength = tl.sum(load(beta, b, g, here, tl.arange(0, 1), seen[:, None]), 1)
    length = tl.where(length * power < SHORTEST, 0.0, length)
    erase, gain = gate(length * power, strength, RULE)
    inverse = inverted(length)
    keys = factor(keys, DTYPE)
    scores = product(keys, tl.trans(keys), tl.zeros((CHUNK, CHUNK), tl.float32), DTYPE)
    answer = solve((erase * inverse)[:, None] * inverse[None, :] * scores, CHUNK, DTYPE)

    spots = solved + program * CHUNK * CHUNK + steps[:, None] * CHUNK + steps[None, :]
    tl.store(spots, answer.to(solved.dtype.element_ty))
    scalars += p * 3 * tokens + here
    tl.store(scalars, inverse / power, mask=here < tokens)
    tl.store(scalars + tokens, erase, mask=here < tokens)
    tl.store(scalars + 2 * tokens, gain, mask=here < tokens)
