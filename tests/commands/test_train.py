"""`softless train`: what it writes and says, how it goes on, and wrong words in one line."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch.distributed as dist

from softless.commands import train as verb
from softless.data import open_splits
from softless.errors import FileError, NonFiniteError
from softless.train import assemble
from softless.train.assemble import Runtime
from softless.train.choose import TypicalSize, fitting, typical_size
from softless.train.devices import leave
from softless.train.loop import Interrupted
from tests.commands.conftest import HEEDS_CTRL_C
from tests.commands.tiny import words
from tests.data.pictures import class_names, encoded, folder, parquet

ROOT = Path(__file__).parents[2]
TRAINED = [
    "schema",
    "out",
    "recipe",
    "model",
    "parameters",
    "steps",
    "best_step",
    "best_top1",
    "last",
    "seconds",
    "skipped",
]
EVALUATED = ["schema", "target", "step", "data", "device", "images", "top1", "top5", "ece", "loss", "images_per_second"]


def test_a_training_writes_its_folder_and_says_what_it_reached(softless, flowers, tmp_path):
    result = softless(*words("--out", "a"))
    assert (result.exit_code, result.stderr) == (0, "")
    recipe, images, model, updates, one, two, last = result.stdout.splitlines()
    assert recipe == "recipe   tiny.toml"
    assert images == "images   10 to train on, 4 to test on, 2 classes; 24 x 20 pixels, seen in 8 x 8"
    assert re.fullmatch(r"model    inline_deit_tiny, [\d.]+ k parameters, cpu", model)
    assert updates == "updates  4: 2 epochs of 2, batch 4"
    assert one.startswith("epoch   1/2   loss ")
    assert "top-1 " in two
    assert last.endswith("softless evaluate a")
    assert {path.name for path in (tmp_path / "a").iterdir()} == {
        "run.json", "log.jsonl", "last", "best", "tensorboard", "result.json",
    }  # fmt: skip
    about = json.loads((tmp_path / "a/run.json").read_text())
    assert about["classes"] == ["lily", "rose"]
    assert about["recipe"]["model"]["dims"] == 8
    assert list((tmp_path / "a/tensorboard").glob("events*"))


def test_the_json_schemas_are_frozen(softless, flowers):
    document = json.loads(softless(*words("--out", "a", "--json")).stdout)
    assert list(document) == TRAINED
    assert (document["schema"], document["steps"]) == ("softless.train/1", 4)
    assert list(document["last"]) == ["top1", "top5", "ece", "test_loss"]
    result = softless("evaluate", "a", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert list(found) == [*EVALUATED, "by_class", "skipped"]
    assert (document["skipped"], found["skipped"]) == (0, {})
    assert (found["schema"], found["images"], list(found["by_class"])) == ("softless.evaluate/1", 4, ["lily", "rose"])
    assert (found["top1"], found["step"]) == (document["best_top1"], document["best_step"])


def test_of_several_ranks_the_first_prints_the_json(softless, flowers, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    result = softless(*words("--out", "a", "--json"))
    assert (result.exit_code, result.output) == (0, "")


def test_train_without_arguments_trains_on_the_digits(softless):
    """With the conftest's recipe in place of the real one, which test_bars.py runs."""
    result = softless("train")
    assert result.exit_code == 0, result.output
    assert "chosen for the embedded digits" in result.stdout
    assert result.stderr == ""
    assert "images   digits (embedded): 1,437 to train on, 360 to test on, 10 classes; 8 x 8 pixels" in result.stdout


def test_a_recipe_for_other_images_warns_that_it_trains_on_the_digits(softless, flowers):
    result = softless("train", "--recipe", "tiny.toml", "--set", "image_size=16", "--set", "epochs=1", "--out", "a")
    assert result.exit_code == 0, result.output
    assert result.stderr == "warning: no --data: training on the embedded digits\n"


