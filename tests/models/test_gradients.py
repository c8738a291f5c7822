"""Every parameter of every model gets a finite gradient, at two image sizes, in float32 and bfloat16 autocast."""

import copy

import pytest
import torch

import softless
from tests.models.cases import SMALL, images, loud, small

# A CPU without bfloat16 says so, once, and computes by another way.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

WINDOWED = [("inline_swin_tiny", {"window": 3}), ("inline_cswin_tiny", {"window": 2})]
VARIANTS = [(name, {}) for name in SMALL] + WINDOWED


def last_residual(model: torch.nn.Module, name: str) -> bool:
    """DeiT reads its class token alone, and the last block's 3x3 does not reach it."""
    return model.config.family == "deit" and name.startswith(f"blocks.{len(model.blocks) - 1}.attn.residual")


def check(model: torch.nn.Module, size: tuple[int, int], dtype: torch.dtype) -> None:
    model.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        out = model(images(2, 3, *size, dtype=torch.float32))
        loss = out.float().square().mean()
    loss.backward()
    assert out.isfinite().all()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any() or last_residual(model, name), f"{name} has no influence"


@pytest.mark.parametrize(("name", "changes"), VARIANTS, ids=str)
@pytest.mark.parametrize("size", [(64, 64), (52, 80)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_parameter_gets_a_finite_gradient(name, changes, size, dtype):
    check(loud(small(name, **changes)).train(), size, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", softless.list_models())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_parameter_of_every_preset_gets_a_finite_gradient(name, dtype):
    model = softless.create_model(name, num_classes=3).train()
    for size in ((64, 64), (96, 128)):
        check(model, size, dtype)


MOVING = ("inline_deit_tiny", {"mechanism": softless.mechanism("emanet", bases=5, detach=False)})


@pytest.mark.parametrize(("name", "changes"), [*((name, {}) for name in SMALL), MOVING], ids=str)
def test_checkpointing_changes_nothing_but_memory(name, changes):
    plain = small(name, **changes).train()
    saving = copy.deepcopy(plain)
    saving.set_grad_checkpointing()
    x = images(2, 3, 64, 64, dtype=torch.float32)
    outs = [model(x) for model in (plain, saving)]
    for out in outs:
        out.square().mean().backward()
    torch.testing.assert_close(*outs)
    for mine, other in zip(plain.parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    assert all(map(torch.equal, plain.buffers(), saving.buffers()))  # emanet's bases move once


@pytest.mark.parametrize("name", SMALL)
def test_drop_rates_drop_in_training_only(name):
    rates = {"drop_rate": 0.3, "proj_drop_rate": 0.3, "drop_path_rate": 0.5}
    model = small(name, **rates).train()
    x = images(2, 3, 64, 64, dtype=torch.float32)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))
    if name.startswith("inline"):
        return
    attending = small(name, attn_drop_rate=0.5).train()
    assert not torch.equal(attending(x), attending(x))


def test_paths_are_dropped_more_often_the_deeper_they_lie():
    model = softless.create_model("inline_swin_tiny", drop_path_rate=0.2, device="meta")
    rates = [getattr(block.drop_path, "drop_prob", 0.0) for layer in model.layers for block in layer.blocks]
    assert rates == pytest.approx([0.2 * i / 11 for i in range(12)])
