"""Products of rounded factors, summed in float32: what every kernel multiplies with.

    bfloat16   factors rounded to bfloat16: the tensor cores' fastest, with float32's range
    float16    factors rounded to tf32: as many bits as float16, and no overflow at 65,504
    float32    factors as they are, multiplied exactly (ieee)

Rounding is to nearest, ties to even. The tensor cores would cut tf32 off, which is biased; Triton's interpreter
would cut bfloat16 off, and multiplies it wrongly: there the same numbers travel as float32.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
ONES = tl.constexpr(16)  # the fewest rows a product may have


@triton.jit
def nearest(x, BITS: tl.constexpr):
    """The nearest float32 whose last BITS bits are zero; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    bits = bits + ((1 << (BITS - 1)) - 1) + ((bits >> BITS) & 1)
    rounded = ((bits >> BITS) << BITS).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)


@triton.jit
def factor(x, DTYPE: tl.constexpr):
    """x as a factor of `product`."""
    if DTYPE == tl.bfloat16:
        if INTERPRETED:
            return nearest(x.to(tl.float32), 16)
        else:
            return x.to(tl.bfloat16)
    elif DTYPE == tl.float16:
        return nearest(x.to(tl.float32), 13)
    else:
        return x.to(tl.float32)


@triton.jit
def product(a, b, sums, DTYPE: tl.constexpr):
    """a @ b + sums, of two factors [m, k] and [k, n]; float32."""
    if DTYPE == tl.float32:
        return tl.dot(a, b, sums, input_precision="ieee")
    else:
        return tl.dot(a, b, sums, input_precision="tf32")


@triton.jit
def column_sums(x, sums, DTYPE: tl.constexpr):
    """sums [ONES, d] plus the sum over the rows of a factor [n, d], in every row: cheaper than a reduction."""
    return product(factor(tl.full((ONES, x.shape[0]), 1.0, tl.float32), DTYPE), x, sums, DTYPE)


@triton.jit
def weighted_sums(weights, x, sums, DTYPE: tl.constexpr):
    """`column_sums` of weights [n, 1] times a factor [n, d]."""
    return product(factor(tl.zeros((ONES, 1), tl.float32) + tl.trans(weights), DTYPE), x, sums, DTYPE)


@triton.jit
def row(sums):
    """The one row that all rows of `column_sums` are."""
    return tl.sum(sums, 0) * (1.0 / ONES)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """x as it is stored: rounded once, to nearest."""
    if DTYPE == tl.bfloat16 and INTERPRETED:
        return nearest(x, 16).to(DTYPE)
    else:
        return x.to(DTYPE)
