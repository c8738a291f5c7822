"""Half precision is as good as the dtype allows, and float32 is good to 1e-5: R3 on the CPU.

The truth is the explicit weights in float64, on the same rounded inputs. `eager.py` has the published
formulas as anyone would type them; `budget.py` says how near the truth a result must be.
"""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from softless import attention, attention_weights, attention_with_state, mechanism
from tests.numerics import eager, eager_scored
from tests.numerics.budget import FORWARD, GRADIENT, assert_within_budget, worst
from tests.numerics.cases import CASES, FORMS, Draw, attend, draw, every_form, gradients, grid, judged
from tests.numerics.eager import visible

FORMULAS = eager.FORMULAS | eager_scored.FORMULAS
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}

every_case = pytest.mark.parametrize("case", CASES)


@st.composite
def draws(options, case: str, dtype: torch.dtype) -> Draw:
    """Lengths around 64, scores from flat to peaked, values with and without a mean; rounded to `dtype`."""
    tokens = options(st.sampled_from([1, 2, 3, 17, 63, 64, 65, 70]))
    dim = options(st.integers(1, 6))
    torch.manual_seed(options(st.integers(0, 2**31 - 1)))
    q, k, v, inputs = draw(case, tokens, dim, width=options(st.integers(1, 5)))
    q = q * 10.0 ** options(st.integers(-2, 0 if case == "general" else 1)) + options(st.sampled_from([0.0, 1.0]))
    k = k * 10.0 ** options(st.integers(-2, 0)) + options(st.sampled_from([0.0, 1.0]))
    v = v + options(st.sampled_from([0.0, 1.0, 100.0]))
    return Draw(q, k, v, inputs).to(dtype)


def fits(x: torch.Tensor, dtype: torch.dtype) -> bool:
    return bool(x.isfinite().all()) and x.abs().max().item() <= torch.finfo(dtype).max


@every_form
def test_the_plain_formulas_are_the_specification(case, is_causal):
    """The eager side of the budget, in float64, is the same function: it was not written from the library."""
    q, k, v, inputs = drawn = draw(case, 17, 3, batch=2)
    plain = FORMULAS[case](q, k, v, visible(q, k, is_causal), inputs)
    exact = attend(case, drawn, is_causal=is_causal, backend="reference")
    rows = judged(case, q, k, is_causal=is_causal) & plain.isfinite().all(-1)  # the plain ones give 0/0 for phi(q) = 0
    assert rows.any()
    assert worst(plain[rows], exact[rows]) <= 1e-12 * (1 + exact.abs().max())


@every_case
@given(st.data())
def test_half_precision_stays_within_budget(case, data):
    dtype, is_causal = HALF[data.draw(st.sampled_from(list(HALF)))], data.draw(st.sampled_from(FORMS[case]))
    drawn = data.draw(draws(case, dtype))
    wide = drawn.to(torch.float64)
    rows = judged(case, wide.q, wide.k, is_causal=is_causal)
    assume(rows.any())
    exact_leaves, leaves, eager_leaves = (
        [x.clone().requires_grad_() for x in d.leaves()] for d in (wide, drawn, drawn)
    )

    exact = attend(case, wide.rebuilt(*exact_leaves), is_causal=is_causal, backend="reference")
    actual = attend(case, drawn.rebuilt(*leaves), is_causal=is_causal)
    q, k, v, inputs = drawn.rebuilt(*eager_leaves)
    eager = FORMULAS[case](q, k, v, visible(q, k, is_causal), inputs)
    assume(fits(exact[rows], dtype))
    assert_within_budget(actual[rows], exact[rows], eager[rows], **FORWARD, name="output")

    upstream = torch.where(rows[..., None], torch.randn(exact.shape, dtype=torch.float64), 0.0).to(dtype)
    single_leaves = [x.float().requires_grad_() for x in drawn.leaves()]
    single = attend(case, drawn.rebuilt(*single_leaves), is_causal=is_causal, backend="reference")
    grads = [
        gradients(out, upstream, inputs)
        for out, inputs in ((exact, exact_leaves), (actual, leaves), (eager, eager_leaves), (single, single_leaves))
    ]
    for name, truth, mine, plain, float32 in zip(("q", "k", "v", *drawn.inputs), *grads, strict=True):
        if fits(truth, dtype) and resolved(float32, truth, dtype):
            assert_within_budget(mine, truth, plain, **GRADIENT, name=f"gradient of {name}")


def test_a_gradient_below_the_normal_numbers_is_good_to_their_steps():
    """The steps of float16 near 1.3e-5 are 6e-8: found at random, when an ulp was still a thousandth of the number."""
    q, k = (
        torch.tensor(x).reshape(1, 2, 2, 1).half() for x in ([-1.63, 0.11, -1.68, 0.33], [-1.36, -0.91, 0.49, -1.0])
    )
    v, scale = torch.randn(1, 2, 2, 4).half(), torch.tensor([[-0.2854], [0.3013]]).half()
    found = []
    for dtype, backend in ((torch.float64, "reference"), (torch.float16, "torch")):
        key = k.to(dtype).requires_grad_()
        out = attention(
            q.to(dtype), key, v.to(dtype), mechanism("focused", learned_scale=True), is_causal=True,
            inputs={"scale": scale.to(dtype)}, backend=backend,
        )  # fmt: skip
        found.append(torch.autograd.grad(out.sum(), key)[0])
    exact, actual = found
    assert 0 < exact.abs().max() < torch.finfo(torch.float16).smallest_normal
    assert_within_budget(actual, exact, torch.full_like(actual, torch.inf), **GRADIENT, name="gradient of k")


