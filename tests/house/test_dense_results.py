"""The results on segmentation and detection: what is measured, runs that are stopped, and what the page says."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from softless.errors import ArgumentError, FileError
from softless.train.assemble import Runtime
from softless.train.assemble_dense import train_dense
from softless.train.dense_recipe import SegmentModel, SegmentRecipe
from tests.data import boxed, masked
from tests.scripts import script
from tests.train.jobs import Quiet

ROOT = Path(__file__).parents[2]
FAKE = """
import json, pathlib, signal, sys, time

folder, seconds, status = pathlib.Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
folder.mkdir(parents=True, exist_ok=True)
(folder / "begun").open("a").write("x")
about = {"schema": "softless.run/1", "recipe": {"epochs": 3, "batch": 4, "precision": "bf16"}, "images": {"train": 8}}
(folder / "run.json").write_text(json.dumps(about))


def save(*_):
    (folder / "saved").touch()
    sys.exit(130)


signal.signal(signal.SIGTERM, save)
(folder / "ready").touch()
time.sleep(0 if (folder / "saved").exists() else seconds)
if status:
    sys.exit("error: no luck") if status == 1 else (print("a crash"), sys.exit(status))
machine = {"versions": {"torch": "3"}, "machine": {"processor": "an abacus"}}
(folder / "result.json").write_text(json.dumps(
    {"steps": 6, "best_step": 4, "best_miou": 0.5, "best_top1": 0.75, "seconds": 2.0, **machine}
))
"""


@pytest.fixture
def tool():
    return script("dense_results")


@pytest.fixture
def page():
    return script("dense_page")


@pytest.fixture
def runs(monkeypatch):
    monkeypatch.setattr(script("packed_runs"), "LAST", 0.0)
    return script("dense_runs")


def fake(training: Any, seconds: float = 0.0, status: int = 0) -> list[str]:
    return [sys.executable, "-c", FAKE, str(training.run.folder), str(seconds), str(status)]


def record(backbone: str, head: str, seed: int, score: float, metric: str = "miou", **more: Any) -> dict[str, Any]:
    images = [score + 0.1 * at for at in (-2, -1, 0, 1, 2)] if metric == "miou" else []
    return {
        "name": f"{backbone}-{head}-{seed}", "backbone": backbone, "head": head, "seed": seed, "status": "done",
        "best": 0.6, "together": 5, "images": {"train": 367, "test": 101}, "seconds": 300.0, "classifier": 0.811,
        "recipe": {"epochs": 60, "batch": 16, "precision": "bf16"}, "versions": {"torch": "3"},
        "machine": {"processor": "an abacus"},
        "test": {"numbers": {metric: score / 100}, "images": images, "tested": 233, "parameters": 37_700_000}, **more,
    }  # fmt: skip


def timing(backbone: str, head: str, rate: float | None, *, trains: bool = False) -> dict[str, Any]:
    return {
        "backbone": backbone, "attends": True, "head": head, "trains": trains, "images_per_second": rate,
        "memory_bytes": 2e9, "parameters": 5, "skipped": None if rate else "out of memory",
    }  # fmt: skip


def test_the_page_shows_the_records_that_were_kept(page):
    text = page.PAGE.read_text()
    assert page.fill(text, *page.stored()) == text


def test_the_page_says_what_was_not_run(page):
    shown = page.fill(page.PAGE.read_text(), {part: [] for part in page.PAIRS}, None)
    assert "| UperNet | InLine-Swin-T | not run yet |" in shown
    assert "| Faster R-CNN | PVT-T | not run yet |" in shown
    assert "| CamVid, UperNet with InLine-Swin-T: test mIoU | >= 55 % |  | not run yet |" in shown
    assert page.MISSED not in shown


def test_a_table_shows_seeds_the_difference_from_softmax_and_failures(page):
    ours = [record("inline-swin", "upernet", seed, 58 + 0.1 * seed) for seed in range(3)]
    theirs = [record("swin", "upernet", seed, 57 + 0.1 * seed) for seed in range(3)]
    lost = {"backbone": "pvt", "head": "fpn", "status": "diverged"}
    shown = page.scores("camvid", [*ours, *theirs, lost])
    assert "| UperNet | InLine-Swin-T | 37.7 M | 58.00, 58.10, 58.20 | 58.10 | +1.00 | +0." in shown
    assert "| 60.00 | 81.1 | 45.57 |" in shown
    assert "| Semantic FPN | PVT-T | not finite |" in shown
    assert "| Semantic FPN | InLine-PVT-T | not run yet |" in shown
    assert "367 images to train on, 101 to choose by, 233 to test on; 60 epochs of batch 16, bf16. 6 runs on" in shown


def test_a_missed_bar_is_marked_and_a_reached_one_too(page):
    slow = {"rows": [timing("inline-swin", "", 10.0), timing("swin", "", 9.0), timing("inline-pvt", "", 14.0),
                     timing("pvt", "", 10.0)]}  # fmt: skip
    known = {"pretrain": [record("inline-swin", "", 0, 80)], "camvid": [record("inline-swin", "upernet", 0, 54.9)],
             "bccd": [record("inline-pvt", "faster_rcnn", 0, 76, "ap50")]}  # fmt: skip
    verdicts = {bar.what: bar.verdict for bar in page.bars(known, slow)}
    assert verdicts["CamVid, UperNet with InLine-Swin-T: test mIoU"] == page.MISSED
    assert verdicts["the same: pretraining and training, on a shared GPU"] == "reached"
    assert verdicts["BCCD, Faster R-CNN with InLine-PVT-T: test AP50"] == "reached"
    assert verdicts["InLine-Swin-T against Swin-T, head: none: images/s"] == page.MISSED
    assert verdicts["InLine-PVT-T against PVT-T, head: none: images/s"] == "reached"
    assert verdicts["InLine-PVT-T against PVT-T, head: none: memory of training"] == page.MISSING


def test_the_table_of_speed_shows_ratios_and_what_failed(page):
    document = {
        "rows": [timing("inline-swin", "", 12.0), timing("swin", "", 10.0), timing("swin", "upernet", None)],
        "image_size": [1024, 2048], "batch": 6, "dtype": "bfloat16", "machine": {"processor": "an abacus"},
        "versions": {"torch": "3"},
    }  # fmt: skip
    shown = page.speed(document)
    assert "| InLine-Swin-T, Swin-T | none | forward | 12 | 10 | 1.2x | - | - | 2 | 2 | 1x |" in shown
    assert "| InLine-Swin-T, Swin-T | none | forward+backward | not run yet |" in shown
    assert "Swin-T with head UperNet, forward: out of memory." in shown


def test_the_shares_of_the_images_have_the_miou_as_their_mean(page):
    confusions = np.random.default_rng(0).integers(0, 50, (7, 4, 4))
    confusions[:, 3] = confusions[:, :, 3] = 0  # a class in no image and no answer
    whole = confusions.sum(0)
    right = np.diagonal(whole)[:3]
    miou = (right / (whole.sum(0) + whole.sum(1) - np.diagonal(whole))[:3]).mean()
    shares = page.shares(confusions)
    assert shares.mean() == pytest.approx(miou)
    without = page.shares(confusions[1:]).mean()
    assert without == pytest.approx(miou - (shares[0] - miou) / 6, abs=0.01)  # linear: what one image adds


def test_one_recipe_trains_all_models_of_a_head(tool, runs, tmp_path):
    given = tool.options().parse_args(["train", "--set", "camvid", "--data", "x-train.parquet", "--out", str(tmp_path)])
    given.device, given.workers = "cpu", 0
    alike = set()
    for training in runs.trainings(tmp_path, "camvid", [0]):
        words = " ".join(tool.training_words(training, given))
        assert f"--init {tmp_path}/pretrain/{training.backbone}-0" in words
        for own in (training.run.folder, training.classifier.folder, *words.split()):
            if isinstance(own, Path) or own.startswith("model.") or own == "--set":
                words = words.replace(f" {own}", "")
        alike.add(words)
    assert len(alike) == 1
    assert "--recipe segment-camvid --data x-train.parquet --seed 0" in alike.pop()


def test_a_run_that_fails_is_reported_and_tried_again_and_does_not_stop_the_others(runs, tmp_path, capsys):
    trainings = runs.trainings(tmp_path, "pretrain", [0])
    status = {"pvt": 7, "swin": 1}
    assert runs.run_packed(trainings, lambda each: fake(each, status=status.get(each.backbone, 0)), pack=3) == 1
    shown = capsys.readouterr().out
    assert "pretrain pvt-0                    failed with status 7: a crash" in shown
    assert "pretrain inline-swin-0            best 50.00%, 2 s" in shown
    (lost,) = (training for training in trainings if training.backbone == "swin")
    assert json.loads(lost.record.read_text())["reason"] == "error: no luck"  # softless train: not finite
    assert runs.run_packed(trainings, fake, pack=3) == 0
    begun = {training.backbone: (training.run.folder / "begun").read_text() for training in trainings}
    assert begun == dict.fromkeys(("inline-swin", "swin", "regress-swin", "inline-pvt"), "x") | {"pvt": "xx"}


def test_runs_are_saved_when_the_time_is_over_and_continued(runs, tmp_path, capsys):
    trainings = runs.trainings(tmp_path, "pretrain", [0])[:2]
    began = time.monotonic()
    assert runs.run_packed(trainings, lambda each: fake(each, seconds=60), pack=2, minutes=0.02) == 2
    assert time.monotonic() - began < 10
    assert [(training.run.folder / "saved").exists() for training in trainings] == [True, True]
    assert capsys.readouterr().out.count("stopped") == 2
    assert runs.run_packed(trainings, lambda each: fake(each, seconds=60), pack=2, minutes=1) == 0


def test_a_run_begins_after_its_classifier_and_is_tested_at_its_end(runs, tmp_path, capsys):
    trainings = runs.trainings(tmp_path, "camvid", [0, 1])
    assert [training.seed for training in trainings] == [0] * 5 + [1] * 5  # whole seeds first

    def words(training: Any) -> list[str]:
        if not training.run.result.exists():
            return fake(training)
        test = '{"numbers": {"miou": 0.25}, "images": [], "tested": 4, "parameters": 9}'
        return [sys.executable, "-c", f"open({str(training.tested)!r}, 'w').write({test!r})"]

    assert runs.run_packed(trainings, words, pack=2) == 10
    assert (
        "10 runs need classifiers of inline-swin, swin, regress-swin, inline-pvt and pvt: run pretrain"
        in capsys.readouterr().out
    )
    first = trainings[0].classifier
    first.folder.mkdir(parents=True)
    first.result.write_text('{"best_top1": 0.75}')
    assert runs.run_packed(trainings, words, pack=2) == 8
    assert "camvid inline-swin-upernet-1    best 50.00%, test 25.00%, 2 s" in capsys.readouterr().out
    kept = json.loads(trainings[0].record.read_text())
    assert (kept["best"], kept["classifier"], kept["test"]["numbers"]["miou"]) == (0.5, 0.75, 0.25)


def test_a_call_leaves_out_what_is_kept_already(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "kept", lambda _part: {"pvt-faster_rcnn-0": {}})
    given = tool.options().parse_args(
        ["train", "--set", "bccd", "--data", "x", "--out", str(tmp_path), "--only", "pvt"]
    )
    wanted = []
    monkeypatch.setattr(tool, "run_packed", lambda runs, _words, **_options: wanted.extend(runs) or 0)
    tool.work(given, "bccd", (0, 1), list)
    assert [training.name for training in wanted] == ["pvt-faster_rcnn-1"]
    given.only = ["plumbus"]
    with pytest.raises(ArgumentError, match="--only has plumbus, and the backbones are inline-swin, swin"):
        tool.work(given, "bccd", (0,), list)


def pair(seed: int) -> tuple[bytes, bytes]:
    pixels, mask = masked.drawn(seed)
    mask[mask == masked.VOID] = 11
    return masked.png(pixels), masked.png(mask)


def camvid(folder: Path) -> Path:
    """A set as that of CamVid."""
    for part in ("train", "val", "test"):
        masked.parquet(folder / f"scenes-{part}.parquet", [pair(seed) for seed in range(4)])
    return folder / "scenes-train.parquet"


def bccd(folder: Path) -> Path:
    """A set as that of BCCD."""
    rows = [boxed.row(seed) for seed in range(12)]
    path = boxed.parquet(folder / "cells.parquet", [{**row, "labels": [1, 2]} for row in rows])
    table = pq.read_table(path)
    pq.write_table(table.append_column("split", [["train"] * 6 + ["val"] * 4 + ["test"] * 2]), path)
    return path


def test_no_run_is_chosen_on_the_images_that_test_it(tool, tmp_path):
    scenes, cells = camvid(tmp_path), bccd(tmp_path)
    assert tool.test_images("camvid", scenes, tmp_path).name == "scenes-test.parquet"
    assert pq.read_table(tool.test_images("bccd", cells, tmp_path))["split"].to_pylist() == ["test"] * 2
    (tmp_path / "scenes-val.parquet").unlink()  # softless train would choose on the test images
    with pytest.raises(FileError, match=r"scenes-val\.parquet: no such file, and train, val and test are needed"):
        tool.test_images("camvid", scenes, tmp_path)
    tool.cut(cells, tmp_path / "without.parquet", range(6))
    with pytest.raises(FileError, match="its column split lacks test and val"):
        tool.test_images("bccd", tmp_path / "without.parquet", tmp_path)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (
            ["pretrain", "--data", "nothing.parquet", "--out", "out"],
            "--data is nothing.parquet, and there is no such file",
        ),
        (["speed", "--out", "out", "--pack", "0"], "--pack is 0, and at least one process is needed"),
        (["keep", "nowhere"], "nowhere: nothing was measured there"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(tool, tmp_path, monkeypatch, capsys, words, complaint):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["dense_results.py", *words])
    assert tool.main() == 3
    assert capsys.readouterr().err == f"error: {complaint}\n"


def test_a_segmentation_is_tested_image_by_image(tool, tmp_path):
    data = masked.pair_of_files(tmp_path / "data")
    model = SegmentModel(name="inline_pvt_tiny", head="fpn", channels=16, dims=[16, 32], depths=[1, 1], heads=[1, 2])
    recipe = SegmentRecipe(model=model, height=24, width=32, batch=4, epochs=1, warmup_epochs=0)
    outcome = train_dense(tmp_path / "run", recipe, str(data), Quiet(), runtime=Runtime(device="cpu"))
    found = tool.tested(tmp_path / "run", data.with_name("x-test.parquet"), "cpu", 0)
    assert found["numbers"] == pytest.approx(outcome.last)
    assert np.mean(found["images"]) == pytest.approx(100 * outcome.best, abs=1e-3)
    assert (len(found["images"]), found["tested"]) == (4, 4)


def test_a_model_is_timed_with_and_without_attention():
    timer = script("dense_speed")
    setting = timer.Setting(image_size=(32, 64), batch=1)
    for attends in (True, False):
        case = {"backbone": "inline-pvt", "attends": attends, "head": "", "trains": False}
        row = timer.timing(case, setting, timer.TINY_MODEL)
        assert (row["skipped"], row["images_per_second"] > 0, row["memory_bytes"] > 0) == (None, True, True)
        assert timer.told(case | row).startswith(
            "InLine-PVT-T, " + ("" if attends else "without attention, ") + "none, fo"
        )


def test_keep_adds_to_the_records_that_are_kept(tool, page, tmp_path, monkeypatch):
    for each in (tool, page):
        monkeypatch.setattr(each, "RESULTS", tmp_path)
    given = tool.options().parse_args(["keep", str(tmp_path)])
    with pytest.raises(FileError, match="nothing was measured there"):
        tool.keep(given)
    for seed in range(2):
        one = record("pvt", "fpn", seed, 50.0)
        (tmp_path / "records").mkdir(exist_ok=True)
        (tmp_path / "records" / "camvid-one.json").write_text(json.dumps(one))
        tool.keep(given)
    assert [*page.kept("camvid")] == ["pvt-fpn-0", "pvt-fpn-1"]
    assert page.stored()[0]["bccd"] == []


@pytest.mark.slow
def test_every_step_runs_at_the_size_of_a_toy(tool, tmp_path, monkeypatch, capsys):
    rows = [{"image": pair(seed)[0], "label": seed // 24} for seed in range(240)]
    flowers = tmp_path / "flowers-train.parquet"
    for path in (flowers, tmp_path / "flowers-val.parquet"):
        pq.write_table(boxed.pa.Table.from_pylist(rows), path)
    steps = (
        ["pretrain", "--only", "pvt", "--data", str(flowers)],
        ["train", "--set", "camvid", "--only", "pvt", "--data", str(camvid(tmp_path))],
        ["train", "--set", "bccd", "--only", "pvt", "--data", str(bccd(tmp_path))],
        ["speed"],
    )  # fmt: skip
    for step in steps:
        monkeypatch.setattr(sys, "argv", ["dense_results.py", *step, "--out", str(tmp_path / "out"), "--small"])
        assert tool.main() == 0
        assert capsys.readouterr().out.splitlines()[-1] == "0 left"
