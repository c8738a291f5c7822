"""Attention over ranks is attention on one device: outputs and gradients to 1e-12 in float64 (R20)."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import softless
from softless.errors import ArgumentError
from softless.functional import prepare
from softless.mechanisms.kernelized import Kernelized
from tests.laws.cases import STATEFUL, ask
from tests.parallel.ranks import CASES, cut

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-12


def run(folder: Path, job: str, ranks: int, *words: int) -> list:
    """What each rank wrote, from processes of their own."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.parallel.ranks", job]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(folder), *map(str, words)],
            cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=500)[1] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0] * ranks, "".join(said)[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def assert_equal(folder: Path, ranks: int, first: int, count: int) -> None:
    parts = run(folder, "equal", ranks, first, count)
    assert all(len(part) == count for part in parts)
    wrong = [case for part in parts for case in part if not case["error"] <= TOLERANCE]
    assert wrong == []


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_together_are_one_device(tmp_path, ranks):
    """Each mechanism and option once: causal or not, masked or not, unevenly cut, with grouped heads.

    From question 264 on: there affine_relu, whose keys differ by query head, meets grouped heads both ways.
    """
    assert_equal(tmp_path, ranks, 264, len(CASES))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "count"), [(2, 200), (3, 200), (4, 200)])
def test_200_questions_to_ranks_together(tmp_path, ranks, count):
    assert_equal(tmp_path, ranks, 1000, count)


def test_every_mechanism_with_a_state_is_asked_and_cuts_leave_some_rank_with_nothing():
    assert {case.name for case in CASES} == {case.name for case in STATEFUL}
    cuts = [cut(random.Random(seed), 2, 3) for seed in range(50)]
    assert any(len(set(places)) < len(places) for places in cuts)


def test_what_ranks_cannot_do_is_one_sentence_and_nobody_waits(tmp_path):
    for rank, said in enumerate(run(tmp_path, "refusals", 2)):
        assert said == {
            "scored": "UnsupportedError: mechanism 'softmax' keeps no state that ranks could merge: its queries need "
            "every key of every rank",
            "uneven": f"ArgumentError: 2 queries and 3 keys on rank {rank}: causal attention over ranks needs a key "
            "for every query, and a query for every key",
            "stranger": f"ArgumentError: rank {rank} is not in the group that was given",
            "shape": "ArgumentError: q has shape [2, 3, 4] and must be [batch, heads, tokens, dim]",
        }


def test_without_a_process_group_it_says_what_to_do():
    x = torch.randn(1, 1, 2, 3)
    with pytest.raises(ArgumentError, match=r"no process group: call torch\.distributed\.init_process_group first"):
        softless.parallel.attention(x, x, x)


@pytest.mark.parametrize("case", STATEFUL, ids=str)
def test_reading_the_state_of_all_tokens_is_attention(case):
    """The law that the exchange rests on, on one device."""
    at = ask(case, 9, heads=(4, 2), dims=(3, 3))
    _, state = softless.attention_with_state(at.q[:, :, :0], at.k, at.v, case.made, inputs=at.inputs)
    assert isinstance(case.made, Kernelized)
    made, call = prepare(at.q, at.k, at.v, case.made, False, None, None, None, at.inputs, None, "auto")
    found = made.attend_to_state(at.q, at.k, at.v, state, call)
    torch.testing.assert_close(found, softless.attention(*at[:3], case.made, inputs=at.inputs), atol=1e-12, rtol=1e-12)