def test_without_a_recipe_one_is_chosen_that_fits_the_images_and_the_banner_says_so(softless, flowers, tmp_path):
    result = softless("train", "--data", "flowers", "--set", "epochs=1", "--device", "cpu", "--out", "a")
    assert (result.exit_code, result.stderr) == (0, "")
    recipe, images, model, updates, *_ = result.stdout.splitlines()
    assert recipe == (
        "recipe   twins-images, chosen for images of 24 x 20 pixels without a CUDA device, with batch 8 instead of 64; "
        "--recipe NAME takes another"
    )
    assert images.endswith("24 x 20 pixels, seen in 32 x 32")
    assert "221 k parameters" in model
    assert updates == "updates  1: 1 epoch of 1, batch 8"
    assert json.loads((tmp_path / "a/run.json").read_text())["recipe"]["image_size"] == 32


@pytest.mark.parametrize("recipe", [["--recipe", "tiny.toml"], []])
def test_a_set_of_one_part_trains_on_it_if_a_share_is_held_out(softless, flowers, tmp_path, recipe):
    parquet(tmp_path / "one.parquet", [0, 1] * 10)
    changes = ["--set", "hold_out=0.2", "--set", "epochs=1"]
    result = softless("train", *recipe, "--data", "one.parquet", *changes, "--device", "cpu", "--out", "a")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines()[1].startswith("images   16 to train on, 4 to test on, 2 classes")


def test_a_recipe_for_much_smaller_images_is_used_with_a_warning(softless, flowers):
    sizes = [word for key in ("image_size=6", "model.patch_size=3") for word in ("--set", key)]
    result = softless(*words("--out", "a", *sizes))
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    result = softless(*words("--out", "b", "--set", "image_size=4"))
    assert result.exit_code == 0, result.output
    assert result.stderr == (
        "warning: recipe 'tiny.toml' shrinks these images from 24 x 20 to 4 x 4 pixels; leave --recipe out to have one "
        "chosen that fits them\n"
    )


@pytest.mark.parametrize(
    ("side", "count", "cuda", "name"),
    [
        (300, 1000, False, "twins-images"),
        (32, 50_000, True, "cifar10"),
        (8, 50_000, True, "cifar10"),
        (500, 7_000, True, "imagenette"),
        (500, 1_281_167, True, "inline_deit_tiny"),
    ],
)
def test_the_recipe_follows_from_size_number_and_machine(side, count, cuda, name):
    chosen, because, changes = fitting("photos", range(count), TypicalSize(side, side + 10, True), cuda)
    assert (chosen, changes) == (name, {})
    assert f"{side} x {side + 10} pixels" in because


def test_only_the_digits_get_the_recipe_of_the_digits():
    assert {fitting(data, range(9), None, cuda)[0] for data in (None, "digits") for cuda in (0, 1)} == {"digits"}
    for cuda in (False, True):
        name, _, changes = fitting("photos", range(9), TypicalSize(8, 8, True), cuda)
        assert name != "digits"
        assert changes == {"batch": "8"}


def test_a_picture_that_is_damaged_does_not_hide_the_size_of_the_others(tmp_path):
    root = folder(tmp_path / "set", {"train": {"a": 3, "b": 3}, "val": {"a": 1, "b": 1}})
    (root / "train/a/0.png").write_bytes(b"")
    assert typical_size(open_splits(root)[0]) == TypicalSize(24, 20, True)


def test_a_run_resumes_from_its_folder_alone(softless, flowers, tmp_path):
    for name, epochs in (("whole", "2"), ("cut", "2")):
        assert softless(*words("--out", name, "--set", f"epochs={epochs}")).exit_code == 0
    for path in (tmp_path / "cut/last").glob("step-00000004/*"):
        path.unlink()
    result = softless("train", "--out", "cut", "--resume")
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("warning: the checkpoint cut/last/step-00000004 has no manifest.json; ")
    assert result.stderr.count("\n") == 1
    assert result.stdout.count("continuing after update 2 of 4\n") == result.stdout.count("continuing") == 1
    assert (tmp_path / "cut/log.jsonl").read_bytes() == (tmp_path / "whole/log.jsonl").read_bytes()


def test_teacher_and_init_may_be_other_runs(softless, flowers):
    assert softless(*words("--out", "a")).exit_code == 0
    result = softless(*words("--out", "b", "--teacher", "a", "--init", "a", "--seed", "1"))
    assert result.exit_code == 0, result.output
    result = softless(*words("--out", "c", "--init", "a", "--set", "image_size=16"))  # positions are resampled
    assert result.exit_code == 0, result.output


