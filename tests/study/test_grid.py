"""The grid of twins: every run once, in order, whatever interrupts it; and bad twins do not spoil good ones."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from pathlib import Path
from shutil import copytree

import pytest
import torch
from PIL import Image

from softless.data import reading
from softless.errors import ArgumentError, FileError
from softless.study import grid
from softless.study.grid import Schedule, Silent, read_record, run_grid
from softless.study.twin_run import TwinRun, trained_twin
from softless.study.twins import Twin, twins_named
from softless.study.workers import Workers, execute
from softless.train.assemble import Runtime
from softless.train.loop import Interrupted
from softless.train.metrics import Answers
from softless.train.recipe import read_recipe

ROOT = Path(__file__).parents[2]
TINY = read_recipe(str(ROOT / "tests/commands/quick.toml"), [("epochs", "3"), ("checkpoint_every", "1")])
CPU = Runtime(device="cpu")
TIMES = ("seconds", "wall_seconds", "together")


class Notes(Silent):
    """Remembers who ran."""

    def __init__(self):
        self.names, self.begun, self.images, self.shares = [], None, 0, []

    def begin(self, runs, finished):
        self.begun = (runs, finished)

    def decoding(self, images):
        self.images += images

    def tick(self, name, share):
        self.shares.append((name, share))

    def ran(self, record):
        self.names.append(f"{record['twin']['id']}-{record['seed']}")


def ran(out, ids=("softmax", "inline-local"), **options):
    notes = Notes()
    options = {"runtime": CPU, "seeds": (0, 1), "watch": notes, **options}
    twins = [each if isinstance(each, Twin) else twins_named([each])[0] for each in ids]
    return run_grid(out, options.pop("recipe", TINY), twins, **options), notes


def twin_run(out, twin="softmax", **options):
    options = {"base": TINY, "data": None, "runtime": CPU, **options}
    return TwinRun(out=out, twin=twins_named([twin])[0], seed=0, **options)


def without_time(record):
    """The record as its file has it, without what depends on the load of the machine."""
    stored = json.loads(json.dumps(record))
    del stored["machine"]["load_average"]
    return {key: value for key, value in stored.items() if key not in TIMES}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two twins, two seeds, never interrupted."""
    out = tmp_path_factory.mktemp("grid")
    return out, *ran(out)


def test_seed_0_of_every_twin_comes_first(whole):
    out, found, notes = whole
    assert notes.names == ["softmax-0", "inline-local-0", "softmax-1", "inline-local-1"]
    assert notes.begun == (4, 0)
    assert notes.images == 1797
    assert (len(found.records), found.left) == (4, 0)
    assert sorted(path.name for path in (out / "runs").iterdir()) == sorted(f"{name}.json" for name in notes.names)
    assert [share for name, share in notes.shares if name == "softmax-0"] == [n / 6 for n in range(1, 7)]


