"""Attention over ranks is attention on one device: outputs and gradients to 1e-12 in float64 (R20)."""

import json
import random
from pathlib import Path

import pytest
import torch

import softless
from softless.errors import ArgumentError
from softless.mechanisms.kernelized import Kernelized
from softless.validation import prepare
from tests.laws.cases import STATEFUL, ask
from tests.parallel.ranks import CASES, MERGED, cut
from tests.ranks import run as start_ranks

TOLERANCE = 1e-12
FIRST = 324  # from there, affine_relu, whose keys differ by query head, meets grouped heads both ways


def run(folder: Path, ranks: int, first: int, count: int) -> list[dict]:
    """What each rank wrote."""
    ended = start_ranks("tests.parallel.ranks", folder, ranks, str(first), str(count))
    assert [each.status for each in ended] == [0] * ranks, "".join(each.said for each in ended)[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def assert_equal(parts: list[dict], count: int) -> None:
    assert all(len(part["cases"]) == count for part in parts)
    assert [case for part in parts for case in part["cases"] if not case["error"] <= TOLERANCE] == []


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run(tmp_path_factory.mktemp("two"), 2, FIRST, len(CASES))


def test_two_ranks_match_one_device(two):
    """Each mechanism and option once: causal or not, masked or not, unevenly cut, with grouped heads."""
    assert_equal(two, len(CASES))


@pytest.mark.slow
def test_three_ranks_match_one_device(tmp_path):
    assert_equal(run(tmp_path, 3, FIRST, len(CASES)), len(CASES))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_200_random_calls_over_ranks_match_one_device(tmp_path, ranks):
    assert_equal(run(tmp_path, ranks, 1000, 200), 200)


def test_every_mechanism_with_a_state_is_asked_and_cuts_leave_some_rank_with_nothing():
    assert {case.name for case in CASES} == {case.name for case in MERGED}
    assert {case.name for case in STATEFUL} - {case.name for case in MERGED} == {
        "cosformer",
        "delta",
        "efla",
        "decay",
        "nearfar",
    }
    assert {case.name for case in MERGED} - {case.name for case in STATEFUL} == {"a2"}  # one that is never causal
    cuts = [cut(random.Random(seed), 2, 3) for seed in range(50)]
    assert any(len(set(places)) < len(places) for places in cuts)


def test_unsupported_calls_over_ranks_raise_one_sentence_and_no_rank_hangs(two):
    for rank, part in enumerate(two):
        assert part["said"] == {
            "scored": "UnsupportedError: mechanism 'softmax' keeps no state that ranks could merge: its queries need "
            "every key of every rank",
            "uneven": f"ArgumentError: 2 queries and 3 keys on rank {rank}: causal attention over ranks needs a key "
            "for every query, and a query for every key",
            "mean of queries": "UnsupportedError: mechanism 'regress' weighs keys by the mean of all queries, which a "
            "rank does not know",
            "places": "UnsupportedError: mechanism 'nearfar' weighs a token by its position in the sequence, which a "
            "rank does not know",
            "apart": f"ArgumentError: 0 queries and 3 keys on rank {rank}: angular attention over ranks needs a key "
            "for every query, and a query for every key",
            "stranger": f"ArgumentError: rank {rank} is not in the group that was passed",
            "shape": "ArgumentError: q has shape [2, 3, 4] and must be [batch, heads, tokens, dim]",
        }


def test_a_rank_without_tokens_is_part_of_the_graph_though_keys_and_values_are_frozen(two):
    """All ranks run backward if one does."""
    assert [part["graphs"] for part in two] == [[True, True]] * 2


def test_attention_over_ranks_without_a_process_group_says_what_to_do():
    x = torch.randn(1, 1, 2, 3)
    with pytest.raises(ArgumentError, match=r"no process group: call torch\.distributed\.init_process_group first"):
        softless.parallel.attention(x, x, x)


@pytest.mark.parametrize("case", MERGED, ids=str)
def test_reading_the_state_of_all_tokens_is_attention(case):
    """The law that the exchange rests on, on one device."""
    at = ask(case, 9, heads=(4, 2), dims=(3, 3))
    assert isinstance(case.made, Kernelized)
    made, call = prepare(at.q, at.k, at.v, case.made, inputs=at.inputs)
    _, state = made.attend_with_state(at.q[:, :, :0], at.k, at.v, None, call)
    found = made.attend_to_state(at.q, at.k, at.v, state, call)
    torch.testing.assert_close(found, softless.attention(*at[:3], case.made, inputs=at.inputs), atol=1e-12, rtol=1e-12)
