"""Converting models of images, ours and timm's: undo, saving and loading, and what cannot be converted."""

import json

import pytest
import timm
import torch
from torch import nn

import softless
from softless.conversion.document import verdict
from softless.conversion.layers_images import ImageLayers
from softless.conversion.metrics import METRICS
from softless.conversion.stand_ins import Candidate
from softless.errors import ArgumentError, FileError, SoftlessError, UnsupportedError

LOOSE = {"budget": 1.0, "candidates": ["inline+local"], "steps": 2}
SMALL = {"num_classes": 4, "img_size": 32}
MODELS = {
    "our DeiT": lambda: softless.create_model("deit_tiny", dims=32, depths=2, heads=2, patch_size=8, **SMALL),
    "our Swin": lambda: softless.create_model("swin_tiny", dims=32, depths=2, heads=2, patch_size=4, **SMALL),
    "a twin in windows": lambda: softless.create_model(
        "inline_swin_tiny", mechanism="softmax", local=False, window=4, dims=32, depths=1, heads=2, **SMALL
    ),
    "timm's ViT": lambda: timm.create_model("test_vit", num_classes=4, img_size=64),
    "timm's DeiT": lambda: timm.create_model("deit_tiny_distilled_patch16_224", num_classes=4, img_size=64, depth=1),
    "timm's Swin": lambda: timm.create_model(
        "swin_tiny_patch4_window7_224", num_classes=4, img_size=56, embed_dim=8, depths=(2, 1), num_heads=(2, 2)
    ),
}  # fmt: skip
LOADABLE = "our DeiT", "our Swin", "a twin in windows", "timm's ViT"


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for x in model.parameters():  # louder than at the beginning of a training, so that every layer matters
        x.data += 0.1 * torch.randn_like(x)
    return model


def samples_for(model: nn.Module, count: int = 24) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    side = 64 if "VisionTransformer" in type(model).__name__ else 56 if "Transformer" in type(model).__name__ else 32
    return {"pixel_values": torch.randn(count, 3, side, side, generator=draw), "labels": torch.arange(count) % 4}


@torch.no_grad()
def output(model: nn.Module, samples: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(samples["pixel_values"][:4])


@pytest.mark.parametrize("name", MODELS)
def test_layers_become_linear_and_undo_restores_the_model_to_the_bit(name):
    """R22."""
    model = model_of(name)
    samples, modules = samples_for(model), dict(model.named_modules())
    before, weights = output(model, samples), {key: x.clone() for key, x in model.state_dict().items()}
    conversion = softless.convert(model, samples, **LOOSE)
    assert all(layer.converted for layer in conversion.layers)
    assert conversion.document["metric"] == "accuracy"
    assert not torch.equal(output(model, samples), before)
    conversion.undo()
    assert torch.equal(output(model, samples), before)
    assert dict(model.named_modules()) == modules
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(x, weights[key]) for key, x in model.state_dict().items())


@pytest.mark.parametrize("name", MODELS)
def test_softmax_in_the_place_of_softmax_changes_nothing(name):
    """R22: every parameter is mapped. In Swin this holds without its bias, and where windows are not shifted."""
    model = model_of(name).double()
    layers = ImageLayers(model)
    for part in model.modules():
        if hasattr(part, "relative_position_bias_table"):
            part.relative_position_bias_table.data.zero_()
    straight = [at for at, place in enumerate(layers.places) if not getattr(place.original, "shifted", False)]
    straight = [at for at in straight if not any(getattr(layers.places[at].parent, "shift_size", ()))]
    samples = {"pixel_values": samples_for(model)["pixel_values"].double()}
    before = output(model, samples)
    for at in straight:
        layers.put(at, layers.new(at, Candidate(softless.mechanism("softmax"))))
    assert torch.allclose(output(model, samples), before, rtol=1e-9)


