"""The bench on a CUDA device: a graph is what the device does, a copy is a copy, and every row has its numbers."""

import json

import pytest
import torch
from typer.testing import CliRunner

import softless
from softless import stopwatch
from softless.bench import contest
from softless.bench.contestants import Contestant, contestants
from softless.bench.cost import Shape, Terms
from softless.cli import app

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
TERMS = Terms(shape=Shape(4, 8, 1024, 64, 1024, 8), dtype=torch.bfloat16, device="cuda")


def test_a_copy_runs_at_the_copy_rate():
    """An add to one tensor moves as many bytes as a copy of it, within a fifth."""
    x, y = (torch.zeros(1 << 29, dtype=torch.bfloat16, device=CUDA) for _ in range(2))
    timing = stopwatch.time_calls({"add": lambda: torch.add(x, 1, out=y)}, CUDA, repeats=10)["add"]
    assert 2 * x.nbytes / timing.seconds == pytest.approx(stopwatch.copy_rate(CUDA), rel=0.2)


def test_a_graph_leaves_launches_out_and_the_eager_time_counts_them():
    x = torch.zeros(16, device=CUDA)

    def many():
        for _ in range(200):
            x.add_(1)

    timing = stopwatch.time_calls({"many": many}, CUDA, repeats=10)["many"]
    assert timing.timing == "graph"
    assert timing.seconds < timing.eager_seconds


def test_what_waits_for_the_device_cannot_be_captured_and_is_timed_all_the_same():
    x = torch.ones(1000, device=CUDA)
    timing = stopwatch.time_calls({"item": lambda: x.sum().item()}, CUDA, repeats=3)["item"]
    assert (timing.timing, timing.repeats) == ("events", 3)
    assert torch.equal(x + 1, torch.full_like(x, 2))  # the device still works
    assert torch.randn(100, device=CUDA).isfinite().all()  # and its random numbers


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_everyone_is_timed_or_excused(is_causal, backward):
    terms = Terms(shape=TERMS.shape, dtype=torch.bfloat16, device="cuda", is_causal=is_causal)
    everyone = contestants({name: softless.mechanism(name) for name in ("linear", "inline")}, terms, compiled=False)
    rate = stopwatch.copy_rate(CUDA)
    for row in contest.contest(everyone, terms, rate=rate, backward=backward, repeats=3):
        if row["role"] in ("ours", "sdpa", "plain"):
            assert row["skipped"] is None
            assert 0 < row["share"] < 1.2
            assert row["eager_ms"] > 0
        else:
            assert (row["ms"] is None) == (row["skipped"] is not None)


def test_extra_memory_counts_what_is_held_beyond_the_output():
    twice = Contestant("twice", "rival", call=lambda q, _k, _v: q.neg().neg())
    (found,) = contest.contest([twice], TERMS, rate=1e12, repeats=1)
    assert found["extra_bytes"] == 4 * 8 * 1024 * 64 * 2


def test_the_command_uses_the_device_and_bfloat16_by_default():
    words = ["bench", "inline", "--shape", "1,4,512,64", "--quick", "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["device"], document["dtype"]) == ("cuda", "bfloat16")
    assert {row["timing"] for row in document["results"][0]["rows"] if row["ms"]} <= {"graph", "events"}
