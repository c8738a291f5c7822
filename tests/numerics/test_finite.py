"""Outputs and gradients are finite unless the true answer overflows, and the edges have defined values: R4.

The grid is q, k in {0, 1e-4, 1, 1e4}, v in {0, 1, 1e4}, lengths 1, 2, 17, three dtypes: 432 cells for
each mechanism and causality. The 48 scales of a length and dtype ride in one batch: rows do not know each other.
"""

from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from softless import attention, attention_weights, attention_with_state, mechanism
from tests.numerics.cases import (
    CASES,
    CAUSAL,
    CAUSALITY,
    FORMS,
    HEADS,
    STATEFUL,
    Draw,
    attend,
    draw,
    every_form,
    forms,
    gradients,
    judged,
)

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SCALES = torch.tensor(list(product([0.0, 1e-4, 1.0, 1e4], [0.0, 1e-4, 1.0, 1e4], [0.0, 1.0, 1e4])), dtype=torch.float64)


class How(NamedTuple):
    dtype: torch.dtype
    backend: str


EVERY = [How(dtype, backend) for dtype in DTYPES.values() for backend in ("torch", "reference")]
every_case = pytest.mark.parametrize("case", CASES)
every_stateful_case = pytest.mark.parametrize("case", STATEFUL)
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
both_causalities = pytest.mark.parametrize("is_causal", CAUSALITY.values(), ids=CAUSALITY)
both_backends = pytest.mark.parametrize("backend", ["torch", "reference"])


def grid(case: str, tokens: int, dtype: torch.dtype) -> Draw:
    """One batch row a cell."""
    q, k, v, inputs = draw(case, tokens, 3, batch=len(SCALES), heads=HEADS[case])
    return Draw(*(x * s[:, None, None, None] for x, s in zip((q, k, v), SCALES.T, strict=True)), inputs).to(dtype)


def representable(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.isfinite() & (x.abs() <= torch.finfo(dtype).max)


def blame(bad: Tensor) -> str:
    cells = SCALES[bad.flatten(1).any(1)].tolist()
    return f"not finite at (q, k, v) scales {cells}"


@every_form
@every_dtype
def test_outputs_and_gradients_are_finite_unless_the_truth_overflows(case, is_causal, dtype):
    for tokens in (1, 2, 17):
        given = grid(case, tokens, dtype)
        wide = given.to(torch.float64)
        leaves, wide_leaves = ([x.requires_grad_() for x in d.leaves()] for d in (given, wide))
        actual = attend(case, given, is_causal=is_causal)
        exact = attend(case, wide, is_causal=is_causal, backend="reference")
        rows = judged(case, wide.q.detach(), wide.k.detach(), is_causal=is_causal)[..., None]
        bad = rows & representable(exact, dtype) & ~actual.isfinite()
        assert not bad.any(), f"output of {tokens} tokens {blame(bad)}"

        upstream = torch.where(rows, torch.randn(exact.shape, dtype=torch.float64), 0.0).to(dtype)
        cells = (representable(exact, dtype) | ~rows).flatten(1).all(1)  # an infinite output has no use for gradients
        upstream = upstream * cells[:, None, None, None]
        found, truths = gradients(actual, upstream, leaves), gradients(exact, upstream, wide_leaves)
        for name, mine, truth in zip("qkv", found, truths, strict=False):
            bad = cells[:, None, None, None] & representable(truth, dtype) & ~mine.isfinite()
            assert not bad.any(), f"gradient of {name}, {tokens} tokens, {blame(bad)}"


@every_stateful_case
def test_finite_across_chunks_and_from_state_to_state(case):
    """A large key may come late, in another chunk or another call, and must not erase what was there."""
    given = grid(case, 130, torch.float32)
    exact = attend(case, given.to(torch.float64), is_causal=True, backend="reference")
    rows = judged(case, given.q.double(), given.k.double(), is_causal=True)[..., None]
    whole = attend(case, given, is_causal=True)
    state, outputs = None, []
    for here in (slice(65), slice(65, 66), slice(66, None)):
        q, k, v, inputs = given.tokens(here)
        out, state = attention_with_state(q, k, v, CASES[case], state, inputs=inputs)
        outputs.append(out)
    for name, out in (("one call", whole), ("three calls", torch.cat(outputs, 2))):
        bad = rows & representable(exact, torch.float32) & ~out.isfinite()
        assert not bad.any(), f"{name} {blame(bad)}"


@forms([case for case, made in CASES.items() if made.rows_sum_to_one])
def test_one_token_reads_its_own_value(case, is_causal):
    for dtype, backend in EVERY:
        given = grid(case, 1, dtype)
        out = attend(case, given, is_causal=is_causal, backend=backend)
        near = (out.double() - given.v.double()).abs() <= 2 * torch.finfo(dtype).eps * given.v.double().abs()
        wrong = ~near.flatten(1).all(1)
        assert not wrong.any(), f"{dtype} {backend}: not v at (q, k, v) scales {SCALES[wrong].tolist()}"


@forms([case for case, made in CASES.items() if made.rows_sum_to_one])
@every_dtype
def test_equal_values_are_read_as_they_are(case, is_causal, dtype):
    """Rows sum to one: whatever the scores, a constant v comes out."""
    given = grid(case, 17, dtype)
    given = given._replace(v=torch.ones_like(given.v))
    rows = judged(case, given.q.double(), given.k.double(), is_causal=is_causal)
    out = attend(case, given, is_causal=is_causal)[rows]
    assert ((out.double() - 1).abs() <= 17 * torch.finfo(dtype).eps).all()  # a sum of 17 terms


@pytest.mark.parametrize(("low", "reach"), [(-1, 1), (-30, 5), (-88, 1), (-100, 4), (-103, 1), (-120, 20), (-1000, 1)])
@pytest.mark.parametrize("far", ["q", "k", "both"])
@both_causalities
@both_backends
def test_elu_of_very_negative_numbers_is_finite_with_finite_gradients(low, reach, far, is_causal, backend):
    """e^-100 is a subnormal float32: neither it nor its reciprocal may turn into an infinity."""
    q, k, v = torch.randn(3, 1, 2, 9, 4).unbind()
    q = low + reach * q if far != "k" else q
    k = low + reach * k if far != "q" else k
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, "linear", is_causal=is_causal, backend=backend)
    assert out.isfinite().all()
    for name, gradient in zip("qkv", gradients(out, torch.randn_like(out), leaves), strict=True):
        assert gradient.isfinite().all(), f"gradient of {name}"


