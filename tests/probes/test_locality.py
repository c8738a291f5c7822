"""Local mass and distance, against sums over neighbors written out."""

import math

import pytest
import torch

import softless
from softless.probes.locality import locality, residual_share

GRID, PREFIX = (3, 4), 2
TOKENS = PREFIX + 12


def brute(weights, grid, prefix, side):
    """(mass, distance) of each query of the picture, neighbor by neighbor."""
    height, width = grid
    mass, distance = [], []
    for i in range(height * width):
        row, column = divmod(i, width)
        near = moved = total = 0.0
        for j in range(height * width):
            other_row, other_column = divmod(j, width)
            w = weights[prefix + i, prefix + j].item()
            if max(abs(row - other_row), abs(column - other_column)) <= side // 2:
                near += w
            moved += abs(w) * math.dist((row, column), (other_row, other_column))
            total += abs(w)
        mass.append(near)
        distance.append(moved / total)
    return mass, distance


@pytest.mark.parametrize("side", [1, 3, 5])
@pytest.mark.parametrize("mechanism", ["softmax", "inline"])
def test_mass_and_distance_equal_sums_over_every_neighbor(mechanism, side):
    q, k = 3 * torch.randn(2, 2, 3, TOKENS, 8, dtype=torch.float64)
    weights = softless.attention_weights(q, k, mechanism)
    found = locality(weights, GRID, PREFIX, side=side)
    for sample, head in [(0, 0), (1, 2)]:
        mass, distance = brute(weights[sample, head], GRID, PREFIX, side)
        assert found["local_mass"][sample, head].tolist() == pytest.approx(mass)
        assert found["attention_distance"][sample, head].tolist() == pytest.approx(distance)


def test_uniform_weights_have_the_baseline():
    weights = torch.full((1, 1, TOKENS, TOKENS), 1 / TOKENS, dtype=torch.float64)
    found = locality(weights, GRID, PREFIX)
    torch.testing.assert_close(found["local_mass"], found["local_baseline"])
    torch.testing.assert_close(found["attention_distance"], found["distance_baseline"])


def test_the_baseline_is_over_the_keys_that_are_seen():
    """Two halves that see only themselves, as in a shifted window."""
    half = torch.arange(12) % 4 < 2
    seen = half[:, None] == half
    weights = seen.double() / 6
    found = locality(weights[None, None], GRID, seen=seen[None, None])
    torch.testing.assert_close(found["local_baseline"], found["local_mass"])
    torch.testing.assert_close(found["distance_baseline"], found["attention_distance"])
    assert (found["local_baseline"] > locality(weights[None, None], GRID)["local_baseline"]).any()
    alone = torch.eye(12, dtype=torch.bool)[None, None]
    assert (locality(weights[None, None], GRID, seen=alone)["local_baseline"] == 1).all()


def test_deits_baseline_is_9_of_197_less_at_the_border():
    found = locality(torch.full((1, 1, 197, 197), 1 / 197), (14, 14), 1)
    inner = found["local_mass"][0, 0].unflatten(0, (14, 14))[1:-1, 1:-1]
    torch.testing.assert_close(inner, torch.full_like(inner, 9 / 197))
    assert found["local_baseline"].mean().item() == pytest.approx((3 * 14 - 2) ** 2 / 14**2 / 197)


def test_a_query_that_looks_only_at_itself_is_local():
    found = locality(torch.eye(TOKENS)[None, None], GRID, PREFIX, side=1)
    assert (found["local_mass"] == 1).all()
    assert (found["attention_distance"] == 0).all()


def test_a_query_that_looks_only_at_the_class_token_has_no_mass_and_no_distance():
    weights = torch.zeros(1, 1, TOKENS, TOKENS)
    weights[..., 0] = 1.0
    found = locality(weights, GRID, PREFIX)
    assert found["local_mass"].abs().sum() == found["attention_distance"].abs().sum() == 0


def test_the_share_of_the_local_residual_is_by_length():
    local, output = 3 * torch.eye(4)[None, None], 4 * torch.eye(4)[None, None]
    assert residual_share(local, output).item() == pytest.approx(3 / 7)
    assert residual_share(0 * local, output).item() == 0
    assert residual_share(0 * local, 0 * output).item() == 0
