"""The contest: everyone on the same tensors, numbers that follow from each other, and no one dropped in silence."""

from dataclasses import replace

import pytest
import torch

import softless
from softless import stopwatch
from softless.bench import contest, contestants
from softless.bench.contestants import Contestant
from softless.bench.cost import Shape, Terms, cost, floor_bytes
from softless.errors import ArgumentError, UnsupportedError

SMALL = Terms(shape=Shape(2, 4, 33, 8, 33, 4))
RATE = 1e9


def everyone(*names, terms=SMALL):
    return contestants.contestants({name: softless.mechanism(name) for name in names}, terms, compiled=False)


def held(*names, terms=SMALL, **options):
    results = contest.contest(everyone(*names, terms=terms), terms, rate=RATE, repeats=2, **options)
    return {row["label"]: row for row in results}


def floor(terms, backward=False):
    return floor_bytes(terms, backward=backward)


def test_everyone_is_on_the_list_and_either_timed_or_excused():
    found = held("linear", "inline")
    assert list(found) == [
        "linear", "inline", "SDPA", "linear plain", "linear compiled", "inline plain", "inline compiled",
        "fla chunk", "fla fused_chunk", "flash_bla", "fla chunk alone", "fla fused_chunk alone", "flash_bla alone",
    ]  # fmt: skip
    for row in found.values():
        assert (row["ms"] is None) == (row["skipped"] is not None)
    assert found["inline compiled"]["skipped"] == "compiling takes longer than a quick run"
    assert [found[name]["role"] for name in ("linear", "SDPA", "linear plain", "flash_bla")] == [
        "ours", "sdpa", "plain", "rival",
    ]  # fmt: skip


@pytest.mark.parametrize("backward", [False, True])
def test_ratio_and_share_follow_from_the_times(backward):
    found = held("inline", backward=backward)
    fastest = floor(SMALL, backward) / RATE
    for row in found.values():
        if row["ms"] is not None:
            assert row["ratio"] == pytest.approx(found["SDPA"]["ms"] / row["ms"])
            assert row["share"] == pytest.approx(1e3 * fastest / row["ms"])


def test_tick_is_told_every_label_once_a_turn_and_once_before():
    told = []
    held("inline", tick=told.append)
    assert {told.count(each.label) for each in everyone("inline")} == {3}


def test_the_floor_is_four_tensors_and_eleven_with_the_backward_pass():
    one = 2 * 4 * 33 * 8 * 4
    assert floor(SMALL) == 4 * one == cost(softless.mechanism("inline"), SMALL).floor_bytes
    assert floor(SMALL, backward=True) == 11 * one
    half = replace(SMALL, dtype=torch.bfloat16)
    assert floor(half, backward=True) == 11 * one / 2


def test_grouped_keys_count_once():
    grouped = Terms(shape=Shape(1, 4, 10, 8, 30, 2))
    q, k = 4 * 10 * 8 * 4, 2 * 30 * 8 * 4
    assert floor(grouped) == 2 * q + 2 * k
    assert floor(grouped, backward=True) == 5 * q + 6 * k


def test_extra_memory_leaves_out_what_the_call_gives():
    tensor = 2 * 4 * 33 * 8 * 4
    lean = Contestant("lean", "rival", call=lambda q, _k, _v: q.clone())
    rich = Contestant("rich", "rival", call=lambda q, _k, _v: q.neg().neg())
    found = contest.contest([lean, rich], SMALL, rate=RATE, repeats=1)
    assert [(row["extra_bytes"], row["extra_share"]) for row in found] == [(0, 0), (tensor, 1)]
    trained = held("inline", backward=True)["inline"]
    assert trained["extra_share"] == trained["extra_bytes"] / (4 * tensor)


def test_the_tensors_are_those_of_the_terms():
    terms = Terms(shape=Shape(1, 4, 5, 8, 7, 2), dtype=torch.bfloat16)
    q, k, v = contest.tensors(terms)
    assert (q.shape, k.shape, v.shape) == ((1, 4, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8))
    assert {x.dtype for x in (q, k, v)} == {torch.bfloat16}
    assert torch.equal(q, contest.tensors(terms)[0])