def test_a_teacher_may_move_but_not_change(softless, flowers, tmp_path):
    assert softless(*words("--out", "a")).exit_code == 0
    assert softless(*words("--out", "b", "--teacher", "a")).exit_code == 0
    (tmp_path / "a").rename(tmp_path / "moved")
    assert softless("train", "--out", "b", "--resume", "--teacher", "moved").exit_code == 0
    assert softless(*words("--out", "a", "--seed", "7")).exit_code == 0
    other = softless("train", "--out", "b", "--resume")
    assert other.exit_code == 3, other.output
    assert "was begun with teacher a, and the best weights of a are other weights" in other.stderr


@pytest.mark.parametrize(
    ("ranks", "runtime", "says"),
    [
        ("1", {}, "softless train --out 'a b' --resume"),
        ("1", {"graph": True, "workers": 4}, "softless train --out 'a b' --resume --workers 4 --graph"),
        (
            "8",
            {"sharing": "fsdp", "on_bad_image": "skip"},
            "torchrun --nproc-per-node 8 -m softless train --out 'a b' --resume --sharing fsdp --on-bad-image skip",
        ),
    ],
)
def test_the_resume_command_repeats_the_options_of_the_run(monkeypatch, ranks, runtime, says):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert verb.resume_command(Path("a b"), Runtime(**runtime)) == says


@pytest.mark.parametrize("change", ["image_size=16", "augment.std=[1.0, 1.0, 1.0]"])
def test_a_teacher_with_another_preparation_of_images_is_refused(softless, flowers, change):
    assert softless(*words("--out", "a")).exit_code == 0
    result = softless(*words("--out", "b", "--teacher", "a", "--set", change))
    assert result.exit_code == 3
    key = change.partition("=")[0]
    assert f"the teacher in a was trained with {key} " in result.stderr


