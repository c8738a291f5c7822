"""The arithmetic that every kernel shares: rounding to nearest even, products, sums of rows."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from softless.kernels.common.arithmetic import (
    ONES,
    column_sums,
    dots,
    factor,
    nearest,
    product,
    rounded,
    summed,
    weighted_sums,
)

pytestmark = pytest.mark.kernels

DTYPES = {
    "bf16": (torch.bfloat16, tl.bfloat16),
    "fp16": (torch.float16, tl.float16),
    "fp32": (torch.float32, tl.float32),
}
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@triton.jit
def nearest_kernel(x, out, BITS: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, nearest(tl.load(x + at), BITS))


@triton.jit
def rounded_kernel(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, rounded(tl.load(x + at), out.dtype.element_ty))


@triton.jit
def product_kernel(a, b, c, out, DTYPE: tl.constexpr, T: tl.constexpr):
    lines, columns = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    at = lines * T + columns
    found = product(factor(tl.load(a + at), DTYPE), factor(tl.load(b + at), DTYPE), tl.load(c + at), DTYPE)
    tl.store(out + at, found)


@triton.jit
def sums_kernel(x, weights, plain, weighted, DTYPE: tl.constexpr, T: tl.constexpr):
    lines, columns = tl.arange(0, T), tl.arange(0, T)
    terms = factor(tl.load(x + lines[:, None] * T + columns[None, :]), DTYPE)
    nothing = tl.zeros((T, ONES), tl.float32)
    tl.store(plain + columns, summed(column_sums(terms, column_sums(terms, nothing, DTYPE), DTYPE)))
    tl.store(weighted + columns, summed(weighted_sums(tl.load(weights + lines)[:, None], terms, nothing, DTYPE)))


@triton.jit
def dots_kernel(x, vector, found, DTYPE: tl.constexpr, T: tl.constexpr):
    lines, columns = tl.arange(0, T), tl.arange(0, T)
    terms = factor(tl.load(x + lines[:, None] * T + columns[None, :]), DTYPE)
    vectors = tl.load(vector + columns)[:, None] + tl.zeros((T, ONES), tl.float32)
    tl.store(found + lines, dots(terms, vectors, DTYPE))


def floats(*numbers: float) -> Tensor:
    """Padded to sixteen."""
    return torch.tensor([*numbers, *[0.0] * (16 - len(numbers))])


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def apply_nearest(x: Tensor, count: int) -> Tensor:
    out = torch.full_like(x, torch.nan)
    nearest_kernel[(1,)](x, out, BITS=count, N=len(x))
    return out


@pytest.mark.parametrize("count", [13, 16])
def test_ties_round_to_even(count):
    """At one, the numbers that are kept lie 2^(count - 23) apart."""
    step = 2.0 ** (count - 23)
    x = floats(1 + step / 2, 1 + 3 * step / 2, 1 + 5 * step / 2, -1 - step / 2, -1 - 3 * step / 2)
    assert torch.equal(apply_nearest(x, count), floats(1, 1 + 2 * step, 1 + 2 * step, -1, -1 - 2 * step))


@pytest.mark.parametrize("count", [13, 16])
def test_rounding_goes_to_the_nearer_neighbor(count):
    step, hair = 2.0 ** (count - 23), 2.0**-23
    x = floats(1 + step / 2 + hair, 1 + step / 2 - hair, 2 - hair, -1 - step / 2 - hair)
    assert torch.equal(apply_nearest(x, count), floats(1 + step, 1, 2, -1 - step))


def test_rounding_keeps_nan_and_infinity():
    strange = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000, 0x7F800000], dtype=torch.int32)  # -1 is a NaN too
    x = torch.cat([strange.view(torch.float32), torch.tensor([-torch.inf]), torch.zeros(10)])
    for count in (13, 16):
        out = apply_nearest(x, count)
        assert out[:4].isnan().all()
        assert out[4:6].tolist() == [torch.inf, -torch.inf]


def test_the_largest_float_rounds_to_infinity_and_zeros_keep_their_sign():
    x = floats(torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max, 0.0, -0.0, 1e-45, -1e-45)
    out = apply_nearest(x, 16)
    assert out[:2].tolist() == [torch.inf, -torch.inf]
    assert bits(out[2:6]).tolist() == bits(torch.tensor([0.0, -0.0, 0.0, -0.0])).tolist()


def test_rounding_off_sixteen_bits_gives_bfloat16():
    """Torch rounds to bfloat16 by itself: any number, subnormal ones too."""
    x = torch.randint(-(2**31), 2**31 - 1, (1024,), dtype=torch.int32).view(torch.float32)
    x = torch.where(x.isnan(), 1.0, x)
    assert torch.equal(bits(apply_nearest(x, 16)), bits(x.bfloat16().float()))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_stores_round_as_torch_does(dtype):
    x = torch.cat(
        [torch.randn(1000) * 10.0 ** torch.randint(-6, 5, (1000,)), floats(1e6, torch.nan, torch.inf, 65_520)]
    )
    x = torch.cat([x, torch.zeros(8)])
    out = torch.empty(1024, dtype=DTYPES[dtype][0])
    rounded_kernel[(1,)](x, out, N=1024)
    right = x.to(out.dtype)
    assert torch.equal(out.nan_to_num(-1.0), right.nan_to_num(-1.0))


def as_factor(x: Tensor, dtype: str) -> Tensor:
    """bfloat16, tf32 or float32, by torch and numpy alone: nearest, ties to even."""
    if dtype == "fp32":
        return x.double()
    if dtype == "bf16":
        return x.bfloat16().double()
    mantissa, exponent = torch.frexp(x.double())
    return torch.ldexp((mantissa * 2**11).round(), exponent - 11)


def in_two_parts(x: Tensor, dtype: str) -> Tensor:
    """The nearest factor, and the nearest to what is left."""
    large = as_factor(x, dtype)
    return large + as_factor((x.double() - large).float(), dtype)


@every_dtype
def test_products_round_their_factors_and_sum_in_float32(dtype):
    a, b, c = torch.randn(3, 32, 32).unbind()
    out = torch.full((32, 32), torch.nan)
    product_kernel[(1,)](a, b, c, out, DTYPE=DTYPES[dtype][1], T=32)
    a, b = as_factor(a, dtype), as_factor(b, dtype)
    terms = a.abs() @ b.abs() + c.abs().double()
    assert ((out.double() - (a @ b + c.double())).abs() <= 33 * 2**-24 * terms).all()  # 33 roundings in float32


@every_dtype
def test_products_do_not_overflow_where_float16_would(dtype):
    a = torch.full((32, 32), 1e5)
    out = torch.full((32, 32), torch.nan)
    product_kernel[(1,)](a, a, torch.zeros(32, 32), out, DTYPE=DTYPES[dtype][1], T=32)
    assert ((out / (32 * 1e10) - 1).abs() < 2 * 2**-8).all()


@every_dtype
def test_column_sums_and_weighted_sums_match_torch(dtype):
    """Twice over, to see that they add up; weights are factors too."""
    x, weights, plain, weighted = torch.randn(32, 32), torch.randn(32), torch.zeros(32), torch.zeros(32)
    sums_kernel[(1,)](x, weights, plain, weighted, DTYPE=DTYPES[dtype][1], T=32)
    x, weights = as_factor(x, dtype), as_factor(weights, dtype)[:, None]
    assert ((plain.double() - 2 * x.sum(0)).abs() <= 80 * 2**-24 * 2 * x.abs().sum(0)).all()  # 64 + 16 roundings
    bound = 48 * 2**-24 * (weights * x).abs().sum(0)  # 32 + 16
    assert ((weighted.double() - (weights * x).sum(0)).abs() <= bound).all()


@every_dtype
def test_dots_do_not_round_their_vector(dtype):
    x, vector, found = torch.randn(32, 32), 100 * torch.randn(32), torch.zeros(32)
    dots_kernel[(1,)](x, vector, found, DTYPE=DTYPES[dtype][1], T=32)
    x, vector = as_factor(x, dtype), in_two_parts(vector, dtype)
    bound = 80 * 2**-24 * (x.abs() @ vector.abs())
    assert ((found.double() - x @ vector).abs() <= bound).all()
