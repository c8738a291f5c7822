"""LongformerAttention: a window through one set of projections, global tokens through the other."""

import pytest
import torch
from torch import Tensor

from softless.errors import SoftlessError
from softless.nn import Attention, LongformerAttention
from softless.nn.maps import attention_maps
from softless.probes.capture import capture


def by_hand(layer: LongformerAttention, x: Tensor, mask: Tensor, is_causal: bool) -> Tensor:
    """Query by query: the keys it sees, one softmax, the heads side by side."""
    batch, tokens, _ = x.shape
    window, some, d = layer.mechanism.window, layer.global_tokens, layer.head_dim
    out = torch.zeros_like(x)
    for b in range(batch):
        q, k, v, q_all, k_all, v_all = (
            part for project in (layer.qkv, layer.qkv_global) for part in project(x[b]).chunk(3, -1)
        )
        for i in range(tokens):
            far = i < some
            seen = [
                j
                for j in range(tokens)
                if mask[b, j] and (j <= i or not is_causal) and (far or j < some or abs(i - j) <= window)
            ]
            mine, keys, values = (q_all[i], k_all[seen], v_all[seen]) if far else (q[i], k[seen], v[seen])
            for h in range(layer.heads):
                here = slice(h * d, (h + 1) * d)
                weights = (keys[:, here] @ mine[here] * d**-0.5).softmax(0)
                out[b, i, here] = weights @ values[:, here]
    return layer.proj(out)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("window", "some"), [(2, 1), (3, 3), (1, 0), (20, 2), (2, 30)])
def test_longformer_attention_is_the_formula(window: int, some: int, is_causal: bool):
    layer = LongformerAttention(12, 3, window=window, global_tokens=some).double()
    torch.nn.init.normal_(layer.qkv_global.weight)
    x, mask = torch.randn(2, 13, 12, dtype=torch.float64), torch.ones(2, 13, dtype=torch.bool)
    mask[1, 9:] = False
    out = layer(x, key_mask=mask, is_causal=is_causal)
    torch.testing.assert_close(out[mask], by_hand(layer, x, mask, is_causal)[mask], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("some", [0, 2, 30])
def test_longformer_weights_are_those_behind_its_output(some: int, kv_heads: int):
    """Rows of global tokens are of the second set, in the map too, and read its values; padding weighs nothing."""
    layer = LongformerAttention(12, 4, window=2, global_tokens=some, kv_heads=kv_heads).double()
    torch.nn.init.normal_(layer.qkv_global.weight)
    x, mask = torch.randn(2, 13, 12, dtype=torch.float64), torch.arange(13) < torch.tensor([[13], [9]])
    out, weights = layer.with_weights(torch.where(mask[..., None], x, torch.nan), key_mask=mask)
    torch.testing.assert_close(out[mask], layer(x, key_mask=mask)[mask], rtol=1e-12, atol=1e-12)
    assert not weights[1, :, :9, 9:].any()
    causal = layer.as_call(layer.project(x), source=x, is_causal=True)[0]
    out = layer.combine(layer.weights(causal), causal).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer.proj(out), layer(x, is_causal=True), rtol=1e-12, atol=1e-12)

    (found,) = attention_maps(layer, x)
    assert torch.equal(found.weights, layer.with_weights(x)[1])
    q, k, _ = layer._heads(layer.qkv_global(x))
    rows = (q[:, :, :some] @ k.repeat_interleave(4 // kv_heads, 1).mT / 3**0.5).softmax(-1)
    torch.testing.assert_close(found.weights[:, :, :some], rows, rtol=1e-12, atol=1e-12)


def test_longformer_attention_starts_as_the_mechanism_with_one_projection():
    """qkv_global is a copy: until it is trained, nothing has changed."""
    layer, plain = LongformerAttention(12, 3, window=4, global_tokens=2), Attention(12, 3, "longformer")
    plain.mechanism = layer.mechanism
    plain.load_state_dict({key: x for key, x in layer.state_dict().items() if not key.startswith("qkv_global")})
    x = torch.randn(2, 20, 12)
    torch.testing.assert_close(layer(x), plain(x))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_every_parameter_of_longformer_attention_gets_a_gradient(kv_heads: int):
    layer = LongformerAttention(12, 4, window=2, kv_heads=kv_heads)
    layer(torch.randn(2, 9, 12)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_unsupported_calls_of_longformer_attention_are_refused():
    layer = LongformerAttention(12, 3)
    with pytest.raises(SoftlessError, match="bias would be added"):
        layer(torch.randn(2, 9, 12), bias=torch.zeros(9, 9))
    packed = torch.nested.nested_tensor([torch.randn(9, 12), torch.randn(4, 12)], layout=torch.jagged)
    for call in (layer, layer.with_weights):
        with pytest.raises(SoftlessError, match="x is packed sequences, and each has global tokens"):
            call(packed)
    with pytest.raises(SoftlessError, match=r"'' is a LongformerAttention, .* a probe reads one set"), capture(layer):
        layer(torch.randn(2, 9, 12))
    with pytest.raises(SoftlessError, match="keep a KV cache"):
        layer.with_state(torch.randn(2, 9, 12))
    with pytest.raises(SoftlessError, match="window -1"):
        LongformerAttention(12, 3, window=-1)