@pytest.mark.parametrize("name", LOADABLE)
def test_a_saved_conversion_loads_with_load_converted(name, tmp_path):
    model = model_of(name)
    samples = samples_for(model)
    conversion = softless.convert(model, samples, **LOOSE | {"candidates": ["regress+local", "linear"]})
    conversion.save(tmp_path / "converted")
    again = softless.load_converted(tmp_path / "converted")
    assert torch.equal(output(again, samples), output(model, samples))
    assert sorted(path.name for path in (tmp_path / "converted").iterdir()) == [
        "conversion.json", "model.json", "model.safetensors"
    ]  # fmt: skip


def test_the_fit_brings_layers_of_images_closer_to_the_softmax():
    model = model_of("our DeiT")
    errors = []
    for steps in (1, 30):
        conversion = softless.convert(model, samples_for(model, 64), **LOOSE | {"steps": steps})
        conversion.undo()
        errors.append([next(iter(layer.errors.values())) for layer in conversion.layers])
    assert all(fitted < begun for begun, fitted in zip(*errors, strict=True)), errors


def test_the_harm_of_a_classifier_is_the_share_of_answers_lost():
    model = model_of("our DeiT")
    samples = samples_for(model, 40)
    conversion = softless.convert(model, samples, **LOOSE)
    prove = torch.randperm(40, generator=torch.Generator().manual_seed(0))[30:]

    def right() -> float:
        with torch.no_grad():
            return float((model(samples["pixel_values"][prove]).argmax(1) == samples["labels"][prove]).float().mean())

    after = right()
    conversion.undo()
    assert conversion.document["before"] == pytest.approx(right())
    assert conversion.document["delivered"]["mean"] == pytest.approx(right() - after)
    assert conversion.document["after"] == pytest.approx(after)


def test_without_labels_the_embedding_is_measured():
    model = model_of("timm's ViT")
    conversion = softless.convert(model, samples_for(model)["pixel_values"], **LOOSE)
    assert conversion.document["metric"] == "cosine"


