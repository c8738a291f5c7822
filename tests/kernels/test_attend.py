"""The non-causal kernels are the explicit weights: outputs and gradients, whatever the shape, mask or strides.

The truth is `backend="reference"` in float64, or the formulas of tests/laws/oracle.py: never another fast path.
"""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from softless import attention
from tests.kernels.cases import (
    CASES,
    CHOSEN,
    LINEAR_SOFTMAX,
    REGIMES,
    assert_near,
    assert_same,
    assert_true,
    draw,
    regime,
    run,
    truth,
)
from tests.laws import cases as laws
from tests.numerics.budget import worst

pytestmark = pytest.mark.kernels
every_case = pytest.mark.parametrize("case", CASES)
chosen_cases = pytest.mark.parametrize("case", CHOSEN)
every_regime = pytest.mark.parametrize("cut", REGIMES)


@every_case
def test_short_sequences_match_the_explicit_weights(case):
    """Two tiles of keys, fewer queries than keys, values narrower than keys."""
    assert_true(case, draw(20, 35))


@every_case
def test_spans_match_the_explicit_weights(case):
    with regime("spans"):
        assert_true(case, draw(30, 35))


@pytest.mark.parametrize("case", ["linear-elu", "inline-exp", "none-elu", "efficient"])
def test_spans_of_several_tiles_match_the_explicit_weights(case):
    with regime("one span"):
        assert_true(case, draw(35, 67, heads=2, groups=1))


@chosen_cases
def test_full_tiles_match_the_explicit_weights(case):
    """32 tokens and 32 channels fill a tile: nothing is compared with an end."""
    with regime("spans"):
        assert_true(case, draw(32, 64, dims=(32, 32)))


@pytest.mark.parametrize(
    ("queries", "keys", "dims"), [(64, 31, (32, 5)), (33, 32, (5, 32)), (32, 32, (31, 33))], ids=str
)
@pytest.mark.parametrize("cut", ["whole", "one span"])
def test_tiles_full_in_one_direction_match_the_explicit_weights(queries, keys, dims, cut):
    with regime(cut):
        assert_true("linear-elu", draw(queries, keys, dims=dims))


def test_full_tiles_respect_the_mask():
    with regime("spans"):
        assert_true("linear-elu", draw(32, 32, batch=2, dims=(32, 32)), key_mask=torch.arange(64).view(2, 32) % 37 < 9)


@pytest.mark.parametrize(
    ("cut", "tokens"),
    [*product(["whole", "one span"], [1, 31, 32, 33, 64, 65]), ("spans", 1), ("spans", 33), ("spans", 64)],
)
def test_lengths_around_the_edge_of_a_tile_match_the_weights(cut, tokens):
    with regime(cut):
        assert_true("linear-elu", draw(tokens))


@pytest.mark.parametrize(("queries", "keys"), [(255, 7), (7, 256), (257, 7), (7, 257), (300, 300)])
def test_lengths_around_the_edge_of_the_regimes_match_the_weights(queries, keys):
    assert_true("inline-elu", draw(queries, keys))


@pytest.mark.slow
@every_case
@pytest.mark.parametrize("tokens", [31, 33, 64, 65, 255, 256, 257, 300, 513])
def test_every_mechanism_matches_the_weights_at_every_length(case, tokens):
    assert_true(case, draw(tokens, heads=2, groups=1))


DIMS = [(1, 1), (1, 33), (8, 200), (20, 64), (33, 1), (64, 100), (100, 20), (130, 130), (200, 8), (256, 256)]


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_every_head_dimension_matches_the_weights(dims):
    """Beyond 128 x 128 values are cut into slices, whose shares of dq and dk add up."""
    assert_true("inline-elu", draw(19, 17, dims=dims))


@pytest.mark.parametrize("case", [LINEAR_SOFTMAX, "linear-exp", "taylor", "efficient"])
@pytest.mark.parametrize("dims", [(33, 20), (130, 66)], ids=str)
def test_padding_columns_of_a_block_have_no_effect(case, dims):
    """A softmax, a norm or a maximum over channels must not see the zeros beyond the last one."""
    q, k, v = draw(19, 17, dims=dims)
    assert_true(case, (q - 3, k - 3, v))


@pytest.mark.slow
@every_case
@pytest.mark.parametrize("dims", DIMS, ids=str)
@every_regime
def test_every_mechanism_matches_the_weights_at_every_head_dimension(case, dims, cut):
    with regime(cut):
        assert_true(case, draw(35, 33, dims=dims))


