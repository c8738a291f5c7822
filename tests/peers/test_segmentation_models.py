"""segmentation-models-pytorch takes our backbones as encoders."""

import pytest
import timm
import torch

import softless.timm  # noqa: F401 registers them

smp = pytest.importorskip("segmentation_models_pytorch", reason="it is no part of make setup")
NAMES = ("inline_pvt_tiny", "inline_swin_tiny", "inline_cswin_tiny")
SMALL = {"depths": [1, 1, 1, 1]}


@pytest.mark.parametrize("name", NAMES)
def test_an_encoder_gives_the_features_of_the_backbone(name):
    model = smp.FPN(f"tu-{name}", encoder_weights=None, classes=3, **SMALL).eval()
    alone = timm.create_model(name, features_only=True, **SMALL).eval()
    alone.load_state_dict(model.encoder.model.state_dict())
    images = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        *_, first, second, third, fourth = model.encoder(images)
        for found, expected in zip((first, second, third, fourth), alone(images), strict=True):
            turned = expected if expected.shape[1] == found.shape[1] else expected.permute(0, 3, 1, 2)
            assert torch.equal(found, turned)
        assert model(images).shape == (1, 3, 64, 96)


def test_options_of_the_backbone_are_passed_on_and_all_weights_learn():
    model = smp.UPerNet(
        "tu-inline_pvt_tiny",
        encoder_weights=None,
        classes=3,
        img_size=(64, 96),
        mechanism="softmax",
        local=False,
        **SMALL,
    )
    attention = [module for module in model.encoder.modules() if hasattr(module, "mechanism")]
    assert {module.mechanism.name for module in attention} == {"softmax"}
    model(torch.randn(2, 3, 64, 96)).square().mean().backward()
    assert [name for name, weight in model.encoder.named_parameters() if weight.grad is None] == []


def test_a_backbone_with_one_scale_is_refused():
    with pytest.raises(ValueError, match="downsampling pattern"):
        smp.FPN("tu-inline_deit_tiny", encoder_weights=None, classes=3)
