"""nn.Attention takes the place of the attention in a timm model, whose blocks call it in their own way."""

from copy import deepcopy

import pytest
import torch

import softless
from softless.errors import UnsupportedError

timm = pytest.importorskip("timm")


def with_ours(theirs: torch.nn.Module, mechanism: str) -> torch.nn.Module:
    model = deepcopy(theirs)
    for block in model.blocks:
        ours = softless.nn.Attention(block.attn.qkv.in_features, block.attn.num_heads, mechanism).double()
        ours.load_state_dict(block.attn.state_dict())
        block.attn = ours
    return model.eval()


def test_a_timm_vit_with_our_softmax_gives_the_same_output():
    theirs = timm.create_model("test_vit").double().eval()
    images = torch.randn(2, 3, 160, 160, dtype=torch.float64)
    expected = theirs(images)
    size = expected.abs().max()
    assert (with_ours(theirs, "softmax")(images) - expected).abs().max() <= 1e-12 * size
    assert (with_ours(theirs, "inline")(images) - expected).abs().max() > 1e-6 * size


def test_arguments_that_timm_passes_are_used_or_refused():
    layer, x = softless.nn.Attention(8, 2, "softmax"), torch.randn(1, 5, 8)
    assert torch.equal(layer(x, attn_mask=None, is_causal=False), layer(x))
    assert not torch.equal(layer(x, attn_mask=None, is_causal=True), layer(x))
    with pytest.raises(UnsupportedError, match=r"attn_mask \[5, 5\] is not taken: pass key_mask \[batch, tokens\]"):
        layer(x, attn_mask=torch.zeros(5, 5))
