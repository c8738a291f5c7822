"""`softless train`, `evaluate`, `predict` and `data check` on images with masks."""

import json

import numpy as np
import pytest
from PIL import Image

from tests.data.masked import encoded, pair_of_files, parquet

TINY = """
task = "segment"
command = "softless train --recipe tiny.toml --data data/x-train.parquet"
height = 24
width = 32
batch = 4
epochs = 2
warmup_epochs = 0
lr = 1e-2
log_every = 1
[model]
name = "inline_pvt_tiny"
dims = [16, 32]
depths = [1, 1]
heads = [1, 2]
head = "fpn"
channels = 16
"""
NUMBERS = ["miou", "pixel_accuracy", "test_loss"]


@pytest.fixture
def squares(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)
    return pair_of_files(tmp_path / "data")


def words(*more):
    return ["train", "--recipe", "tiny.toml", "--data", "data/x-train.parquet", "--device", "cpu", *more]


def test_a_segmentation_trains_resumes_and_is_evaluated(softless, squares):
    result = softless(*words("--out", "a"))
    assert (result.exit_code, result.stderr) == (0, "")
    recipe, images, model, updates, one, two, last = result.stdout.splitlines()
    assert recipe == "recipe   tiny.toml"
    assert images == "images   8 with masks to train on, 4 to test on, 3 classes, seen in 24 x 32"
    assert model.startswith("model    inline_pvt_tiny with fpn, ")
    assert updates == "updates  4: 2 epochs of 2, batch 4"
    assert "mIoU " in one
    assert "pixel accuracy " in two
    assert last.startswith("best mIoU ")
    assert softless("train", "--out", "a", "--resume", "--device", "cpu").exit_code == 0
    shown = softless("evaluate", "a", "--device", "cpu").stdout.splitlines()
    assert shown[0] == "4 images of data/x-train.parquet, cpu"
    assert [line.split()[0] for line in shown if line] == [
        "4", "mIoU", "pixel", "speed", "class", "ground", "red", "blue",
    ]  # fmt: skip


def test_evaluate_gives_the_numbers_of_the_run_and_the_schemas_are_frozen(softless, squares):
    document = json.loads(softless(*words("--out", "a", "--json")).stdout)
    assert list(document) == [
        "schema", "out", "recipe", "model", "parameters", "steps", "best_step", "best_miou", "last", "seconds",
        "skipped",
    ]  # fmt: skip
    assert (document["schema"], list(document["last"])) == ("softless.train/1", NUMBERS)
    found = json.loads(softless("evaluate", "a", "--json", "--device", "cpu", "--batch", "3").stdout)
    assert list(found) == [
        "schema", "target", "step", "data", "device", "images", "pixels", "miou", "pixel_accuracy", "loss",
        "images_per_second", "by_class", "recall", "skipped",
    ]  # fmt: skip
    assert (found["schema"], found["images"], found["pixels"]) == ("softless.evaluate-masks/1", 4, 4 * 24 * 31)
    assert found["miou"] == pytest.approx(document["best_miou"], abs=1e-6)
    assert list(found["by_class"]) == ["ground", "red", "blue"]


def test_predict_draws_the_classes_onto_pictures_and_writes_masks(softless, squares, tmp_path):
    assert softless(*words("--out", "a")).exit_code == 0
    (tmp_path / "photos/inner").mkdir(parents=True)
    (tmp_path / "photos/one.png").write_bytes(encoded(0)[0])
    (tmp_path / "photos/inner/two.png").write_bytes(encoded(1, height=40, width=30)[0])
    result = softless("predict", "a", "photos", "--out", "answers", "--device", "cpu")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines()[0].startswith("answers/inner/two.png: ")
    assert result.stdout.endswith("2 pictures in answers\n")
    mask = np.asarray(Image.open(tmp_path / "answers/inner/two-mask.png"))
    assert mask.shape == (40, 30)
    assert {*mask.ravel()} <= {0, 1, 2}
    with Image.open(tmp_path / "answers/one.png") as drawn:
        assert drawn.width > 32  # the legend is beside it
    document = json.loads(
        softless("predict", "a", "data/x-test.parquet", "--out", "b", "--json", "--device", "cpu").stdout
    )
    assert (document["schema"], document["task"], len(document["images"])) == ("softless.predict/1", "segment", 4)
    first = document["images"][0]
    assert first["name"] == "data/x-test.parquet[row 0]"
    assert first["files"] == ["b/x-test-000000.png", "b/x-test-000000-mask.png"]
    assert sum(first["classes"].values()) == pytest.approx(1)


def test_predict_overwrites_neither_a_picture_nor_an_answer(softless, squares, tmp_path):
    assert softless(*words("--out", "a")).exit_code == 0
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/one.png").write_bytes(encoded(0)[0])
    (tmp_path / "linked").symlink_to("photos")
    (tmp_path / "links").mkdir()
    (tmp_path / "links/one.png").symlink_to("../photos/one.png")
    for source, out in (("photos", "photos"), ("photos/one.png", "linked"), ("photos", "links"), ("links", "photos")):
        result = softless("predict", "a", source, "--out", out, "--device", "cpu")
        says = f"error: --out {out}: this would overwrite the input picture {out}/one.png: give another folder\n"
        assert (result.exit_code, result.stderr) == (3, says)
    (tmp_path / "photos/one-mask.png").write_bytes(encoded(1)[0])
    result = softless("predict", "a", "photos", "--out", "b", "--device", "cpu")
    assert (result.exit_code, result.stderr) == (3, (
        "error: --out b: the answers for photos/one-mask.png and photos/one.png would both be b/one-mask.png: "
        "rename one of the pictures\n"
    ))  # fmt: skip
    assert not (tmp_path / "b").exists()
    assert (tmp_path / "photos/one.png").read_bytes() == encoded(0)[0]


