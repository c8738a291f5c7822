"""How every kernel multiplies: products of rounded factors, summed in float32.

    bfloat16   factors rounded to bfloat16: the fastest on tensor cores, with float32's range
    float16    factors rounded to tf32: as many bits as float16, and no overflow at 65,504
    float32    factors as they are, multiplied exactly (ieee)
    PAIRS      factors as two bfloat16 each, 16 bits: three products on the tensor cores. For bfloat16 inputs where
               small differences of features count; float16 inputs use float32 there

Rounding is to nearest, ties to even. Tensor cores would truncate tf32, which is biased. Triton's interpreter would
truncate bfloat16 and multiplies it wrongly, so there the rounded numbers are stored as float32.
"""

import triton
import triton.language as tl
from triton.language import target_info

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
PAIRS = tl.constexpr(tl.float64)  # marks a way to multiply, with a dtype that no kernel takes
ONES = tl.constexpr(16)  # the fewest rows or columns a product may have
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def nearest(x, BITS: tl.constexpr):
    """The nearest float32 whose last BITS bits are zero; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    bits = bits + ((1 << (BITS - 1)) - 1) + ((bits >> BITS) & 1)
    rounded = ((bits >> BITS) << BITS).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)


@triton.jit
def factor(x, DTYPE: tl.constexpr):
    """x rounded to a factor of `product`."""
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
    elif DTYPE == PAIRS:
        large, rest = parts(a, tl.bfloat16)
        large_b, rest_b = parts(b, tl.bfloat16)
        sums = tl.dot(large, rest_b, tl.dot(rest, large_b, sums, input_precision="tf32"), input_precision="tf32")
        return tl.dot(large, large_b, sums, input_precision="tf32")
    else:
        return tl.dot(a, b, sums, input_precision="tf32")


@triton.jit
def parts(x, DTYPE: tl.constexpr):
    """x in float32 as two factors, its large part and the rest: twice the bits of one factor."""
    large = factor(x, DTYPE)
    return large, factor(x - large.to(tl.float32), DTYPE)


@triton.jit
def precise_left(a, b, sums, DTYPE: tl.constexpr):
    """`product` of a in float32, with twice the bits, and a factor b."""
    if DTYPE == tl.float32 or DTYPE == PAIRS:
        return product(a, b, sums, DTYPE)
    else:
        large, rest = parts(a, DTYPE)
        return product(large, b, product(rest, b, sums, DTYPE), DTYPE)


@triton.jit
def precise_right(a, b, sums, DTYPE: tl.constexpr):
    """`product` of a factor a, and b in float32 with twice the bits."""
    if DTYPE == tl.float32 or DTYPE == PAIRS:
        return product(a, b, sums, DTYPE)
    else:
        large, rest = parts(b, DTYPE)
        return product(a, large, product(a, rest, sums, DTYPE), DTYPE)


@triton.jit
def precise(a, b, sums, DTYPE: tl.constexpr):
    """`product` of a and b in float32, each with twice the bits; rest times rest is left out."""
    if DTYPE == tl.float32 or DTYPE == PAIRS:
        return product(a, b, sums, DTYPE)
    else:
        large, rest = parts(a, DTYPE)
        large_b, rest_b = parts(b, DTYPE)
        sums = product(large, rest_b, product(rest, large_b, sums, DTYPE), DTYPE)
        return product(large, large_b, sums, DTYPE)


@triton.jit
def exponential(x):
    """e^x. On NVIDIA 0 where that is below the smallest normal number: subnormals would cost twice the instructions."""
    if INTERPRETED or not target_info.is_cuda():
        return tl.exp(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * LOG2E], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def held(x, DTYPE: tl.constexpr):
    """x [n, d] plus a product of zeros: Triton then keeps x in the tensor cores' layout, and computes it once."""
    if INTERPRETED or DTYPE == tl.float32 or DTYPE == PAIRS:
        return x
    else:
        left, right = tl.zeros((x.shape[0], ONES), tl.float32), tl.zeros((ONES, x.shape[1]), tl.float32)
        return product(factor(left, DTYPE), factor(right, DTYPE), x, DTYPE)


@triton.jit
def column_sums(x, sums, DTYPE: tl.constexpr):
    """sums [d, ONES] plus the sum over the rows of a factor [n, d], in every column.

    As a product it reuses the transposed factor that is there already; a reduction would go through registers.
    """
    return product(tl.trans(x), factor(tl.full((x.shape[0], ONES), 1.0, tl.float32), DTYPE), sums, DTYPE)


@triton.jit
def weighted_sums(weights, x, sums, DTYPE: tl.constexpr):
    """`column_sums` of weights [n, 1] times a factor [n, d]."""
    return product(tl.trans(x), factor(tl.zeros((1, ONES), tl.float32) + weights, DTYPE), sums, DTYPE)


@triton.jit
def summed(sums):
    """The column that all columns of `column_sums` equal, [d]."""
    return tl.sum(sums, 1) * (1.0 / ONES)


@triton.jit
def dots(x, sums, DTYPE: tl.constexpr):
    """x.s for each row of a factor [n, d], [n]; every column of `sums` [d, ONES] is s.

    Half of the columns enter as the large part of s and half as the rest, so s is not rounded.
    """
    large = factor(sums, DTYPE).to(tl.float32)
    parts = tl.where(tl.arange(0, ONES)[None, :] % 2 == 0, large, sums - large)
    columns = product(x, factor(parts, DTYPE), tl.zeros((x.shape[0], ONES), tl.float32), DTYPE)
    return tl.sum(columns, 1) * (2.0 / ONES)


@triton.jit
def lost(terms, n, FEATURES: tl.constexpr):
    """The bound of `softless.algebra.readers` for float32: a mass of n tokens is lost where it is no larger.

    terms  the sum of the absolute values of the mass's terms
    """
    return (2.0 * 2.0**-23) * tl.sqrt(64.0 + 2.0 * FEATURES + n * (1.0 / 64.0)) * terms


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """x as it is stored: rounded once, to nearest."""
    if DTYPE == tl.bfloat16 and INTERPRETED:
        return nearest(x, 16).to(DTYPE)
    else:
        return x.to(DTYPE)
