"""InLine's propositions: when no two queries collide, and a pair that does wherever there is one."""

import pytest
import torch

import softless
from softless.errors import UnsupportedError
from softless.probes.injectivity import rank_condition
from tests.probes.colliding import colliding_pair

DIM, KEYS = 6, 20


def keys(rank=None, *, on_plane=False):
    """Of full rank, or in a subspace, or on a plane that misses the origin (where K x = 1 has a solution)."""
    k = torch.randn(KEYS, DIM, dtype=torch.float64)
    if rank is not None:
        k = k[:, :rank] @ torch.randn(rank, DIM, dtype=torch.float64)
    if on_plane:
        k[:, 0] = 1.5
    return k


def reaches_full_rank(condition):
    """[B, G]: whether these keys let an injective phi (or a softmax) tell all queries apart."""
    return condition.rank == condition.features + 1


def weights_of(query, k, mechanism, inputs=None):
    return softless.attention_weights(query[None, None, None], k[None, None], mechanism, inputs=inputs)[0, :, 0]


def assert_collide(k, mechanism, found, inputs=None):
    p, q = found
    a, b = weights_of(p, k, mechanism, inputs), weights_of(q, k, mechanism, inputs)
    assert (p - q).norm() > 1e-3 * (p.norm() + q.norm())
    assert (a - b).norm() <= 1e-9 * b.norm()


def brute_rank(matrix):
    return int(torch.linalg.matrix_rank(matrix))


def test_ranks_equal_those_of_the_matrices_with_a_column_of_ones():
    k = torch.stack([keys(), keys(3), keys(on_plane=True)])[:, None]
    found = rank_condition(k, "softmax")
    with_one = torch.cat([k, torch.ones(3, 1, KEYS, 1)], -1)
    assert found.features == DIM
    assert found.rank.flatten().tolist() == [brute_rank(each) for each in with_one[:, 0]] == [7, 4, 6]
    assert [brute_rank(each) for each in k[:, 0]] == [6, 3, 6]
    assert reaches_full_rank(found).flatten().tolist() == [True, False, False]
    torch.testing.assert_close(found.singular_values, torch.linalg.svdvals(with_one))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-6, 1.0, 1e6, 1e12, 1e30])
def test_ranks_do_not_depend_on_the_scale_of_the_keys(scale, dtype):
    k = torch.stack([keys(), keys(3), keys(on_plane=True), 0 * keys()])[:, None]
    mask = (torch.arange(KEYS) < 15).expand(4, -1)
    for key_mask in (None, mask):
        found = rank_condition((scale * k).to(dtype), "softmax", key_mask=key_mask)
        assert found.rank.flatten().tolist() == [7, 4, 6, 1]


@pytest.mark.parametrize("phi", ["identity", "relu", "elu", "leaky_relu", "softmax"])
def test_the_rank_condition_is_on_the_features_of_the_keys(phi):
    k = keys()[None, None]
    mapped = softless.algebra.feature_maps.ELEMENTWISE[phi](k)
    expected = torch.linalg.svdvals(torch.cat([mapped, torch.ones(1, 1, KEYS, 1)], -1))
    torch.testing.assert_close(rank_condition(k, softless.mechanism("inline", phi=phi)).singular_values, expected)


def test_the_rank_of_large_exponentials_is_finite():
    found = rank_condition(1000 * keys()[None, None], softless.mechanism("inline", phi="exp"))
    assert found.singular_values.isfinite().all()


def test_keys_that_a_relu_all_but_erased_have_the_rank_of_the_ones():
    k = -torch.rand(1, 1, KEYS, DIM)
    k[..., 0] = 1e-42
    found = rank_condition(k, softless.mechanism("inline", phi="relu"))
    assert found.rank.item() == 1
    assert found.singular_values[0, 0, 0].item() == pytest.approx(KEYS**0.5)


def test_padding_takes_no_part_in_the_rank():
    k = keys()[None, None]
    mask = torch.arange(KEYS)[None] < 12
    poisoned = k.masked_fill(~mask[:, None, :, None], torch.nan)
    found, alone = rank_condition(poisoned, "inline", key_mask=mask), rank_condition(k[:, :, :12], "inline")
    torch.testing.assert_close(found.singular_values, alone.singular_values)


def test_ranks_are_counted_at_the_precision_of_the_keys():
    """A plane that float32 can only write down with an error is a plane."""
    k = keys().float()
    k[:, 0] = k[:, 1] + k[:, 2]
    assert not reaches_full_rank(rank_condition(k[None, None], "softmax")).any()


def test_fewer_tokens_than_channels_never_reach_the_rank():
    assert not reaches_full_rank(rank_condition(keys()[None, None, :DIM], "softmax")).any()


