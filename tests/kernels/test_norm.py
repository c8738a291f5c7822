"""Layer normalization on its kernel, against PyTorch's in float64."""

import pytest
import torch
import torch.nn.functional as F

from softless.kernels.norm import WIDEST, layer_norm

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 192), (2, 7, 33), (70, 96), (2, WIDEST)], ids=str)
@pytest.mark.parametrize("parts", ["weight and bias", "weight", "neither"])
def test_the_kernel_is_the_formula(shape, parts):
    x = 3 + torch.randn(shape)
    weight = torch.randn(shape[-1]) if "weight" in parts else None
    bias = torch.randn(shape[-1]) if "bias" in parts else None
    exact = F.layer_norm(x.double(), shape[-1:],
                         *(None if y is None else y.double() for y in (weight, bias)), 1e-6)  # fmt: skip
    found = layer_norm(x, weight, bias, 1e-6)[0]
    assert found.shape == x.shape
    assert (found - exact).abs().max() <= 2e-6 * (1 + exact.abs().max())


def test_half_precision_is_rounded_once():
    x, weight = torch.randn(9, 64).bfloat16(), torch.randn(64).bfloat16()
    exact = F.layer_norm(x.double(), (64,), weight.double(), None, 1e-6)
    found = layer_norm(x, weight, None, 1e-6)[0]
    assert found.dtype == torch.bfloat16
    assert ((found.double() - exact).abs() <= 0.51 * torch.finfo(torch.bfloat16).eps * exact.abs() + 1e-6).all()


def test_a_large_mean_costs_no_digits():
    x = 1000 + torch.randn(4, 128)
    exact = F.layer_norm(x.double(), (128,), None, None, 1e-6)
    assert (layer_norm(x, None, None, 1e-6)[0] - exact).abs().max() <= 1e-3
