"""A model computed another way is the same model: a yardstick that computes something else would measure nothing."""

import copy

import pytest
import torch
from torch import nn

import softless
from softless.bench.model_contest import by_backend, by_plain_formulas, linear_layers
from softless.errors import BackendError, UnsupportedError
from tests.models.cases import FAMILIES, images, loud, mixings, small


def assert_same(found, expected, tolerance=1e-11):
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def model_and_images(family: str, **options: object) -> tuple[nn.Module, torch.Tensor]:
    return loud(small(f"inline_{family}_tiny", **options)).double(), images(2, 3, 52, 80)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mechanism", ["inline", "linear"])
@pytest.mark.parametrize("local", [True, False])
def test_plain_formulas_are_the_model(family, mechanism, local):
    model, x = model_and_images(family, mechanism=mechanism, local=local)
    expected = model(x)
    assert_same(by_plain_formulas(model)(x), expected)


@pytest.mark.parametrize("family", FAMILIES[1:])
@pytest.mark.parametrize("mechanism", ["inline", "linear"])
def test_plain_formulas_are_the_model_in_windows_that_are_padded(family, mechanism):
    model, x = model_and_images(family, mechanism=mechanism, window=5)
    expected = model(x)
    assert_same(by_plain_formulas(model)(x), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_formulas_have_the_gradients_of_the_model(family):
    model, x = model_and_images(family)
    weights = list(model.parameters())
    expected = torch.autograd.grad(model(x).square().mean(), weights)
    found = torch.autograd.grad(by_plain_formulas(model)(x).square().mean(), weights)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() <= 1e-9 * (1 + theirs.abs().max())


def test_only_linear_layers_are_computed_otherwise():
    model = small("inline_swin_tiny")
    linear = linear_layers(model)
    assert [layer.mechanism.name for layer in linear] == ["inline"] * 6
    by_plain_formulas(model)
    for layer in mixings(model).values():
        assert ("_mix" in vars(layer)) == (layer in linear)
    assert linear_layers(small("swin_tiny")) == linear_layers(small("deit_tiny")) == []


def test_the_plain_formula_is_what_runs(monkeypatch):
    """Were it the model's own attention again, a wrong formula would go unnoticed."""
    model, x = model_and_images("deit", local=False)
    expected = by_plain_formulas(copy.deepcopy(model))(x)
    monkeypatch.setattr("softless.bench.model_contest.plain", lambda _: lambda q, _k, _v: torch.zeros_like(q))
    assert (by_plain_formulas(model)(x) - expected).abs().max() > 1e-3 * expected.abs().max()


def test_a_mechanism_without_a_plain_formula_says_so_and_the_model_is_as_it_was():
    model = small("inline_deit_tiny", mechanism="hydra", local=False)
    with pytest.raises(UnsupportedError, match="hydra has no plain formula here"):
        by_plain_formulas(model)
    assert not any("_mix" in vars(layer) for layer in mixings(model).values())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_backend_by_name_is_the_model(family, backend):
    window = {} if family == "deit" else {"window": 5}
    model, x = model_and_images(family, **window)
    expected = model(x)
    assert_same(by_backend(model, backend)(x), expected)


def test_a_backend_gets_what_its_mechanism_learned():
    affine = softless.mechanism("linear", phi="affine_relu")
    model, x = model_and_images("deit", mechanism=affine)
    expected = model(x)
    assert_same(by_backend(model, "reference")(x), expected)


def test_a_backend_that_cannot_run_says_why():
    model, x = model_and_images("deit")
    with pytest.raises(BackendError, match="backend 'triton' was asked for and cannot run"):
        by_backend(model, "triton")(x)
