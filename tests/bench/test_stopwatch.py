"""The stopwatch: turns on a CPU, graphs or events on CUDA, and a copy rate that a copy really has."""

import pytest
import torch

from softless import stopwatch

CPU = torch.device("cpu")


def test_calls_take_turns():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    timings = stopwatch.time_calls(calls, CPU, repeats=3)
    turns = [name for name, before in zip(order, [None, *order], strict=False) if name != before]
    assert turns == ["a", "b"] * 4
    for timing in timings.values():
        assert (timing.repeats, timing.timing, timing.eager_seconds) == (3, "clock", None)
        assert 0 < timing.fastest <= timing.seconds


def test_tick_gets_every_label_once_per_round():
    told = []
    stopwatch.time_calls({"a": lambda: None, "b": lambda: None}, CPU, repeats=2, tick=told.append)
    assert told == ["a", "b"] * 2


def test_a_slow_call_is_repeated_less(monkeypatch):
    monkeypatch.setattr(stopwatch, "SLOW", 0.0)
    timings = stopwatch.time_calls({"a": lambda: None}, CPU, repeats=7)
    assert timings["a"].repeats == stopwatch.SLOW_REPEATS


def test_the_copy_rate_counts_bytes_read_and_written(monkeypatch):
    monkeypatch.setitem(stopwatch.COPY_BYTES, "cpu", 1000)
    monkeypatch.setattr(stopwatch, "seconds_per_call", lambda call: call() or 0.5)
    assert stopwatch.copy_rate(CPU) == 4000


def test_the_thread_count_is_restored():
    before = torch.get_num_threads()
    with stopwatch.threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


@pytest.fixture
def cuda(monkeypatch):
    """A CUDA device of paper: events say 2 s for a graph and 3 s for an ordinary call."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(stopwatch, "_captured", lambda _: "graph")
    monkeypatch.setattr(stopwatch, "_between_events", lambda call, count: [2.0 if call == "graph" else 3.0] * count)
    return torch.device("cuda")


def test_a_graph_is_timed_where_it_can_be_captured(cuda):
    timing = stopwatch.time_calls({"a": lambda: None}, cuda, repeats=4)["a"]
    assert (timing.seconds, timing.timing, timing.repeats) == (2.0, "graph", 4)
    assert timing.eager_seconds is not None


@pytest.mark.parametrize("error", [RuntimeError("not permitted"), torch.OutOfMemoryError("CUDA out of memory")])
def test_what_cannot_be_captured_is_timed_by_events(cuda, monkeypatch, error):
    def fail(_):
        raise error

    monkeypatch.setattr(stopwatch, "_captured", fail)
    timing = stopwatch.time_calls({"a": lambda: None}, cuda, repeats=4)["a"]
    assert (timing.seconds, timing.timing) == (3.0, "events")


def test_a_call_that_fails_by_itself_is_not_hidden(cuda):
    def fail():
        raise RuntimeError("CUDA error: an illegal memory access")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        stopwatch.time_calls({"a": fail}, cuda, repeats=4)


def test_a_slow_call_on_cuda_is_repeated_less(cuda, monkeypatch):
    monkeypatch.setattr(stopwatch, "SLOW", 0.0)
    assert stopwatch.time_calls({"a": lambda: None}, cuda, repeats=7)["a"].repeats == stopwatch.SLOW_REPEATS