def test_a_record_has_the_settings_and_the_results_of_a_run(whole):
    record = whole[1].records[1]
    assert list(record) == [
        "schema", "twin", "seed", "status", "reason", "accuracy", "loss", "seconds", "skipped", "answers", "curve",
        "parameters", "wall_seconds", "together", "recipe", "data", "images", "fingerprint", "versions", "machine",
    ]  # fmt: skip
    assert record["schema"] == "softless.twin/2"
    assert (record["status"], record["reason"], record["seed"]) == ("done", None, 0)
    assert record["twin"]["id"] == "inline-local"
    assert record["recipe"]["model"]["mechanism"] == {"name": "inline", "phi": "identity"}
    assert [point["epoch"] for point in record["curve"]] == [1, 2, 3]
    assert record["curve"][-1] == {"epoch": 3, "accuracy": record["accuracy"], "loss": record["loss"]}
    assert record["images"] == {"train": 1437, "test": 360}
    assert record["parameters"] > whole[1].records[0]["parameters"]
    assert 0 < record["seconds"] <= record["wall_seconds"]
    assert record["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]


def test_the_stored_model_has_the_recorded_accuracy(whole):
    out, found, _ = whole
    for record in found.records[:2]:
        model = trained_twin(record, out)
        test = twin_run(out).material().test
        from softless.data.device_augment import finish

        with torch.no_grad():
            answers = model(finish(test.pixels, TINY.augment)).argmax(1)
        assert (answers == test.labels).double().mean().item() == pytest.approx(record["accuracy"], abs=1e-12)
        assert Answers(**record["answers"]).bits().tolist() == (answers == test.labels).tolist()
    assert not (out / "trainings").exists() or not list((out / "trainings").iterdir())


def test_finished_runs_are_skipped_and_missing_runs_are_trained(whole, tmp_path):
    out, found = copytree(whole[0], tmp_path / "grid"), whole[1]
    again, notes = ran(out)
    assert (notes.names, notes.begun, notes.images) == ([], (4, 4), 0)
    assert again.records == found.records
    more, notes = ran(out, ids=("softmax", "inline-local", "taylor"), seeds=(0,))
    assert (notes.names, notes.images) == (["taylor-0"], 0)
    assert len(more.records) == 3


def test_a_run_with_a_damaged_record_is_trained_again(whole, tmp_path):
    out, found = copytree(whole[0], tmp_path / "grid"), whole[1]
    path = out / "runs/softmax-0.json"
    path.write_text("{")
    cut, _ = ran(out, minutes=0)
    assert (len(cut.records), cut.left) == (3, 1)
    again, notes = ran(out)
    assert notes.names == ["softmax-0"]
    assert without_time(again.records[0]) == without_time(found.records[0])


def test_a_run_stopped_in_the_middle_goes_on_to_the_same_numbers(whole, tmp_path):
    expected = whole[1].records[0]
    ran(tmp_path, ids=["taylor"], seeds=(0,), minutes=0)
    halves = iter([False, False, False, True])
    slowly = {"stopped": lambda: time.sleep(0.3) or next(halves)}
    assert execute(twin_run(tmp_path), twin_run(tmp_path).material(), **slowly) is None
    assert not (tmp_path / "runs/softmax-0.json").exists()
    assert (tmp_path / "trainings/softmax-0").is_dir()
    record = execute(twin_run(tmp_path), twin_run(tmp_path).material())
    assert record["wall_seconds"] >= record["seconds"] > 4 * 0.3
    assert without_time(record) == without_time(expected)
    assert without_time(read_record(tmp_path / "runs/softmax-0.json")) == without_time(expected)


def test_a_record_counts_no_more_runs_on_the_device_than_were_waiting(whole, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        grid, "_train_packed", lambda schedule, count, _: asked.append((count, schedule.waiting[0].together))
    )
    out = copytree(whole[0], tmp_path / "grid")
    ran(out, ids=("softmax", "taylor"), pack=4)
    assert asked == [(2, 2)]


@pytest.mark.slow
def test_the_numbers_do_not_depend_on_how_many_run_at_once(whole, tmp_path):
    found, notes = ran(tmp_path, pack=2)
    assert sorted(notes.names) == sorted(f"{twin}-{seed}" for seed in (0, 1) for twin in ("softmax", "inline-local"))
    assert [without_time(record) for record in found.records] == [without_time(record) for record in whole[1].records]
    assert {record["together"] for record in found.records} == {2}
    assert {name for name, share in notes.shares if share == 1} == set(notes.names)


def test_a_process_that_dies_is_a_failure_of_its_run_and_no_other(whole, tmp_path):
    with closing(Workers(1)) as workers:
        workers.start(twin_run(tmp_path))
        first = workers.workers[0].process
        os.kill(first.pid, signal.SIGKILL)
        (record,) = workers.wait(lambda _name, _share: None)
        assert (record["status"], record["reason"]) == ("failed", "its process ended with status -9")
        assert workers.free
        assert workers.workers == []
    assert read_record(tmp_path / "runs/softmax-0.json")["accuracy"] is None
    assert not grid.finished(twin_run(tmp_path))


def test_one_bad_twin_is_recorded_and_the_others_run(tmp_path):
    bad = Twin(id="bad", label="bad", mechanism="linear", options={"phi": "nonsense"})
    found, notes = ran(tmp_path, ids=(bad, "softmax"), seeds=(0,))
    assert notes.names == ["bad-0", "softmax-0"]
    assert [record["status"] for record in found.records] == ["failed", "done"]
    assert found.records[0]["reason"].startswith("ArgumentError: phi 'nonsense' is not one of")
    assert found.left == 1
    _, notes = ran(tmp_path, ids=(bad, "softmax"), seeds=(0,))
    assert notes.names == ["bad-0"]


def test_a_loss_that_is_not_finite_is_a_result(tmp_path, monkeypatch):
    from softless.train.tasks.classify import ClassificationLoss

    monkeypatch.setattr(ClassificationLoss, "__call__", lambda _self, model, part: model(part[0]).sum() * float("nan"))
    found, _ = ran(tmp_path, ids=("linear-identity",), seeds=(0,))
    (record,) = found.records
    assert (record["status"], record["accuracy"], record["curve"]) == ("diverged", None, [])
    assert record["reason"].startswith("update 0 was not made: its loss is nan")
    assert found.left == 0
    assert ran(tmp_path, ids=("linear-identity",), seeds=(0,))[1].names == []


def test_when_the_minutes_are_over_the_rest_is_left(tmp_path):
    found, notes = ran(tmp_path, minutes=0)
    assert (found.records, found.left, notes.names) == ((), 4, [])
    assert not (tmp_path / "trainings/inline-local-0").exists()


def record(twin, seconds, status="done"):
    return {"twin": {"id": twin}, "status": status, "wall_seconds": seconds}


def test_no_run_is_started_that_would_not_end_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(grid.time, "time", lambda: 1000.0)
    tasks = [twin_run(tmp_path, name) for name in ("softmax", "inline", "taylor")]
    known = [record("softmax", 100.0), record("softmax", 90.0), record("inline", 20.0), record("hydra", 1.0, "failed")]
    schedule = Schedule(tasks, known, 1000.0 + 60)
    assert [schedule.expected(each) for each in tasks] == [100.0, 20.0, 70.0]
    assert schedule.next().twin.id == "inline"
    assert schedule.next() is None
    assert [each.twin.id for each in schedule.waiting] == ["softmax", "taylor"]
    assert Schedule(tasks, [], 1000.0 + 1).next().twin.id == "softmax"
    assert Schedule(tasks, known, None).next().twin.id == "softmax"


def test_ctrl_c_leaves_the_run_to_go_on(tmp_path, monkeypatch):
    class Impatient(Silent):
        def tick(self, name, share):
            if share >= 0.5:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        run_grid(tmp_path, TINY, twins_named(["softmax"]), seeds=(0,), runtime=CPU, watch=Impatient())
    assert (tmp_path / "trainings/softmax-0/last").is_dir()
    assert not (tmp_path / "runs/softmax-0.json").exists()


def test_a_grid_refuses_another_recipe_or_other_images(whole):
    out = whole[0]
    other = read_recipe(str(ROOT / "tests/commands/quick.toml"), [("epochs", "2"), ("checkpoint_every", "1")])
    with pytest.raises(ArgumentError, match=r"was begun with recipe.epochs 3, and it is 2 now"):
        ran(out, recipe=other)
    prose = read_recipe(str(ROOT / "tests/commands/quick.toml"), [("epochs", "3"), ("checkpoint_every", "1")])
    assert ran(out, recipe=grid.replace(prose, cost="more"))[1].names == []


def test_a_key_that_came_after_a_grid_has_its_default_there(whole, tmp_path):
    out = copytree(whole[0], tmp_path / "grid")
    about = json.loads((out / "grid.json").read_text())
    del about["recipe"]["accumulate"], about["recipe"]["augment"]["area"]
    (out / "grid.json").write_text(json.dumps(about))
    assert ran(out)[1].names == []
    with pytest.raises(ArgumentError, match=r"was begun with recipe.accumulate 1, and it is 2 now"):
        ran(out, recipe=grid.replace(TINY, accumulate=2))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"recipe": 3}', '{"recipe": {"magic": 1}}'])
