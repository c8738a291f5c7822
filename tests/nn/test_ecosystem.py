"""nn.Attention in company: cross-attention, normalized and rotated heads, and PyTorch's own transformer layers."""

import copy

import pytest
import torch
from torch import Tensor, nn

import softless
from softless.errors import ArgumentError, SoftlessError, UnsupportedError
from softless.nn import Attention, LongformerAttention, MultiheadAttention
from softless.nn.mixing import as_heads
from softless.nn.rotary import rotate

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def doubles(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def padding(*lengths: int, tokens: int) -> Tensor:
    """bool [B, N], True for a real token."""
    return torch.arange(tokens) < torch.tensor(lengths)[:, None]


# heads and num_heads


def test_num_heads_is_another_name_for_heads():
    torch.manual_seed(0)
    ours = Attention(8, heads=2)
    torch.manual_seed(0)
    theirs = Attention(8, num_heads=2)
    assert theirs.heads == theirs.num_heads == ours.num_heads == 2
    x = torch.randn(2, 5, 8)
    assert torch.equal(ours(x), theirs(x))
    assert Attention(8, 2, num_heads=2).heads == 2


def test_two_different_numbers_of_heads_are_refused():
    with pytest.raises(ArgumentError, match="heads 2 and num_heads 4 are two names for the same number"):
        Attention(8, 2, num_heads=4)
    with pytest.raises(ArgumentError, match="heads is None and must be the number of heads"):
        Attention(8)


# Cross-attention


@pytest.mark.parametrize("kv_heads", [None, 1])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mechanism", ["softmax", "inline", "linear", "delta"])
def test_cross_attention_takes_keys_and_values_from_the_context(mechanism, bias, kv_heads):
    causal = mechanism == "delta"
    layer = Attention(12, 3, mechanism, qkv_bias=bias, kv_heads=kv_heads).double()
    x, context = doubles(2, 5, 12), doubles(2, 7, 12)
    mask = padding(7, 4, tokens=7)
    q = layer._heads(layer.qkv(x))[0]
    _, k, v = layer._heads(layer.qkv(context))
    inputs = layer.inputs(context)
    out = softless.attention(q, k, v, layer.mechanism, key_mask=mask, is_causal=causal, inputs=inputs)
    expected = layer.proj(out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, context=context, key_mask=mask, is_causal=causal), expected, **EXACT)


def test_cross_attention_to_itself_is_self_attention():
    layer, x = Attention(12, 3, "inline").double(), doubles(2, 5, 12)
    torch.testing.assert_close(layer(x, context=x.clone()), layer(x), **EXACT)


def test_cross_attention_calls_a_projection_that_has_hooks():
    layer, x, context = Attention(12, 3).double(), doubles(2, 5, 12), doubles(2, 7, 12)
    before = layer(x, context=context)
    layer.qkv.register_forward_hook(lambda *call: 2 * call[-1])
    assert not torch.equal(layer(x, context=context), before)
    with torch.no_grad():
        for parameter in layer.qkv.parameters():
            parameter.div_(2)
    torch.testing.assert_close(layer(x, context=context), before, **EXACT)


def test_cross_attention_with_dropout_and_bias_runs():
    layer, x, context = Attention(12, 3, "softmax", attn_drop=0.5), torch.randn(2, 5, 12), torch.randn(2, 7, 12)
    assert layer(x, context=context, bias=torch.randn(2, 3, 5, 7)).shape == (2, 5, 12)