@both_causalities
@both_backends
@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("fall", [16.0, 32.0, 48.0])
def test_division_cancels_however_small_the_features(is_causal, backend, side, fall):
    """Below zero elu(x) + 1 is e^x, and a constant fall is a factor; computed as it is written it is 0 from -17 on."""
    low = -torch.randint(1, 16, (1, 2, 70, 4)) / 4
    other, v = torch.randn(1, 2, 70, 4), torch.randn(1, 2, 70, 3)

    def run(x: Tensor) -> Tensor:
        q, k = (x, other) if side == "q" else (other, x)
        return attention(q, k, v, "linear", is_causal=is_causal, backend=backend)

    torch.testing.assert_close(run(low - fall), run(low), rtol=1e-5, atol=1e-5)


def running_mean(v: Tensor, is_causal: bool) -> Tensor:
    if not is_causal:
        return v.mean(2, keepdim=True).expand_as(v)
    return v.cumsum(2) / torch.arange(1, v.shape[2] + 1, dtype=v.dtype)[:, None]


@pytest.mark.parametrize(
    ("made", "q", "k"),
    [
        (mechanism("linear", phi="relu"), -1.0, 1.0),
        (mechanism("linear", phi="relu"), 1.0, -1.0),
        (mechanism("linear", phi="identity"), 0.0, 1.0),
        (mechanism("linear", phi="relu", phi_k="exp"), -1.0, 1.0),
        (mechanism("inline"), 0.0, 1.0),
        (mechanism("inline", phi="relu"), -1.0, 1.0),
        (mechanism("taylor"), 0.0, 1.0),
        (mechanism("taylor", order=2), 0.0, 1.0),
        (mechanism("general", sim=lambda q, k: 0 * q @ k.mT), 1.0, 1.0),
    ],
)
@both_causalities
@both_backends
@every_dtype
def test_a_query_without_features_reads_the_mean(made, q, k, is_causal, backend, dtype):
    q, k = (x * torch.rand(1, 2, 70, 3).add(0.5).to(dtype) for x in (q, k))
    v = torch.randn(1, 2, 70, 4).to(dtype)
    out = attention(q, k, v, made, is_causal=is_causal, backend=backend)
    expected = running_mean(v.double(), is_causal)
    ulps = 5 if dtype == torch.float32 else 1  # half precision is rounded once; float32 adds up 70 numbers: R3's bar
    ulp = torch.finfo(dtype).eps * v.abs().max().item()
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=ulps * ulp)


@every_form
def test_a_query_that_sees_nothing_reads_zero(case, is_causal):
    mask = torch.tensor([[False] * 5, [False, False, True, True, False]])
    for how in EVERY:
        given = draw(case, 5, 3, batch=2).to(how.dtype)
        leaves = [x.requires_grad_() for x in given.leaves()]
        out = attend(case, given, is_causal=is_causal, backend=how.backend, key_mask=mask)
        assert (out[0] == 0).all(), how
        assert out.isfinite().all(), how
        assert (out[1, :, :2] == 0).all() or not is_causal, how
        assert all(g.isfinite().all() for g in gradients(out, torch.randn(out.shape), leaves)), how


