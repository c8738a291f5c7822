"""Recipes: plain files that refuse what they do not understand, and the paper's fifteen, number by number."""

import json
import math
import re
import tomllib
from dataclasses import asdict, fields

import pytest
import torch

from softless.errors import ArgumentError, FileError
from softless.models.table import CONFIGS
from softless.train.architecture import Architecture
from softless.train.assemble_dense import task_for
from softless.train.dense_recipe import DetectRecipe, SegmentRecipe
from softless.train.language_recipe import LanguageModel, LanguageRecipe
from softless.train.recipe import Recipe, changed, document_of, from_document, read_recipe, shipped
from softless.train.tasks import language
from softless.train.tasks.classify import build

# images a GPU, peak lr, warm-up lr, min lr, weight decay, epochs, cooldown, warm-up, drop path, clip; 8 GPUs
PAPER = {
    "inline_deit_tiny": (512, 4e-3, 4e-6, 4e-5, 0.05, 300, 0, 20, 0.1, 5.0),
    "inline_deit_small": (128, 1e-3, 1e-6, 1e-5, 0.05, 300, 0, 20, 0.1, 5.0),
    "inline_deit_base": (64, 5e-4, 5e-7, 5e-6, 0.05, 300, 0, 20, 0.1, 5.0),
    "inline_pvt_tiny": (128, 1e-3, 2e-6, 2e-5, 0.05, 300, 10, 5, 0.1, 0),
    "inline_pvt_small": (128, 1e-3, 2e-6, 2e-5, 0.05, 300, 10, 5, 0.1, 0),
    "inline_pvt_medium": (128, 1e-3, 2e-6, 2e-5, 0.05, 300, 10, 5, 0.3, 1.0),
    "inline_pvt_large": (64, 5e-4, 1e-6, 1e-5, 0.05, 300, 10, 5, 0.3, 1.0),
    "inline_swin_tiny": (128, 1e-3, 1e-6, 1e-5, 0.05, 300, 0, 20, 0.2, 5.0),
    "inline_swin_small": (128, 1e-3, 1e-6, 1e-5, 0.05, 300, 0, 20, 0.3, 5.0),
    "inline_swin_base": (64, 5e-4, 5e-7, 5e-6, 0.05, 300, 0, 20, 0.5, 5.0),
    "inline_swin_base_384": (32, 1e-5, 1e-8, 1e-7, 1e-8, 30, 0, 5, 0.5, 5.0),
    "inline_cswin_tiny": (128, 1e-3, 2e-6, 2e-5, 0.05, 300, 10, 20, 0.2, 0),
    "inline_cswin_small": (128, 1e-3, 2e-6, 2e-5, 0.05, 300, 10, 20, 0.4, 0),
    "inline_cswin_base": (64, 5e-4, 1e-6, 1e-5, 0.1, 300, 10, 20, 0.5, 0),
    "inline_cswin_base_384": (32, 2.5e-6, 2.5e-6, 2.5e-7, 1e-8, 20, 10, 0, 0.7, 0),
}