def test_sliced_values_in_spans_match_the_weights():
    with regime("spans"):
        assert_true("linear-elu", draw(35, 33, dims=(130, 70)), key_mask=torch.arange(33)[None] < 20)


@pytest.mark.parametrize("heads", [(4, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("cut", ["whole", "spans"])
def test_query_heads_share_the_key_head_of_their_group(heads, cut):
    with regime(cut):
        assert_true("linear-elu", draw(3, 5, batch=2, heads=heads[0], groups=heads[1], dims=(3, 2)))


def padding(tokens: int) -> Tensor:
    place = torch.arange(tokens)
    return torch.stack([place < 3, place >= 40, place < 0, place % 3 == 1])


@chosen_cases
def test_masked_keys_have_no_weight(case):
    """Right, left (longer than a tile), all and scattered padding, in turn."""
    kind = CHOSEN.index(case) % 4
    assert_true(case, draw(4, 47), key_mask=padding(47)[kind : kind + 1])


@pytest.mark.parametrize(
    ("case", "cut"), [("linear-exp", "spans"), ("inline-identity", "spans"), ("efficient", "one span")]
)
def test_masked_keys_have_no_weight_in_spans(case, cut):
    """Spans of padding alone are merged with those that have tokens."""
    with regime(cut):
        assert_true(case, draw(4, 67, batch=2), key_mask=padding(67)[1:3])


@pytest.mark.parametrize(
    ("case", "cut"), [*((case, "whole") for case in CHOSEN), ("linear-exp", "spans"), ("efficient", "spans")]
)
def test_queries_without_visible_keys_read_zero(case, cut):
    q, k, v = draw(3, 9)
    with regime(cut):
        ours = run(case, (q, k, v), torch.randn(1, 1, 3, 5), key_mask=torch.zeros(1, 9, dtype=torch.bool))
    for x in ours:
        assert (x == 0).all()


@pytest.mark.parametrize(
    ("case", "cut"), [*((case, "whole") for case in CHOSEN), ("linear-elu", "spans"), ("efficient", "spans")]
)
def test_the_contents_of_padding_change_nothing(case, cut):
    """Outputs and gradients are bitwise those of zeros, and padding gets a gradient of zero."""
    q, k, v = draw(5, 16, dims=(3, 2))
    mask, upstream = torch.arange(16)[None] % 5 == 2, torch.randn(1, 1, 5, 2)
    junk = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38]).repeat(4)[:, None]
    outcomes = []
    for there in (torch.zeros(16, 1), junk):
        filled = [torch.where(mask[:, None, :, None], x, there) for x in (k, v)]
        with regime(cut):
            outcomes.append(run(case, (q, *filled), upstream, key_mask=mask))
    assert_same(*outcomes)
    assert all(x.isfinite().all() for x in outcomes[0])
    assert (outcomes[0].dk[:, :, ~mask[0]] == 0).all()
    assert (outcomes[0].dv[:, :, ~mask[0]] == 0).all()


@chosen_cases
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_nan_in_a_visible_token_reaches_the_output(case, where):
    """In its own row for a query, in every row for a key, in its channel for a value: never silently dropped."""
    tensors = dict(zip("qkv", draw(4, 6, dims=(3, 2)), strict=True))
    tensors[where][0, 0, 2, 1] = torch.nan
    bad = attention(*tensors.values(), CASES[case].mechanism, backend="triton").isnan()
    expected = torch.zeros_like(bad)
    expected[{"q": (0, 0, 2), "k": ..., "v": (..., 1)}[where]] = True
    assert torch.equal(bad, expected)


@pytest.mark.parametrize(
    ("case", "q", "k"),
    [
        ("linear-relu", -1.0, 1.0),
        ("linear-relu", 1.0, -1.0),
        ("linear-identity", 0.0, 1.0),
        ("linear-relu-exp", -1.0, 1.0),
        ("linear-exp-relu", 1.0, -1.0),
        ("inline-identity", 0.0, 1.0),
        ("inline-relu", -1.0, 1.0),
        ("taylor", 0.0, 1.0),
    ],
)
def test_a_query_without_features_reads_the_mean(case, q, k):
    """And its gradients are those of the truth."""
    q, k = (sign * torch.rand(1, 1, 37, 3).add(0.5) for sign in (q, k))
    v, upstream = torch.randn(1, 1, 37, 4), torch.randn(1, 1, 37, 4)
    ours = run(case, (q, k, v), upstream)
    mean = v.double().mean(2, keepdim=True).expand(ours.out.shape)
    assert worst(ours.out, mean) <= 5 * torch.finfo(torch.float32).eps * v.abs().max().item()  # a sum: R3's bar
    for name, mine, right in zip(ours._fields, ours, truth(case, (q, k, v), upstream), strict=True):
        assert_near(mine, right, name)


@pytest.mark.parametrize("case", [case for case, each in CASES.items() if each.mechanism.rows_sum_to_one])
def test_a_single_key_returns_its_value(case):
    q, k, v = draw(3, 1)
    out = attention(q.abs(), k.abs(), v, CASES[case].mechanism, backend="triton")
    assert worst(out, v.double().expand(out.shape)) <= torch.finfo(torch.float32).eps * v.abs().max().item()


@pytest.mark.parametrize("case", ["inline-exp-relu", "inline-elu-identity", "none-exp"])
def test_keys_whose_mean_is_zero_still_have_a_covariance(case):
    """phi(k) = -1, 1 sums to zero and is not nothing."""
    q, k, v = draw(3, 2, dims=(2, 3))
    assert_true(case, (q, torch.cat([k[:, :, :1], -k[:, :, :1]], 2), v))


def test_exponential_queries_read_keys_whose_mean_is_zero():
    """The same where the query's features are logarithms."""
    from softless import mechanism

    made = mechanism("inline", phi="exp", phi_k="identity")
    q, k, v = draw(3, 2, dims=(2, 3))
    k = torch.cat([k[:, :, :1], -k[:, :, :1]], 2)
    exact = attention(q.double(), k.double(), v.double(), made, backend="reference")
    assert_near(attention(q, k, v, made, backend="triton"), exact, "output")


@pytest.mark.parametrize(
    ("case", "side", "far"),
    [
        *((case, side, -80.0) for case in ("linear-elu", "linear-exp", LINEAR_SOFTMAX, "efficient") for side in "qk"),
        *((case, side, 80.0) for case in ("linear-exp", LINEAR_SOFTMAX, "efficient") for side in "qk"),
        ("linear-relu-exp", "k", -80.0),
        ("linear-relu-exp", "k", 80.0),
        ("linear-exp-relu", "q", -80.0),
        ("linear-exp-relu", "q", 80.0),
    ],
)
def test_division_cancels_a_constant_factor_at_either_end_of_the_range(case, side, far):
    """e^-80 and e^80 are factors of all features of a query, or of all keys."""
    q, k, v = draw(4, 5, dims=(3, 2))
    q, k = -torch.rand_like(q), -torch.rand_like(k)
    q, k = (-q if "relu-exp" in case else q), (-k if "exp-relu" in case else k)
    far = (q + far, k) if side == "q" else (q, k + far)
    exact = attention(*(x.double() for x in (*far, v)), CASES[case].mechanism, backend="reference")
    assert_near(attention(*far, v, CASES[case].mechanism, backend="triton"), exact, "output")


@pytest.mark.parametrize(
    ("case", "rise"), [("linear-exp", 60), ("inline-exp-half", 9), ("none-exp", 9), ("efficient", 9), ("efficient", 60)]
)
@pytest.mark.parametrize("cut", ["whole", "spans"])
def test_a_late_large_exponential_key_keeps_earlier_keys(case, rise, cut):
    """The running maximum rises in the second tile, and every sum so far must follow it."""
    q, k, v = draw(3, 40)
    k[:, :, 35] += rise
    with regime(cut):
        assert_true(case, (q, k, v))


def packed(x: Tensor) -> Tensor:
    """The same numbers as the second of three in a [B, N, 3, H, d] projection."""
    return torch.stack([x - 1, x, x + 1], 2).permute(0, 3, 2, 1, 4).contiguous().transpose(1, 3)[:, :, 1]


LAYOUTS = {
    "packed": packed,
    "tokens first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "dimension outermost": lambda x: x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    "dimension before tokens": lambda x: x.mT.contiguous().mT,
    "every other number": lambda x: torch.stack([x, x + 1], -1).flatten(-2)[..., ::2],
}


@pytest.mark.parametrize(
    ("layout", "cut"), [*((layout, "whole") for layout in LAYOUTS), ("packed", "spans"), ("tokens first", "spans")]
)
def test_strides_do_not_change_the_results(layout, cut):
    plain, upstream = draw(5, 7, heads=2, dims=(3, 4)), torch.randn(1, 2, 5, 4)
    strided = [LAYOUTS[layout](x) for x in plain]
    assert_same(strided, plain)
    assert not any(x.is_contiguous() for x in strided)
    with regime(cut):
        assert_same(run("linear-elu", strided, LAYOUTS[layout](upstream)), run("linear-elu", plain, upstream))


def test_expanded_tensors_and_gradients_are_read_as_they_are():
    """Strides of zero: keys shared by a batch, and the gradient of a sum."""
    q, k, v = draw(5, 7, batch=2, dims=(3, 4))
    shared = [x[:1].expand(2, -1, -1, -1) for x in (k, v)]
    ones = torch.ones(1, 1, 1, 1).expand(2, 1, 5, 4)
    assert_same(
        run("linear-elu", (q, *shared), ones), run("linear-elu", (q, *(x.clone() for x in shared)), ones.clone())
    )


def test_the_caller_s_tensors_are_left_alone():
    q, k, v = draw(5, 7, batch=2)
    given = [q, k, v, torch.randn(2, 1, 5, 5), torch.arange(7).expand(2, 7) < 4]
    before = [x.clone() for x in given]
    for cut in ("whole", "spans"):
        with regime(cut):
            run("inline-elu", given[:3], given[3], key_mask=given[4])
    assert_same(given, before)


@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0)], ids=str)
@every_regime
def test_empty_tensors_give_empty_or_zero_outputs(shape, cut):
    """No samples, no queries or no keys: empty, or zeros, with gradients of zero."""
    batch, queries, keys = shape
    q, k, v = draw(queries, keys, batch=batch, heads=2)
    with regime(cut):
        ours = run("linear-elu", (q, k, v), torch.ones(batch, 2, queries, 5))
    assert [x.shape for x in ours] == [(batch, 2, queries, 5), q.shape, k.shape, v.shape]
    assert all((x == 0).all() for x in ours)


