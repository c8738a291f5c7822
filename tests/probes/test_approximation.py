"""How far from softmax: the first-order bound is a theorem, and error grows with the range of the scores."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import softless
from softless.bench.scaling import study_cases
from softless.probes import approximation as probe

SPREADS = (0.03, 0.1, 0.3, 1.0, 3.0)


def queries_and_keys(tokens=48, dim=32, heads=2):
    return torch.randn(2, 1, heads, tokens, dim, dtype=torch.float64).unbind()


@given(
    st.lists(st.floats(-30, 30), min_size=1, max_size=40),
    st.floats(0.001, 1),
)
def test_first_order_error_never_exceeds_half_the_squared_range(scores, scale):
    """Any row of scores whatever, as q.k/sqrt(d) with d = 1: keys are the scores, the query is 1."""
    k = scale * torch.tensor(scores, dtype=torch.float64)[None, None, :, None]
    found = probe.approximation(torch.ones(1, 1, 1, 1, dtype=torch.float64), k, "inline")
    assert found.error <= found.range**2 / 2 * (1 + 1e-6) + 1e-12


@pytest.mark.parametrize("deviation", SPREADS)
def test_every_inline_row_is_within_its_bound(deviation):
    (found,) = probe.sweep(*queries_and_keys(), "inline", [deviation])
    assert found.within_bound == 1


@pytest.mark.parametrize("mechanism", [None, "inline", softless.mechanism("taylor", order=2)])
def test_error_grows_with_the_range(mechanism):
    curve = probe.sweep(*queries_and_keys(), mechanism, SPREADS)
    errors, ranges = [point.error for point in curve], [point.range for point in curve]
    assert errors == sorted(errors)
    assert ranges == sorted(ranges)


def test_sweep_rescales_the_scores_to_each_deviation():
    curve = probe.sweep(*queries_and_keys(), "inline", SPREADS)
    assert [point.deviation for point in curve] == pytest.approx(SPREADS)


def test_softmax_is_at_distance_zero_from_itself():
    assert all(point.worst == 0 for point in probe.sweep(*queries_and_keys(), "softmax", SPREADS))


def test_uniform_error_is_that_of_the_formula():
    q, k = queries_and_keys()
    p = softless.attention_weights(q, k, "softmax")
    expected = (1 - 1 / (p.shape[-1] * p.square().sum(-1))).sqrt().mean()  # |1/n - p|^2 = |p|^2 - 1/n
    assert probe.approximation(q, k, None).error == pytest.approx(expected.item(), rel=1e-9)


def test_each_order_gains_one_power_of_the_range():
    """Halving small scores divides the error by 2, 4 and 8 for zeroth, first and second order."""
    q, k = queries_and_keys()
    for order, mechanism in enumerate([None, "inline", softless.mechanism("taylor", order=2)], start=1):
        small, half = probe.sweep(q, k, mechanism, [0.02, 0.01])
        assert small.error / half.error == pytest.approx(2**order, rel=0.05)


def test_only_first_order_mechanisms_approximate_softmax_at_small_scores():
    q, k = queries_and_keys(dim=64)
    uniform = probe.sweep(q, k, None, [0.03])
    found = {c.label for c in study_cases() if probe.approximates(probe.sweep(q, k, c.mechanism, [0.03]), uniform)}
    assert found & {c.label for c in study_cases()[:12]} == {
        "softmax",
        "inline",
        "taylor order 2",
        "threshold",
        "threshold minimax",
    }


def test_the_published_threshold_is_worse_than_uniform_weights_at_unit_deviation():
    q, k = queries_and_keys(tokens=256, dim=64, heads=1)
    (published,), (better,), (uniform,) = (
        probe.sweep(q, k, mechanism, [1.0])
        for mechanism in ("threshold", softless.mechanism("threshold", expansion="minimax", tail="mean"), None)
    )
    assert better.error < uniform.error < published.error


def test_hydra_is_compared_channel_by_channel_with_its_own_head():
    q, k = queries_and_keys(tokens=7, dim=3)
    softmax = softless.attention_weights(q, k, "softmax")
    weights = softless.attention_weights(q, k, "hydra")
    errors = [(weights[0, c] - softmax[0, c // 3]).norm(dim=-1) / softmax[0, c // 3].norm(dim=-1) for c in range(6)]
    found = probe.approximation(q, k, "hydra")
    assert found.error == pytest.approx(torch.stack(errors).mean().item(), rel=1e-12)
    assert found.worst == pytest.approx(torch.stack(errors).max().item(), rel=1e-12)


def test_keys_may_have_fewer_heads():
    q, k = torch.randn(1, 4, 9, 8, dtype=torch.float64), torch.randn(1, 2, 9, 8, dtype=torch.float64)
    assert probe.approximation(q, k, "inline") == probe.approximation(q, k.repeat_interleave(2, 1), "inline")


def point(spread, error):
    return probe.Approximation(spread, spread, error, error, spread**2 / 2, 1.0)


def test_safe_range_is_where_the_error_reaches_the_tolerance():
    quadratic = [point(r, r**2) for r in (0.1, 1.0, 2.0)]
    assert probe.safe_range(quadratic, 0.25) == pytest.approx(0.5)
    assert probe.safe_range(quadratic, 0.001) == 0
    assert probe.safe_range(quadratic, 9.0) is None
    assert probe.safe_range([point(1.0, 0.0), point(2.0, 0.0)], 0.1) is None
    assert probe.safe_range([point(1.0, 0.0), point(2.0, 0.5)], 0.1) == pytest.approx(2)