@pytest.mark.parametrize(
    ("layer", "call", "message"),
    [
        (
            Attention(12, 3),
            {"grid": (2, 3)},
            "grid needs queries and keys of the same tokens: it cannot go with context",
        ),
        (Attention(12, 3, local=True), {}, "local needs queries and keys of the same tokens"),
        (Attention(12, 3, window=2), {}, "window needs queries and keys of the same tokens"),
        (Attention(12, 3, rotary=True), {}, "rotary needs queries and keys of the same tokens"),
        (Attention(12, 3, "soft"), {}, "mechanism 'soft' needs queries and keys of the same tokens"),
        (Attention(12, 3), {"key_mask": padding(6, 5, tokens=6)}, r"must be \[batch, keys\] = \[2, 7\]"),
        (LongformerAttention(12, 3), {}, "context was passed, and global tokens see the tokens of one sequence"),
    ],
)
def test_what_a_context_cannot_go_with_is_refused(layer, call, message):
    with pytest.raises(SoftlessError, match=message):
        layer(torch.randn(2, 6, 12), context=torch.randn(2, 7, 12), **call)


def test_a_context_of_the_wrong_kind_is_refused_by_name():
    layer, x = Attention(12, 3), torch.randn(2, 6, 12)
    with pytest.raises(ArgumentError, match=r"context has shape \[2, 7, 8\] and must be \[batch, tokens, 12\]"):
        layer(x, context=torch.randn(2, 7, 8))
    with pytest.raises(SoftlessError, match="batch sizes must be equal"):
        layer(x, context=torch.randn(3, 7, 12))
    sequences = torch.nested.nested_tensor([x[0], x[1, :3]], layout=torch.jagged)
    with pytest.raises(UnsupportedError, match="context needs dense tokens"):
        layer(sequences, context=x)


# qk_norm


@pytest.mark.parametrize("norm", [True, nn.RMSNorm])
@pytest.mark.parametrize("options", [{}, {"kv_heads": 1}, {"window": 2}, {"local": True}], ids=str)
def test_qk_norm_normalizes_the_queries_and_keys_of_each_head(norm, options):
    layer = Attention(12, 3, qk_norm=norm, **options).double()
    nn.init.uniform_(layer.q_norm.weight)
    nn.init.uniform_(layer.k_norm.weight)
    x = doubles(2, 6, 12)
    plain = copy.deepcopy(layer)
    plain.q_norm = plain.k_norm = nn.Identity()
    q, k, v = as_heads(layer.project(x))
    raw_q, raw_k, raw_v = as_heads(plain.project(x))
    torch.testing.assert_close(q, layer.q_norm(raw_q), **EXACT)
    torch.testing.assert_close(k, layer.k_norm(raw_k), **EXACT)
    assert torch.equal(v, raw_v)
    assert layer(x, (2, 3)).shape == x.shape


def test_qk_norm_is_timms():
    timm = pytest.importorskip("timm")
    theirs = timm.layers.Attention(12, 3, qkv_bias=True, qk_norm=True, norm_layer=nn.LayerNorm).double()
    nn.init.uniform_(theirs.q_norm.weight)
    ours = Attention(12, num_heads=3, mechanism="softmax", qk_norm=nn.LayerNorm).double()
    ours.load_state_dict(theirs.state_dict())
    x = doubles(2, 6, 12)
    torch.testing.assert_close(ours(x), theirs(x), **EXACT)


def test_qk_norm_of_a_mechanism_with_shared_keys_has_one_norm():
    layer = Attention(12, 3, "soft", qk_norm=True)
    q, k, _ = as_heads(layer.project(torch.randn(2, 6, 12)))
    assert torch.equal(q, k)
    assert not [name for name in layer.state_dict() if name.startswith("k_norm")]


def test_qk_norm_holds_in_cross_attention():
    layer, x, context = Attention(12, 3, qk_norm=True).double(), doubles(2, 5, 12), doubles(2, 7, 12)
    q, k, v = layer.project(x, context)
    torch.testing.assert_close(q.mean(-1), torch.zeros(2, 3, 5, dtype=torch.float64), **EXACT)
    out = softless.attention(q, k, v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer(x, context=context), layer.proj(out), **EXACT)


# Rotary positions


