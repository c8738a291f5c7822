"""Masks are found however scores are spelled, so what a probe measures does not depend on the spelling."""

import math
from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softless.probes.capture import capture
from softless.probes.examination import examine
from softless.probes.findings import LayerFindings
from softless.probes.running import Estimate

BATCH, HEADS, TOKENS = 3, 2, 9
Spelling = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k and what is added: the scores

SPELLINGS: dict[str, Spelling] = {
    "divided": lambda q, k, mask: q @ k.mT / math.sqrt(q.shape[-1]) + mask,
    "multiplied": lambda q, k, mask: (q @ k.mT) * q.shape[-1] ** -0.5 + mask,
    "divided by a tensor": lambda q, k, mask: q @ k.mT / torch.tensor(q.shape[-1], dtype=q.dtype).sqrt() + mask,
    "queries multiplied": lambda q, k, mask: (q * q.shape[-1] ** -0.5) @ k.mT + mask,
    "masked first": lambda q, k, mask: (q @ k.mT + mask) / math.sqrt(q.shape[-1]),
    "the maximum subtracted": lambda q, k, mask: less_maximum(q @ k.mT / math.sqrt(q.shape[-1]) + mask),
    "filled": lambda q, k, mask: (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(mask < 0, mask.min()),
    "filled in place": lambda q, k, mask: (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill_(mask < 0, mask.min()),
}
VALUES: dict[str, Callable[[torch.dtype], float]] = {
    "-inf": lambda _: -math.inf,
    "-1e4": lambda _: -1e4,
    "finfo.min": lambda dtype: torch.finfo(dtype).min,
}


def less_maximum(scores: Tensor) -> Tensor:
    return scores - scores.amax(-1, keepdim=True)


def real(side: str) -> Tensor:
    tokens = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    tokens[1, slice(6, None) if side == "right" else slice(3)] = False
    return tokens


class Padded(nn.Module):
    """Attention over tokens some of which are padding; None is the fused call, with the mask as it is meant."""

    def __init__(self, spelling: Spelling | None, side: str, value: float) -> None:
        super().__init__()
        self.spelling, self.real, self.value = spelling, real(side), value

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x.unbind(1)
        if self.spelling is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.real[:, None, None])
        mask = torch.zeros(BATCH, 1, 1, TOKENS, dtype=q.dtype).masked_fill(~self.real[:, None, None], self.value)
        return self.spelling(q, k, mask).softmax(-1) @ v


def heads(dim: int, dtype: torch.dtype) -> Tensor:
    """q, k and v of each sample, with a few queries that are nearly the same, so that some are confused."""
    x = torch.randn(BATCH, 3, HEADS, TOKENS, dim, generator=torch.Generator().manual_seed(dim)).to(dtype)
    x[:, 0, :, 1:4] = x[:, 0, :, :1] * (1 + 2.0**-10)
    return x


def findings(model: nn.Module, x: Tensor) -> LayerFindings:
    return examine(model, [x]).layers[0]


def assert_same(found: LayerFindings, expected: LayerFindings, rel: float) -> None:
    for field in fields(LayerFindings):
        one, two = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(two, Estimate):
            assert one.mean == pytest.approx(two.mean, rel=rel, abs=rel), field.name
    assert (found.confusions.mean, found.rank) == (expected.confusions.mean, expected.rank)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [8, 24, 48, 64, 80])
def test_padding_is_found_in_every_spelling_of_the_scores(dim, dtype, value, side):
    x, number = heads(dim, dtype), VALUES[value](dtype)
    for name, spelling in SPELLINGS.items():
        with torch.no_grad(), capture(model := Padded(spelling, side, number)) as captured:
            model(x)
        (layer,) = captured.layers
        assert (name, layer.bias, layer.is_causal) == (name, None, False)
        assert torch.equal(layer.key_mask, real(side)), name


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [8, 24, 48, 64, 80])
def test_findings_are_the_same_in_every_spelling_of_the_scores(dim, dtype, value):
    x = heads(dim, dtype)
    expected = findings(Padded(None, "right", 0.0), x)
    assert expected.confusions.mean > 0
    for spelling in SPELLINGS.values():
        found = findings(Padded(spelling, "right", VALUES[value](dtype)), x)
        assert_same(found, expected, 1e-4 if dtype == torch.float32 else 1e-9)


def test_a_small_bias_is_not_mistaken_for_rounding():
    bias = torch.randn(HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(0)) * 1e-3
    model = Padded(lambda q, k, mask: q @ k.mT / math.sqrt(q.shape[-1]) + bias + mask, "right", -math.inf)
    with torch.no_grad(), capture(model) as captured:
        model(heads(24, torch.float32))
    (layer,) = captured.layers
    assert torch.equal(layer.key_mask, real("right"))
    seen = layer.bias > -torch.inf
    assert torch.equal(seen, layer.key_mask[:, None, None].expand_as(seen))
    assert (layer.bias - bias)[seen].abs().max() < 1e-5


@pytest.mark.parametrize("biased", [False, True], ids=["alone", "and a bias"])
def test_the_same_low_bias_for_all_keys_of_a_query_hides_none_of_them(biased):
    bias = torch.randn(HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(0)).double() * biased
    model = Padded(lambda q, k, mask: q @ k.mT * 100 + bias - 5000.0 + mask, "right", 0.0)
    x = heads(24, torch.float64)
    with torch.no_grad(), capture(model, edit=lambda _, weights: weights) as captured:
        found = model(x)
    with torch.no_grad():
        assert (found - model(x)).abs().max() < 1e-9
    assert captured.layers[0].key_mask is None
    assert (captured.layers[0].bias is not None) == biased
