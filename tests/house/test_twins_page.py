"""docs/results.md: what the kept runs say, and nothing else."""

import json
import runpy
import sys
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from softless.errors import ArgumentError, FileError
from softless.study.tables import tables
from softless.study.twins import QUESTIONS, twins_of
from softless.train.recipe import read_recipe
from tests.scripts import script
from tests.study.test_tables import RUNS, runs

ROOT = Path(__file__).parents[2]


trained, drawing, twins = script("trained"), script("curves_picture"), script("twins")


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Two twins, two seeds, as a grid leaves them, kept in one file."""
    folder = tmp_path / "cifar10"
    (folder / "runs").mkdir(parents=True)
    recipe = asdict(read_recipe("twins-cifar10"))
    (folder / "grid.json").write_text(json.dumps({"recipe": recipe}))
    for id_, seed, accuracy in (
        ("softmax", 0, 0.8),
        ("softmax", 1, 0.82),
        ("softmax-relu", 0, 0.7),
        ("softmax-relu", 1, 0.7),
    ):
        record = {
            "schema": "softless.twin/1", "twin": {"id": id_, "label": id_}, "seed": seed, "status": "done",
            "reason": f"it is listed in {folder}/trainings/x.json",
            "accuracy": accuracy, "loss": 1.0, "wall_seconds": 30.0, "together": 2, "recipe": recipe,
            "curve": [{"epoch": n, "accuracy": accuracy * n / 2, "loss": 1.0} for n in (1, 2)],
            "data": "somewhere/train.parquet", "images": {"train": 50_000, "test": 10_000},
            "fingerprint": {}, "versions": {}, "machine": {"device": "a GPU"},
        }  # fmt: skip
        (folder / "runs" / f"{id_}-{seed}.json").write_text(json.dumps(record))
    monkeypatch.setattr(twins, "RESULTS", tmp_path)
    assert twins.keep([folder]) == 0
    return tmp_path / "twins-cifar10.json"


def test_the_page_has_cost_tables_and_curves(kept):
    text = twins.page([kept], [])
    assert "## cifar10, twins" in text
    assert "train.parquet: 50,000 images to train on, 10,000 to test on." in text
    assert "4 runs with 2 seeds on a GPU, 2 at once. They took 2 minutes in total, and the longest took 30 s." in text
    assert "| softmax | 81.00 ± 1.41 | 2 | +0.00 | 72.2 |" in text
    assert "| softmax | 40.5 | 81.0 |" in text
    assert "softmax is 11.0 points ahead of softmax-relu, more than the spread of seeds (4.3)." in text


def test_the_page_repeats_the_command_and_shows_the_picture(kept):
    text = twins.page([kept], [])
    twins_run = "--out runs/cifar10 --twins softmax,softmax-relu --seeds 2 --pack 2 --graph\n"
    assert f"run --recipe twins-cifar10 --data train.parquet {twins_run}" in text
    assert "](pictures/twins-cifar10.svg)" in text
    assert "has changed since" not in text


def test_the_command_leaves_out_what_it_would_do_anyway(kept):
    document = json.loads(kept.read_text())
    run = document["runs"][0]
    every = twins_of([question.id for question in QUESTIONS])
    document["runs"] = [{**run, "twin": vars(twin), "seed": seed} for twin in every for seed in range(3)]
    document["machine"]["device"], document["data"] = "cpu", None
    line = "run --recipe twins-cifar10 --out runs/cifar10 --pack 2 --device cpu\n"
    assert line in twins.command("cifar10", document)


@pytest.mark.parametrize("words", [["twins.py", "run", "--out", "nowhere"], ["loading.py"]])
def test_a_change_without_a_value_is_one_sentence(words, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(sys, "argv", [*words, "--set", "epochs"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "benchmarks" / words[0]), run_name="__main__")
    assert "error: 'epochs' is not name=value" in f"{capsys.readouterr().err}{end.value.code}"


def test_the_page_says_where_the_recipe_is_another_by_now(kept):
    document = json.loads(kept.read_text())
    document["recipe"]["lr"] = 7.0
    document["recipe"]["cost"] = "more"
    document["recipe"]["model"]["dims"] = 8
    kept.write_text(json.dumps(document))
    text = twins.page([kept], [])
    assert "has changed since these runs (`lr`, `model.dims`), so the command trains with other settings." in text


def test_the_picture_has_a_dot_for_each_run_of_a_twin_that_learned(kept):
    runs = json.loads(kept.read_text())["runs"]
    for run in runs:
        run["accuracy"] = 0.1 if run["twin"]["id"] == "softmax-relu" else run["accuracy"]
    drawn = ET.fromstring(twins.picture(twins.groups(runs).values()))
    kinds = [mark.get("class") for mark in drawn]
    assert (kinds.count("seed"), kinds.count("mean"), kinds.count("softmax")) == (2, 1, 1)
    texts = [mark.text for mark in drawn if mark.tag.endswith("text")]
    assert texts[-3:] == ["softmax", "softmax-relu", "10.0 %: did not learn"]


def test_the_curves_are_lines_and_named_where_there_is_room(kept, monkeypatch):
    runs = json.loads(kept.read_text())["runs"]
    for run in runs:
        run["curve"][-1]["accuracy"] = 0.81 if run["twin"]["id"] == "softmax-relu" else run["accuracy"]
    runs.append({**runs[0], "twin": {"id": "hydra", "label": "hydra"}, "curve": [{"epoch": 2, "accuracy": 0.2}]})
    runs.append({**runs[0], "twin": {"id": "taylor", "label": "taylor"}, "curve": []})
    drawn = ET.fromstring(twins.pictures("a", runs)["a-curves"])
    assert [mark.text for mark in drawn if mark.tag.endswith("text")][-3:] == ["softmax", "softmax-relu", "hydra"]
    monkeypatch.setattr(drawing, "FEW", 2)
    drawn = ET.fromstring(twins.pictures("a", runs)["a-curves"])
    lines = {mark.get("class"): mark.get("points") for mark in drawn if mark.tag.endswith("polyline")}
    assert set(lines) == {"curve", "curve softmax", "curve named"}
    assert len(lines["curve softmax"].split()) == 2
    assert [mark.text for mark in drawn if mark.tag.endswith("text")][-2:] == ["softmax", "hydra"]


def test_kept_runs_name_no_place_on_a_machine(kept):
    document = json.loads(kept.read_text())
    assert document["data"] == "train.parquet"
    assert document["runs"][0]["reason"] == "it is listed in trainings/x.json"
    assert len(document["runs"]) == 4
    assert "recipe" not in document["runs"][0]


def finished(folder, model, seed, top1):
    """A run of one epoch, as `softless train` leaves it."""
    folder.mkdir()
    recipe = asdict(read_recipe("digits", [("epochs", "1")]))
    recipe["model"]["name"] = model
    about = {
        "schema": "softless.run/1", "recipe": recipe, "data": "somewhere/train.parquet", "seed": seed,
        "images": {"train": 1_400, "test": 397}, "fingerprint": {}, "classes": ["a", "b"],
    }  # fmt: skip
    result = {
        "steps": 9, "best_step": 9, "best_top1": top1, "last": {"top1": top1, "ece": 0.05}, "seconds": 12.0,
        "versions": {}, "machine": {"device": "a GPU"},
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(about))
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "log.jsonl").write_text(json.dumps({"step": 9, "epoch": 1, "top1": top1}) + "\n")
    return folder


def test_whole_models_are_a_row_each_and_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(trained, "RESULTS", tmp_path)
    runs = [("inline_deit_tiny", 0, 0.9), ("inline_deit_tiny", 1, 0.91), ("deit_tiny", 0, 0.8), ("deit_tiny", 1, 0.79)]
    folders = [finished(tmp_path / f"{model}-{seed}", model, seed, top1) for model, seed, top1 in runs]
    path = trained.keep("digits", folders, 2)
    document = json.loads(path.read_text())
    assert document["data"] == "train.parquet"
    assert document["runs"][0]["curve"] == [{"epoch": 1, "accuracy": 0.9}]
    text = twins.page([], [path])
    assert "train.parquet: 1,400 images to train on, 397 to test on, at 8 x 8; 1 epochs" in text
    assert ", on a GPU, 2 at once." in text
    assert "The recipe has changed since these runs (`epochs`), so the command trains with other settings." in text
    assert (
        "$ softless train deit_tiny --recipe digits --data train.parquet --seed 0 --out runs/deit_tiny-0 --graph"
        in text
    )
    assert "| 90.00, 91.00 | 90.50 ± 0.71 | 0.050 | 12 |" in text
    assert "inline_deit_tiny is 11.0 points ahead of deit_tiny, more than the spread of seeds (3.0)." in text


def test_runs_that_cannot_be_compared_are_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(trained, "RESULTS", tmp_path)
    one, again = (finished(tmp_path / name, "deit_tiny", 0, 0.8) for name in ("one", "again"))
    with pytest.raises(ArgumentError, match=r"again and .*one are both deit_tiny of seed 0"):
        trained.keep("digits", [one, again], 1)
    about = json.loads((again / "run.json").read_text())
    (again / "run.json").write_text(json.dumps({**about, "seed": 1, "images": {"train": 9, "test": 3}}))
    with pytest.raises(ArgumentError, match=r"again and .*one differ in images"):
        trained.keep("digits", [one, again], 1)
    (one / "result.json").unlink()
    with pytest.raises(FileError, match=r"one is not finished: softless train --out .*one --resume"):
        trained.keep("digits", [one], 1)


def test_a_grid_that_is_not_finished_says_so(kept):
    document = json.loads(kept.read_text())
    document["runs"].pop()
    kept.write_text(json.dumps(document))
    assert "3 of 4 runs with 2 seeds" in twins.page([kept], [])


def test_a_grid_is_kept_under_the_name_of_its_recipe(tmp_path):
    with pytest.raises(FileError, match="'twins-mine' is neither a file nor a recipe of softless"):
        twins.keep([tmp_path / "mine"])


def test_a_bar_in_a_twins_name_ends_no_cell(kept):
    document = json.loads(kept.read_text())
    for run in document["runs"]:
        run["twin"]["label"] = "relu(q)/|relu(q)|"
    kept.write_text(json.dumps(document))
    rows = [line for line in twins.page([kept], []).splitlines() if "relu(q)" in line and line.startswith("|")]
    assert len(rows) == 4
    assert all(r"relu(q)/\|relu(q)\| |" in row for row in rows)


def test_the_page_of_results_is_the_one_the_kept_runs_make():
    results = ROOT / "benchmarks/results"
    kept, whole = (sorted(results.glob(f"{kind}-*.json"), key=lambda path: path.stem) for kind in ("twins", "trained"))
    page = ROOT / "docs/results.md"
    assert page.read_text() == twins.page(kept, whole)
    for path in kept:
        for name, drawn in twins.pictures(path.stem, json.loads(path.read_text())["runs"]).items():
            assert (page.parent / f"pictures/{name}.svg").read_text() == drawn


def test_markdown_says_what_the_tables_hold():
    lost = [*runs("linear-leaky", None, None), *runs("inline-leaky", None, None, lost="failed")]
    text = twins.markdown(tables([*RUNS, *lost]))
    assert "### Table 3: Division against subtraction" in text
    assert "| linear relu | 71.00 ± 1.41 | 2 | -10.00 | 77.3 |" in text
    assert "| linear leaky relu | not finite | 0 of 2 |  | 1.5 |" in text
    assert "| inline leaky relu | failed | 0 of 2 |  | 79.8 |" in text
    assert "In the paper (ImageNet-1K, Swin-T): Subtraction gains" in text


def test_markdown_leaves_out_a_column_that_says_nothing():
    windows = [run for id_ in ("inline", "inline-cut8") for run in runs(id_, 0.8)]
    text = twins.markdown(tables(windows))
    assert "| twin | top-1 | seeds | in the paper |\n|---|---|---|---|\n| inline | 80.00 | 1 | 80.2 |" in text


def test_markdown_shows_parameters_where_they_differ():
    sizes = {"inline-local": 61_400}
    sized = [{**run, "parameters": sizes.get(run["twin"]["id"], 58_000)} for run in RUNS]
    assert "| inline + local | 61.4 k | 91.00 ± 1.41 |" in twins.markdown(tables(sized))
