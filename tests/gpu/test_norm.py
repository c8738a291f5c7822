"""Which layer norms of a backbone run on the kernel: those without gradients, outside autocast and torch.compile."""

import pytest
import torch
import torch.nn.functional as F

from softless.kernels.norm import layer_norm
from softless.models.blocks import LayerNorm

pytestmark = pytest.mark.gpu


def normed(x: torch.Tensor, layer: LayerNorm) -> tuple[torch.Tensor, bool]:
    """The output, and whether the kernel made it."""
    layer_norm.plans.clear()
    return layer(x), bool(layer_norm.plans)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [64, 192, 1024])
def test_the_kernel_gives_what_torch_gives(dtype, width):
    layer = LayerNorm(width, 1e-6).to("cuda", dtype)
    torch.nn.init.normal_(layer.weight)
    x = torch.randn(4, 197, width, device="cuda", dtype=dtype)
    exact = F.layer_norm(x.double(), (width,), layer.weight.double(), layer.bias.double(), 1e-6)
    with torch.no_grad():
        found, on_kernel = normed(x, layer)
    assert on_kernel
    tolerance = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert (found - exact).abs().max() <= tolerance * (1 + exact.abs().max())


def test_gradients_autocast_other_layouts_and_compilation_are_torchs():
    layer, x = LayerNorm(64).cuda(), torch.randn(2, 9, 64, device="cuda")
    out, on_kernel = normed(x, layer)
    assert not on_kernel
    assert out.requires_grad
    with torch.no_grad():
        assert not normed(x.transpose(0, 1), layer)[1]
        with torch.autocast("cuda", torch.bfloat16):
            assert not normed(x, layer)[1]
        assert not normed(x, torch.compile(layer, backend="eager", fullgraph=True))[1]
        assert normed(x, layer)[1]
