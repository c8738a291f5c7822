"""Injectivity: confusion counts against every pair compared one by one, and InLine's propositions as counts."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import softless
from softless.probes import injectivity
from softless.probes.injectivity import collinear_distance, collinear_pairs, confusions, row_distance
from softless.probes.layer import Layer

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
    softless.mechanism("regress"),
    softless.mechanism("inline"),
    softless.mechanism("inline", phi="leaky_relu"),
    softless.mechanism("softmax"),
    softless.mechanism("taylor", order=2),
    softless.mechanism("threshold", expansion="minimax", tail="mean"),
]


def brute(weights, tolerance=1e-3, q=None, real=None):
    """Pair by pair."""
    samples, matrices, tokens, _ = weights.shape
    count = torch.zeros(samples, matrices, dtype=torch.long)
    for b in range(samples):
        for c in range(matrices):
            for i in range(tokens):
                for j in range(i + 1, tokens):
                    close = (weights[b, c, i] - weights[b, c, j]).double().norm() < tolerance
                    differ = q is None or bool((q[b, c, i] != q[b, c, j]).any())
                    count[b, c] += bool(close and differ and (real is None or (real[b, i] and real[b, j])))
    return count


def rows_with_twins(samples=2, matrices=3, tokens=9, keys=7):
    """A third of the rows lie within 1e-3 of another, at distances around it."""
    weights = torch.randn(samples, matrices, tokens, keys).softmax(-1)
    step = torch.randn(samples, matrices, tokens // 3, keys)
    length = torch.tensor([0.0, 0.7e-3, 1.4e-3])[:, None]
    weights[:, :, : tokens // 3] = weights[:, :, tokens // 3 : 2 * (tokens // 3)] + length * step / step.norm(
        dim=-1, keepdim=True
    )
    return weights


def layer(q, k, mechanism, **more):
    return Layer("layer", q, k, k, softless.mechanism(mechanism) if isinstance(mechanism, str) else mechanism, **more)


@pytest.mark.parametrize("block", [1, 40, 1000, 2**21])
def test_confusions_are_counted_over_every_pair_whatever_the_block_size(monkeypatch, block):
    monkeypatch.setattr(injectivity, "BLOCK", block)
    weights = rows_with_twins()
    found = confusions(weights)
    assert torch.equal(found, brute(weights))
    assert (found == 2).all()  # of three twins a matrix, one is too far


def test_equal_queries_do_not_count_as_confusion():
    weights, q = torch.full((1, 1, 5, 4), 0.25), torch.randn(1, 1, 5, 3)
    q[:, :, 1] = q[:, :, 0]
    q[:, :, 2], q[:, :, 3] = 0.0, -0.0
    assert confusions(weights).item() == 10
    assert confusions(weights, q=q).item() == brute(weights, q=q).item() == 8


def test_padding_is_in_no_confused_pair():
    weights = rows_with_twins()
    real = torch.rand(2, 9) < 0.6
    assert torch.equal(confusions(weights, real=real), brute(weights, real=real))
    assert confusions(weights, real=torch.zeros(2, 9, dtype=torch.bool)).sum() == 0


def test_distances_far_below_the_size_of_the_rows_are_told_apart():
    """Rows of length 1 that differ by 0.9e-3 and 1.1e-3: float32 products would not see it."""
    a = torch.zeros(1, 1, 3, 2)
    a[..., 0] = 1.0
    a[0, 0, 1, 1], a[0, 0, 2, 1] = 0.9e-3, 2.0e-3
    assert confusions(a).item() == 1


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that is formed within."""

    def __enter__(self):
        self.numbers = 0
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not out._is_view():
            self.numbers = max(self.numbers, out.numel())
        return out


@pytest.mark.parametrize("keys", [16, pytest.param(4096, marks=pytest.mark.slow)])
def test_memory_is_bounded_for_4096_tokens(keys):
    """They have 8 million pairs: no tensor is formed that holds more than a block."""
    weights = torch.rand(1, 1, 4096, keys).softmax(-1)
    with Largest() as largest:
        found = confusions(weights, 0.05, q=torch.rand(1, 1, 4096, 8))
    assert 4096 < largest.numbers <= 2**21
    assert 0 <= found.item() <= 4096 * 4095 // 2


def test_softmax_confuses_none_and_relu_with_division_does():
    """A constructed layer: half the queries are twice the other half."""
    q, k = torch.randn(2, 2, 8, 16, dtype=torch.float64), torch.randn(2, 2, 24, 16, dtype=torch.float64)
    q = torch.cat([q, 2 * q], 2)
    softmax, linear = layer(q, k, "softmax"), layer(q, k, softless.mechanism("linear", phi="relu"))
    assert (confusions(softmax.weights(), q=q) == 0).all()
    assert (confusions(linear.weights(), q=q) == 8).all()
    assert (confusions(layer(q, k, "inline").weights(), q=q) == 0).all()
    assert (collinear_pairs(q) == 8).all()


