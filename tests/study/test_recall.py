"""Recall and decoding: the sequences ask for what they showed, runs repeat from their seed, and states stay small."""

import pytest
import torch

from softless.study.text.decoding import cache_bytes, decoding_cost
from softless.study.text.plan import RECIPE, DecodingPlan, RecallPlan
from softless.study.text.recall import KEYS, TRIGGER, RecallRun, pairs_and_keys, trigger_twice
from softless.study.text.twins import TEXT_TWINS, text_twins_named
from softless.study.workers import RunWatcher, execute
from softless.train.assemble import Runtime

PLAN = RecallPlan(updates=3, batch=4, dim=16, inside=(2,), beyond=(3,), tested=8)


def recall_run(out, twin="linear", **more):
    return RecallRun(
        out=out, twin=text_twins_named([twin])[0], seed=0, runtime=Runtime(device="cpu"), plan=PLAN, **more
    )


def test_every_key_is_asked_once_for_the_value_that_followed_it():
    tokens, targets = pairs_and_keys(50, 5, torch.Generator().manual_seed(0))
    assert tokens.shape == targets.shape == (50, 20)
    for row, wanted in zip(tokens.tolist(), targets.tolist(), strict=True):
        shown = dict(zip(row[:10:2], row[1:10:2], strict=True))
        assert len(shown) == 5
        assert sorted(row[10::2]) == sorted(shown)
        assert [place for place, target in enumerate(wanted) if target >= 0] == [10, 12, 14, 16, 18]
        assert [wanted[place] for place in range(10, 20, 2)] == [shown[key] for key in row[10::2]]
        assert all(KEYS <= value < TRIGGER for value in shown.values())


def test_the_trigger_comes_twice_and_asks_for_the_token_after_it():
    tokens, targets = trigger_twice(200, 3, torch.Generator().manual_seed(0))
    for row, wanted in zip(tokens.tolist(), targets.tolist(), strict=True):
        place = row.index(TRIGGER)
        assert row.count(TRIGGER) == 2
        assert row[-1] == TRIGGER
        assert [target >= 0 for target in wanted] == [False] * 11 + [True]
        assert wanted[-1] == row[place + 1] != TRIGGER


@pytest.mark.parametrize("twin", [twin.id for twin in TEXT_TWINS])
def test_every_twin_learns_recall_and_a_run_repeats_from_its_seed(tmp_path, twin):
    first, second = (execute(recall_run(tmp_path / place, twin), None) for place in ("a", "b"))
    assert first["status"] == "done", first["reason"]
    assert first["points"] == second["points"]
    assert [(point["task"], point["tokens"], point["inside"]) for point in first["points"]] == [
        ("recall", 8, True), ("recall", 12, False), ("induction", 8, True), ("induction", 12, False),
    ]  # fmt: skip


def test_a_run_that_must_stop_leaves_no_record(tmp_path):
    run = recall_run(tmp_path, ends=1.0)
    assert RunWatcher(run, lambda *_: None, lambda: False).over()
    assert execute(run, None) is None
    assert not run.record.exists()


def test_a_softmax_cache_grows_with_the_tokens_and_a_state_does_not():
    sizes = {}
    for twin in text_twins_named(["softmax", "linear", "delta"]):
        points = decoding_cost(twin, RECIPE, DecodingPlan(tokens=(256, 512), steps=1))
        assert all(point["seconds"] > 0 for point in points)
        sizes[twin.id] = [point["bytes"] for point in points]
    assert sizes["softmax"][1] > 1.9 * sizes["softmax"][0]
    assert sizes["linear"][0] == sizes["linear"][1]
    assert sizes["delta"][0] == sizes["delta"][1]


def test_the_bytes_of_a_softmax_cache_are_its_keys_and_values():
    from transformers import DynamicCache

    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8), 0)
    assert cache_bytes(cache) == 2 * 2 * 5 * 8 * 4


@pytest.mark.slow
def test_delta_and_softmax_solve_recall_inside_training_and_linear_does_not(tmp_path):
    worst = {}
    for twin in ("softmax", "delta", "linear"):
        run = RecallRun(
            out=tmp_path, twin=text_twins_named([twin])[0], seed=0, runtime=Runtime(device="cpu"), plan=RecallPlan()
        )
        points = [point for point in execute(run, None)["points"] if point["inside"]]
        worst[twin] = min(point["accuracy"] for point in points if point["task"] == "recall")
        assert min(point["accuracy"] for point in points if point["task"] == "induction") >= 0.99
    assert worst["softmax"] >= 0.99
    assert worst["delta"] >= 0.99
    assert worst["linear"] < 0.9
