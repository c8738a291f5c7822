"""Whole models on the kernels: the same answer as on torch, and every product counted."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from softless.bench.model_contest import by_backend, linear_layers
from softless.kernels.parallel import ops  # noqa: F401, a counter knows the operators that exist when it is made
from softless.models.blocks import Stage
from tests.models.cases import loud, small

pytestmark = pytest.mark.kernels


def model_of(family: str) -> nn.Module:
    model = loud(small(f"inline_{family}_tiny", img_size=32))
    if family != "deit":
        model.prune_intermediate_layers([0], prune_norm=True)
    for stage in (module for module in model.modules() if isinstance(module, Stage)):
        del stage[1:]
    return model


@pytest.mark.parametrize(
    "family", ["deit", *(pytest.param(family, marks=pytest.mark.slow) for family in ("pvt", "swin", "cswin"))]
)
def test_a_model_on_the_kernels_matches_the_model_on_torch(family):
    model, images = model_of(family), torch.randn(2, 3, 32, 32)
    expected = model(images)
    error = (by_backend(model, "triton")(images) - expected).abs().max()
    assert error <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("family", ["deit", pytest.param("swin", marks=pytest.mark.slow)])
def test_flops_of_a_model_include_the_kernels(family):
    """As many as on torch, and those of the residual, which torch does not compute as a product."""
    model, images = model_of(family), torch.randn(2, 3, 32, 32)
    layers = linear_layers(model)
    patches = 4 if family == "deit" else 64
    residual = 2 * 9 * 2 * patches * sum(layer.heads * layer.head_dim for layer in layers)
    on_torch = flops(model, images)
    assert flops(by_backend(model, "triton"), images) == on_torch + residual


def flops(model: nn.Module, images: Tensor) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images)
    return counter.get_total_flops()
