"""Models as backbones of a head are timed like any others, and the bound is the model without attention."""

from dataclasses import replace

import pytest
import torch

from softless.bench import model_contest as contest
from softless.bench.model_contest import Setting, linear_layers
from softless.bench.model_heads import CLASSES, head_of
from softless.errors import ArgumentError
from softless.nn.mixing import Mixing, as_heads

SMALL = Setting(image_size=(32, 48), batch=1, head="fpn", bound=True)
TINY = {"dims": [8, 16, 32, 64], "depths": [1, 1, 1, 1], "heads": [1, 1, 2, 2]}


def everyone(name, setting=SMALL):
    return {each.role: each for each in contest.entrants(name, TINY, setting, compiled=False)}


@pytest.mark.parametrize("head", ["fpn", "retinanet"])
def test_numbers_of_a_head_follow_from_each_other(head):
    setting = replace(SMALL, head=head)
    found = everyone("inline_pvt_tiny", setting)
    assert list(found) == ["ours", "plain", "softmax", "timm", "bound"]
    rows = {row["role"]: row for row in contest.model_contest([*found.values()], setting, train=True, repeats=1)}
    assert rows["timm"]["skipped"] == "timm has PVT v2, another architecture"
    for role in ("ours", "plain", "softmax", "bound"):
        row, weights = rows[role], list(found[role].model.parameters())
        assert row["skipped"] is None
        assert row["parameters"] == sum(weight.numel() for weight in weights) > 1e6  # most of them are the head's
        assert row["images_per_second"] == pytest.approx(1e3 / row["ms"])
        assert row["memory_bytes"] > 8 * row["parameters"]
    assert rows["softmax"]["parameters"] == rows["bound"]["parameters"] < rows["ours"]["parameters"]


def test_the_bound_is_the_twin_with_a_sum_instead_of_attention(monkeypatch):
    found = everyone("inline_swin_tiny")
    twin, bound, images = found["softmax"].model, found["bound"].model, SMALL.images
    bound.load_state_dict(twin.state_dict())
    with torch.no_grad():
        attended, summed = twin(images), bound(images)
        assert attended.shape == (1, CLASSES["segment"], 32, 48)
        assert not torch.allclose(attended, summed)
        monkeypatch.setattr(Mixing, "_mix", lambda _layer, call: sum(as_heads(call.qkv)).transpose(1, 2).flatten(2))
        torch.testing.assert_close(twin(images), summed)
    assert linear_layers(found["ours"].model)
    assert linear_layers(bound) == []
    assert contest.bound("swin_tiny", TINY, SMALL).model is not None  # a softmax model is its own twin


@pytest.mark.parametrize("head", ["faster_rcnn", "mask_rcnn"])
def test_half_precision_leaves_the_head_of_a_detection_in_single(head):
    ours = contest.ours("inline_pvt_tiny", TINY, replace(SMALL, head=head, dtype=torch.bfloat16)).model
    assert {weight.dtype for weight in ours.network.head.parameters()} == {torch.float32}
    assert {weight.dtype for weight in ours.network.features.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        assert ours(SMALL.images.bfloat16()).shape[1:] == (4,)
        assert ours.train()(SMALL.images.bfloat16()).isfinite()


def test_a_head_needs_its_task():
    assert (head_of("segment", None), head_of("detect", None), head_of(None, None)) == ("upernet", "faster_rcnn", None)
    with pytest.raises(ArgumentError, match="--head fpn needs --task segment, or it would not be used"):
        head_of(None, "fpn")
    with pytest.raises(ArgumentError, match="--head fpn is no head of --task detect, which has faster_rcnn, ret"):
        head_of("detect", "fpn")