@pytest.mark.parametrize("mechanism", ["softmax", "inline", softless.mechanism("inline", phi="leaky_relu")])
def test_no_pair_collides_where_the_propositions_hold(mechanism):
    for _ in range(20):
        k = keys()
        assert reaches_full_rank(rank_condition(k[None, None], mechanism)).all()
        assert colliding_pair(k, mechanism) is None


@pytest.mark.parametrize("phi", ["elu", "exp"])
def test_no_pair_collides_under_subtraction_with_an_injective_map(phi):
    assert colliding_pair(keys(), softless.mechanism("inline", phi=phi)) is None


@pytest.mark.parametrize("lacking", [{"rank": 3}, {"on_plane": True}])
@pytest.mark.parametrize("mechanism", ["softmax", "inline"])
def test_keys_that_fail_the_rank_condition_have_a_colliding_pair(mechanism, lacking):
    k = keys(**lacking)
    assert_collide(k, mechanism, colliding_pair(k, mechanism))


@pytest.mark.parametrize("phi", ["identity", "relu", "leaky_relu", "elu", "exp", "softmax"])
def test_division_has_a_colliding_pair_for_every_feature_map(phi):
    """Proposition 2, on 50 sets of keys."""
    made = softless.mechanism("linear", phi=phi)
    for _ in range(50):
        k = keys()
        assert_collide(k, made, colliding_pair(k, made))


def test_division_has_a_colliding_pair_for_a_learned_feature_map():
    made = softless.mechanism("linear", phi="affine_relu")
    for _ in range(20):
        inputs = {"weight": torch.randn(1, DIM, DIM).double(), "bias": torch.randn(1, DIM).double()}
        k = keys()
        found = colliding_pair(k, made, q=torch.randn(DIM), inputs=inputs)
        assert found is not None
        assert_collide(k, made, found, inputs)


OTHERS = ["taylor", "focused", "efficient", "a2", "cosformer", "hydra"]
OTHERS += [softless.mechanism("softmax", confusion="relu"), softless.mechanism("inline", phi="relu")]
OTHERS += [softless.mechanism("angular", exact=True), softless.mechanism("inline", phi="softmax")]


@pytest.mark.parametrize("mechanism", OTHERS, ids=str)
def test_feature_maps_that_lose_a_part_of_a_query_have_a_colliding_pair(mechanism):
    k = keys()
    assert_collide(k, mechanism, colliding_pair(k, mechanism))


@pytest.mark.parametrize("mechanism", ["threshold", softless.mechanism("topk", k=3)], ids=str)
def test_rules_that_drop_keys_confuse_queries_that_keep_few(mechanism):
    k = keys()
    assert_collide(k, mechanism, colliding_pair(k, mechanism))


EQUAL_KEYS = [
    "softmax",
    "inline",
    "linear",
    "taylor",
    "efficient",
    "threshold",
    softless.mechanism("linear", phi="relu"),
]


@pytest.mark.parametrize("value", [0.0, 0.3, -2.0])
@pytest.mark.parametrize("mechanism", EQUAL_KEYS, ids=str)
def test_equal_keys_have_a_colliding_pair_zero_or_not(mechanism, value):
    k = torch.full((KEYS, DIM), value, dtype=torch.float64)
    assert_collide(k, mechanism, colliding_pair(k, mechanism))


@pytest.mark.parametrize("mechanism", ["softmax", "inline"])
def test_a_search_that_starts_at_zero_finds_a_colliding_pair(mechanism):
    k = keys(3)
    assert_collide(k, mechanism, colliding_pair(k, mechanism, q=torch.zeros(DIM)))


def test_rounding_makes_no_colliding_pair_under_softmax():
    """Scores of a million: rows of q and 2q are the same in floating point, and different in truth."""
    assert colliding_pair(1e6 * keys(), "softmax") is None
    assert colliding_pair(keys(), "softmax", q=1e6 * torch.randn(DIM)) is None


def test_the_search_for_a_pair_starts_at_the_given_query():
    k, q = keys(), torch.randn(DIM, dtype=torch.float64)
    p, other = colliding_pair(k, softless.mechanism("linear", phi="identity"), q=q)
    for each in (p, other):
        assert torch.nn.functional.cosine_similarity(each, q, dim=0).item() == pytest.approx(1)


def test_colliding_pair_takes_keys_in_half_precision():
    assert colliding_pair(keys().bfloat16(), softless.mechanism("linear", phi="relu")) is not None


def test_rows_that_depend_on_other_queries_are_refused():
    with pytest.raises(UnsupportedError, match="a row of 'nystrom' depends on more than its query and the keys"):
        colliding_pair(keys(), "nystrom")
