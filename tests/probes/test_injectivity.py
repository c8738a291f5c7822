"""InLine's propositions as counts: division confuses q and 2q, subtraction does not."""

import pytest
import torch

import softless
from softless.probes.injectivity import collinear_collisions, row_distance

DRAWS, KEYS, DIM = 1000, 24, 16

HOMOGENEOUS = [
    softless.mechanism("linear", phi="relu"),
    softless.mechanism("linear", phi="leaky_relu"),
    softless.mechanism("taylor"),
    softless.mechanism("hydra"),
    softless.mechanism("angular", exact=True),
    softless.mechanism("focused"),
]
INJECTIVE = [
    softless.mechanism("inline"),
    softless.mechanism("inline", phi="leaky_relu"),
    softless.mechanism("softmax"),
    softless.mechanism("taylor", order=2),
    softless.mechanism("threshold", expansion="minimax", tail="mean"),
]


def draws(count=DRAWS, keys=KEYS, dim=DIM):
    """One query and its own set of keys a draw."""
    return torch.randn(count, 1, 1, dim, dtype=torch.float64), torch.randn(count, 1, keys, dim, dtype=torch.float64)


@pytest.mark.parametrize("mechanism", HOMOGENEOUS, ids=str)
def test_a_homogeneous_map_with_division_confuses_every_collinear_pair(mechanism):
    found = collinear_collisions(*draws(), mechanism)
    assert (found.collisions, found.pairs) == (DRAWS, DRAWS)


@pytest.mark.parametrize("mechanism", INJECTIVE, ids=str)
def test_an_injective_mechanism_with_full_rank_keys_confuses_none(mechanism):
    found = collinear_collisions(*draws(), mechanism)
    assert found.key_rank == DIM + 1
    assert (found.collisions, found.pairs) == (0, DRAWS)
    assert found.smallest > 10 * found.tolerance


def test_any_positive_factor_cancels_under_division():
    q, k = draws(50)
    for factor in (1e-6, 0.3, 7.0, 1e6):
        assert collinear_collisions(q, k, softless.mechanism("linear", phi="relu"), factor=factor).smallest < 1e-12


def test_subtraction_with_relu_still_confuses_queries_that_relu_erases():
    q, k = draws(50)
    found = collinear_collisions(-q.abs(), k, softless.mechanism("inline", phi="relu"))
    assert found.collisions == 50


def test_keys_of_low_rank_are_reported():
    q, k = draws(20)
    assert collinear_collisions(q, k[..., :1].expand_as(k), "inline").key_rank == 2


def test_equal_keys_make_every_query_equal():
    q, k = draws(20)
    assert collinear_collisions(q, k[:, :, :1].expand_as(k), "inline").collisions == 20


def test_the_published_threshold_confuses_queries_that_see_one_key():
    """If only the largest score is within tau, for q and for 2q, both rows are that one key."""
    q, k = torch.ones(1, 1, 1, 1, dtype=torch.float64), torch.tensor([[[[3.0], [0.0], [-1.0]]]], dtype=torch.float64)
    assert collinear_collisions(q, k, "threshold").smallest == 0
    assert collinear_collisions(q, k, softless.mechanism("threshold", tail="mean")).smallest > 0.01


def test_a_pair_is_a_query_of_one_head():
    q, k = torch.randn(3, 2, 4, 5, 8, dtype=torch.float64)[:2]
    for mechanism in ("inline", "hydra"):
        assert collinear_collisions(q, k[:, :, :5], mechanism).pairs == 2 * 4 * 5


def test_distance_is_over_all_matrices_of_a_head():
    a, b = torch.randn(2, 1, 6, 3, 4, dtype=torch.float64)
    expected = (a[0, 3:, 2] - b[0, 3:, 2]).norm()
    assert row_distance(a, b, 2)[0, 1, 2] == pytest.approx(expected.item())