REFUSED = {
    "words": ("our DeiT", {"metric": "perplexity"}, ArgumentError, "is of words, and DeiT reads pictures"),
    "a picture beside class tokens": (
        "our DeiT", {"candidates": [softless.mechanism("nearfar", neighborhood=3)]}, UnsupportedError, "needs a picture"
    ),
    "no softmax": ("linear", {}, UnsupportedError, "no layer of softmax attention"),
    "keys of its own": ("pvt", {}, UnsupportedError, "see a part of the keys"),
    "another model of timm": ("resnet", {}, UnsupportedError, "does not know how to convert ResNet"),
    "a gate": ("gated", {}, UnsupportedError, "a converted layer would lose it"),
}  # fmt: skip
OTHERS = {
    "linear": lambda: softless.create_model("inline_deit_tiny", dims=32, depths=2, heads=2, patch_size=8, **SMALL),
    "pvt": lambda: softless.create_model("pvt_tiny", dims=(32, 64), depths=(1, 1), heads=(1, 2), **SMALL),
    "resnet": lambda: timm.create_model("test_resnet", num_classes=4),
    "gated": lambda: timm.create_model("test_vit", num_classes=4, img_size=64, scale_attn_norm=True),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_and_candidates_that_do_not_fit_are_refused_in_one_sentence(case):
    name, options, error, sentence = REFUSED[case]
    model = OTHERS[name]() if name in OTHERS else model_of(name)
    with pytest.raises(error, match=sentence):
        softless.convert(model, samples_for(model), **LOOSE | options)


def test_a_model_with_options_that_its_name_does_not_tell_is_not_half_saved(tmp_path):
    conversion = softless.convert(model := model_of("timm's DeiT"), samples_for(model), **LOOSE)
    said = r"could not be loaded again: keep conversion.model, or .* torch.save\(model.state_dict\(\), path\)"
    with pytest.raises(UnsupportedError, match=said):
        conversion.save(tmp_path / "converted")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", MODELS)
def test_whether_a_model_can_be_saved_is_known_before_it_is_converted(name):
    layers = ImageLayers(model_of(name))
    if name in LOADABLE:
        layers.check_saving()
        return
    with pytest.raises(UnsupportedError, match="could not be loaded again"):
        layers.check_saving()


def test_a_model_without_a_name_says_that_it_cannot_be_loaded_again(tmp_path):
    model = timm.models.vision_transformer.VisionTransformer(64, 8, num_classes=4, embed_dim=32, depth=1, num_heads=2)
    conversion = softless.convert(model, samples_for(model), **LOOSE)
    with pytest.raises(UnsupportedError, match="VisionTransformer was built with options that its name None"):
        conversion.save(tmp_path / "converted")


def test_too_few_samples_to_tell_are_not_taken_for_layers_that_do_harm():
    torch.manual_seed(0)
    model = MODELS["our DeiT"]().eval()  # of small weights, so that no answer changes
    document = softless.convert(model, samples_for(model), **LOOSE | {"budget": 0.01}).document
    assert document["verdict"] == (
        "No layer of 2 is proven to fit a budget of 1 %: 6 samples to choose cannot tell; give more data. The model is "
        "unchanged."
    )
    harmful = [layer | {"damage": layer["damage"] | {"mean": 0.5}} for layer in document["layers"]]
    assert verdict(document | {"layers": harmful}, METRICS["accuracy"]) == (
        "No layer of 2 can be made linear within a budget of 1 %; the model is unchanged."
    )


def test_a_path_that_holds_no_converted_model_is_told_why(tmp_path):
    (tmp_path / "converted/model").mkdir(parents=True)
    with pytest.raises(FileError, match=r"because there is neither model\.json nor config\.json in it$"):
        softless.load_converted(tmp_path / "converted")
    (tmp_path / "converted/model/model.json").write_text("{}")
    with pytest.raises(FileError, match=r"in it: did you mean .*converted/model"):
        softless.load_converted(tmp_path / "converted")
    with pytest.raises(FileError, match=r"model\.json is a file, and the folder of a converted model is needed"):
        softless.load_converted(tmp_path / "converted/model/model.json")
    with pytest.raises(FileError, match="missing does not exist"):
        softless.load_converted(tmp_path / "missing")


@pytest.mark.parametrize("damage", ["no json", "another schema", "another builder", "another mechanism", "no weights"])
def test_a_damaged_folder_is_refused_in_one_sentence(tmp_path, damage):
    conversion = softless.convert(model := model_of("our DeiT"), samples_for(model), **LOOSE)
    conversion.save(tmp_path / "model")
    path = tmp_path / "model/model.json"
    document = json.loads(path.read_text())
    if damage == "no weights":
        (tmp_path / "model/model.safetensors").unlink()
    elif damage == "another mechanism":
        next(iter(document["layers"].values()))["name"] = "magic"
    else:
        document |= {"schema": "x"} if damage == "another schema" else {"source": "os"}
    path.write_text("{" if damage == "no json" else json.dumps(document))
    with pytest.raises((FileError, SoftlessError)) as caught:
        softless.load_converted(tmp_path / "model")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", MODELS)
def test_the_document_shows_where_the_middle_query_looks_before_and_after(name):
    """Weights over a picture without other tokens add up to one, before and after; the others are in the prefix."""
    model = model_of(name)
    layers = ImageLayers(model)
    found = softless.convert(model, samples_for(model), **LOOSE).document["looks"]
    assert [row["layer"] for row in found["layers"]] == [
        layers.names[at] for at in sorted({0, len(layers) - 1, (len(layers) - 1) // 2})
    ]
    for row in found["layers"]:
        before, after = (torch.tensor(row[side]) for side in ("original", "converted"))
        assert before.shape == after.shape
        assert before.min() >= 0
        assert not torch.allclose(before, after, atol=1e-3)
        assert all(x.sum().item() == pytest.approx(1, abs=0.01) for x in (before, after) if not layers.prefix)