@pytest.mark.parametrize("name", PAPER)
def test_the_paper_recipes_have_the_authors_numbers(name):
    r = read_recipe(name)
    each = (r.batch // 8, r.lr, r.warmup_lr, r.min_lr, r.weight_decay, r.epochs, r.cooldown_epochs, r.warmup_epochs)
    assert (*each, r.model.drop_path_rate, r.clip) == PAPER[name]
    assert r.model.name == name
    assert (r.image_size, r.image_size) == CONFIGS[name].img_size
    assert (r.mixup, r.cutmix, r.mix_prob, r.mix_switch, r.label_smoothing) == (0.8, 1.0, 1.0, 0.5, 0.1)
    assert (r.beta1, r.beta2, r.precision) == (0.9, 0.999, "fp16")
    a = r.augment
    assert (a.crop, a.flip, a.operations, a.magnitude, a.magnitude_std, a.erase) == ("resized", 0.5, 2, 9.0, 0.5, 0.25)
    assert a.crop_share == (1.0 if name == "inline_swin_base_384" else 0.875)
    expected = 0.9996 ** (r.batch / 4096) if "cswin" in name else 0.0
    assert math.isclose(r.ema, expected, abs_tol=5e-7)


@pytest.mark.parametrize("name", shipped())
def test_every_recipe_states_its_command_cost_and_result_and_makes_its_model(name):
    recipe = changed(document_of(name), ())
    assert re.search(rf"softless train --recipe {name} ", recipe.command)
    assert recipe.cost
    assert recipe.expected
    with torch.device("meta"):
        if isinstance(recipe, SegmentRecipe | DetectRecipe):
            model = task_for(recipe).build(recipe, len(recipe.values.classes))
        else:
            text = isinstance(recipe, LanguageRecipe)
            model = language.build(recipe) if text else build(recipe.model, recipe.image_size, 10)
    assert sum(parameter.numel() for parameter in model.parameters()) > 0
    assert recipe.batch % (8 if name in PAPER else 1) == 0


def test_the_small_recipes_make_models_for_small_images():
    with torch.device("meta"):
        sizes = {
            name: sum(p.numel() for p in build(read_recipe(name).model, read_recipe(name).image_size, 10).parameters())
            for name in ("digits", "cifar10")
        }
    assert sizes["digits"] < 100_000
    assert sizes["cifar10"] <= 10_000_000


def test_a_recipe_round_trips_through_its_document():
    recipe = read_recipe("cifar10", [("model.mechanism", '{name = "linear", phi = "relu"}')])
    assert from_document(asdict(recipe)) == recipe
    assert recipe.model.mechanism == {"name": "linear", "phi": "relu"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("learning_rate", "1"), "'learning_rate' is not a key of a recipe"),
        (("epoch", "1"), "'epoch' is not a key of a recipe: did you mean 'epochs'?"),
        (("model.dim", "1"), r"'dim' is not a key of \[model\]: did you mean 'dims'?"),
        (("augment.zoom", "1"), r"'zoom' is not a key of \[augment\]: it has crop, area"),
        (("optimizer.lr", "1"), "'optimizer.lr' is not a key of a recipe: its tables are model and augment"),
        (("lr", "fast"), "lr is 'fast' and must be a number"),
        (("lr", "nan"), "lr is nan and must be at least 0"),
        (("lr", "-1"), "lr is -1 and must be at least 0"),
        (("lr", "inf"), "lr is inf and must be at least 0"),
        (("model.local", "False"), "model.local is 'False' and must be true or false"),
        (("augment.flip", "often"), r"\[augment\] has a value of the wrong kind"),
        (("epochs", "1.5"), "epochs is 1.5 and must be a whole number"),
        (("epochs", "true"), "epochs is True and must be a whole number"),
        (("compile", "1"), "compile is 1 and must be true or false"),
        (("precision", "fp8"), "precision is 'fp8' and must be one of fp32, bf16, fp16"),
        (("beta2", "1.5"), "beta2 is 1.5 and must be from 0 to 1"),
        (("beta1", "1"), "beta1 is 1 and must be below"),
        (("ema", "1"), "ema is 1 and must be below"),
        (("model.drop_path_rate", "a"), "model.drop_path_rate is 'a' and must be a number"),
        (("model.weight_std", "true"), "model.weight_std is True and must be a number"),
        (("augment.area", "[0.1]"), r"area is \(0.1,\) and must be 2 numbers"),
        (("augment.mean", "[0.1, 0.2]"), r"mean is \(0.1, 0.2\) and must be 3 numbers"),
        (("augment.mean", '["a", 1, 2]'), "mean is .* and must be 3 numbers"),
        (("augment.std", "[nan, 1, 1]"), "std is .* and must be 3 numbers"),
        (("augment.std", "[0, 1, 1]"), "std is .* and must be positive"),
        (("augment.magnitude", "9.5"), "magnitude is 9.5 and must be a whole number"),
        (("augment.operations", "1.0"), "operations is 1.0 and must be a whole number"),
        (("augment.padding", "1.0"), "padding is 1.0 and must be a whole number"),
        (("accumulate", "3"), "batch 64 is not a multiple of accumulate 3"),
        (("warmup_epochs", "11"), "warmup_epochs 11 are more than epochs 10"),
        (("augment.crop", "round"), "crop is 'round' and must be one of"),
        (("augment.crop_mode", "center"), "cache keeps whole images, so augment.crop_mode is squash and cannot be cen"),
        (("augment.crop_share", "0.5"), "cache keeps whole images, so augment.crop_share is 1 and cannot be 0.5"),
        (("model", "3"), r"\[model\] is 3 and must be a table of keys"),
        (("command", "3"), "command is 3 and must be text"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_a_wrong_key_or_value_is_refused_by_name(change, says):
    with pytest.raises(ArgumentError, match=says):
        read_recipe("digits", [change])


def test_odd_parts_cannot_be_mixed_in_pairs():
    with pytest.raises(ArgumentError, match="mixup and cutmix mix pairs, and a part of batch 63 has 63 images"):
        Recipe(batch=63, mixup=0.1)


@pytest.mark.parametrize(
    ("text", "says"),
    [("lr = ", "it is not TOML"), ("\xff", "it is not TOML"), ("a" * 70_000, "too large for a recipe")],
)
def test_a_file_that_is_not_a_recipe_raises_a_file_error(tmp_path, text, says):
    path = tmp_path / "a.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(FileError, match=says):
        read_recipe(str(path))


def test_an_unknown_recipe_name_lists_the_known_ones(tmp_path):
    with pytest.raises(FileError, match="recipe 'nonsense' is neither a file nor one of cifar10, detect-bccd, digits"):
        read_recipe("nonsense")
    with pytest.raises(FileError, match="is neither a file nor one of"):
        read_recipe(str(tmp_path / "none.toml"))


def test_a_recipe_file_is_read_by_its_path(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('epochs = 3\nwarmup_epochs = 0\n[model]\nname = "swin_tiny"\n')
    assert read_recipe(str(path)).model == Architecture(name="swin_tiny")
    assert changed(document_of(str(path)), [("model.local", "false")]).model.local is False
    assert tomllib.loads(path.read_text())["epochs"] == 3


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (cls, key.name)
        for cls in (Recipe, LanguageRecipe, LanguageModel, SegmentRecipe, DetectRecipe)
        for key in fields(cls)
        if key.type in (int, float, int | None)
    ],
)
def test_no_number_of_a_recipe_may_be_negative(cls, name):
    table = "model." if cls is LanguageModel else ""
    with pytest.raises(ArgumentError, match=f"recipe: {table}{name} is -1 and must be (at least|from)"):
        cls(**{name: -1})


def test_the_names_with_other_limits_are_numbers_of_a_recipe():
    for cls in (Recipe, LanguageRecipe, LanguageModel, SegmentRecipe, DetectRecipe):
        assert {*cls.least, *cls.most} <= {key.name for key in fields(cls) if key.type in (int, float, int | None)}


def test_a_mechanism_with_options_reaches_the_model():
    model = build(Architecture(mechanism={"name": "linear", "phi": "relu"}, local=False, depths=1), 32, 3)
    assert model.blocks[0].attn.mechanism.phi == "relu"
    with pytest.raises(ArgumentError, match=r"model.mechanism is {'phi': 'relu'} and must have a name"):
        build(Architecture(mechanism={"phi": "relu"}), 32, 3)


def test_set_replaces_a_table_and_then_one_of_its_keys():
    changes = [("model", '{name = "swin_tiny"}'), ("model.drop_path_rate", "0.1")]
    model = read_recipe("digits", changes).model
    assert (model.name, model.drop_path_rate, model.dims) == ("swin_tiny", 0.1, None)
    with pytest.raises(ArgumentError, match="is 3 and must be a table of keys"):
        read_recipe("digits", [("model", "3"), ("model.local", "false")])


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("text-small", ("image_size", "8"), "'image_size' is not a key of a language recipe: only recipes of"),
        ("text-small", ("mixup", "0.5"), "'mixup' is not a key of a language recipe: only recipes of"),
        ("text-small", ("augment.flip", "0.5"), "'augment.flip' is not a key of a language recipe: its table is model"),
        ("text-small", ("augment", "{}"), "'augment' is not a key of a language recipe: only recipes of"),
        ("text-small", ("model.name", "llama"), r"'name' is not a key of \[model\]: only recipes of task"),
        ("text-small", ("model.zoom", "8"), r"'zoom' is not a key of \[model\]: it has dim, depth, heads"),
        ("text-small", ("lenght", "8"), "'lenght' is not a key of a language recipe: did you mean 'length'?"),
        ("text-small", ("tokens", "words"), "tokens is 'words' and must be one of bytes, bpe"),
        ("text-small", ("vocabulary", "256"), "vocabulary is 256 and must be from 257 to"),
        ("text-small", ("length", "1"), "length is 1 and must be from 2 to"),
        ("text-small", ("model.dim", "100"), "model.dim 100 is not a multiple of twice model.heads 4: rotary"),
        ("text-small", ("model.key_heads", "3"), "model.heads 4 is not a multiple of model.key_heads 3"),
        ("text-small", ("model.key_heads", "two"), "model.key_heads is 'two' and must be a whole number"),
        ("text-small", ("model.mlp_ratio", "0"), "model.mlp_ratio 0 of model.dim 128 leaves no channel"),
        ("text-small", ("model.tied", "1"), "model.tied is 1 and must be true or false"),
        ("text-small", ("model.mechanism", "3"), "model.mechanism is 3 and must be text"),
        ("text-small", ("model.mechanism", "{phi = 'relu'}"), "model.mechanism is {'phi': 'relu'} and must have"),
        ("text-small", ("task", "poetry"), "task is 'poetry' and must be one of classify, language, segment, detect"),
        ("text-small", ("task", "classify"), r"'dim' is not a key of \[model\]: did you mean 'dims'"),
        ("digits", ("length", "8"), "'length' is not a key of a recipe: only recipes of task 'language'"),
        ("digits", ("model.tied", "true"), r"'tied' is not a key of \[model\]: only recipes of task 'language'"),
        ("digits", ("task", "language"), r"'name' is not a key of \[model\]: only recipes of task 'classify' have it"),
    ],
)  # fmt: skip
def test_a_key_of_another_task_is_refused_by_name(name, change, says):
    with pytest.raises(ArgumentError, match=says):
        changed(document_of(name), [change])


