"""Racing: who takes part, what is derived from the times, and what the memory numbers mean."""

import dataclasses

import pytest
import torch

import softless
from softless import stopwatch
from softless.bench import scaling
from softless.bench.scaling import CASES, study_cases


def qkv(tokens=64, heads=2, dim=8):
    return torch.randn(3, 1, heads, tokens, dim).unbind()


def test_a_race_has_a_lap_for_sdpa_and_for_every_mechanism():
    laps = scaling.race(*qkv(), {"a": "inline", "b": softless.mechanism("linear", phi="relu")}, repeats=3)
    assert [lap.label for lap in laps] == ["SDPA", "a", "b"]
    for lap in laps:
        assert (lap.tokens, lap.head_dim, lap.repeats, lap.skipped) == (64, 8, 3, None)
        assert 0 < lap.fastest <= lap.seconds
        assert lap.peak_bytes >= 64 * 2 * 8 * 4
    assert laps[0].speedup == 1
    assert laps[1].speedup == pytest.approx(laps[0].seconds / laps[1].seconds)


def test_tick_gets_every_label_once_per_round():
    told = []
    scaling.race(*qkv(), {"a": "inline"}, repeats=2, tick=told.append)
    assert told == ["SDPA", "a"] * 3


def test_what_would_not_fit_in_memory_is_skipped_with_a_reason(monkeypatch):
    monkeypatch.setattr(stopwatch, "free_bytes", lambda _: 1000)
    _, linear, explicit = scaling.race(*qkv(), {"inline": "inline", "threshold": "threshold"}, repeats=1)
    assert linear.seconds is not None
    assert explicit.seconds is None
    assert "are free" in explicit.skipped


def test_a_slow_call_is_repeated_less(monkeypatch):
    monkeypatch.setattr(stopwatch, "SLOW", 0.0)
    assert [lap.repeats for lap in scaling.race(*qkv(), {"a": "inline"}, repeats=7)] == [stopwatch.SLOW_REPEATS] * 2


def lap(tokens, seconds, speedup, peak=100):
    return scaling.Lap("a", tokens, 8, seconds, seconds, 3, speedup, peak)


def test_growth_is_two_for_linear_and_four_for_quadratic():
    assert scaling.growth_per_doubling([(10, 5.0), (100, 1.0), (200, 2.0)]) == pytest.approx(2)
    assert scaling.growth_per_doubling([(100, 1.0), (400, 16.0)]) == pytest.approx(4)
    assert scaling.growth_per_doubling([(100, 1.0)]) is None


def test_crossover_is_where_the_speedup_passes_one_for_good():
    assert scaling.faster_from([(100, 0.5), (400, 2.0)]) == 200
    assert scaling.faster_from([(100, 2.0), (200, 0.5), (800, 2.0)]) == 400
    assert scaling.faster_from([(100, 2.0), (200, 3.0)]) == 100
    assert scaling.faster_from([(100, 2.0), (200, 0.9)]) is None
    assert scaling.faster_from([]) is None


def test_a_trend_leaves_out_what_was_skipped():
    skipped = scaling.Lap("a", 400, 8, skipped="too large")
    trend = scaling.trend([lap(100, 1.0, 2.0), lap(200, 4.0, 3.0, 200), skipped])
    assert (trend.seconds_growth, trend.bytes_growth) == (pytest.approx(4), pytest.approx(2))
    assert (trend.crossover, trend.faster_everywhere) == (100, True)
    assert scaling.trend([skipped]).crossover is None


def test_steady_threads_leaves_the_thread_count_alone():
    before = torch.get_num_threads()
    assert stopwatch.steady_threads(size=1000, repeats=2) in (1, before)
    assert torch.get_num_threads() == before


def test_peak_counts_every_byte_that_is_alive_at_once():
    x, cpu = torch.zeros(1000), torch.device("cpu")
    assert stopwatch.peak_bytes(x.neg, cpu) == 4000
    assert stopwatch.peak_bytes(lambda: x.neg().neg(), cpu) == 8000
    assert stopwatch.peak_bytes(lambda: x.neg().neg().neg(), cpu) == 8000
    assert stopwatch.peak_bytes(lambda: x[10:], cpu) == 0


def test_peak_is_what_the_call_adds_not_what_was_there():
    kept, cpu = [torch.zeros(10_000)], torch.device("cpu")
    assert stopwatch.peak_bytes(kept[0].neg, cpu) == 40_000
    assert stopwatch.peak_bytes(kept.clear, cpu) == 0


def test_peak_memory_says_nothing_on_stderr(capfd):
    stopwatch.peak_bytes(lambda: torch.zeros(10), torch.device("cpu"))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("name", "growth"), [("inline", 2), ("linear", 2), ("hydra", 2), ("threshold", 4)])
def test_peak_memory_grows_as_the_form_says(name, growth):
    peaks = []
    for tokens in (512, 1024):
        q, k, v = qkv(tokens)
        peaks.append(stopwatch.peak_bytes(lambda q=q, k=k, v=v: softless.attention(q, k, v, name), q.device))
    assert peaks[1] / peaks[0] == pytest.approx(growth, rel=0.1)


def test_free_memory_is_a_positive_number_or_unknown():
    free = stopwatch.free_bytes(torch.device("cpu"))
    assert free is None or free > 0


def test_a_container_limit_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(stopwatch, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert stopwatch.free_bytes(torch.device("cpu")) == 3000
    (tmp_path / "memory.max").write_text("max\n")
    assert stopwatch.free_bytes(torch.device("cpu")) > 3000


def test_the_study_covers_every_mechanism_that_runs_on_q_k_and_v_alone():
    named = {case.name for case in study_cases()}
    for name in softless.list_mechanisms():
        try:
            mechanism = softless.mechanism(name)
        except softless.errors.ArgumentError:
            continue
        alone = not mechanism.inputs and not mechanism.needs_grid and mechanism.lacks(is_causal=False) is None
        assert (name in named) == alone
    labels = [case.label for case in study_cases()]
    assert len(labels) == len(set(labels))


def test_cases_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CASES[0].label = "x"