def test_mixup_refuses_a_rank_with_an_odd_number_of_images(softless, flowers, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = softless(*words("--out", "a", "--set", "batch=6", "--set", "mixup=0.5"))
    assert result.exit_code == 3
    assert "mixup and cutmix mix pairs, and a part of batch 6 has 3 images" in result.stderr


@pytest.mark.parametrize("cache", ["true", "false"])
def test_images_that_are_skipped_are_counted_and_named(softless, flowers, tmp_path, cache):
    for seed, part in enumerate(("train", "val")):
        sound, _ = encoded(seed), folder(tmp_path / "many", {part: {"a": 0, "b": 0}})
        for number in range(1000):
            (tmp_path / f"many/{part}/{'ab'[number % 2]}/{number}.png").write_bytes(sound)
        (tmp_path / f"many/{part}/a/8.png").write_bytes(sound[:-30])
    skip = ["--data", "many", "--on-bad-image", "skip"]
    changes = [
        word for key in ("batch=500", "epochs=1", "augment.crop_share=1.0", f"cache={cache}") for word in ("--set", key)
    ]
    result = softless("train", "--recipe", "tiny.toml", "--out", "a", *skip, *changes)
    assert result.exit_code == 0, result.output
    assert "2 images skipped: a/skipped.json" in result.stdout.splitlines()
    named = json.loads((tmp_path / "a/skipped.json").read_text())
    assert {part: list(names) for part, names in named.items()} == {
        "train": ["many/train/a/8.png"],
        "test": ["many/val/a/8.png"],
    }
    assert "damaged" in named["train"]["many/train/a/8.png"]
    assert json.loads((tmp_path / "a/result.json").read_text())["skipped"] == 2
    document = json.loads(softless("evaluate", "a", *skip, "--json").stdout)
    assert (document["images"], document["skipped"]) == (999, named["test"])
    assert f"skipped many/val/a/8.png: {named['test']['many/val/a/8.png']}" in softless("evaluate", "a", *skip).stdout


SETS = {
    "one class": lambda at: folder(at, {"train": {"a": 3}, "val": {"a": 1}}),
    "empty class": lambda at: folder(at, {"train": {"a": 3, "b": 0}, "val": {"a": 1}}),
    "one part": lambda at: folder(at, {"": {"a": 3, "b": 2}}),
    "damaged": lambda at: (
        folder(at, {"train": {"a": 4, "b": 4}, "val": {"a": 1, "b": 1}}) / "train/a/0.png"
    ).write_bytes(encoded(1)[:-30]),
}
WRONG = [
    (["--data", "none"], "none: there is no such file or folder"),
    (["--data", "one class"], "it has one class, 'a', and at least two are needed"),
    (["--data", "empty class"], "1 of its 2 classes without images: 'b'"),
    (["--data", "one part"], "images to test on are needed"),
    (["--data", "labels-train.parquet"], "has label 7, and the labels of 2 classes run from 0 to 1"),
    (["--data", "damaged"], "train/a/0.png: it is damaged"),
    (["--recipe", "nonsense"], "recipe 'nonsense' is neither a file nor one of"),
    (["--set", "learning_rate=1"], "'learning_rate' is not a key of a recipe"),
    (["--set", "model.dims=7"], "dims [7] are not multiples of heads [2]"),
    (["--set", "batch=11"], "needs 11 images, and an epoch has 10"),
    (["--set", "precision=fp16", "--device", "cpu"], "precision 'fp16' needs a CUDA device"),
    (["--graph", "--device", "cpu"], "a CUDA graph needs one CUDA device, and this training has a CPU"),
    (["nonsense"], "model 'nonsense' is not one of inline_deit_tiny"),
    (["--out", "/dev/null/run"], "cannot write in the folder '/dev/null/run'"),
    (["--out", "nothing", "--resume"], "nothing holds no run: there is no run.json in it"),
    (["--teacher", "nothing"], "nothing holds no trained model"),
    (["--init", "nothing"], "nothing: there is no such file"),
]


@pytest.mark.parametrize(("given", "says"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_bad_input_is_one_line_and_exit_3(softless, flowers, tmp_path, given, says):
    for name, make in SETS.items():
        if name in given:
            make(tmp_path / name)
    if "labels-train.parquet" in given:
        parquet(tmp_path / "labels-train.parquet", [0, 1, 7, 0])
        parquet(tmp_path / "labels-val.parquet", [0, 1])
        class_names(tmp_path / "labels-classes.json", ["a", "b"])
    given = given if "--out" in given else [*given, "--out", "a"]
    result = softless(*words(*given))
    assert result.exit_code == 3, result.output
    assert result.stderr.count("\n") == 1
    assert says in result.stderr
    assert "Traceback" not in result.output
    begun = (
        "damaged" in given
    )  # it trains until it meets the image; in all other cases the mended command has its folder
    assert (tmp_path / "a").exists() == begun


def test_a_mismatched_checkpoint_or_recipe_is_named(softless, flowers, tmp_path):
    assert softless(*words("--out", "a")).exit_code == 0
    again = softless(*words("--out", "a"))
    assert (again.exit_code, "a holds a run already" in again.stderr) == (3, True)
    other = softless(*words("--out", "a", "--resume", "--set", "lr=0.5"))
    assert (other.exit_code, "was begun with recipe.lr 0.001, and it is 0.5 now" in other.stderr) == (3, True)
    (tmp_path / "flowers/train/rose/9.png").write_bytes(encoded(99))
    moved = softless("train", "--out", "a", "--resume")
    assert moved.exit_code == 3
    assert moved.stderr == (
        "error: the run in a was begun with other images: class 'rose' of flowers had 5 images to train on, and has 6 "
        "now; give the same images, or another folder with --out\n"
    )
    alien = softless("evaluate", "a", "--data", "digits")
    assert (alien.exit_code, "a was trained on 2 classes (lily, rose)" in alien.stderr) == (3, True)
    for recipe in ("", ', "recipe": 3'):
        (tmp_path / "a/run.json").write_text('{"schema": "softless.run/1"' + recipe + "}")
        damaged = softless("train", "--out", "a", "--resume")
        assert (damaged.exit_code, "a/run.json is damaged" in damaged.stderr) == (3, True)


def test_a_number_that_is_not_finite_exits_1(softless, flowers):
    result = softless(*words("--out", "a", "--set", "lr=1e38", "--set", "warmup_lr=1e38"))
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("error: update ")
    assert result.stderr.count("\n") == 1
    once = softless(*words("--out", "b", *(w for k in ("lr=1e38", "clip=0.0", "batch=10") for w in ("--set", k))))
    assert once.exit_code == 1, once.output
    assert once.stderr == "error: the loss on the test images is nan after update 1, and no checkpoint had been saved\n"


@pytest.mark.parametrize(
    ("ending", "left"), [(None, True), (Interrupted(1, 4), True), (NonFiniteError(), True), (FileError(), False)]
)
def test_the_process_group_is_left_when_all_ranks_end(softless, flowers, monkeypatch, ending, left):
    """A disk may be full for one rank alone, which must not wait for the others."""

    def train(*_, watch, **__):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        if ending is not None:
            raise ending
        watch.wanted = False  # there is no outcome to tell of

    monkeypatch.setattr(assemble, "train", train)
    softless(*words("--out", "a"))
    still = dist.is_initialized()
    leave()
    assert still != left


def test_a_logged_loss_is_shown_once(softless, flowers):
    """Losses are read back after updates 3 and 6, and an epoch has two."""
    result = softless(*words("--out", "a", "--set", "log_every=3", "--set", "epochs=4"))
    shown = [line for line in result.stdout.splitlines() if line.startswith("epoch")]
    assert ["loss" in line for line in shown] == [False, True, True, False]


@pytest.mark.parametrize("name", ["train", "evaluate"])
def test_help_fits_a_terminal(softless, name):
    result = softless(name, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, id="Ctrl-C"), pytest.param(signal.SIGTERM, id="SIGTERM", marks=pytest.mark.slow)],
)
def test_a_signal_to_stop_exits_130_saves_and_says_how_to_resume(flowers, tmp_path, number):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", HEEDS_CTRL_C, *words("--out", "a", "--set", "epochs=2000", "--workers", "1")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, cwd=tmp_path, env=env, **pipes) as process:
        log, deadline = tmp_path / "a/log.jsonl", time.monotonic() + 100
        while not (log.exists() and log.stat().st_size > 300) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(process.pid, number)  # as terminals and schedulers do: the worker that decodes gets it too
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert said.startswith("stopped after update ")
    assert said.endswith(" of 4000; to go on: softless train --out a --resume --workers 1\n")
    step = int(said.split()[3])
    assert (tmp_path / f"a/last/step-{step:08d}/manifest.json").exists()


@pytest.mark.parametrize("begun", [False, True])
def test_ctrl_c_before_the_first_update_says_that_nothing_was_saved_or_how_to_go_on(
    softless, flowers, monkeypatch, begun
):
    def interrupted(*_):
        raise KeyboardInterrupt

    where = (verb.TrainingDisplay, "begin") if begun else (verb, "choose_start")
    monkeypatch.setattr(*where, interrupted)
    result = softless(*words("--out", "a"))
    assert result.exit_code == 130
    assert result.stderr == (
        "stopped; to go on, from the start, because no checkpoint was saved yet: softless train --out a --resume\n"
        if begun
        else "stopped before the first update; nothing was saved\n"
    )
    if begun:
        monkeypatch.undo()
        monkeypatch.chdir(flowers.parent)
        assert softless("train", "--out", "a", "--resume").exit_code == 0


def test_missing_options_are_taken_from_the_resumed_run(tmp_path):
    from softless.train.recipe import read_recipe
    from softless.train.run import Run

    asked = {"data": None, "seed": None, "teacher": None, "init": None}
    start = verb.choose_start(tmp_path, None, "deit_tiny", [("epochs", "4")], asked, resume=False, device="cpu")
    assert (start.name, start.recipe.image_size) == ("digits", 8)
    assert (start.recipe.model.name, start.recipe.epochs, start.options) == ("deit_tiny", 4, {**asked, "seed": 0})
    data = str(folder(tmp_path / "x", {"train": {"a": 2, "b": 2}, "val": {"a": 1, "b": 1}}))
    about = {"recipe": asdict(read_recipe("cifar10")), "data": data, "seed": 5, "teacher": "t", "init": "i"}
    Run(tmp_path).begin(about)
    start = verb.choose_start(tmp_path, None, None, [], asked, resume=True, device="cpu")
    assert start.recipe == read_recipe("cifar10")
    assert start.options == {"data": data, "seed": 5, "teacher": Path("t"), "init": Path("i")}
