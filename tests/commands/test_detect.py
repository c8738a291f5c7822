"""`softless train`, `evaluate`, `predict` and `data check` on images with boxes, and with masks of objects."""

import json

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as codes

from softless.train.tasks import detect
from tests.data import outlined
from tests.data.boxed import coco, drawn, pair_of_files, parquet, row
from tests.data.masked import png

TINY = """
task = "detect"
height = 32
width = 48
batch = 4
epochs = 1
warmup_epochs = 0
lr = 1e-3
log_every = 1
[model]
name = "inline_pvt_tiny"
dims = [16, 32]
depths = [1, 1]
heads = [1, 2]
head = "retinanet"
channels = 16
"""
NUMBERS = ["ap", "ap50", "ap75", "test_loss"]
MASK_NUMBERS = ["mask_ap", "mask_ap50", "mask_ap75"]
HEADS = ("retinanet", "mask_rcnn")


@pytest.fixture
def rectangles(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)
    return pair_of_files(tmp_path / "data", draw=outlined.row)


def words(*more):
    return ["train", "--recipe", "tiny.toml", "--data", "data/x-train.parquet", "--device", "cpu", *more]


@pytest.mark.parametrize("head", HEADS)
def test_a_detection_trains_is_evaluated_and_draws_its_boxes_and_masks(softless, rectangles, tmp_path, head):
    masks = head == "mask_rcnn"
    result = softless(*words("--out", "a", "--set", f"model.head={head}"))
    assert (result.exit_code, result.stderr) == (0, "")
    _, images, model, _, one, last = result.stdout.splitlines()
    assert images == "images   8 with boxes to train on, 4 to test on, 2 classes, seen in 32 x 48"
    assert model.startswith(f"model    inline_pvt_tiny with {head}, ")
    assert "AP " in one
    assert "AP50 " in one
    assert ("mask AP " in one) == masks
    assert last.startswith("best AP ")
    assert softless("train", "--out", "a", "--resume", "--device", "cpu").exit_code == 0
    shown = softless("evaluate", "a", "--device", "cpu").stdout.splitlines()
    assert shown[0] == "4 images of data/x-train.parquet, cpu"
    assert [line.split()[0] for line in shown if line] == [
        "4", "AP", "AP50", "AP75", "sizes", *["mask"] * (4 * masks), "speed", "class", "red", "blue",
    ]  # fmt: skip
    found = json.loads(softless("evaluate", "a", "--json", "--device", "cpu", "--batch", "3").stdout)
    precisions = ["ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large", "by_class", "by_class50"]
    assert list(found) == [
        "schema", "target", "step", "data", "device", "images", "boxes", *precisions, "masks", "loss",
        "images_per_second", "skipped",
    ]  # fmt: skip
    assert found["masks"] is None or list(found["masks"]) == precisions
    assert (found["schema"], found["images"], found["boxes"]) == ("softless.evaluate-boxes/1", 4, 8)
    best = json.loads((tmp_path / "a/result.json").read_text())
    assert found["ap"] == pytest.approx(best["best_ap"], abs=1e-6)
    assert sorted(best["last"]) == sorted(NUMBERS + MASK_NUMBERS * masks)

    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/one.png").write_bytes(png(drawn(1, 64, 96)[0]))
    result = softless("predict", "a", "photos", "--out", "answers", "--json", "--device", "cpu")
    document = json.loads(result.stdout)
    assert (document["schema"], document["task"]) == ("softless.predict/1", "detect")
    (image,) = document["images"]
    assert image["files"] == ["answers/one.png", "answers/one-boxes.json"]
    boxes = json.loads((tmp_path / "answers/one-boxes.json").read_text())
    assert all(list(box) == ["class", "score", "box", *["mask"] * masks] for box in boxes)
    assert all((box["mask"]["size"], codes.area(box["mask"]) >= 0) == ([64, 96], True) for box in boxes if masks)
    assert image["classes"] == {
        name: max(box["score"] for box in boxes if box["class"] == name) for name in image["classes"]
    }
    with Image.open(tmp_path / "answers/one.png") as picture:
        assert picture.width > 96  # the legend is beside it


def test_predict_says_that_a_picture_has_no_objects(softless, rectangles, tmp_path, monkeypatch):
    assert softless(*words("--out", "a")).exit_code == 0
    (tmp_path / "one.png").write_bytes(png(drawn(1, 64, 96)[0]))
    nothing = (np.zeros((0, 4)), np.zeros(0, int), np.zeros(0), [])
    monkeypatch.setattr(detect, "answered", lambda *_given: nothing)
    result = softless("predict", "a", "one.png", "--out", "answers", "--device", "cpu")
    assert result.stdout == "answers/one.png: no objects\n1 picture in answers\n"


