"""What is captured is what ran (R33): attention written by hand is captured exactly, or listed as missed."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softless.errors import UnsupportedError
from softless.probes.capture import capture
from softless.probes.examination import examine
from tests.probes.by_hand import (
    BATCH,
    CAPTURED,
    DIM,
    EVERY,
    HEADS,
    INF,
    TOKENS,
    Way,
    changed,
    changed_afterwards,
    drawn,
)


class Written(nn.Module):
    """Not called attention, so that only what it does can tell."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way = way
        self.ran = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x.unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4).unbind()
        out, self.ran = self.way(q, k, v)
        return out.transpose(1, 2).flatten(2)


class Known(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class Model(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        self.written = Written(way)
        self.known = Known()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.written(x), self.known(x[:, None])


def tokens(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(BATCH, TOKENS, 3 * HEADS * DIM, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "inference"),
    [(torch.float64, False), (torch.float32, True), (torch.bfloat16, False)],
    ids=["float64", "float32 in inference mode", "bfloat16"],
)
@pytest.mark.parametrize("name", EVERY)
def test_attention_by_hand_is_captured_exactly_or_listed_as_missed(name, dtype, inference):
    model, x = Model(EVERY[name]), tokens(dtype)
    with torch.inference_mode(inference), torch.no_grad():
        torch.manual_seed(0)
        expected, _ = model(x)
        ran = model.written.ran
        torch.manual_seed(0)
        with capture(model) as captured:
            found, _ = model(x)
        assert torch.equal(found, expected)
        torch.manual_seed(0)
        with capture(model, edit=lambda _, weights: weights):
            edited, _ = model(x)
    close = 32 * torch.finfo(dtype).eps
    assert (edited - expected).abs().max() <= close * (1 + expected.abs().max())
    layers = [layer for layer in captured.layers if layer.name.startswith("written")]
    assert list(captured.missed) == ([] if name in CAPTURED else ["written"])
    assert bool(layers) == (name in CAPTURED)
    if layers and name != "two values":
        weights = torch.cat([layer.weights() for layer in layers], 2)
        assert (weights.reshape(ran.shape) - ran).abs().max() <= close


@pytest.mark.parametrize("name", EVERY)
def test_a_probe_of_attention_by_hand_ends_without_an_error(name):
    found = examine(Model(EVERY[name]), [tokens()])
    assert "known" in [layer.name for layer in found.layers]


def test_a_layer_whose_values_change_after_they_were_used_is_missed():
    model = Model(changed_afterwards)
    with torch.no_grad(), capture(model) as captured:
        model(tokens())
    assert [layer.name for layer in captured.layers] == ["known"]
    assert list(captured.missed) == ["written"]


def test_pytorchs_own_multihead_attention_is_missed_and_left_alone():
    class Multihead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(12, 3, batch_first=True)
            self.known = Known()

        def forward(self, x: Tensor) -> Tensor:
            return self.known(self.inner(x, x, x, need_weights=False)[0][:, None])

    model, x = Multihead().eval(), torch.randn(2, 6, 12)
    with torch.no_grad():
        expected = model(x)
        with capture(model, edit=lambda _, weights: weights) as captured:
            found = model(x)
    assert (found - expected).abs().max() <= 1e-5
    assert list(captured.missed) == ["inner"]


@pytest.mark.parametrize("seen", [False, True], ids=["as it is", "with a bias"])
def test_padding_of_scores_by_hand_is_a_key_mask(seen):
    """Also where a bias was added: padding takes no part in what is measured."""
    real = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    real[1, 4:] = False

    def change(scores: Tensor) -> Tensor:
        scores = scores + drawn(HEADS, TOKENS, TOKENS) if seen else scores
        return scores.masked_fill(~real[:, None, None], -INF)

    model = Model(changed(change))
    with torch.no_grad(), capture(model) as captured:
        model(tokens())
    layer = captured.layers[0]
    assert torch.equal(layer.key_mask, real)
    assert (layer.bias is not None) == seen
    assert (layer.weights() - model.written.ran).abs().max() < 1e-12


SMALL = {"img_size": 64}
FAMILIES: dict[str, dict[str, object]] = {
    "mvitv2_tiny": SMALL,
    "swinv2_tiny_window8_256": SMALL | {"depths": (1, 1), "num_heads": (3, 6)},
    "swin_tiny_patch4_window7_224": SMALL | {"depths": (1, 2), "num_heads": (3, 6)},
    "cait_xxs24_224": SMALL | {"depth": 2},
    "xcit_nano_12_p16_224": SMALL | {"depth": 2},
    "beit_base_patch16_224": SMALL | {"embed_dim": 96, "depth": 2, "num_heads": 3},
    "eva02_tiny_patch14_224": {"img_size": 56, "depth": 2},
    "coatnet_nano_rw_224": SMALL,
    "maxvit_nano_rw_256": SMALL,
    "volo_d1_224": SMALL,
    "twins_svt_small": SMALL | {"depths": (1, 1, 2, 1)},
    "pvt_v2_b0": {},
    "crossvit_tiny_240": {},
    "gcvit_xxtiny": SMALL,
    "levit_128s": SMALL,
    "deit3_small_patch16_224": SMALL | {"depth": 2},
}
UNKNOWN = {"swinv2_tiny_window8_256", "cait_xxs24_224", "xcit_nano_12_p16_224", "volo_d1_224"}  # of each some layers


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "written out"])
@pytest.mark.parametrize("name", FAMILIES)
def test_an_edit_that_changes_nothing_leaves_the_output_of_every_family_of_timm(name, fused):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, **FAMILIES[name])
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1 if parameter.ndim > 1 else 0.02)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    model = model.double().eval()
    side = FAMILIES[name].get("img_size", model.default_cfg["input_size"][-1])
    x, edits = torch.randn(1, 3, side, side, dtype=torch.float64), []
    with torch.no_grad():
        expected = model(x)
        try:
            with capture(model, edit=lambda layer, weights: edits.append(layer) or weights) as captured:
                found = model(x)
        except UnsupportedError:
            assert name in UNKNOWN
            return
    assert (found - expected).norm() <= 1e-9 * expected.norm()
    assert edits
    assert name in UNKNOWN or not captured.missed


def test_relative_positions_that_mvit_writes_into_its_scores_are_captured():
    torch.manual_seed(0)
    model = timm.create_model("mvitv2_tiny", img_size=32, num_classes=5).eval()
    for name, parameter in model.named_parameters():
        if "rel_pos" in name:
            nn.init.normal_(parameter)
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        expected = model(x)
        with capture(model, edit=lambda _, weights: weights) as captured:
            found = model(x)
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    assert len(captured.layers) == 10
    assert captured.layers[0].bias is not None
    assert captured.missed == {}