def doubled(mechanism, q, k, factor=2.0):
    """|w(q) - w(factor q)| of every query."""
    each = layer(q, k, mechanism)
    return collinear_distance(each, each.weights(), factor=factor)


def draws(count=DRAWS, keys=KEYS, dim=DIM):
    """One query and its own set of keys per draw."""
    return torch.randn(count, 1, 1, dim, dtype=torch.float64), torch.randn(count, 1, keys, dim, dtype=torch.float64)


@pytest.mark.parametrize("mechanism", HOMOGENEOUS, ids=str)
def test_a_homogeneous_map_with_division_confuses_every_collinear_pair(mechanism):
    assert (doubled(mechanism, *draws()) < 1e-3).all()


@pytest.mark.parametrize("mechanism", INJECTIVE, ids=str)
def test_an_injective_mechanism_with_full_rank_keys_confuses_no_collinear_pair(mechanism):
    distance = doubled(mechanism, *draws())
    assert distance.shape == (DRAWS, 1, 1)
    assert distance.min() > 1e-2


def test_any_positive_factor_cancels_under_division():
    q, k = draws(50)
    for factor in (1e-6, 0.3, 7.0, 1e6):
        assert doubled(softless.mechanism("linear", phi="relu"), q, k, factor).min() < 1e-12


def test_subtraction_with_relu_still_confuses_queries_that_relu_erases():
    q, k = draws(50)
    assert (doubled(softless.mechanism("inline", phi="relu"), -q.abs(), k) < 1e-3).all()


def test_equal_keys_make_every_query_equal():
    q, k = draws(20)
    assert (doubled("inline", q, k[:, :, :1].expand_as(k)) < 1e-3).all()


def test_the_published_threshold_confuses_queries_that_see_one_key():
    """If only the largest score is within tau, for q and for 2q, both rows are that one key."""
    q, k = torch.ones(1, 1, 1, 1, dtype=torch.float64), torch.tensor([[[[3.0], [0.0], [-1.0]]]], dtype=torch.float64)
    assert doubled("threshold", q, k).item() == 0
    assert doubled(softless.mechanism("threshold", tail="mean"), q, k).item() > 0.01


@pytest.mark.parametrize("mechanism", ["inline", "hydra"])
def test_every_query_of_a_head_has_one_collinear_distance(mechanism):
    q, k = torch.randn(2, 2, 4, 5, 8, dtype=torch.float64)
    assert doubled(mechanism, q, k).shape == (2, 4, 5)


def test_row_distance_is_over_all_matrices_of_a_head():
    a, b = torch.randn(2, 1, 6, 3, 4, dtype=torch.float64)
    expected = (a[0, 3:, 2] - b[0, 3:, 2]).norm()
    assert row_distance(a, b, 2)[0, 1, 2] == pytest.approx(expected.item())


def test_collinear_pairs_are_those_with_a_cosine_near_one():
    q = torch.randn(2, 2, 12, 2)
    units = torch.nn.functional.normalize(q.double(), dim=-1)
    cosine = (units @ units.mT).triu(1)
    assert torch.equal(collinear_pairs(q), (cosine > 1 - injectivity.SAME_WAY**2 / 2).sum((2, 3)))


def test_collinear_distance_uses_the_bias_and_scale_of_the_layer():
    """A layer's bias holds its rows apart."""
    q, k = torch.randn(2, 1, 1, 6, 8).unbind()
    bias = 5 * torch.randn(1, 1, 6, 6)
    each = layer(q, k, "softmax", bias=bias, scale=0.2)
    expected = softless.attention_weights(2 * q, k, "softmax", bias=bias, scale=0.2) - each.weights()
    torch.testing.assert_close(collinear_distance(each, each.weights()), expected.norm(dim=-1))


@pytest.mark.parametrize("size", [1.0, 1e4, 1e6, 1e9])
def test_pairs_are_counted_right_whatever_the_size_of_the_weights(size):
    """In multiples of 2^-20, which float64 adds to a large weight without rounding."""
    steps = torch.tensor([0, 200, 900, 1100, 3000, 3100], dtype=torch.float64) / 2**20
    weights = round(size) * torch.randint(-4, 5, (2, 3, 1, 40)).double() + torch.zeros(2, 3, 6, 40)
    weights[..., 7] += steps
    apart = (steps[:, None] - steps).abs()
    expected = int((apart < 1e-3).triu(1).sum())
    assert 0 < expected < 15
    assert confusions(weights).tolist() == [[expected] * 3] * 2
