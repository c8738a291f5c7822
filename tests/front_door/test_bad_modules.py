"""A mistake in a module or its call raises a SoftlessError that says what was passed and what was needed."""

import pytest
import torch
from torch import Tensor

from softless import nn
from tests.front_door.refusals import (
    INF,
    LAYOUTS,
    MASKS,
    NAN,
    refuses,
    some,
)

LAYERS = {
    "local": lambda: nn.Attention(12, 4, local=True),
    "window": lambda: nn.Attention(12, 4, window=2),
    "attn_drop": lambda: nn.Attention(12, 4, "softmax", attn_drop=0.1),
}


@pytest.mark.parametrize("mistake", MASKS)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_module_names_a_key_mask_that_does_not_fit(mistake, layer):
    mask, words = MASKS[mistake]
    refuses(lambda: LAYERS[layer]()(some(2, 5, 12), (1, 5), key_mask=mask), "key_mask", *words)


def residual(context: Tensor | None = None, v: Tensor | None = None, grid: tuple = (2, 3), prefix: int = 0) -> Tensor:
    context, v = some(2, 12) if context is None else context, some(2, 4, 6, 3) if v is None else v
    return nn.LocalResidual(12, 4)(context, v, grid, prefix)


MODULES = {
    "dim": (lambda: nn.Attention(190, 3), [190, 3]),
    "heads": (lambda: nn.Attention(12, 0), [12, 0]),
    "kv_heads": (lambda: nn.Attention(12, 4, kv_heads=3), [4, 3]),
    "local with kv_heads": (lambda: nn.Attention(12, 4, local=True, kv_heads=2), [4, 2]),
    "attn_drop of inline": (lambda: nn.Attention(12, 4, attn_drop=0.1), ["attn_drop", 0.1, "inline"]),
    "attn_drop above one": (lambda: nn.Attention(12, 4, "softmax", attn_drop=1.5), ["attn_drop", 1.5]),
    "proj_drop negative": (lambda: nn.Attention(12, 4, proj_drop=-0.1), ["proj_drop", -0.1]),
    "residual": (lambda: nn.LocalResidual(190, 3), [190, 3]),
    "dim of x": (lambda: nn.Attention(12, 4)(some(2, 5, 13)), [13, 12]),
    "rank of x": (lambda: nn.Attention(12, 4)(some(5, 12)), [[5, 12]]),
    "no grid": (lambda: nn.Attention(12, 4, local=True)(some(2, 6, 12)), ["grid", 6]),
    "large grid": (lambda: nn.Attention(12, 4, local=True)(some(2, 6, 12), grid=(3, 3)), [6, 3, 9]),
    "grid of one number": (lambda: nn.Attention(12, 4, local=True)(some(2, 6, 12), grid=6), ["grid", 6]),
    "causal local": (lambda: nn.Attention(12, 4, local=True)(some(2, 6, 12), (2, 3), is_causal=True), ["causal"]),
    "state and local": (lambda: nn.Attention(12, 4, local=True).with_state(some(2, 6, 12)), ["local", "state"]),
    "state of softmax": (lambda: nn.Attention(12, 4, "softmax").with_state(some(2, 6, 12)), ["softmax", "KV cache"]),
    "window zero": (lambda: nn.Attention(12, 4, window=0), ["window", 0, "at least 1"]),
    "window negative": (lambda: nn.Attention(12, 4, window=-1), ["window", -1, "at least 1"]),
    "window a fraction": (lambda: nn.Attention(12, 4, window=2.5), ["window", 2.5, "whole number"]),
    "window a pair": (lambda: nn.Attention(12, 4, window=(2, 2)), ["window", (2, 2), "whole number"]),
    "prefix": (lambda: residual(v=some(2, 4, 7, 3)), [7, 2, 3, 6]),
    "prefix negative": (lambda: residual(v=some(2, 4, 4, 3), prefix=-2), ["prefix", -2, "whole number"]),
    "grid negative": (lambda: residual(grid=(-2, -3)), [(-2, -3), "at least 1 x 1"]),
    "grid of fractions": (lambda: residual(grid=(2.0, 3.0)), [(2.0, 3.0), "(height, width)"]),
    "context too wide": (lambda: residual(context=some(2, 16)), ["context", [2, 16], "[batch, 12]"]),
    "context of tokens": (lambda: residual(context=some(2, 6, 12)), ["context", [2, 6, 12], "[batch, 12]"]),
    "batch of context": (lambda: residual(context=some(1, 12)), [[2, 4, 6, 3], [1, 12]]),
    "heads of v": (lambda: residual(v=some(2, 1, 6, 3)), ["v", [2, 1, 6, 3], "[2, 4, 6, 3]"]),
    "dim of v": (lambda: residual(v=some(2, 4, 6, 5)), ["v", [2, 4, 6, 5], "[2, 4, 6, 3]"]),
    "rank of v": (lambda: residual(v=some(4, 6, 3)), ["v", [4, 6, 3], "[batch, heads, tokens, dim]"]),
}


@pytest.mark.parametrize("mistake", MODULES)
def test_a_module_that_cannot_be_is_refused(mistake):
    call, words = MODULES[mistake]
    refuses(call, *words)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_module_refuses_tokens_that_are_not_dense(layout):
    change, words = LAYOUTS[layout]
    x = some(2, 6, 8)
    for module in (
        nn.Attention(8, 2),
        nn.LongformerAttention(8, 2),
        nn.EliminationEncoder(8, 2, 1, 6),
        nn.FunnelEncoder(8, 2, (1, 1)),
        nn.StridedFeedForward(8),
    ):
        refuses(lambda module=module: module(change(x)), "x", *words)
        refuses(lambda module=module: module(x.tolist()), "x", "list")
        refuses(
            lambda module=module: module(x, key_mask=torch.ones(2, 5, dtype=torch.bool)), "key_mask", [2, 5], [2, 6]
        )


SIZES = ["dim", "heads", "num_heads", "kv_heads", "window", "attn_drop", "proj_drop", "local", "qkv_bias", "rotary",
         "qk_conv"]  # fmt: skip


@pytest.mark.parametrize("size", [*SIZES, "qk_norm"])
def test_an_absurd_size_of_a_layer_is_refused_by_its_name(size):
    for value in (-1, 10**400, 10**5000, 0.5, NAN, INF, "a", "no", (), torch.ones(2), 1j):
        if not (size.endswith("drop") and isinstance(value, float) and value == 0.5):
            refuses(lambda value=value: nn.Attention(**{"dim": 8, "heads": 2, size: value}), size)
