"""Running means and histograms are the same from any portions; intervals hold the truth as often as they say."""

from itertools import pairwise
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from softless.probes.running import Estimate, Histogram, Running, histogram, merge, observe, proportion, student

counts = st.lists(st.integers(0, 10_000), max_size=40)


def folded(samples: torch.Tensor, cuts: list[int]) -> Running:
    """The samples in portions."""
    bounds = [0, *sorted(cuts), len(samples)]
    parts = [observe(samples[a:b]) for a, b in pairwise(bounds) if b > a]
    found = parts[0]
    for part in parts[1:]:
        found = merge(found, part)
    return found


@given(
    st.integers(1, 60), st.lists(st.integers(0, 60), max_size=5), st.sampled_from([0.0, 1.0, 1e6]), st.integers(0, 99)
)
def test_merged_portions_equal_all_samples_at_once(count, cuts, offset, seed):
    samples = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + offset
    found, whole = folded(samples, [cut for cut in cuts if cut < count]), observe(samples)
    assert found.n == whole.n == count
    torch.testing.assert_close(found.mean, whole.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.squares, whole.squares, rtol=1e-9, atol=1e-9 * (1 + offset * 1e-6))


def test_the_interval_of_a_mean_is_students():
    samples = torch.tensor([3.0, 5.0, 4.0, 8.0, 6.5])
    found = observe(samples).estimates()[0]
    low, high = stats.t.interval(0.95, 4, samples.mean().item(), stats.sem(samples.numpy()))
    assert found.mean == pytest.approx(5.3)
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-6)
    assert found.n == 5


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 6, 7, 9, 12, 30, 100, 359, 10_000])
def test_quantiles_of_students_t_equal_the_published_tables(degrees):
    assert student(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), abs=3e-4)


def test_more_degrees_of_freedom_never_widen_the_interval():
    points = [student(degrees) for degrees in range(1, 50)]
    assert points == sorted(points, reverse=True)
    assert points[-1] > NormalDist().inv_cdf(0.975)


def test_a_single_sample_has_a_mean_and_no_interval():
    assert observe(torch.tensor([7.0])).estimates()[0] == Estimate(7.0, None, None, 1)


def test_every_head_has_its_own_interval():
    samples = torch.randn(20, 3)
    found = observe(samples).estimates()
    for head, each in enumerate(found):
        alone = observe(samples[:, head]).estimates()[0]
        assert (each.mean, each.low, each.high) == pytest.approx((alone.mean, alone.low, alone.high))


@pytest.mark.parametrize("count", [3, 10, 40])
def test_the_interval_holds_the_true_mean_in_95_of_100_studies(count):
    """4,000 studies of normal samples: a share of 0.95 has a standard error of 0.0034, so 0.014 is four of them."""
    draws = torch.randn(count, 4000, generator=torch.Generator().manual_seed(count), dtype=torch.float64) * 3 + 5
    found = observe(draws).estimates()
    share = sum(each.low <= 5 <= each.high for each in found) / len(found)
    assert abs(share - 0.95) < 0.014


def test_the_interval_of_merged_portions_holds_the_true_mean_as_often():
    draws = torch.randn(12, 4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    share = sum(each.low <= 0 <= each.high for each in folded(draws, [2, 3, 7]).estimates()) / 4000
    assert abs(share - 0.95) < 0.014


@pytest.mark.parametrize("successes", [0, 1, 17, 359, 360])
def test_a_proportion_has_wilsons_interval(successes):
    found = proportion(successes, 360)
    exact = stats.binomtest(successes, 360).proportion_ci(0.95, method="wilson")
    assert found.mean == successes / 360
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high), abs=1e-12)


def test_a_proportion_of_all_samples_still_has_an_interval():
    assert proportion(360, 360).low < 0.99


@pytest.mark.parametrize("truth", [0.3, 0.7, 0.93])
def test_wilsons_interval_holds_the_truth_in_95_of_100_studies(truth):
    """Counts are whole numbers, so no interval is right to the digit: within 0.02 of 0.95 at 360 images."""
    counts = torch.distributions.Binomial(360, torch.tensor(truth, dtype=torch.float64))
    torch.manual_seed(0)
    found = [proportion(int(count), 360) for count in counts.sample((4000,))]
    share = sum(each.low <= truth <= each.high for each in found) / 4000
    assert abs(share - 0.95) < 0.02


@given(counts.filter(bool))
def test_every_count_lies_between_the_edges_of_its_bin(values):
    found = histogram(torch.tensor(values))
    expected = [
        sum(low <= value < high for value in values) for low, high in zip(found.edges, found.edges[1:], strict=False)
    ]
    assert list(found.counts) == expected
    assert sum(found.counts) == len(values)
    assert found.edges[:4] == (0, 1, 2, 4)[: len(found.edges)]


@given(counts, counts)
def test_histograms_of_two_sets_add_up_to_the_histogram_of_both(a, b):
    both = histogram(torch.tensor(a + b, dtype=torch.long))
    assert histogram(torch.tensor(a, dtype=torch.long)) + histogram(torch.tensor(b, dtype=torch.long)) == both


def test_no_samples_have_an_empty_histogram():
    assert histogram(torch.tensor([], dtype=torch.long)) == Histogram()
    assert Histogram() + Histogram() == Histogram()