def test_a_damaged_grid_raises_a_one_sentence_error(tmp_path, text):
    (tmp_path / "grid.json").write_text(text)
    with pytest.raises(FileError, match=r"grid.json cannot be read"):
        ran(tmp_path)


def test_images_that_are_skipped_are_counted_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "LIMIT", 0.1)
    for number in range(48):
        path = tmp_path / "images" / ("train" if number < 40 else "val") / f"class {number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (5 * number,) * 3).save(path)
    bad = tmp_path / "images/train/class 1/3.png"
    bad.write_bytes(b"torn")
    one = {"ids": ["softmax"], "seeds": (0,), "data": str(tmp_path / "images"), "recipe": grid.replace(TINY, batch=8)}
    skip = Runtime(device="cpu", on_bad_image="skip")
    ran(tmp_path, **one, runtime=skip, minutes=0)
    stopped = twin_run(tmp_path, base=one["recipe"], data=one["data"], runtime=skip)
    assert execute(stopped, stopped.material(), stopped=lambda: True) is None
    named = json.loads((stopped.training / "skipped.json").read_text())
    assert [*named["train"], *named["test"]] == [str(bad)]
    with pytest.raises(FileError, match=r"3.png: it is no intact JPEG"):
        ran(tmp_path, **one)
    (record,) = ran(tmp_path, **one, runtime=skip)[0].records
    assert (record["status"], record["skipped"]) == ("done", 1)


