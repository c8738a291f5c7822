"""DeiT and Swin are timm's: its weights load by name, and give its outputs."""

import pytest
import timm
import torch

import softless
from tests.models.cases import loud, small

TIMM = {
    "deit_tiny": "deit_tiny_patch16_224",
    "deit_small": "deit_small_patch16_224",
    "deit_base": "deit_base_patch16_224",
    "swin_tiny": "swin_tiny_patch4_window7_224",
    "swin_small": "swin_small_patch4_window7_224",
    "swin_base": "swin_base_patch4_window7_224",
    "swin_base_384": "swin_base_patch4_window12_384",
}


def test_a_small_swin_is_timms():
    """Shifted windows, a table, merging: all of it, narrow."""
    sizes = {"embed_dim": 12, "depths": (2, 2, 2, 1), "num_heads": (3, 6, 12, 24), "window_size": 3}
    theirs = loud(timm.create_model("swin_tiny_patch4_window7_224", img_size=96, num_classes=5, **sizes)).eval()
    ours = small("swin_tiny", img_size=96)
    del ours.layers[3].blocks[1]
    ours.load_state_dict(theirs.state_dict(), strict=True)
    images = torch.randn(2, 3, 96, 96, dtype=torch.float64)
    expected = theirs.double()(images)
    assert (ours.double()(images) - expected).abs().max() <= 1e-10 * expected.abs().max()
    assert (ours.float()(images.float()) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_what_stands_beside_a_swin_keeps_its_names():
    """A part of a larger model reads its own entries, and touches no others."""
    whole = torch.nn.ModuleDict(
        {"backbone": small("swin_tiny"), "head": torch.nn.ModuleDict({"fc": torch.nn.Linear(5, 2)})}
    )
    state = whole.state_dict()
    assert "head.fc.weight" in state
    extra = {"backbone.layers.0.blocks.1.attn_mask": torch.zeros(1), "attn_mask": torch.zeros(1)}
    assert whole.load_state_dict(state | extra, strict=False).unexpected_keys == ["attn_mask"]
    del extra["attn_mask"]
    whole.load_state_dict(state | extra, strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", TIMM)
def test_outputs_are_timms_from_timms_weights(name):
    theirs = loud(timm.create_model(TIMM[name])).eval()
    ours = softless.create_model(name, device="meta").eval()
    ours.load_state_dict(theirs.state_dict(), strict=True, assign=True)
    side = 384 if name.endswith("384") else 224
    images = torch.randn(1, 3, side, side)
    with torch.no_grad():
        for dtype, bound in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
            expected = theirs.to(dtype)(images.to(dtype))
            assert expected.std() > 0.1
            assert (ours.to(dtype)(images.to(dtype)) - expected).abs().max() <= bound * expected.abs().max()


def test_a_small_deit_is_timms():
    sizes = {"embed_dim": 12, "depth": 2, "num_heads": 3}
    theirs = loud(timm.create_model("deit_tiny_patch16_224", img_size=64, num_classes=5, **sizes)).eval()
    ours = small("deit_tiny")
    ours.load_state_dict(theirs.state_dict(), strict=True)
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    expected = theirs.double()(images)
    assert (ours.double()(images) - expected).abs().max() <= 1e-10 * expected.abs().max()
    assert (ours.float()(images.float()) - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", [name for name in TIMM if name.endswith("tiny")])
def test_parameters_are_as_many_as_timms(name):
    with torch.device("meta"):
        theirs = timm.create_model(TIMM[name])
    ours = softless.create_model(name, device="meta")
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize(
    ("name", "millions"), [("cswin_tiny", 22.3), ("cswin_small", 34.6), ("cswin_base", 77.4), ("pvt_tiny", 12.9)]
)
def test_parameters_are_about_as_many_as_published(name, millions):
    """CSwin: 23M, 35M, 78M. PVT-Tiny: 13.2M with its class token, whose place a mean takes here."""
    model = softless.create_model(name, device="meta")
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.4)
