"""A layer's scores, weights and output are those of its formula, written out here."""

import math

import pytest
import torch

import softless
from softless.probes.layer import Layer

B, H, G, N, M, D, E = 2, 4, 2, 5, 7, 8, 3
SOFTMAX = softless.mechanism("softmax")


def drawn(**options: object) -> Layer:
    q, k, v = (torch.randn(B, *shape, dtype=torch.float64) for shape in ((H, N, D), (G, M, D), (G, M, E)))
    return Layer("one", q, k, v, **({"mechanism": SOFTMAX} | options))


def by_hand(layer: Layer) -> torch.Tensor:
    """Scores pair by pair."""
    scores = torch.full((B, H, N, M), -torch.inf, dtype=torch.float64)
    scale = 1 / math.sqrt(D) if layer.scale is None else layer.scale
    bias = 0.0 if layer.bias is None else layer.bias.expand(B, H, N, M)
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, (B, H, N, M))).tolist():
        seen = not layer.is_causal or j - (M - N) <= i
        if seen and (layer.key_mask is None or layer.key_mask[b, j]):
            product = sum((layer.q[b, h, i, c] * layer.k[b, h // (H // G), j, c]).item() for c in range(D))
            scores[b, h, i, j] = scale * product + (bias if isinstance(bias, float) else bias[b, h, i, j])
    return scores


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "bias": {"bias": torch.linspace(-1, 1, H * N * M, dtype=torch.float64).view(1, H, N, M)},
    "mask": {"key_mask": torch.arange(M) < torch.tensor([[M], [4]])},
    "all": {
        "is_causal": True,
        "scale": 0.3,
        "key_mask": torch.arange(M) != torch.tensor([[2], [3]]),
        "bias": torch.linspace(0, 2, N * M, dtype=torch.float64).view(1, 1, N, M),
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_scores_are_what_a_softmax_would_see(options):
    layer = drawn(**options)
    expected = by_hand(layer)
    found = layer.scores()
    assert torch.equal(found == -torch.inf, expected == -torch.inf)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_weights_and_output_follow_from_the_scores(options):
    layer = drawn(**options)
    weights = by_hand(layer).softmax(-1)
    torch.testing.assert_close(layer.weights(), weights, rtol=1e-12, atol=1e-12)
    out = weights @ layer.v.repeat_interleave(H // G, 1)
    torch.testing.assert_close(layer.output(), out, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "name", ["inline", "blend", "regress", "linear", "efficient", "hydra", "angular", "taylor", "threshold"]
)
def test_output_is_attention_by_the_layers_own_mechanism(name):
    q, k, v = torch.randn(3, B, H, 6, D, dtype=torch.float64).unbind()
    made, grid = softless.mechanism(name), (2, 3)
    inputs = {
        word: torch.randn(shape, dtype=torch.float64).abs() for word, shape in made.input_shapes(H, D).items()
    } or None
    layer = Layer("one", q, k, v, made, grid=grid, inputs=inputs)
    own = grid if made.reads_grid else None
    expected = softless.attention(q, k, v, made, inputs=inputs, grid=own)
    torch.testing.assert_close(layer.output(), expected, rtol=1e-10, atol=1e-10)


def test_other_weights_give_another_output():
    layer = drawn()
    first = torch.zeros(B, H, N, M, dtype=torch.float64)
    first[..., 0] = 1.0
    expected = layer.v[:, :, :1].repeat_interleave(H // G, 1).expand(-1, -1, N, -1)
    assert torch.equal(layer.combined(first), expected)


def test_what_a_mask_hides_reaches_neither_scores_nor_output():
    layer = drawn(key_mask=torch.arange(M).expand(B, M) < 4)
    layer.k[:, :, 4:] = torch.nan
    layer.v[:, :, 4:] = torch.nan
    assert not layer.scores().isnan().any()
    assert layer.output().isfinite().all()


def test_a_softmax_with_induced_confusion_sees_confused_queries():
    layer = drawn(mechanism=softless.mechanism("softmax", confusion="relu"))
    q = layer.q.relu()
    q = q / q.norm(dim=-1, keepdim=True)
    expected = q @ layer.k.repeat_interleave(H // G, 1).mT / math.sqrt(D)
    torch.testing.assert_close(layer.scores(), expected, rtol=1e-12, atol=1e-12)


def test_half_precision_scores_are_float32():
    q, k, v = torch.randn(3, 1, 2, 6, 8).bfloat16().unbind()
    layer = Layer("one", q, k, v, SOFTMAX)
    assert layer.scores().dtype == torch.float32
    assert layer.output().dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "grid"),
    [({"grid": (3, 4), "prefix": 2}, (3, 4)), ({}, None), ({"grid": (3, 3)}, None), ({"grid": (3, 4)}, None)],
)
def test_a_layer_is_a_picture_if_the_prefix_and_the_grid_are_all_its_tokens(options, grid):
    q = torch.randn(1, 1, 14, 8)
    assert Layer("one", q, q, q, SOFTMAX, **options).picture() == grid
    assert Layer("one", q, q[:, :, 1:], q[:, :, 1:], SOFTMAX, **options).picture() is None