def rotated_one_by_one(x: Tensor, base: float) -> Tensor:
    """The formula as it is written, token by token and channel by channel: x [B, heads, N, d]."""
    out, half = torch.empty_like(x), x.shape[-1] // 2
    for i in range(x.shape[2]):
        for c in range(half):
            angle = torch.tensor(i * base ** (-2 * c / x.shape[-1]), dtype=x.dtype)
            one, two = x[..., i, c], x[..., i, c + half]
            out[..., i, c] = one * angle.cos() - two * angle.sin()
            out[..., i, c + half] = two * angle.cos() + one * angle.sin()
    return out


@pytest.mark.parametrize(("rotary", "base"), [(True, 10_000.0), (100.0, 100.0)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mechanism", ["softmax", "inline", "linear"])
def test_rotary_attention_is_the_plain_formula(mechanism, is_causal, rotary, base):
    layer, x = Attention(12, 3, mechanism, rotary=rotary).double(), doubles(2, 7, 12)
    q, k, v = layer.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
    q, k = rotated_one_by_one(q, base), rotated_one_by_one(k, base)
    out = softless.attention(q, k, v, mechanism, is_causal=is_causal)
    torch.testing.assert_close(layer(x, is_causal=is_causal), layer.proj(out.transpose(1, 2).flatten(2)), **EXACT)


def test_rotated_scores_depend_on_the_distance_of_tokens_alone():
    q, k, places = doubles(1, 1, 6, 8), doubles(1, 1, 6, 8), torch.arange(6)
    near = rotate(q, places) @ rotate(k, places).mT
    far = rotate(q, places + 1000) @ rotate(k, places + 1000).mT
    torch.testing.assert_close(near, far, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(near, rotate(q, places + 1) @ rotate(k, places).mT)


def test_rotary_softmax_does_not_change_when_all_positions_move():
    """Padding before a sequence moves every token by as many places."""
    layer, x = Attention(12, 3, "softmax", rotary=True).double(), doubles(1, 5, 12)
    longer = torch.cat([doubles(1, 4, 12), x], 1)
    mask = torch.arange(9)[None] >= 4
    torch.testing.assert_close(layer(longer, key_mask=mask)[:, 4:], layer(x), **EXACT)


def test_rotary_positions_do_not_count_hidden_tokens():
    layer, x, mask = Attention(12, 3, rotary=True).double(), doubles(1, 6, 12), torch.ones(1, 6, dtype=torch.bool)
    mask[:, 2:4] = False
    torch.testing.assert_close(layer(x, key_mask=mask)[mask], layer(x[mask][None])[0], **EXACT)


@pytest.mark.parametrize("options", [{}, {"kv_heads": 1}], ids=str)
@pytest.mark.parametrize("mechanism", ["linear", "inline"])
def test_rotary_attention_continues_from_a_state(mechanism, options):
    layer, x = Attention(12, 3, mechanism, rotary=True, **options).double(), doubles(2, 8, 12)
    first, state = layer.with_state(x[:, :3])
    second, state = layer.with_state(x[:, 3:7], state)
    third, _ = layer.with_state(x[:, 7:], state)
    torch.testing.assert_close(torch.cat([first, second, third], 1), layer(x, is_causal=True), **EXACT)


def test_rotary_attention_continues_after_padded_prompts():
    layer, x = Attention(12, 3, "linear", rotary=True).double(), doubles(2, 8, 12)
    prompt, mask = x[:, :6].clone(), padding(6, 4, tokens=6)
    _, state = layer.with_state(prompt, key_mask=mask)
    token, _ = layer.with_state(x[:, 6:7], state)
    short = torch.cat([x[1:, :4], x[1:, 6:7]], 1)
    torch.testing.assert_close(token[1, 0], layer(short, is_causal=True)[0, -1], **EXACT)


@pytest.mark.parametrize("options", [{"rotary": True}, {"qk_norm": True}, {"rotary": True, "qk_norm": True}], ids=str)
def test_each_packed_sequence_has_its_own_positions_and_norms(options):
    layer, sequences = Attention(12, 3, **options).double(), [doubles(length, 12) for length in (3, 5, 1)]
    packed = layer(torch.nested.nested_tensor(sequences, layout=torch.jagged))
    for one, out in zip(sequences, packed.unbind(), strict=True):
        torch.testing.assert_close(out, layer(one[None])[0], **EXACT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rotation_of_half_precision_is_rounded_once(dtype):
    x, places = torch.randn(1, 2, 50, 8).to(dtype), torch.arange(50)
    exact = rotate(x.double(), places)
    assert (rotate(x, places).double() - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.parametrize(
    ("dim", "options", "message"),
    [
        (9, {"rotary": True}, "rotary=True rotates pairs of channels, and the head dimension 3 is odd"),
        (12, {"rotary": "yes"}, "rotary is 'yes' and must be True, False or a base above 1"),
        (12, {"rotary": -1.0}, "rotary is -1.0 and must be"),
        (12, {"rotary": float("inf")}, "rotary is inf and must be"),
        (12, {"qk_norm": "layer"}, "qk_norm is 'layer' and must be True, False or a norm layer"),
    ],
)
def test_options_of_the_wrong_kind_are_refused(dim, options, message):
    with pytest.raises(ArgumentError, match=message):
        Attention(dim, 3, **options)


# PyTorch's transformer layers


def encoder_layer(mechanism: str, *, batch_first: bool = True, **options: object) -> nn.TransformerEncoderLayer:
    layer = nn.TransformerEncoderLayer(12, 3, 24, batch_first=batch_first, **options)
    layer.self_attn = MultiheadAttention(12, 3, mechanism, batch_first=batch_first)
    return layer.double()


def composed(layer: nn.TransformerEncoderLayer, x: Tensor, **call: object) -> Tensor:
    """A post-norm encoder layer, written out."""
    x = layer.norm1(x + layer.dropout1(layer.self_attn.attention(x, **call)))
    return layer.norm2(x + layer.dropout2(layer.linear2(layer.dropout(layer.linear1(x).relu()))))


@pytest.mark.parametrize("mechanism", ["softmax", "inline", "linear"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_a_transformer_encoder_layer_runs_our_attention(mechanism, training, grad):
    layer = encoder_layer(mechanism, dropout=0.1 if training else 0.0).train(training)
    x, real = doubles(2, 7, 12), padding(7, 4, tokens=7)
    with torch.set_grad_enabled(grad):
        torch.manual_seed(0)
        out = layer(x, src_key_padding_mask=~real)
        torch.manual_seed(0)
        torch.testing.assert_close(out, composed(layer, x, key_mask=real), **EXACT)


@pytest.mark.parametrize("mechanism", ["softmax", "inline"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # says that the fused softmax path is not taken
def test_a_transformer_encoder_runs_our_attention(mechanism, training, batch_first):
    encoder = nn.TransformerEncoder(encoder_layer(mechanism, batch_first=batch_first, dropout=0.0), 2).train(training)
    x, real = doubles(2, 7, 12), padding(7, 4, tokens=7)
    with torch.no_grad():
        out = encoder(x if batch_first else x.transpose(0, 1), src_key_padding_mask=~real)
        expected = x
        for layer in encoder.layers:
            expected = composed(layer, expected, key_mask=real)
    torch.testing.assert_close(out if batch_first else out.transpose(0, 1), expected, **EXACT)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("mechanism", ["softmax", "linear"])
def test_a_causal_mask_of_pytorch_is_causal_attention(mechanism):
    encoder, x = nn.TransformerEncoder(encoder_layer(mechanism, dropout=0.0), 2).eval(), doubles(2, 7, 12)
    expected = x
    for layer in encoder.layers:
        expected = composed(layer, expected, is_causal=True)
    mask = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    torch.testing.assert_close(encoder(x, mask=mask, is_causal=True), expected, **EXACT)
    torch.testing.assert_close(encoder(x, mask=mask), expected, **EXACT)  # detected by PyTorch


@pytest.mark.parametrize("kind", [torch.bool, torch.float64])
@pytest.mark.parametrize("ndim", [2, 3])
def test_a_mask_of_scores_is_pytorchs(kind, ndim):
    """Softmax attention with the weights of torch.nn.MultiheadAttention gives its output."""
    theirs = nn.MultiheadAttention(12, 3, batch_first=True).double()
    ours = MultiheadAttention(12, 3, "softmax", batch_first=True).double()
    ours.attention.load_state_dict(
        {
            "qkv.weight": theirs.in_proj_weight,
            "qkv.bias": theirs.in_proj_bias,
            "proj.weight": theirs.out_proj.weight,
            "proj.bias": theirs.out_proj.bias,
        }
    )
    x, memory = doubles(2, 5, 12), doubles(2, 7, 12)
    mask = doubles(*((6, 5, 7) if ndim == 3 else (5, 7)))
    mask = mask > 0.5 if kind is torch.bool else mask
    hidden = ~padding(7, 4, tokens=7) if kind is torch.bool else None
    expected = theirs(x, memory, memory, attn_mask=mask, key_padding_mask=hidden, need_weights=False)[0]
    out, weights = ours(x, memory, memory, attn_mask=mask, key_padding_mask=hidden)
    assert weights is None
    seen = expected.isfinite()  # a query that sees no key is NaN there
    torch.testing.assert_close(out[seen], expected[seen], **EXACT)
    assert out.isfinite().all()


def test_a_transformer_decoder_layer_runs_our_attention():
    layer = nn.TransformerDecoderLayer(12, 3, 24, dropout=0.0, batch_first=True)
    layer.self_attn = MultiheadAttention(12, 3, "linear", batch_first=True)
    layer.multihead_attn = MultiheadAttention(12, 3, "inline", batch_first=True)
    layer.double().eval()
    x, memory, real = doubles(2, 5, 12), doubles(2, 7, 12), padding(7, 4, tokens=7)
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    out = layer(x, memory, tgt_mask=mask, tgt_is_causal=True, memory_key_padding_mask=~real)
    y = layer.norm1(x + layer.self_attn.attention(x, is_causal=True))
    y = layer.norm2(y + layer.multihead_attn.attention(y, context=memory, key_mask=real))
    torch.testing.assert_close(out, layer.norm3(y + layer.linear2(layer.linear1(y).relu())), **EXACT)


@pytest.mark.parametrize(
    ("mechanism", "call", "message"),
    [
        ("inline", {"need_weights": True}, "need_weights is True and must be False: Attention.with_weights"),
        ("inline", {"attn_mask": torch.zeros(7, 7)}, "mechanism 'inline' has none: pass is_causal=True"),
        ("softmax", {"attn_mask": torch.zeros(7)}, r"attn_mask is \[7\] and must be a tensor \[N, M\]"),
        ("softmax", {"attn_mask": "causal"}, "attn_mask is 'causal' and must be a tensor"),
        ("inline", {"key_padding_mask": torch.ones(2, 7)}, "values other than 0 and -inf"),
        ("inline", {"key_padding_mask": [True]}, r"key_padding_mask is \[True\] and must be a tensor"),
        ("inline", {"value": torch.randn(2, 7, 12)}, "value is not the same tensor as key"),
    ],
)
def test_what_multihead_attention_cannot_do_is_refused(mechanism, call, message):
    x = torch.randn(2, 7, 12)
    with pytest.raises(SoftlessError, match=message):
        MultiheadAttention(12, 3, mechanism, batch_first=True)(**{"query": x, "key": x, "value": x, **call})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_that_was_built_before_our_attention_was_set_says_what_to_do():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 24, batch_first=True), 1).eval()
    encoder.layers[0].self_attn = MultiheadAttention(12, 2, batch_first=True)
    with torch.no_grad(), pytest.raises(UnsupportedError, match="enable_nested_tensor=False"):
        encoder(torch.randn(2, 7, 12), src_key_padding_mask=~padding(7, 4, tokens=7))
