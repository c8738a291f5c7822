"""Agreement with Hugging Face's models, weights and inputs the same.

Where theirs depends on the padding or on the batch (Nystromformer's start of its inverse, Funnel's mask and its last
token, Reformer's pairs that two rounds find), the question is one on which both must agree; our laws hold the rest.
"""

from importlib import import_module

import pytest
import torch
from torch import Tensor, nn

from softless import attention, mechanism
from softless.nn import FunnelDecoder, FunnelEncoder, LongformerAttention
from softless.nn.beyond.funnel import FunnelLayer

transformers = pytest.importorskip("transformers", reason="make setup installs it")
N, DIM, HEADS = 24, 12, 3


def peer(model: str) -> object:
    return import_module(f"transformers.models.{model}.modeling_{model}")


def heads(x: Tensor, count: int = HEADS) -> Tensor:
    """[B, N, C] -> [B, heads, N, d]"""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def side_by_side(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def ulp(like: Tensor, dtype: torch.dtype = torch.float32) -> float:
    return torch.finfo(dtype).eps * like.abs().max().item()


def test_longformer():
    """Padding and global tokens too. Their attention_window counts both sides, and their softmax is float32."""
    config = transformers.LongformerConfig(hidden_size=DIM, num_attention_heads=HEADS, attention_window=[8])
    config.attention_probs_dropout_prob = 0.0
    theirs = peer("longformer").LongformerSelfAttention(config, layer_id=0).double().eval()
    layer = LongformerAttention(DIM, HEADS, window=4, global_tokens=2).double()
    for suffix in ("", "_global"):
        parts = [getattr(theirs, f"{name}{suffix}") for name in ("query", "key", "value")]
        mine = getattr(layer, f"qkv{suffix}")
        mine.load_state_dict({kind: torch.cat([getattr(part, kind) for part in parts]) for kind in ("weight", "bias")})
    x = torch.randn(2, 32, DIM, dtype=torch.float64)
    states = torch.zeros(2, 32)  # below zero: padding; above: global
    states[:, :2], states[1, 25:] = 1.0, -1.0
    expected = theirs(
        x,
        attention_mask=torch.where(states < 0, torch.finfo(torch.float64).min, states.double() * 10_000),
        is_index_masked=states < 0,
        is_index_global_attn=states > 0,
        is_global_attn=True,
    )[0]
    ours = layer.mix(layer.project(x), source=x, key_mask=states >= 0)
    torch.testing.assert_close(ours[states >= 0], expected[states >= 0], rtol=0, atol=4 * ulp(expected))


def test_nystromformer():
    """One sample and one head: theirs start the inverse from the largest of all."""
    config = transformers.NystromformerConfig(
        hidden_size=8, num_attention_heads=1, num_landmarks=6, segment_means_seq_len=N
    )
    layer = peer("nystromformer").NystromformerSelfAttention(config).double().eval()
    nn.init.zeros_(layer.conv.weight)  # the convolution of v is not part of the mechanism
    x = torch.randn(1, N, 8, dtype=torch.float64)
    q, k, v = (part(x)[:, None] for part in (layer.query, layer.key, layer.value))
    ours = attention(q, k, v, mechanism("nystrom", landmarks=6))
    torch.testing.assert_close(ours[:, 0], layer(x)[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("layer_number", [0, 1])
def test_minimax_s_lightning_attention(layer_number: int, padded: bool):
    """Within their slopes, which are float32 and a little more than TransNormerLLM's; padding at the end."""
    config = transformers.MiniMaxConfig(
        hidden_size=DIM,
        num_attention_heads=HEADS,
        head_dim=4,
        num_hidden_layers=3,
        layer_types=["linear_attention"] * 3,
        block_size=8,
    )
    layer = peer("minimax").MiniMaxLightningAttention(config, layer_number).double().eval()
    x, mask = torch.randn(2, N, DIM, dtype=torch.float64), torch.ones(2, N, dtype=torch.bool)
    mask[1, N - 5 :] = not padded
    expected = layer(x, position_embeddings=None, attention_mask=mask)[0]
    q, k, v = nn.functional.silu(layer.qkv_proj(x)).unflatten(-1, (HEADS, -1)).transpose(1, 2).chunk(3, -1)
    factor = 1 - layer_number / (3 - 1 + 1e-5) + 1e-5
    out = attention(q, k, v, mechanism("decay", factor=factor), is_causal=True, key_mask=mask)
    out = side_by_side(out)
    out = layer.out_proj(nn.functional.sigmoid(layer.output_gate(x)) * layer.norm(out))
    torch.testing.assert_close(out[mask], expected[mask], rtol=0, atol=N * ulp(expected))


@pytest.mark.parametrize("is_causal", [False, True])
def test_reformer_with_the_same_hashes(is_causal: bool):
    """Of each bucket as many tokens as a chunk holds: then their chunks are the buckets, and so are our windows."""
    buckets, chunk, d = 4, 8, DIM
    torch.manual_seed(3)  # as they will
    rotations = torch.randn(1, d, 1, buckets // 2, dtype=torch.float64).transpose(1, 2)  # [heads, rounds, d, b / 2]
    drawn = 3 * torch.randn(1000, d, dtype=torch.float64)
    turned = drawn @ rotations[0, 0]
    bucket = torch.cat([turned, -turned], -1).argmax(-1)
    chosen = torch.cat([(bucket == b).nonzero()[:chunk, 0] for b in range(buckets)])
    x = drawn[chosen[torch.randperm(len(chosen))]][None]
    config = transformers.ReformerConfig(
        hidden_size=d,
        num_attention_heads=1,
        attention_head_size=d,
        num_buckets=buckets,
        num_hashes=1,
        hash_seed=3,
        lsh_attn_chunk_length=chunk,
        lsh_num_chunks_before=0,
        lsh_num_chunks_after=0,
        is_decoder=is_causal,
        lsh_attention_probs_dropout_prob=0.0,
    )
    layer = peer("reformer").LSHSelfAttention(config).double().eval()
    nn.init.eye_(layer.query_key.weight)
    expected = layer(x).hidden_states
    made = mechanism("reformer", buckets=buckets, rounds=1, window=chunk)
    ours = attention(
        x[:, None], x[:, None], layer.value(x)[:, None], made, is_causal=is_causal, inputs={"rotations": rotations}
    )
    # They add 1e-6 to the mean square of a key: a score s is off by at most s 1e-6 / (2 mean square).
    apart = (x.norm(dim=-1).max() * 1e-6 / (2 * x.square().mean(-1).min())).item()
    torch.testing.assert_close(ours[:, 0], expected, rtol=0, atol=2 * apart * expected.abs().max().item())


def funnel_layer(ours: FunnelLayer, theirs: nn.Module) -> None:
    """Their weights, and of their relative attention its plain part alone."""
    attend, feed = theirs.attention, theirs.ffn
    for name in ("r_w_bias", "r_r_bias", "r_kernel", "r_s_bias", "seg_embed"):
        nn.init.zeros_(getattr(attend, name))
    ours.q.weight, ours.proj = attend.q_head.weight, attend.post_proj
    nn.init.zeros_(ours.q.bias)
    for kind in ("weight", "bias"):
        getattr(ours.kv, kind).data.copy_(torch.cat([getattr(attend.k_head, kind), getattr(attend.v_head, kind)]))
    ours.feed[0], ours.feed[2], ours.norm1, ours.norm2 = (
        feed.linear_1,
        feed.linear_2,
        attend.layer_norm,
        feed.layer_norm,
    )


@pytest.mark.parametrize(("count", "pool"), [(13, "mean"), (16, "mean"), (16, "max")])
def test_funnel(count: int, pool: str):
    """The whole model, encoder and decoder, with their relative positions and segments set to nothing."""
    config = transformers.FunnelConfig(
        d_model=DIM,
        n_head=HEADS,
        d_head=DIM // HEADS,
        d_inner=20,
        block_sizes=[1, 2, 1],
        num_decoder_layers=2,
        truncate_seq=False,
        pooling_type=pool,
        hidden_act="gelu",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        vocab_size=5,
    )
    model = peer("funnel").FunnelModel(config).double().eval()
    encoder = FunnelEncoder(DIM, HEADS, (1, 2, 1), pool=pool, hidden=20).double()
    decoder = FunnelDecoder(DIM, HEADS, 3, hidden=20).double()
    blocks = [layer for block in model.encoder.blocks for layer in block]
    for ours, theirs in zip((*encoder.layers, *decoder.layers), (*blocks, *model.decoder.layers), strict=True):
        funnel_layer(ours, theirs)
    embedded = torch.randn(2, count, DIM, dtype=torch.float64)
    x = model.embeddings(inputs_embeds=embedded)
    found = encoder(x)
    short = model.encoder(x, torch.ones(2, count), torch.zeros(2, count).long()).last_hidden_state
    whole = model(inputs_embeds=embedded).last_hidden_state
    torch.testing.assert_close(found.short.x, short, rtol=0, atol=16 * ulp(short))  # their softmax is float32
    torch.testing.assert_close(decoder(found), whole, rtol=0, atol=16 * ulp(whole))
