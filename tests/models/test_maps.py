"""Attention maps are the weights behind the outputs, of every layer of every model, one layer at a time."""

import pytest
import torch

import softless
from softless.mechanisms import Call
from softless.nn import maps
from softless.nn.mixing import Mixing, as_heads
from tests.models.cases import SMALL, images, loud, mixings, small
from tests.numerics.cases import CASES


def alike(model: torch.nn.Module) -> torch.nn.Module:
    """One 3x3 for all channels of a head, so that their mean says everything."""
    for module in mixings(model).values():
        if module.residual is not None:
            last = module.residual[2]
            for parameter in (last.weight.data, last.bias.data):
                split = parameter.unflatten(0, (module.heads, module.head_dim, 9))
                parameter.copy_(split.mean(1, keepdim=True).expand_as(split).flatten(0, 2))
    return model


CAUSAL = ("delta", "efla", "decay")  # backbones have no order for these to go through
EVERY = [
    pytest.param("inline_swin_tiny" if made.needs_grid else "inline_deit_tiny", {"mechanism": made}, id=case)
    for case, made in CASES.items()
    if made.name not in CAUSAL
]
VARIANTS = [(name, {}) for name in SMALL] + [
    ("inline_swin_tiny", {"window": 3}),
    ("inline_pvt_tiny", {"window": 3, "mechanism": "efficient"}),
    ("inline_swin_tiny", {"window": 3, "mechanism": "soft"}),
    ("inline_cswin_tiny", {"window": 2}),
    ("inline_deit_tiny", {"mechanism": softless.mechanism("softmax", confusion="affine_relu")}),
]


@pytest.mark.parametrize(("name", "changes"), VARIANTS + EVERY, ids=str)
def test_values_weighed_by_the_maps_are_the_outputs(name, changes, monkeypatch):
    model = alike(loud(small(name, **changes).double()))
    ran, real = [], Mixing.mix

    def mix(self, qkv, grid=None, **options):
        ran.append((qkv, real(self, qkv, grid, **options)))
        return ran[-1][1]

    monkeypatch.setattr(Mixing, "mix", mix)
    found = list(model.attention_maps(images(2, 3, 64, 80)))
    assert [each.layer for each in found] == list(mixings(model))
    assert len(found) == len(ran)
    for each, (qkv, out) in zip(found, ran, strict=True):
        v, module = as_heads(qkv)[2], model.get_submodule(each.layer)
        assert (each.local is None) == (module.residual is None)
        mixed = module.mechanism.combine(each.weights, v, Call())
        expected = (mixed if each.local is None else mixed + each.local @ v).transpose(1, 2).flatten(2)
        assert (out - expected).abs().max() <= 1e-10 * (1 + expected.abs().max())


def test_a_map_is_computed_when_it_is_read(monkeypatch):
    computed, real = [], maps._map
    monkeypatch.setattr(maps, "_map", lambda layer, *call: computed.append(layer) or real(layer, *call))
    model = small("inline_deit_tiny")
    walk = model.attention_maps(images(1, 3, 32, 32, dtype=torch.float32))
    assert computed == []
    assert next(walk).layer == "blocks.0.attn"
    assert torch.is_grad_enabled()
    assert computed == ["blocks.0.attn"]


def test_attention_maps_leave_the_model_unchanged():
    model = small("inline_swin_tiny")
    x = images(1, 3, 32, 32, dtype=torch.float32)
    before, keys = model(x), [set(vars(module)) for module in model.modules()]
    maps_of = list(model.attention_maps(x))
    assert not any(each.weights.requires_grad for each in maps_of)
    assert [set(vars(module)) for module in model.modules()] == keys
    assert torch.equal(model(x), before)
    with pytest.raises(softless.errors.ArgumentError, match="must be"):
        next(model.attention_maps(x[:, :2]))
    assert [set(vars(module)) for module in model.modules()] == keys


def test_rows_of_inline_sum_to_one_and_the_residual_adds_its_own():
    model = loud(small("inline_deit_tiny").double())
    first = next(model.attention_maps(images(1, 3, 48, 48)))
    torch.testing.assert_close(first.weights.sum(-1), torch.ones(1, 6, 10, dtype=torch.float64))
    assert (first.local[:, :, 0] == 0).all()  # the class token gets none, and gives none
    assert (first.local[:, :, :, 0] == 0).all()
    assert (first.local[0, 0, 5] != 0).sum() == 9  # the middle of 3 x 3 patches
    assert (first.local[0, 0, 1] != 0).sum() == 4  # a corner
