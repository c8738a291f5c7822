"""Whole models for equal seconds: how long each one trains, what the runs differ in, and what the page says."""

import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import softless
from softless.errors import ArgumentError, FileError
from softless.train.metrics import Answers
from softless.train.recipe import parse_change, read_recipe
from tests.scripts import script

OPTIONS = {"ridge": "learned", "gain": "dim"}
MACHINE = {"versions": {"torch": "3"}, "machine": {"processor": "an abacus"}}


@pytest.fixture
def tool():
    return script("regress_whole")


@pytest.fixture
def page():
    return script("regress_whole_page")


def timing(model: str, update: float) -> dict[str, Any]:
    return {
        "name": model, "model": model, "status": "done", "update_seconds": update, "updates_per_epoch": 10,
        "parameters": 5_700_000, **MACHINE,
    }  # fmt: skip


def run(model: str, seed: int, top1: float, budget: float = 150) -> dict[str, Any]:
    right = np.arange(1000) < 1000 * top1
    regress = {"name": "regress", **OPTIONS} if model.endswith("regress") else None
    return {
        "name": f"{model}-{seed}", "model": model, "seed": seed, "status": "done", "epochs": 75, "budget": budget,
        "top1": top1, "together": 6, "images": {"train": 9469, "test": 1000}, "seconds": 200.0, "mechanism": regress,
        "recipe": {"batch": 256, "precision": "bf16", "image_size": 128},
        "answers": Answers.of(right).__dict__, **MACHINE,
    }  # fmt: skip


def parsed(tool, *words: str):
    given = tool.arguments().parse_args(words)
    given.data, given.device, given.workers = "x.parquet", "cpu", 0
    return given


def test_the_page_shows_the_records_that_were_kept(tool, page):
    text = page.PAGE.read_text()
    assert tool.fill(text, page.page(page.kept()), page.MARKS) == text


def test_a_faster_model_trains_for_more_epochs(tool, monkeypatch, tmp_path):
    monkeypatch.setattr(tool, "kept", lambda: {part: {} for part in tool.PARTS})
    given = parsed(tool, "train", "--out", str(tmp_path), "--seconds", "150")
    timings = {model: timing(model, 0.2 if "inline" in model else 0.35) for model in tool.MODELS}
    found = tool.trainings(given, {"time": timings, "train": {}})
    assert {(each.model.split("-")[1], each.epochs) for each in found} == {
        ("softmax", 42),
        ("inline", 75),
        ("regress", 42),
    }
    assert [each.seed for each in found] == [0] * 9 + [1] * 9 + [2] * 9  # whole seeds first
    with pytest.raises(ArgumentError, match="deit-softmax must be timed before models are trained"):
        tool.trainings(given, {"time": {k: v for k, v in timings.items() if k != "deit-softmax"}, "train": {}})
    with pytest.raises(ArgumentError, match=r"--seconds is 150, and there are records of 60 s"):
        tool.trainings(given, {"time": timings, "train": {"a": run("deit-softmax", 0, 0.5, budget=60)}})
    given.seconds = 10.0
    with pytest.raises(ArgumentError, match="--seconds 10 are enough for 2 epochs of deit-softmax, and more than 5"):
        tool.trainings(given, {"time": timings, "train": {}})


def test_the_models_of_a_family_differ_in_attention_alone(tool, page):
    for family in page.FAMILIES:
        recipes = {}
        for attention in page.ATTENTIONS:
            changes = [parse_change(f"{k}={v}") for k, v in page.changes_of(f"{family}-{attention}", OPTIONS).items()]
            recipes[attention] = read_recipe(tool.RECIPE, changes)
        assert recipes["regress"].model.mechanism == {"name": "regress", **OPTIONS}
        assert recipes["softmax"].model.name == f"{family}_tiny"
        assert {recipes["inline"].model.name, recipes["regress"].model.name} == {f"inline_{family}_tiny"}
        assert {recipe.model.name for recipe in recipes.values()} <= set(softless.list_models())
        alike = [replace(each, model=replace(each.model, name="", mechanism=None)) for each in recipes.values()]
        assert alike == [alike[0]] * 3