def resolved(float32: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether float32 sums can tell this gradient to a quarter of an ulp of `dtype`.

    Where they cannot, its terms cancel (one token, one channel, a saturated softmax), and not because of `dtype`.
    """
    size = truth.abs().max().item() if truth.numel() else 0.0
    return not float32.isfinite().all() or (size > 0 and worst(float32, truth) <= 0.25 * torch.finfo(dtype).eps * size)


@every_form
@given(st.data())
def test_float32_is_good_to_five_digits(case, is_causal, data):
    drawn = data.draw(draws(case, torch.float32))
    wide = drawn.to(torch.float64)
    exact = attend(case, wide, is_causal=is_causal, backend="reference")
    rows = judged(case, wide.q, wide.k, is_causal=is_causal)
    assume(rows.any())
    error, size = worst(attend(case, drawn, is_causal=is_causal)[rows], exact[rows]), exact[rows].abs().max().item()
    assert error <= 1e-5 * (1 + size + mass(case, wide, is_causal)), f"{error:.1e} where outputs reach {size:.1e}"


def test_soft_is_as_exact_for_tokens_far_from_the_origin():
    """It knows distances alone. Their squares, expanded where they stand, would lose three digits at 50."""
    torch.manual_seed(0)
    near = draw("soft", 40, 6)
    drawn = near._replace(q=near.q + 50, k=near.k + 50).to(torch.float32)
    wide = drawn.to(torch.float64)
    exact = attend("soft", wide, is_causal=False, backend="reference")
    error, size = worst(attend("soft", drawn, is_causal=False), exact), exact.abs().max().item()
    assert error <= 1e-5 * (1 + size + mass("soft", wide, False))


def mass(case: str, drawn: Draw, is_causal: bool) -> float:
    """max row sum |w| max |v|: what the terms of an output may add up to before they cancel."""
    call = {"is_causal": is_causal, "inputs": drawn.inputs, "grid": grid(case, drawn.q)}
    weights = attention_weights(drawn.q, drawn.k, CASES[case], **call)
    rows = judged(case, drawn.q, drawn.k, is_causal=is_causal)
    sums = weights.abs().sum(-1)
    sums = sums if case == "hydra" else sums[rows]
    return sums.max().item() * drawn.v.abs().max().item()


TOKENS, WIDTH = 65_536, 16


@pytest.fixture(scope="module")
def long_sequence():
    """A causal elu + 1 sequence in bfloat16 whose keys and values have a mean, and the float64 truth.

    The truth is checked where it matters against sums written out: first rows, chunk edges, last rows.
    """
    torch.manual_seed(65_536)
    q, k, v = (torch.randn(1, 1, TOKENS, WIDTH).bfloat16() for _ in "qkv")
    v = v + 1
    wide_q, wide_k, wide_v = (x.double() for x in (q, k, v))
    truth = attention(wide_q, wide_k, wide_v, "linear", is_causal=True)
    phi_q, phi_k = (torch.where(x > 0, x + 1, x.exp()) for x in (wide_q, wide_k))
    for i in (0, 1, 63, 64, 4095, 4096, 40_000, TOKENS - 1):
        score = phi_k[0, 0, : i + 1] @ phi_q[0, 0, i]
        row = (score[:, None] * wide_v[0, 0, : i + 1]).sum(0) / score.sum()
        assert worst(truth[0, 0, i], row) <= 1e-12
    return q, k, v, truth


def assert_within_ulps(actual: torch.Tensor, exact: torch.Tensor, ulps: float) -> None:
    """Row by row: late rows are averages of many tokens, and must not hide behind early ones."""
    ulp = torch.finfo(actual.dtype).eps * exact.abs().amax(-1)
    error = (actual.double() - exact).abs().amax(-1) / ulp
    assert error.max() <= ulps, f"{error.max():.2f} ulp at row {error.argmax()}"


def test_a_long_causal_sequence_in_bf16_stays_within_four_ulp(long_sequence):
    q, k, v, truth = long_sequence
    assert_within_ulps(attention(q, k, v, "linear", is_causal=True), truth, 4)


def test_a_long_stream_in_bf16_stays_within_four_ulp(long_sequence):
    """Uneven blocks, then token by token: the state carries everything."""
    q, k, v, truth = long_sequence
    state, outputs, start = None, [], 0
    lengths = [1, 63, 1000] + [1021] * 62
    for length in [*lengths, *[1] * (TOKENS - sum(lengths))]:
        here = slice(start, start + length)
        out, state = attention_with_state(q[:, :, here], k[:, :, here], v[:, :, here], "linear", state)
        outputs.append(out)
        start += length
    assert state.n.item() == TOKENS
    assert_within_ulps(torch.cat(outputs, 2), truth, 4)


@pytest.mark.slow
def test_a_long_stream_in_bf16_token_by_token_stays_within_four_ulp(long_sequence):
    q, k, v, truth = long_sequence
    state, outputs = None, []
    for i in range(TOKENS):
        out, state = attention_with_state(*(x[:, :, i : i + 1] for x in (q, k, v)), "linear", state)
        outputs.append(out)
    assert_within_ulps(torch.cat(outputs, 2), truth, 4)


def test_half_precision_sums_do_not_stall():
    """In bfloat16 256 + 1 is 256: sums of more than 256 ones must not be kept in it."""
    q = k = torch.ones(1, 1, 5000, 1).bfloat16()
    out = attention(q, k, torch.ones(1, 1, 5000, 1).bfloat16(), mechanism("linear", phi="identity", normalize="none"))
    assert worst(out, torch.full((1, 1, 5000, 1), 5000.0, dtype=torch.float64)) <= 5000 * 2**-8
