"""Twins differ in attention and in nothing else, and stand where the paper's tables have them."""

from dataclasses import replace

import pytest
import torch

from softless.errors import ArgumentError, UnsupportedError
from softless.study.twins import QUESTIONS, TWINS, side_of, tokens_per_side, twins_named, twins_of
from softless.train.recipe import read_recipe
from softless.train.tasks.classify import build

IDS = [twin.id for twin in TWINS]
WHOLE = [twin for twin in TWINS if twin.cut is None]


def made(twin, name):
    recipe = twin.recipe(read_recipe(name))
    with torch.device("meta"):
        return build(recipe.model, recipe.image_size, 10)


def test_ids_are_unique_and_can_be_file_names():
    assert len(set(IDS)) == len(IDS)
    assert all(set(each) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for each in IDS)
    assert len({twin.label for twin in TWINS}) == len(TWINS)


@pytest.mark.parametrize("twin", WHOLE, ids=lambda twin: twin.id)
def test_a_twin_changes_attention_and_nothing_else(twin):
    base = read_recipe("twins-digits")
    recipe = twin.recipe(base)
    assert replace(recipe, model=base.model) == base
    same = {key: getattr(base.model, key) for key in ("mechanism", "local", "qk_conv", "window")}
    other = replace(recipe.model, **same)
    assert other == base.model
    plain = dict(made(twins_named(["softmax"])[0], "twins-digits").named_parameters())
    names = dict(made(twin, "twins-digits").named_parameters())
    own = (".attn.residual.", ".attn.qk_conv.", ".inputs.")
    assert {name: p.shape for name, p in names.items() if not any(part in name for part in own)} == {
        name: p.shape for name, p in plain.items()
    }


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.id)
def test_every_twin_builds_the_attention_of_its_name(twin):
    model = made(twin, "twins-cifar10-windows")
    layers = [module for name, module in model.named_modules() if name.endswith(".attn")]
    assert layers
    for layer in layers:
        assert layer.mechanism.name == twin.mechanism
        assert all(getattr(layer.mechanism, option) == value for option, value in twin.options.items())
        assert (layer.residual is not None) == twin.local
        assert layer.window == (None if twin.cut is None else (16 // twin.cut, 16 // twin.cut))


def test_every_table_has_its_twins_and_every_number_of_the_paper_a_place():
    tables = {question.id: question for question in QUESTIONS}
    assert {table for twin in TWINS for table in twin.tables} == set(tables) == {"1", "3", "4", "9", "10"}
    for question in QUESTIONS:
        members = {twin.id for twin in TWINS if question.id in twin.tables}
        assert set(question.top1) <= members
        assert {each for pair in question.compares for each in pair} <= members
    assert tables["3"].top1 == {
        "linear-relu": 77.3, "linear-affine": 70.2, "linear-leaky": 1.5, "linear-identity": 0.2,
        "inline-relu": 79.8, "inline-affine": 80.0, "inline-leaky": 79.8, "inline": 80.2,
    }  # fmt: skip


def test_twins_are_chosen_by_name_or_by_table():
    assert [twin.id for twin in twins_named(["taylor", "softmax"])] == ["taylor", "softmax"]
    assert {twin.id for twin in twins_of(["3"])} == {
        *(f"linear-{phi}" for phi in ("relu", "affine", "leaky", "identity")),
        *("inline", "inline-relu", "inline-affine", "inline-leaky"),
    }
    assert {twin.cut for twin in twins_of(["4"], side=16)} == {None, 8, 4, 2}
    assert {twin.cut for twin in twins_of(["4"], side=12)} == {None, 4, 2}
    assert {twin.cut for twin in twins_of(["4"])} == {None}
    with pytest.raises(ArgumentError, match="twin 'nobody' is not one of softmax, inline"):
        twins_named(["softmax", "nobody"])
    with pytest.raises(ArgumentError, match="table 2 is not one of 1, 3, 4, 9, 10"):
        twins_of(["2"])


def test_a_twin_in_windows_is_refused_where_the_model_has_none():
    whole, cut = read_recipe("twins-digits"), read_recipe("twins-digits-windows")
    assert [twin.id for twin in twins_named(["inline-cut4", "softmax"], cut)] == ["inline-cut4", "softmax"]
    assert [twin.id for twin in twins_named(["softmax"], whole)] == ["softmax"]
    needs = "needs a picture that {0} x {0} windows of 2 x 2 tokens or more fill, and model"
    with pytest.raises(ArgumentError, match=f"twin 'inline-cut2' {needs.format(2)} 'inline_deit_tiny' .* class token"):
        twins_named(["softmax", "inline-cut2"], whole)
    for side in (8, 12):
        with pytest.raises(ArgumentError, match=f"twin 'inline-cut8' {needs.format(8)} .* {side} x {side} tokens"):
            twins_named(["inline-cut8"], replace(cut, image_size=side * cut.image_size // 8))


@pytest.mark.parametrize("patch_size", [None, 2])
def test_an_unknown_model_raises_an_error_that_lists_the_known_ones(patch_size):
    recipe = read_recipe("twins-digits")
    recipe = replace(recipe, model=replace(recipe.model, name="nope", patch_size=patch_size))
    for ask in (tokens_per_side, side_of, lambda recipe: twins_named(["softmax"], recipe)):
        with pytest.raises(ArgumentError, match="model 'nope' is not one of inline_deit_tiny"):
            ask(recipe)


SIDES = {
    "digits": 8, "digits-windows": 8, "images": 8, "cifar10": 8, "cifar10-windows": 16,
    "imagenette": 16, "imagenette-windows": 32,
}  # fmt: skip


@pytest.mark.parametrize("name", SIDES)
def test_the_recipes_put_the_grids_where_they_say(name):
    recipe = read_recipe(f"twins-{name}")
    assert tokens_per_side(recipe) == SIDES[name]
    assert side_of(recipe) == (SIDES[name] if name.endswith("windows") else None)
    assert recipe.cache
    with torch.device("meta"):
        model = build(recipe.model, recipe.image_size, 10)
        assert model(torch.zeros(1, 3, recipe.image_size, recipe.image_size)).shape == (1, 10)


def test_a_window_needs_a_picture_without_a_class_token():
    with pytest.raises(UnsupportedError, match="DeiT has a class token"):
        made(twins_named(["inline-cut4"])[0], "twins-cifar10")
