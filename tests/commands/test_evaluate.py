"""`softless evaluate`: what it says of a run or of a file of weights, and wrong words in one line."""

import json

import pytest

from softless.io import checkpoint
from softless.train.tasks import classify
from softless.train.tasks.classify import image_loader
from tests.commands.tiny import words


def test_evaluate_shows_the_scores(softless, flowers):
    assert softless(*words("--out", "a")).exit_code == 0
    result = softless("evaluate", "a")
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["4", "top-1", "top-5", "ECE", "speed", "worst"]


def test_a_loss_that_is_not_finite_exits_1(softless, flowers, tmp_path):
    import torch
    from safetensors.torch import save_file

    import softless as library

    weights = library.create_model("inline_deit_tiny", num_classes=2).state_dict()
    save_file(weights | {"head.bias": torch.full((2,), torch.nan)}, tmp_path / "w.safetensors")
    for more in ([], ["--json"]):
        result = softless("evaluate", "inline_deit_tiny", "--weights", "w.safetensors", "--data", "flowers", *more)
        assert (result.exit_code, result.stdout) == (1, "")
        says = "error: the loss of inline_deit_tiny on the images of flowers is nan: its answers are not numbers\n"
        assert result.stderr.endswith(says)


def test_a_picture_too_thin_to_be_brought_to_size_is_named(softless, flowers, tmp_path):
    from PIL import Image
    from safetensors.torch import save_file

    import softless as library

    Image.new("RGB", (100_000, 1)).save(tmp_path / "flowers/val/rose/thin.png")
    save_file(library.create_model("deit_tiny", num_classes=2).state_dict(), tmp_path / "w.safetensors")
    result = softless("evaluate", "deit_tiny", "--weights", "w.safetensors", "--data", "flowers")
    assert result.exit_code == 3, result.output
    assert "thin.png: its 100000 by 1 pixels are too thin: brought to 248, they are over 50000000" in result.stderr


def test_a_class_the_terminal_has_no_letters_for_is_shown(softless, flowers, tmp_path, monkeypatch):
    for part in ("train", "val"):
        (tmp_path / "flowers" / part / "rose").rename(tmp_path / "flowers" / part / "ros\udce9")
    assert softless(*words("--out", "a")).exit_code == 0
    result = softless("evaluate", "a")
    assert result.exit_code == 0, result.output
    assert r"ros\udce9" in result.stdout


@pytest.mark.parametrize(
    ("name", "prepared"), [("inline_deit_tiny", (0.875, "squash")), ("deit_tiny", (0.9, "center"))]
)
def test_a_model_and_a_file_of_weights_are_evaluated_as_their_authors_do(
    softless, flowers, tmp_path, monkeypatch, name, prepared
):
    from safetensors.torch import save_file

    import softless as library

    def checked(images, recipe, *args, **options):
        assert (recipe.augment.crop_share, recipe.augment.crop_mode) == prepared
        return image_loader(images, recipe, *args, **options)

    monkeypatch.setattr(classify, "image_loader", checked)
    save_file(library.create_model(name, num_classes=2).state_dict(), tmp_path / "w.safetensors")
    result = softless("evaluate", name, "--weights", "w.safetensors", "--data", "flowers", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["images"] == 4


def test_a_run_is_evaluated_whatever_it_was_trained_with(softless, flowers, tmp_path):
    """fp16 on a CPU, and one image at a time where pairs were mixed."""
    assert softless(*words("--out", "a", "--set", "mixup=0.5")).exit_code == 0
    found = checkpoint.newest(best := tmp_path / "a/best")
    found.state["about"]["recipe"]["precision"] = "fp16"
    checkpoint.save(best, 10**6, found.parts, found.state, keep=1)
    result = softless("evaluate", "a", "--batch", "1", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["images"] == 4


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["nonsense"], "'nonsense' is neither the folder of a run nor a model: softless list --models"),
        (["inline_deit_tiny"], "is a model without weights: give --weights FILE"),
        (["flowers"], "holds no trained model"),
        (["flowers", "--weights", "x"], "--weights: flowers is a run, which has its own"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_to_evaluate_is_one_line_and_exit_3(softless, flowers, given, says):
    result = softless("evaluate", *given)
    assert result.exit_code == 3, result.output
    assert result.stderr.count("\n") == 1
    assert says in result.stderr