def test_a_language_recipe_round_trips_and_is_no_recipe_for_images():
    recipe = changed(document_of("text-base"), [("model.mechanism", '{name = "linear", phi = "relu"}')])
    assert isinstance(recipe, LanguageRecipe)
    assert recipe.model.attention == ("linear", {"phi": "relu"})
    assert changed(asdict(recipe), ()) == recipe
    with pytest.raises(
        ArgumentError, match="recipe 'text-base' trains a model of task 'language', and a recipe for im"
    ):
        read_recipe("text-base")
    with pytest.raises(ArgumentError, match="the recipe trains a model of task 'language'"):
        from_document(asdict(recipe))
    assert changed({"task": "classify"}, ()) == Recipe()


def test_a_segmentation_recipe_round_trips_and_takes_no_keys_of_other_tasks():
    recipe = changed(document_of("segment-pets"), [("masks.void", "[7]"), ("model.head", "upernet")])
    assert isinstance(recipe, SegmentRecipe)
    assert (recipe.masks.values, recipe.masks.void, recipe.size) == ((1, 2, 3), (7,), (128, 128))
    assert changed(json.loads(json.dumps(asdict(recipe))), ()) == recipe
    for change, says in (
        (("mixup", "0.5"), "'mixup' is not a key of a segmentation recipe: only recipes of task 'classify' have it"),
        (("augment.erase", "0.5"), r"'erase' is not a key of \[augment\]: "),
        (("masks.names", "[]"), r"'names' is not a key of \[masks\]: "),
    ):
        with pytest.raises(ArgumentError, match=says):
            changed(document_of("segment-pets"), [change])


def test_a_detection_recipe_round_trips_and_takes_no_keys_of_other_tasks():
    recipe = changed(document_of("detect-bccd"), [("boxes.form", "xywh"), ("model.head", "retinanet")])
    assert isinstance(recipe, DetectRecipe)
    assert (recipe.boxes.values, recipe.boxes.empty, recipe.size) == ((1, 2, 3), "drop", (480, 640))
    assert changed(json.loads(json.dumps(asdict(recipe))), ()) == recipe
    with pytest.raises(ArgumentError, match=r"'auxiliary' is not a key of \[model\]: only recipes of task 'segment'"):
        changed(document_of("detect-bccd"), [("model.auxiliary", "0.4")])


def test_the_recipes_of_language_models_have_the_sizes_that_they_state():
    sizes = {}
    for name in ("text-small", "text-base"):
        with torch.device("meta"):
            model = language.build(changed(document_of(name), ()))
        sizes[name] = sum(parameter.numel() for parameter in model.parameters())
    assert sizes == {"text-small": 1_022_336, "text-base": 15_808_896}
