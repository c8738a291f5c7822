"""Weights that ship with softless: a file is a model, loaded to the bit, and what it does not fit is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import softless
from softless.errors import ArgumentError, FileError
from softless.models import shipped

NAME, CLASSES = "inline_flowers", ("lily", "rose", "tulip")
ARCHITECTURE = {"name": "inline_deit_tiny", "dims": 16, "depths": 2, "heads": 2, "patch_size": 4, "global_pool": "avg"}
ARCHITECTURE |= {"mechanism": {"name": "linear", "phi": "relu"}, "local": False}
DOCUMENT: dict[str, Any] = {
    "schema": shipped.SCHEMA,
    "model": {**ARCHITECTURE, "img_size": 16, "num_classes": len(CLASSES)},
    "classes": list(CLASSES),
    "images": {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.2, 0.1], "crop_pct": 1.0, "crop_mode": "squash"},
}
EXPECTED = {
    "architecture": NAME, "input_size": (3, 16, 16), "num_classes": 3, "label_names": CLASSES, "mean": (0.5, 0.4, 0.3),
    "std": (0.2, 0.2, 0.1), "crop_pct": 1.0, "crop_mode": "squash",
}  # fmt: skip


def architecture(**changes: Any) -> torch.nn.Module:
    """The model of the file, with random weights."""
    options = {key: value for key, value in DOCUMENT["model"].items() if key != "name"} | changes
    options["mechanism"] = softless.mechanism("linear", phi="relu")
    return softless.create_model("inline_deit_tiny", **options)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of weights that ship: none yet."""
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "weights")
    return tmp_path / "weights"


@pytest.fixture
def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The float16 weights of the only model that ships."""
    folder.mkdir()
    found = {name: tensor.half() for name, tensor in architecture().state_dict().items()}
    save_file(found, folder / f"{NAME}.safetensors", {shipped.METADATA: json.dumps(DOCUMENT)})
    return found


def test_the_names_of_models_with_weights_are_those_of_the_files(weights, folder):
    assert softless.list_models(pretrained=True) == [NAME]
    assert NAME not in softless.list_models()
    (folder / "readme.txt").write_text("")
    (folder / f"{NAME}.safetensors").rename(folder / "another.safetensors")
    assert softless.list_models(pretrained=True) == ["another"]


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.float64])
def test_a_model_has_the_numbers_of_its_file_in_the_dtype_asked_for(weights, dtype):
    model = softless.create_model(NAME, pretrained=True, dtype=dtype)
    assert model.state_dict().keys() == weights.keys()
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == (dtype or torch.float32)
        assert torch.equal(tensor, weights[name].to(tensor.dtype)), name


def test_a_model_answers_as_its_architecture_with_the_same_weights(weights):
    model, same = softless.create_model(NAME, pretrained=True).eval(), architecture().eval()
    same.load_state_dict(weights)
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(model(images), same(images))


def test_a_model_knows_its_images_and_classes(weights):
    config = softless.create_model(NAME, pretrained=True).pretrained_cfg
    assert {key: config[key] for key in EXPECTED} == EXPECTED


def test_without_pretrained_the_architecture_is_the_same_and_the_weights_are_random(weights):
    model = softless.create_model(NAME)
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == {
        name: tensor.shape for name, tensor in weights.items()
    }
    assert not torch.equal(model.state_dict()["blocks.0.attn.qkv.weight"], weights["blocks.0.attn.qkv.weight"].float())
    other = softless.create_model(NAME, mechanism="inline", depths=1, img_size=32)
    assert (other.config.mechanism.name, other.config.depths, other.config.img_size) == ("inline", (1,), (32, 32))


@pytest.mark.parametrize("num_classes", [0, 5])
def test_another_number_of_classes_keeps_every_weight_but_those_of_the_head(weights, num_classes):
    model = softless.create_model(NAME, pretrained=True, num_classes=num_classes)
    assert model(torch.randn(1, 3, 16, 16)).shape == (1, num_classes or 16)
    assert "label_names" not in model.pretrained_cfg
    kept = {name for name in weights if not name.startswith("head.")}
    own = model.state_dict()
    assert set(own) - kept == ({"head.weight", "head.bias"} if num_classes else set())
    assert all(torch.equal(own[name], weights[name].float()) for name in kept)


def test_rates_may_be_given_because_they_change_no_weight(weights):
    model = softless.create_model(NAME, pretrained=True, drop_rate=0.5, drop_path_rate=0.1)
    assert model.head_drop.p == 0.5
    assert torch.equal(model.state_dict()["norm.weight"], weights["norm.weight"].float())


@pytest.mark.parametrize(
    "options",
    [{"mechanism": "inline"}, {"local": True}, {"img_size": 32}, {"dims": 32}, {"in_chans": 1}, {"global_pool": ""}],
)
def test_an_option_that_the_weights_do_not_fit_is_refused(weights, options):
    ((option, value),) = options.items()
    with pytest.raises(ArgumentError, match=f"{option}={value!r} cannot be given with the trained weights of"):
        softless.create_model(NAME, pretrained=True, **options)


def test_a_model_without_weights_is_refused_with_the_names_that_have_some(weights):
    with pytest.raises(ArgumentError, match=f"ships no trained weights for model 'deit_tiny', only for {NAME}; softle"):
        softless.create_model("deit_tiny", pretrained=True)
    with pytest.raises(ArgumentError, match=f"model 'inline_flower' does not exist: did you mean '{NAME}'"):
        softless.create_model("inline_flower")


def test_an_installation_without_weights_says_so(folder):
    assert softless.list_models(pretrained=True) == []
    with pytest.raises(ArgumentError, match="ships no trained weights for model 'deit_tiny', and none for any other"):
        softless.create_model("deit_tiny", pretrained=True)


def test_a_meta_device_has_no_memory_for_weights(weights):
    with pytest.raises(ArgumentError, match="has no memory to load into"):
        softless.create_model(NAME, pretrained=True, device="meta")


@pytest.mark.parametrize("damage", ["no document", "another schema", "cut short", "no json"])
def test_a_damaged_file_is_refused_in_one_sentence(weights, folder, damage):
    path = folder / f"{NAME}.safetensors"
    text = {"another schema": json.dumps(DOCUMENT | {"schema": "x"}), "no json": "{"}.get(damage)
    if damage == "cut short":
        path.write_bytes(path.read_bytes()[:100])
    else:
        save_file(weights, path, None if text is None else {shipped.METADATA: text})
    with pytest.raises(FileError, match=NAME) as caught:
        softless.create_model(NAME, pretrained=True)
    assert "\n" not in str(caught.value)