def test_data_check_counts_the_boxes_and_names_bad_ones(softless, rectangles, tmp_path):
    result = softless("data", "check", "data/x-train.parquet")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "train: 8 images of 32 x 48, 0 bad, 16 boxes (" in result.stdout
    assert result.stdout.endswith("All 12 images fit their boxes.\n")
    bad = {**row(2), "boxes": [[0, 0, 9, 9], [5, 5, 5, 9]]}
    parquet(tmp_path / "data/x-test.parquet", [{**row(1), "boxes": [], "labels": []}, bad])
    result = softless("data", "check", "data/x-train.parquet")
    assert result.exit_code == 1
    assert "1 bad, 0 boxes; 1 images have none" in result.stdout
    assert "row 1]: its box 1 (5, 5, 5, 9) is empty: it has no width or no height\n" in result.stdout
    assert result.stdout.endswith("1 bad among 10 images.\n")
    document = json.loads(softless("data", "check", "data/x-train.parquet", "--json").stdout)
    assert (document["schema"], document["ok"]) == ("softless.data-check-boxes/1", False)
    assert list(document["parts"][0]) == [
        "part", "images", "fingerprint", "smallest", "largest", "classes", "without", "small", "medium", "large",
        "crowds", "dropped", "damaged",
    ]  # fmt: skip
    dropping = tmp_path / "drop.toml"
    dropping.write_text(TINY + '[boxes]\nempty = "drop"\nclasses = ["red", "blue"]\n')
    result = softless("data", "check", "data/x-train.parquet", "--recipe", "drop.toml")
    assert "1 empty and dropped" in result.stdout
    assert result.exit_code == 0


def test_data_check_reads_the_masks_that_a_recipe_needs(softless, rectangles, tmp_path):
    (tmp_path / "masks.toml").write_text(TINY.replace("retinanet", "mask_rcnn"))
    words = ["data", "check", "data/x-train.parquet", "--recipe", "masks.toml"]
    assert softless(*words).stdout.endswith("All 12 images fit their boxes and masks.\n")
    parquet(tmp_path / "data/x-test.parquet", [outlined.row(1), outlined.row(2) | {"masks": [png(drawn(2)[0]), None]}])
    assert softless(*words[:3]).stdout.endswith("All 10 images fit their boxes.\n")
    result = softless(*words)
    assert result.exit_code == 1
    assert "row 1]: its mask 0: its pixels are RGB, and a mask has one whole number per pixel\n" in result.stdout
    assert result.stdout.endswith("1 bad among 10 images.\n")


def test_data_check_names_images_that_are_missing(softless, tmp_path):
    coco(tmp_path / "d/train.json", tmp_path / "d/images", [0, 1])
    coco(tmp_path / "d/val.json", tmp_path / "d/images", [2])
    (tmp_path / "d/images/1.png").unlink()
    result = softless("data", "check", "d")
    assert result.exit_code == 1
    assert "d/images/1.png: it cannot be read (No such file or directory)\n" in result.stdout


WRONG = [
    (["--teacher", "b"], "--teacher: a detection learns from boxes alone"),
    (["--data", "none.parquet"], "there is no such parquet file, JSON file or folder of images and boxes"),
    (["--set", "image_size=8"], "'image_size' is not a key of a detection recipe: only recipes of task 'classify'"),
    (["--set", "model.head=mask_rcnn"], "it has columns image, boxes, labels, and masks is needed"),
    (["--set", "boxes.values=[1, 2]"], "its box 0 (2, 4, 22, 31) has class 0, and the classes are 1, 2"),
    (["--set", "batch=16"], "a batch of 16 needs 16 images, and an epoch has 8: set a batch of at most 8\n"),
]


@pytest.mark.parametrize(("given", "says"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_bad_input_is_one_line_and_exit_3(softless, rectangles, tmp_path, given, says):
    parquet(rectangles, [{**row(0), "boxes": [[2, 4, 22, 31]], "labels": [0]}] + [row(seed) for seed in range(7)])
    if "boxes.values=[1, 2]" in given:
        parquet(rectangles, [{**row(0), "boxes": [[2, 4, 22, 31]], "labels": [0]}])
        given = [*given, "--set", "batch=1", "--on-bad-image", "skip"]
    result = softless(*words(*given, "--out", "a"))
    assert result.exit_code == 3, result.output
    assert result.stderr.count("\n") == 1
    assert says in result.stderr
    assert not (tmp_path / "a").exists()


def test_boxes_need_a_recipe(softless, rectangles):
    result = softless("train", "--data", "data/x-train.parquet", "--out", "a")
    assert "data/x-train.parquet holds boxes: give a recipe for them, such as detect-bccd" in result.stderr
    assert result.exit_code == 3
