"""Ranks see disjoint parts of one order, whose union is all of it; resuming anywhere gives the rest (R14, R20)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from softless.data.sampler import ResumableSampler, key
from softless.errors import ArgumentError

SIZES = st.integers(1, 60)
SEEDS = st.integers(0, 2**40)
RANKS = st.integers(1, 7)
REPEATS = st.integers(1, 3)


def samplers(length, ranks, **options):
    return [ResumableSampler(length, rank=rank, ranks=ranks, **options) for rank in range(ranks)]


@given(length=SIZES, seed=SEEDS, ranks=RANKS, repeats=REPEATS, epoch=st.integers(0, 1000), shuffle=st.booleans())
def test_ranks_have_disjoint_parts_and_together_all(length, seed, ranks, repeats, epoch, shuffle):
    parts = samplers(length, ranks, seed=seed, repeats=repeats, shuffle=shuffle)
    for part in parts:
        part.set_epoch(epoch)
    places = [place for part in parts for place in part.places().tolist()]
    assert sorted(places) == list(range(length * repeats))
    images = [image for part in parts for image in part]
    assert sorted(images) == sorted(list(range(length)) * repeats)
    assert [len(list(part)) for part in parts] == [len(part) for part in parts]
    assert {len(part) - part.batches(1, complete=True) for part in parts} <= {0, 1}


@given(length=SIZES, seed=SEEDS, ranks=RANKS, later=RANKS, repeats=REPEATS, data=st.data())
def test_resuming_at_any_position_on_any_number_of_ranks_gives_the_rest(length, seed, ranks, later, repeats, data):
    before = samplers(length, ranks, seed=seed, repeats=repeats)
    epoch, used = data.draw(st.integers(0, 9)), data.draw(st.integers(0, length * repeats // ranks))
    for part in before:
        part.set_epoch(epoch)
    passed = [list(part)[:used] for part in before]
    for part in before:
        part.advance(used)
    (state,) = {tuple(part.state_dict().items()) for part in before}
    after = samplers(length, later, seed=seed, repeats=repeats)
    for part in after:
        part.load_state_dict(dict(state))
        part.set_epoch(epoch)  # going on with the epoch is not beginning it
    rest = [list(part) for part in after]
    assert sorted(image for part in passed + rest for image in part) == sorted(list(range(length)) * repeats)
    if later == ranks:
        fresh = samplers(length, ranks, seed=seed, repeats=repeats)
        for part in fresh:
            part.set_epoch(epoch)
        assert [a + b for a, b in zip(passed, rest, strict=True)] == [list(part) for part in fresh]


@given(length=st.integers(20, 60), seed=SEEDS)
def test_the_order_is_a_function_of_seed_and_epoch_alone(length, seed):
    torch.manual_seed(seed % 2**32)
    first = ResumableSampler(length, seed=seed)
    orders = []
    for epoch in range(3):
        first.set_epoch(epoch)
        orders.append(list(first))
    torch.rand(3)
    second = ResumableSampler(length, seed=seed)
    second.set_epoch(2)
    assert list(second) == orders[2]
    assert orders[0] != orders[1] != orders[2]
    assert list(ResumableSampler(length, seed=seed + 1)) != orders[0]


def test_iterating_does_not_move_the_position():
    sampler = ResumableSampler(10, seed=0)
    ahead = iter(sampler)
    next(ahead)
    assert list(sampler) == list(sampler)
    assert sampler.state_dict() == {"epoch": 0, "position": 0}


def test_a_new_epoch_begins_at_its_beginning():
    sampler = ResumableSampler(10, seed=0)
    sampler.advance(99)
    assert (len(sampler), sampler.batches(1, complete=True), sampler.position) == (0, 0, 10)
    sampler.set_epoch(1)
    assert (len(sampler), sampler.position) == (10, 0)


def test_without_shuffling_the_order_is_that_of_the_set():
    assert list(ResumableSampler(5, seed=3, shuffle=False, repeats=2)) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_an_order_is_the_same_on_every_machine():
    assert list(ResumableSampler(8, seed=1)) == [6, 3, 0, 7, 2, 1, 4, 5]


def test_keys_of_different_numbers_differ():
    keys = {key(a, b, c) for a in range(8) for b in range(8) for c in range(8)}
    assert len(keys) == 512
    assert all(0 <= value < 2**63 for value in keys)
    assert key(1, 2) == key(1, 2) != key(2, 1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"length": 0}, "length is 0 and must be at least 1"),
        ({"seed": -1}, "seed is -1 and must be at least 0"),
        ({"repeats": 0}, "repeats is 0 and must be at least 1"),
        ({"rank": 2, "ranks": 2}, "rank 2 is not one of 2 ranks"),
    ],
)
def test_impossible_arguments_are_refused(options, says):
    with pytest.raises(ArgumentError, match=says):
        ResumableSampler(**{"length": 4, "seed": 0} | options)


def test_a_position_of_another_set_is_refused():
    with pytest.raises(ArgumentError, match="position 11 is no place in epochs of 10"):
        ResumableSampler(10, seed=0).load_state_dict({"epoch": 0, "position": 11})
