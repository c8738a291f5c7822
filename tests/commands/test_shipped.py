"""From a run to weights that ship: benchmarks/shipped.py keeps a run, and the commands use what it wrote."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import softless as library
from softless.errors import ArgumentError, FileError
from softless.models import shipped
from softless.train.tasks.classify import trained
from tests.scripts import script

RECIPE = Path(__file__).parent / "quick.toml"
NAME = "softmax_digits"
SIZES = ("--set", "model.mechanism=softmax", "--set", "model.local=false", "--set", "model.patch_size=2")


tool = script("shipped")


@pytest.fixture
def run(softless, tmp_path, monkeypatch) -> Path:
    """A finished run on the digits, plain softmax; and an empty folder of weights that ship."""
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "weights")
    result = softless("train", "--recipe", str(RECIPE), "--set", "ema=0.5", *SIZES, "--out", "run")
    assert result.exit_code == 0, result.stderr
    return tmp_path / "run"


@pytest.fixture
def kept(run) -> Path:
    return tool.keep(run, NAME, None, "cpu")


def test_a_kept_run_is_the_model_that_evaluate_measures_rounded_to_float16(softless, run, kept):
    best, about = trained(run)
    model = library.create_model(NAME, pretrained=True)
    assert kept == shipped.FOLDER / f"{NAME}.safetensors"
    assert all(tensor.dtype == torch.float16 for tensor in load_file(kept).values())
    for name, tensor in best.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor.half().float()), name
    document = shipped.read_document(kept)
    assert document["top1"] == pytest.approx(json.loads(softless("evaluate", "run", "--json").stdout)["top1"], abs=0.02)
    assert document["test_images"] == 360
    assert document["recipe"] == json.loads(json.dumps(about["recipe"]))
    assert model.pretrained_cfg["mean"] == tuple(about["recipe"]["augment"]["mean"])
    assert str(run.parent) not in json.dumps(document)


def test_the_page_has_a_row_and_a_line_for_each_model(kept):
    text = tool.section()
    assert f"| `{NAME}` | `inline_deit_tiny` | softmax | " in text
    assert f"- `{NAME}` saw 1,437 images of 8 x 8 pixels from digits for " in text
    page = tool.PAGE.read_text()
    assert text in tool.fill(page, text, tool.MARKS)
    kept.unlink()
    assert tool.section() == tool.NONE


@pytest.mark.parametrize(
    ("limit", "most", "sentence"),
    [("MOST_PARAMETERS", 99, "run has .* parameters, and a model may have 99"), ("MOST_BYTES", 99, "may have 99")],
)
def test_a_model_above_the_limits_is_not_kept(run, monkeypatch, limit, most, sentence):
    monkeypatch.setattr(tool, limit, most)
    with pytest.raises(ArgumentError, match=sentence):
        tool.keep(run, NAME, None, "cpu")
    assert not shipped.FOLDER.exists()


@pytest.mark.parametrize("name", ["deit_tiny", "Digits", "../digits", ""])
def test_a_name_that_is_taken_or_no_name_is_refused(run, name):
    with pytest.raises(ArgumentError, match="is no new name"):
        tool.keep(run, name, None, "cpu")


def test_an_unfinished_run_and_numbers_beyond_float16_are_refused(run):
    large = torch.nn.Linear(2, 1)
    large.weight.data.fill_(1e6)
    with pytest.raises(FileError, match="float16 cannot hold the numbers of weight"):
        tool.rounded(large)
    (run / "result.json").unlink()
    with pytest.raises(FileError, match="run is not finished"):
        tool.keep(run, NAME, None, "cpu")


def test_probe_uses_the_weights_that_ship_unless_a_file_is_given(softless, kept):
    words = ("probe", NAME, "--images", "4", "--json")
    found = json.loads(softless(*words).stdout)
    assert (found["weights"], found["data"], found["samples"]) == ("trained", "digits", "images of 8 x 8 pixels")
    assert found["verdict"] is not None
    save_file({name: 0 * tensor for name, tensor in load_file(kept).items()}, "zeros.safetensors")
    found = json.loads(softless(*words, "--weights", "zeros.safetensors").stdout)
    assert found["weights"] == "zeros.safetensors"
    assert found["layers"][0]["score_range"]["mean"] == 0


def test_convert_makes_layers_of_a_model_that_ships_linear(softless, kept, tmp_path):
    options = "--samples", "40", "--budget", "100%", "--steps", "2", "--no-compare", "--json"
    result = softless("convert", NAME, *options)
    assert result.exit_code == 0, result.stderr
    assert all(layer["converted"] for layer in json.loads(result.stdout)["layers"])
    again = library.load_converted(tmp_path / "converted/model")
    assert again(torch.zeros(1, 3, 8, 8)).shape == (1, 10)


def test_convert_refuses_images_of_other_classes(softless, kept):
    document = shipped.read_document(kept) | {"classes": [*"abcdefghij"]}
    save_file(load_file(kept), kept, {shipped.METADATA: json.dumps(document)})
    result = softless("convert", NAME, "--no-compare")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (3, "", 1)
    assert (
        f"{NAME} knows 10 classes (a, b, c, ...), and digits has 10 classes (0, 1, 2, ...): give images"
        in result.stderr
    )