@every_regime
def test_values_without_channels_give_an_output_without_channels(cut):
    q, k, v = draw(3, 4, dims=(2, 0))
    with regime(cut):
        ours = run("linear-elu", (q, k, v), torch.ones(1, 1, 3, 0))
    assert [x.shape for x in ours] == [(1, 1, 3, 0), q.shape, k.shape, v.shape]
    assert all((x == 0).all() for x in ours)


# The interpreter is slow: eight examples of the twenty-five, and options that a chosen case speaks for in make slow.
a_third_of_the_cases = settings(max_examples=max(2, settings.default.max_examples // 3))
chosen_now = pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (case not in (*CHOSEN, "linear-identity"))) for case in CASES],
)


@st.composite
def questions(choose: st.DrawFn, case: str, *, tame: bool = False) -> tuple[laws.Case, laws.Ask, str]:
    """Lengths around a tile, shared heads, dead tokens, padding; if not tame, six decades and offset values."""
    lengths = st.one_of(st.sampled_from([1, 2, 32, 33]), st.integers(1, 32))
    queries, keys = choose(lengths), choose(lengths)
    heads = choose(st.sampled_from([(1, 1), (1, 1), (2, 1)]))
    dims = choose(st.tuples(st.sampled_from([1, 2, 5, 33]), st.sampled_from([1, 3, 34])))
    cancels = case.startswith("linear") or case == "efficient"  # whatever the size of a query's features
    law = laws.case(CASES[case].mechanism.name, 1e3 if cancels or "exp" not in case else 10.0, **CASES[case].options)
    q, k, v, *_ = laws.ask(law, queries, keys, batch=1, heads=heads, dims=dims, seed=choose(st.integers(0, 2**32 - 1)))
    if not tame:
        q, k = (x * min(law.largest, 10.0 ** choose(st.integers(-3, 3))) for x in (q, k))
        v = v + choose(st.sampled_from([0.0, 1.0, 1e4]))
    for x in (q, k):
        x[:, :, :: choose(st.integers(1, 4))] *= choose(st.sampled_from([0.0, 1.0]))
    mask = choose(st.one_of(st.none(), laws.masks(keys, batch=1)))
    return law, laws.Ask(q, k, v, mask, {}).to(torch.float32), choose(st.sampled_from(list(REGIMES)))


@chosen_now
@a_third_of_the_cases
@given(st.data())
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # in a branch not taken
def test_random_calls_match_the_formula(case, data):
    """Judged row by row, by formulas that share nothing with softless."""
    law, asked, cut = data.draw(questions(case))
    with regime(cut):
        out = attention(*asked[:3], law.made, key_mask=asked.key_mask, backend="triton")
    laws.assert_answers(out, laws.true_answer(law, asked), f"{case}, {cut}")


@pytest.mark.slow
@every_case
@a_third_of_the_cases
@given(st.data())
def test_random_gradients_match_those_of_the_weights(case, data):
    _, asked, cut = data.draw(questions(case, tame=True))
    with regime(cut):
        assert_true(case, asked[:3], key_mask=asked.key_mask)
