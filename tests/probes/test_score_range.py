"""The spread of scores, against formulas written out row by row."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import softless
from softless.probes.score_range import (
    TAU,
    compare,
    cost,
    effective_rank,
    filtered,
    relative_error,
    spread,
    verdict,
)

rows = st.lists(st.floats(-20, 20), min_size=1, max_size=30)


def masked_scores(samples=2, heads=3, queries=5, keys=7):
    """Each row sees some of the keys, at least one."""
    scores = 2 * torch.randn(samples, heads, queries, keys, dtype=torch.float64)
    hidden = torch.rand(scores.shape) < 0.4
    hidden[..., 0] = False
    return scores.masked_fill(hidden, -torch.inf)


def by_hand(row: list[float]) -> dict[str, float]:
    n, mean, top = len(row), sum(row) / len(row), max(row)
    mass = sum(math.exp(s - top) for s in row)
    p = [math.exp(s - top) / mass for s in row]
    size = math.sqrt(sum(x * x for x in p))
    first, even = [(1 + s - mean) / n for s in row], [1 / n] * n
    return {
        "score_range": top - min(row),
        "score_deviation": math.sqrt(sum((s - mean) ** 2 for s in row) / n),
        "entropy": -sum(x * math.log(x) for x in p if x > 0),
        "first_order_error": math.dist(first, p) / size,
        "uniform_error": math.dist(even, p) / size,
        "bound": (top - min(row)) ** 2 / 2,
        "score_volume": volume_by_hand(sorted(row)),
    }


def volume_by_hand(row: list[float]) -> float:
    n, m = len(row), math.isqrt(len(row))
    gaps = [row[min(i + m, n - 1)] - row[max(i - m, 0)] for i in range(n)]
    return math.prod(n * gap / (2 * m) for gap in gaps) ** (1 / n)


def test_every_measure_of_a_row_equals_its_formula():
    scores = masked_scores()
    found = spread(scores)
    for place in torch.cartesian_prod(*map(torch.arange, scores.shape[:3])).tolist():
        row = scores[tuple(place)]
        for name, value in by_hand(row[row > -torch.inf].tolist()).items():
            assert found[name][tuple(place)].item() == pytest.approx(value, rel=1e-9, abs=1e-12), name


@given(rows)
def test_the_first_order_error_never_exceeds_its_bound(row):
    found = spread(torch.tensor(row, dtype=torch.float64)[None, None, None])
    assert found["first_order_error"].item() <= found["bound"].item() * (1 + 1e-9) + 1e-12


@given(rows, st.floats(-50, 50))
def test_a_constant_added_to_a_row_changes_no_measure(row, constant):
    scores = torch.tensor(row, dtype=torch.float64)[None, None, None]
    for before, after in zip(spread(scores).values(), spread(scores + constant).values(), strict=True):
        torch.testing.assert_close(before, after, rtol=1e-9, atol=1e-9)


def test_first_order_weights_are_inline_on_the_same_queries_and_keys():
    q, k = torch.randn(2, 2, 3, 9, 8, dtype=torch.float64)
    inline, softmax = (softless.attention_weights(q, k, name) for name in ("inline", "softmax"))
    torch.testing.assert_close(spread(q @ k.mT * 8**-0.5)["first_order_error"], relative_error(inline, softmax))


@given(rows)
def test_the_volume_of_a_row_is_never_above_its_range(row):
    found = spread(torch.tensor([row], dtype=torch.float64))
    assert 0 <= found["score_volume"].item() <= found["score_range"].item() * (1 + 1e-9)


@given(rows, st.floats(1e-3, 1e3))
def test_the_volume_grows_as_the_scores_do(row, factor):
    scores = torch.tensor([row], dtype=torch.float64)
    expected = factor * spread(scores)["score_volume"].item()
    assert spread(factor * scores)["score_volume"].item() == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_the_volume_is_the_range_of_even_scores_and_4_deviations_of_normal_ones():
    found = spread(torch.stack([torch.linspace(0, 3, 10_000), 3 * torch.randn(10_000)]).double())
    assert found["score_volume"][0].item() == pytest.approx(3, rel=0.02)
    assert found["score_volume"][1].item() == pytest.approx(3 * math.sqrt(2 * math.pi * math.e), rel=0.05)


def test_two_heaps_of_scores_fill_little_however_far_they_are_apart():
    """What range and deviation do not tell."""
    heaps = torch.cat([torch.zeros(50), torch.full((50,), 9.0)]).double()
    found = spread(torch.stack([heaps + 1e-3 * torch.randn(100), 9 * torch.rand(100)]))
    assert found["score_range"][0] > 8.9
    assert found["score_deviation"][0] > found["score_deviation"][1]
    assert found["score_volume"][0] < 0.1
    assert found["score_volume"][1] > 6


def test_a_query_that_sees_no_key_has_zeros():
    found = spread(torch.full((1, 1, 1, 4), -torch.inf))
    assert all(value.item() == 0 for value in found.values())
    kept, discarded = filtered(torch.full((1, 1, 1, 4), -torch.inf))
    assert kept.abs().sum() == discarded.abs().sum() == 0


def test_kept_and_discarded_equal_those_of_the_threshold_report():
    q, k = 2 * torch.randn(2, 2, 3, 9, 8, dtype=torch.float64)
    mask = torch.rand(2, 9) < 0.8
    mask[:, 0] = True
    scores = (q @ k.mT * 8**-0.5).masked_fill(~mask[:, None, None], -torch.inf)
    kept, discarded = filtered(scores, TAU)
    for place, tau in enumerate(TAU):
        report = softless.threshold_report(q, k, tau=tau, key_mask=mask)
        torch.testing.assert_close(kept[..., place], report.kept_fraction)
        torch.testing.assert_close(discarded[..., place], report.discarded_mass)


def test_a_larger_tau_keeps_more():
    kept, discarded = filtered(masked_scores(), (0.5, 1.0, 2.0, 100.0))
    assert (kept.diff(dim=-1) >= 0).all()
    assert (discarded.diff(dim=-1) <= 0).all()
    assert (kept[..., -1] == 1).all()


def test_effective_rank_equals_its_formula_over_the_singular_values():
    scores = torch.randn(2, 3, 6, 9, dtype=torch.float64)
    for each in (scores, scores.mT):
        values = torch.linalg.svdvals(each - each.mean(-1, keepdim=True))
        expected = values.square().sum(-1).square() / values.pow(4).sum(-1)
        torch.testing.assert_close(effective_rank(each), expected)


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_effective_rank_of_equal_directions_is_their_number(rank):
    basis = torch.linalg.qr(torch.cat([torch.ones(12, 1), torch.randn(12, 11)], 1).double()).Q[:, 1 : rank + 1]
    left = torch.linalg.qr(torch.randn(10, rank, dtype=torch.float64)).Q
    scores = left @ basis.T + 7  # rows that sum to nothing, and a constant that no softmax sees
    assert effective_rank(scores[None, None]).item() == pytest.approx(rank)


def test_padding_and_hidden_keys_take_no_part_in_the_rank():
    scores = torch.randn(1, 1, 6, 8, dtype=torch.float64)
    real = torch.tensor([[True] * 5 + [False]])
    hidden = scores.clone()
    hidden[..., 7], hidden[:, :, 5] = -torch.inf, 1e3
    torch.testing.assert_close(effective_rank(hidden, real), effective_rank(scores[:, :, :5, :7]))
    assert effective_rank(torch.ones(1, 1, 3, 3)).item() == 0  # flat scores have no direction


def test_unit_variance_does_not_bound_the_range():
    """Evenly spread scores of variance 1 stay within sqrt(12); the range of normal ones grows with the tokens."""
    scores = torch.stack([torch.zeros(4096), 12**0.5 * torch.rand(4096), torch.randn(4096)]).double()
    measures = {name: values.tolist() for name, values in spread(scores).items()}
    assert [measures[name][0] for name in ("score_range", "first_order_error", "uniform_error")] == [0, 0, 0]
    assert measures["score_deviation"][1:] == pytest.approx([1, 1], abs=0.05)
    assert measures["score_range"][1] <= 12**0.5 < 6 < measures["score_range"][2]
    assert measures["first_order_error"][1] < measures["first_order_error"][2]


def test_the_three_kinds_of_weights_on_one_row_sum_to_one_and_fall():
    by_kind = compare(torch.randn(50))
    assert list(by_kind) == ["softmax", "first order", "uniform"]
    for weights in by_kind.values():
        assert sum(weights) == pytest.approx(1)
        assert list(weights) == sorted(weights, reverse=True)


@pytest.mark.parametrize(
    ("error", "uniform", "word"),
    [(0.004, 0.02, "little"), (0.2, 0.6, "something"), (0.55, 0.6, "much"), (0.9, 0.6, "too much")],
)
def test_the_verdict_says_what_a_linear_kernel_would_cost(error, uniform, word):
    said = verdict(error, uniform, 1.25)
    assert cost(error, uniform) == word
    assert f"would cost {word} here" in said
    assert ("than looking at no score at all" in said) == (error > uniform)
    assert "span 1.2 per query" in said
    assert f"uniform weights are {100 * uniform:.0f} % away" in said


def test_the_verdict_of_a_layer_without_softmax_says_what_runs():
    assert "the scores a softmax would see (it runs inline)" in verdict(0.01, 0.02, 0.1, "inline")
    assert "under 1 % away" in verdict(0.001, 0.02, 0.1)