@pytest.mark.parametrize("words", [{"pack": 0}, {"seeds": ()}, {"ids": ()}])
def test_an_empty_grid_is_refused(tmp_path, words):
    with pytest.raises(ArgumentError, match="a grid needs a twin, a seed and a pack of at least 1"):
        ran(tmp_path, **words)


def test_missing_images_raise_a_one_sentence_error(tmp_path):
    with pytest.raises(FileError, match="there is no such file or folder"):
        ran(tmp_path, data=str(tmp_path / "none"))


def test_a_missing_model_raises_an_error(whole, tmp_path):
    with pytest.raises(FileError, match="holds no trained model"):
        trained_twin(whole[1].records[0], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("pack", [1, 2])
def test_a_grid_killed_several_times_ends_with_the_same_records(whole, tmp_path, pack):
    code = f"""
        from pathlib import Path
        from softless.train.assemble import Runtime
        from softless.study.grid import run_grid
        from softless.train.recipe import read_recipe
        from softless.study.twins import twins_named
        recipe = read_recipe("tests/commands/quick.toml", [("epochs", "3"), ("checkpoint_every", "1")])
        twins = twins_named(["softmax", "inline-local"])
        run_grid(Path({str(tmp_path)!r}), recipe, twins, seeds=(0, 1), runtime=Runtime(device="cpu"), pack={pack})
    """
    kills = 0
    for delay in (6.0, 8.0, 10.0, 12.0, None):
        process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, start_new_session=True)
        try:
            process.wait(delay)
            break
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
            time.sleep(0.5)
    assert process.returncode == 0
    assert kills
    found, notes = ran(tmp_path)
    assert notes.names == []
    assert [without_time(each) | {"versions": 0} for each in found.records] == [
        without_time(each) | {"versions": 0} for each in whole[1].records
    ]