def test_a_model_is_tested_once_after_its_last_update(tool, monkeypatch, tmp_path):
    monkeypatch.setattr(tool, "options_of", lambda _small: OPTIONS)
    given = parsed(tool, "train", "--out", str(tmp_path), "--seconds", "150")
    timings = {model: timing(model, 0.2) for model in tool.MODELS}
    monkeypatch.setattr(
        tool, "records_for", lambda _given: {"time": timings, "train": {"deit-softmax-0": {"budget": 150}}}
    )
    commands = {}
    monkeypatch.setattr(
        tool, "run_packed", lambda runs, words, **_: commands.update({each.name: words(each) for each in runs}) or 0
    )
    tool.train(given)
    assert len(commands) == 26  # one of 27 is kept already
    words = " ".join(commands["swin-regress-2"])
    assert "--recipe imagenette" in words
    assert "--seed 2" in words
    assert "--set epochs=75 --set evaluate_every=75" in words
    assert 'model.mechanism={name = "regress", ridge = "learned", gain = "dim"}' in words


def test_the_table_compares_models_of_one_family(page):
    models = {"deit-softmax": 0.70, "deit-inline": 0.72, "deit-regress": 0.76}
    runs = [run(model, seed, top1 + 0.001 * seed) for model, top1 in models.items() for seed in range(3)]
    runs.append({"name": "swin-inline-0", "model": "swin-inline", "status": "diverged", "epochs": 60, "budget": 150})
    records = {"time": {"deit-inline": timing("deit-inline", 0.2)}, "train": {each["name"]: each for each in runs}}
    shown = page.page(records)
    assert "| DeiT-T, patch 8 | inline | 5.7 M | 200.0 | 75 | 72.00, 72.10, 72.20 | 72.10 | +2.00 ± " in shown
    regress = next(line for line in shown.split("\n") if "| regress | " in line)
    assert "+6.00 ± " in regress
    assert "+4.00 ± " in regress
    assert "| Swin-T | inline |  |  | 60 |  | not finite |" in shown
    assert "| CSwin-T | regress |  |  |  |  | not run yet |" in shown
    assert (
        "150 s of updates per run; 9,469 images to train on and 1,000 to test on, batch 256, bf16; 9 runs on" in shown
    )
    assert "regress has ridge learned, gain dim." in shown


def test_keep_adds_to_the_records_that_are_kept(tool, page, tmp_path, monkeypatch):
    for each in (tool, page):
        monkeypatch.setattr(each, "RESULTS", tmp_path / "kept.json")
    with pytest.raises(FileError, match="nothing was measured there"):
        tool.keep(tmp_path)
    (tmp_path / "records").mkdir()
    for seed in range(2):
        (tmp_path / "records" / "train-one.json").write_text(json.dumps(run("deit-inline", seed, 0.5)))
        tool.keep(tmp_path)
    assert [*page.kept()["train"]] == ["deit-inline-0", "deit-inline-1"]
    (tmp_path / "records" / "train-one.json").write_text(json.dumps(run("deit-inline", 2, 0.5, budget=60)))
    with pytest.raises(ArgumentError, match=r"has runs of other seconds than kept\.json, and they cannot be compared"):
        tool.keep(tmp_path)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["time", "--out", "out"], "--data is None, and the parquet file of the training images is needed"),
        (["train", "--out", "out", "--pack", "0"], "--pack is 0, and at least one run is needed"),
        (["keep", "nowhere"], "nowhere: nothing was measured there"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(tool, tmp_path, monkeypatch, capsys, words, complaint):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["regress_whole.py", *words])
    assert tool.main() == 3
    assert capsys.readouterr().err == f"error: {complaint}\n"


@pytest.mark.slow
def test_both_steps_run_at_the_size_of_a_toy(tool, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tool, "MODELS", {"deit-regress": tool.MODELS["deit-regress"]})
    records = tmp_path / "small" / "records"

    def take(step: str, *words: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["regress_whole.py", step, *words, "--small", "--out", str(tmp_path)])
        assert tool.main() == 0
        assert "0 left" in capsys.readouterr().out
        return json.loads(next(records.glob(f"{step}-deit-regress*.json")).read_text())

    timed = take("time")
    an_epoch_and_a_half = 1.5 * timed["update_seconds"] * timed["updates_per_epoch"]
    trained = take("train", "--seconds", str(an_epoch_and_a_half), "--pack", "1")
    assert trained["status"] == "done"
    assert trained["epochs"] == 1
    assert 0 <= trained["top1"] <= 1
    assert trained["mechanism"]["name"] == "regress"