def test_a_job_gives_the_output_and_every_gradient():
    tensors = contest.tensors(SMALL)
    assert len(contest.make_job(softless.attention, tensors, False)()) == 1
    out, *gradients = contest.make_job(softless.attention, tensors, True)()
    assert [x.shape for x in gradients] == [x.shape for x in tensors]
    assert out.requires_grad


@pytest.mark.parametrize("keys", [33, 40, 20])
def test_sdpa_is_causal_where_we_are(keys):
    terms = Terms(shape=Shape(2, 4, 33, 8, keys, 2), is_causal=True)
    tensors, reference = contest.tensors(terms), contestants.sdpa(terms)
    if keys < 33:
        assert reference.absent == "answers NaN to the 13 queries that see no key"
        return
    ours = softless.attention(*tensors, "softmax", is_causal=True)
    assert (reference.call(*tensors) - ours).abs().max() <= 1e-5


def test_causal_plain_formulas_take_weights_then_sums_then_an_excuse(monkeypatch):
    terms = replace(SMALL, is_causal=True)
    numbers = 2 * 4 * 33 * 4
    for free, way in ((10**9, "weights"), (numbers * 33 * 6, "sums")):
        monkeypatch.setattr(stopwatch, "free_bytes", lambda _, free=free: free)
        monkeypatch.setattr(contestants, "SUMS_COPIES", 1)
        assert contestants._causal_by(terms) == way
    monkeypatch.setattr(stopwatch, "free_bytes", lambda _: 10)
    with pytest.raises(UnsupportedError, match=r"forms weights of .* are free; forms sums of"):
        contestants._causal_by(terms)
    assert held("linear", terms=replace(terms, shape=Shape(2, 4, 33, 8, 40, 4)))["linear plain"]["skipped"].endswith(
        "not 33 and 40"
    )


def test_weights_that_would_not_fit_are_an_excuse(monkeypatch):
    monkeypatch.setattr(stopwatch, "free_bytes", lambda _: 1000)
    assert "forms weights of 0.0 GB" in contestants.ours("threshold", softless.mechanism("threshold"), SMALL).absent
    assert contestants.ours("inline", softless.mechanism("inline"), SMALL).absent is None
    reference = replace(SMALL, backend="reference")
    assert contestants.ours("inline", softless.mechanism("inline"), reference).absent is not None


def test_what_a_mechanism_needs_beyond_q_k_and_v_is_made():
    mechanism = softless.mechanism("linear", phi="affine_relu")
    who = contestants.ours("linear", mechanism, SMALL)
    assert who.call(*contest.tensors(SMALL)).shape == (2, 4, 33, 8)


def failing(role, error):
    def call(*_):
        raise error

    return Contestant("it", role, call=call)


def test_a_rival_that_raises_is_excused_by_its_own_words():
    (found,) = contest.contest([failing("rival", TypeError("no\nway"))], SMALL, rate=RATE)
    assert found["skipped"] == "TypeError: no"


def test_running_out_of_memory_is_an_excuse_for_everyone():
    for error in (torch.OutOfMemoryError("CUDA"), RuntimeError("can't allocate memory")):
        (found,) = contest.contest([failing("ours", error)], SMALL, rate=RATE)
        assert found["skipped"] == "ran out of memory at 33 tokens"


def test_our_own_errors_are_raised():
    for error in (UnsupportedError("cannot"), TypeError("a mistake")):
        with pytest.raises(type(error)):
            contest.contest([failing("ours", error)], SMALL, rate=RATE)


def test_tensors_beyond_memory_are_refused_with_both_sizes(monkeypatch):
    monkeypatch.setattr(stopwatch, "free_bytes", lambda _: 10**9)
    with pytest.raises(ArgumentError, match=r"shape 1,8,1048576,64 with 1048576 keys needs about .* GB and 1.0 GB"):
        contest.check_memory(Terms(shape=Shape(1, 8, 2**20, 64, 2**20, 8)))
    contest.check_memory(SMALL)
