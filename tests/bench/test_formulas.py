"""The plain formulas are the mechanisms: a yardstick that computes something else would measure nothing."""

import pytest
import torch

import softless
from softless.algebra.neighbors import local_residual
from softless.bench.formulas import SUMS, WEIGHTS, plain, plain_padded, plain_residual
from softless.errors import UnsupportedError

CASES = [
    ("linear", {}),
    ("linear", {"normalize": "none"}),
    ("linear", {"phi": "softmax"}),
    ("linear", {"phi": "exp", "t": 0.5}),
    ("linear", {"phi": "elu", "phi_k": "exp"}),
    ("linear", {"phi": torch.exp}),
    ("inline", {}),
    ("inline", {"phi": "relu"}),
    ("inline", {"phi": "leaky_relu", "phi_k": "elu"}),
    ("efficient", {}),
    ("taylor", {}),
]


def qkv(queries=13, keys=13, heads=4, kv_heads=4, dtype=torch.float64):
    q = torch.randn(2, heads, queries, 8, dtype=dtype)
    k, v = torch.randn(2, 2, kv_heads, keys, 8, dtype=dtype).unbind()
    return q, k, v


def assert_same(found, exact):
    assert (found - exact).abs().max() <= 1e-12 * (1 + exact.abs().max())


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("causal_by", [None, WEIGHTS, SUMS])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_plain_formula_equals_the_float64_reference(name, options, causal_by, kv_heads):
    mechanism, tensors = softless.mechanism(name, **options), qkv(kv_heads=kv_heads)
    exact = softless.attention(*tensors, mechanism, is_causal=causal_by is not None, backend="reference")
    assert_same(plain(mechanism, causal_by=causal_by)(*tensors), exact)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_keys_may_be_more_or_fewer_than_queries(name, options):
    mechanism = softless.mechanism(name, **options)
    for keys in (5, 29):
        tensors = qkv(keys=keys)
        assert_same(plain(mechanism)(*tensors), softless.attention(*tensors, mechanism, backend="reference"))


@pytest.mark.parametrize("causal_by", [None, WEIGHTS, SUMS])
@pytest.mark.parametrize("name", ["linear", "inline", "efficient", "taylor"])
def test_a_plain_formula_stays_in_the_dtype_that_comes_in(name, causal_by):
    tensors = qkv(dtype=torch.bfloat16)
    assert plain(softless.mechanism(name), causal_by=causal_by)(*tensors).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["hydra", "angular", "focused", "threshold", "softmax"])
def test_a_mechanism_without_one_says_so(name):
    with pytest.raises(UnsupportedError, match=f"{name} has no plain formula here"):
        plain(softless.mechanism(name))


def test_an_option_without_one_says_so():
    with pytest.raises(UnsupportedError, match="taylor has no plain formula here"):
        plain(softless.mechanism("taylor", order=2))
    with pytest.raises(UnsupportedError, match="phi 'affine_relu' has no plain formula here"):
        plain(softless.mechanism("linear", phi="affine_relu"))


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(("name", "options"), [case for case in CASES if case[0] in ("linear", "inline")])
def test_a_padded_formula_equals_the_masked_reference(name, options, kv_heads):
    """Whatever the padding holds, and where each sample has another number of tokens."""
    mechanism, tensors = softless.mechanism(name, **options), qkv(kv_heads=kv_heads)
    mask = torch.arange(13) < torch.tensor([[13], [5]])
    exact = softless.attention(*tensors, mechanism, key_mask=mask, backend="reference")
    assert_same(plain_padded(mechanism, mask)(*tensors), exact)


@pytest.mark.parametrize("name", ["efficient", "taylor", "hydra"])
def test_a_mechanism_without_a_padded_one_says_so(name):
    with pytest.raises(UnsupportedError, match=f"{name} has no plain formula with padding here"):
        plain_padded(softless.mechanism(name), torch.ones(2, 13, dtype=torch.bool))


@pytest.mark.parametrize(("grid", "prefix"), [((3, 4), 0), ((3, 4), 2), ((1, 5), 1), ((4, 1), 0)])
def test_the_plain_residual_equals_nine_shifted_products(grid, prefix):
    v = torch.randn(2, 3, prefix + grid[0] * grid[1], 5, dtype=torch.float64)
    taps = torch.randn(2, 3, 9, 5, dtype=torch.float64)
    assert_same(plain_residual(v, taps, grid, prefix), local_residual(v, taps, grid, prefix))


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # torch 2.11's compiler imports it
@pytest.mark.parametrize(
    ("name", "causal_by"),
    [
        ("linear", None),
        ("inline", WEIGHTS),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("linear", WEIGHTS), ("inline", None))),
    ],
)
def test_a_compiled_formula_computes_the_same(name, causal_by):
    formula, tensors = plain(softless.mechanism(name), causal_by=causal_by), qkv()
    assert_same(torch.compile(formula, fullgraph=True, dynamic=False)(*tensors), formula(*tensors))