def test_predict_replaces_its_own_answers_and_no_other_file(softless, squares, tmp_path):
    assert softless(*words("--out", "a")).exit_code == 0
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/one.png").write_bytes(encoded(0)[0])
    call = ("predict", "a", "photos", "--device", "cpu", "--out")
    for _ in range(2):
        assert softless(*call, "answers").exit_code == 0
    document = json.loads((tmp_path / "answers/predict.json").read_text())
    assert document["files"] == ["one-mask.png", "one.png"]
    assert [each["name"] for each in document["images"]] == ["photos/one.png"]
    for name, why in (
        ("one-mask.png", "this would overwrite {}: give another folder"),
        ("predict.json", "{} is there, and predict did not write it: give another folder"),
    ):
        (tmp_path / "mine").mkdir(exist_ok=True)
        (tmp_path / "mine" / name).write_bytes(b"{}")
        result = softless(*call, "mine")
        assert (result.exit_code, result.stderr) == (3, f"error: --out mine: {why.format(f'mine/{name}')}\n")
        assert (tmp_path / "mine" / name).read_bytes() == b"{}"


def test_pictures_of_one_name_have_answers_of_their_own(softless, squares, tmp_path):
    assert softless(*words("--out", "a")).exit_code == 0
    for seed, name in enumerate(("one.png", "one.webp", "x/one.png", "y/one.png")):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / name).write_bytes(encoded(seed)[0])
    assert softless("predict", "a", "photos", "--out", "b", "--device", "cpu").exit_code == 0
    drawings = {str(path.relative_to(tmp_path / "b")) for path in (tmp_path / "b").rglob("*.png")}
    assert {name for name in drawings if "-mask" not in name} == {
        "one.png.png", "one.webp.png", "x/one.png", "y/one.png",
    }  # fmt: skip
    assert len(drawings) == 8


def test_predict_of_a_classifier_writes_its_best_classes(softless, flowers, tmp_path):
    assert softless("train", "--recipe", "tiny.toml", "--data", "flowers", "--out", "f").exit_code == 0
    result = softless("predict", "f", "flowers/val/rose/0.png", "--out", "answers", "--device", "cpu")
    assert result.exit_code == 0, result.output
    lines = (tmp_path / "answers/0.txt").read_text().splitlines()
    assert {line.split()[1] for line in lines} == {"rose", "lily"}
    assert sum(float(line.split()[0]) for line in lines) == pytest.approx(1, abs=1e-3)


def test_data_check_counts_the_classes_and_names_bad_masks(softless, squares, tmp_path):
    result = softless("data", "check", "data/x-train.parquet")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "train: 8 images of 24 x 32, 0 bad, 3.1% void" in result.stdout
    assert result.stdout.endswith("All 12 images fit their masks.\n")
    parquet(tmp_path / "data/x-test.parquet", [encoded(1), (encoded(2)[0], encoded(3, height=9)[1])])
    result = softless("data", "check", "data/x-train.parquet")
    assert result.exit_code == 1
    assert "row 1]: its mask has 32 x 9 pixels, and the image 32 x 24\n" in result.stdout
    assert result.stdout.endswith("1 bad among 10 images.\n")
    document = json.loads(softless("data", "check", "data/x-train.parquet", "--json").stdout)
    assert (document["schema"], document["ok"]) == ("softless.data-check-masks/1", False)
    assert list(document["parts"][0]) == [
        "part", "images", "fingerprint", "smallest", "largest", "classes", "void", "damaged",
    ]  # fmt: skip
    assert softless("data", "check", "data/x-train.parquet", "--recipe", "digits").exit_code == 3


WRONG = [
    (["--teacher", "b"], "--teacher: a segmentation learns from masks alone"),
    (["--data", "none.parquet"], "none.parquet: there is no such parquet file or folder of images and masks"),
    (["--set", "image_size=8"], "'image_size' is not a key of a segmentation recipe: only recipes of task 'classify'"),
    (["--set", "masks.classes=[]", "--data", "nameless.parquet"], "its classes have no names: list them in"),
    (["--set", "masks.void=[1]"], "masks.void has 1, which is the number of class 'red'"),
    (["--set", "model.head=unet"], "model.head is 'unet' and must be one of upernet, fpn"),
    (["--set", "batch=16"], "a batch of 16 needs 16 images, and an epoch has 8: set a batch of at most 8\n"),
    (["--data", "bad.parquet", "--set", "hold_out=0.5", "--set", "masks.classes=['a', 'b', 'c']"], "2 of 2 masks are"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "says"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_bad_input_is_one_line_and_exit_3(softless, squares, tmp_path, given, says):
    parquet(tmp_path / "nameless.parquet", [encoded(0)])
    parquet(tmp_path / "bad.parquet", [(encoded(0)[0], b"")] * 4)
    result = softless(*words(*given, "--out", "a"))
    assert result.exit_code == 3, result.output
    assert result.stderr.count("\n") == 1
    assert says in result.stderr
    assert not (tmp_path / "a").exists()


def test_masks_need_a_recipe_and_predict_needs_a_run(softless, squares, tmp_path):
    result = softless("train", "--data", "data/x-train.parquet", "--out", "a")
    assert result.exit_code == 3
    assert "data/x-train.parquet holds masks: give a recipe for them, such as segment-camvid" in result.stderr
    result = softless("train", "--recipe", "tiny.toml", "--out", "a")
    assert "recipe 'tiny.toml' trains a segmentation, and needs images with masks" in result.stderr
    result = softless("predict", "none", "data", "--out", "b")
    assert (result.exit_code, result.stderr) == (
        3, "error: none is no run, and the run of a model for images is needed\n",
    )  # fmt: skip