def cosine(q: Tensor, k: Tensor) -> Tensor:
    return 1 + (q / q.norm(dim=-1, keepdim=True)) @ (k / k.norm(dim=-1, keepdim=True)).mT


@both_causalities
@both_backends
def test_padding_is_nothing_to_a_similarity_without_a_value_at_zero(is_causal, backend):
    leaves = [torch.randn(2, 2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in "qkv"]
    call = {"mechanism": mechanism("general", sim=cosine), "is_causal": is_causal, "backend": backend}
    mask, upstream = torch.arange(5) < torch.tensor([[3], [5]]), torch.randn(1, 2, 3, 3, dtype=torch.float64)
    padded = attention(*leaves, key_mask=mask, **call)[:1, :, :3]
    alone = attention(*(x[:1, :, :3] for x in leaves), **call)
    torch.testing.assert_close(padded, alone, rtol=0, atol=1e-12)
    found, truth = (gradients(out, upstream, leaves) for out in (padded, alone))
    torch.testing.assert_close(found, truth, rtol=0, atol=1e-12)


@every_stateful_case
@every_dtype
def test_a_stream_of_padding_reads_zero_until_a_token_comes(case, dtype):
    given = draw(case, 6, 3).to(dtype)
    mask = torch.tensor([[False, False, False, False, True, True]])
    state, outputs = None, []
    for here in (slice(0, 1), slice(1, 4), slice(4, 5), slice(5, 6)):
        q, k, v, inputs = given.tokens(here)
        out, state = attention_with_state(q, k, v, CASES[case], state, inputs=inputs, key_mask=mask[:, here])
        outputs.append(out)
    out = torch.cat(outputs, 2)
    whole = attend(case, given, is_causal=True, key_mask=mask)
    assert (out[:, :, :4] == 0).all()
    torch.testing.assert_close(out, whole)


@every_form
@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (0, 3), (3, 0)])
def test_no_tokens_give_an_empty_or_zero_result(case, is_causal, queries, keys):
    for how in EVERY:
        q = draw(case, queries, 3, batch=2).to(how.dtype).q
        _, k, v, inputs = draw(case, keys, 3, batch=2, kv_heads=1, width=5).to(how.dtype)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = attention(q, k, v, CASES[case], is_causal=is_causal, backend=how.backend, inputs=inputs)
        assert out.shape == (2, 2, queries, v.shape[3]), how
        assert out.dtype == how.dtype, how
        assert (out == 0).all(), how
        assert all(g.isfinite().all() for g in gradients(out, torch.ones_like(out), leaves)), how


@every_case
@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (0, 3), (3, 0)])
def test_no_tokens_give_empty_weights(case, queries, keys):
    q = draw(case, queries, 3).q
    _, k, _, inputs = draw(case, keys, 3)
    weights = attention_weights(q, k, CASES[case], inputs=inputs, is_causal=FORMS[case][0])
    assert weights.shape == (1, 6 if case == "hydra" else 2, queries, keys)


@every_stateful_case
@pytest.mark.parametrize("keys", [0, 3])
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_state_can_absorb_tokens_that_nothing_queries(case, keys, goes_on):
    """No queries: the output is empty and the state is what it would be; no tokens: it stays as it was."""
    given, made = draw(case, 4 + keys, 3), CASES[case]
    q, k, v, inputs = given.tokens(slice(4))
    before = attention_with_state(q, k, v, made, inputs=inputs)[1] if goes_on else None
    q, k, v, inputs = given.tokens(slice(4, 4 + keys))
    empty, after = attention_with_state(q[:, :, :0], k, v, made, before, inputs=inputs)
    assert empty.shape == (1, 2, 0, v.shape[3])
    assert after.n.item() == 4 * goes_on + keys
    expected = attention_with_state(q, k, v, made, before, inputs=inputs)[1]
    torch.testing.assert_close(tuple(after), tuple(expected))
    if goes_on and not keys:
        torch.testing.assert_close(tuple(after), tuple(before), rtol=0, atol=0)


@pytest.mark.parametrize("case", CAUSAL)
@both_backends
def test_queries_before_the_first_key_read_zero(case, backend):
    """Causal, more queries than keys: the last query is aligned with the last key."""
    q = draw(case, 5, 3).q
    _, k, v, inputs = draw(case, 2, 3)
    out = attention(q, k, v, CASES[case], is_causal=True, inputs=inputs, backend=backend)
    assert (out[:, :, :3] == 0).all()
    assert (out[:, :, 3:] != 0).any()
