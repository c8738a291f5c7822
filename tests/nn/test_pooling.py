"""Pooling over windows of tokens, the feed-forward layer that shortens a sequence, and the funnel built on them."""

import pytest
import torch
from torch import Tensor, nn

from softless import list_mechanisms, mechanism
from softless.errors import SoftlessError
from softless.nn import FunnelDecoder, FunnelEncoder, StridedFeedForward, pool_tokens, repeat_tokens
from softless.nn.beyond.funnel import FunnelLayer
from tests.annotations import same_shapes

DIM = 12
MODES = {"mean": lambda x: x.mean(0), "max": lambda x: x.amax(0), "first": lambda x: x[0]}


def tokens(count: int = 11) -> tuple[Tensor, Tensor]:
    """x [2, N, C] whose padding is NaN, and its mask: holes in the first row, an end of padding in the second."""
    x, mask = torch.randn(2, count, DIM, dtype=torch.float64), torch.rand(2, count) > 0.4
    mask[:, 0], mask[1] = True, torch.arange(count) < count - 4
    return torch.where(mask[..., None], x, torch.nan), mask


def members(mask: Tensor, start: int, width: int) -> list[int]:
    """The real tokens of a window."""
    return [j for j in range(start, min(start + width, len(mask))) if mask[j]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("stride", "width", "prefix"), [(2, 2, 0), (2, 2, 1), (3, 3, 2), (2, 5, 1), (1, 1, 0), (40, 40, 0)]
)
def test_pooling_is_a_loop_over_windows(mode: str, stride: int, width: int, prefix: int):
    x, mask = tokens()
    mask[:, :prefix] = True
    x = torch.where(mask[..., None], x.nan_to_num(1.0), torch.nan)
    pooled, real = pool_tokens(x, mask, stride=stride, width=width, mode=mode, prefix=prefix)
    for b in range(2):
        assert torch.equal(pooled[b, :prefix], x[b, :prefix])
        for t, start in enumerate(range(prefix, x.shape[1], stride), prefix):
            inside = members(mask[b], start, width)
            assert real[b, t] == bool(inside)
            expected = MODES[mode](x[b, inside]) if inside else torch.zeros(DIM, dtype=torch.float64)
            torch.testing.assert_close(pooled[b, t], expected, rtol=1e-12, atol=1e-12)


def test_pooled_and_repeated_tokens_keep_their_place():
    x = torch.arange(10.0)[None, :, None]
    pooled = pool_tokens(x, stride=4, mode="first", prefix=2).x
    assert repeat_tokens(pooled, 4, 10, prefix=2)[0, :, 0].tolist() == [0, 1, 2, 2, 2, 2, 6, 6, 6, 6]
    assert torch.equal(repeat_tokens(pool_tokens(x, stride=1).x, 1, 10), x)


def test_pooled_padding_has_no_gradient():
    x, mask = tokens()
    for mode in MODES:
        leaf = x.clone().requires_grad_()
        out, real = pool_tokens(leaf, mask, mode=mode)
        out[real].square().sum().backward()
        assert torch.equal(leaf.grad[~mask], torch.zeros_like(leaf.grad[~mask]))


# The feed-forward layer.


def feed_by_hand(layer: StridedFeedForward, x: Tensor, mask: Tensor) -> Tensor:
    """Token by token: sum over the window of W1_r x, then the rest."""
    weight = layer.fc1.weight.unflatten(1, (layer.width, DIM))  # [hidden, width, C]
    rows = []
    for start in range(0, len(x), layer.stride):
        inside = members(mask, start, layer.width)
        total = sum((weight[:, j - start] @ x[j] for j in inside), torch.zeros(len(weight), dtype=x.dtype))
        if layer.renormalize and inside:
            total = total * layer.width / len(inside)
        rows.append(layer.fc2(layer.act(total + layer.fc1.bias)))
    return torch.stack(rows)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("stride", "width"), [(2, 2), (3, 4), (1, 3), (20, 20)])
def test_the_strided_layer_is_the_formula(stride: int, width: int, renormalize: bool):
    layer = StridedFeedForward(DIM, 20, stride=stride, width=width, renormalize=renormalize).double()
    x, mask = tokens()
    out, real = layer(x, mask)
    for b in range(2):
        expected = feed_by_hand(layer, x[b], mask[b])
        torch.testing.assert_close(out[b], expected, rtol=1e-12, atol=1e-12)
        assert real[b].tolist() == [bool(members(mask[b], t * stride, width)) for t in range(len(expected))]


def test_the_strided_layer_is_a_convolution():
    layer, conv = StridedFeedForward(DIM, 20, stride=2, width=3).double(), nn.Conv1d(DIM, 20, 3, 2).double()
    conv.load_state_dict({"weight": layer.fc1.weight.unflatten(1, (3, DIM)).mT, "bias": layer.fc1.bias})
    x = torch.randn(2, 11, DIM, dtype=torch.float64)
    expected = layer.fc2(layer.act(conv(x.mT).mT))
    torch.testing.assert_close(layer(x).x[:, :-1], expected, rtol=1e-12, atol=1e-12)  # the last reaches beyond the end


def test_the_strided_layer_with_stride_and_width_one_is_the_plain_layer():
    layer, x = StridedFeedForward(DIM, stride=1), torch.randn(2, 9, DIM)
    plain = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
    plain[0].load_state_dict(layer.fc1.state_dict())
    plain[2].load_state_dict(layer.fc2.state_dict())
    torch.testing.assert_close(layer(x).x, plain(x), rtol=0, atol=0)


# The funnel.


def by_hand(encoder: FunnelEncoder, decoder: FunnelDecoder, x: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence [N, C] without padding, block by block; the layers' own arithmetic is tried below."""
    starts, full = (0, *encoder.ends[:-1]), None
    for number, layer in enumerate(encoder.layers):
        asked = x
        if number in starts[1:]:
            rest = [x[j : j + 2].mean(0) for j in range(1, len(x), 2)]
            asked = torch.stack([x[0], *rest])
        x = layer(asked[None], x[None])[0]
        full = x if number == starts[1] - 1 else full
    short, stride = x, 2 ** (len(starts) - 1)
    x = torch.stack([full[j] + short[0 if j == 0 else 1 + (j - 1) // stride] for j in range(len(full))])
    for layer in decoder.layers:
        x = layer(x[None], x[None])[0]
    return short, x


@pytest.mark.parametrize("count", [1, 2, 9, 12])
def test_the_funnel_is_its_blocks(count: int):
    encoder, decoder = FunnelEncoder(DIM, 3, (2, 1, 2)).double(), FunnelDecoder(DIM, 3, 3).double()
    x = torch.randn(2, count, DIM, dtype=torch.float64)
    found = encoder(x)
    out = decoder(found)
    assert out.shape == x.shape
    for b in range(2):
        short, expected = by_hand(encoder, decoder, x[b])
        torch.testing.assert_close(found.short.x[b], short, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(out[b], expected, rtol=1e-12, atol=1e-12)


def test_a_layer_is_attention_and_a_feed_forward_part_with_norms_after_them():
    layer = FunnelLayer(DIM, 3, "softmax", 20).double()
    asked, x = torch.randn(2, 5, DIM, dtype=torch.float64), torch.randn(2, 9, DIM, dtype=torch.float64)

    def heads(part: Tensor) -> Tensor:
        return part.unflatten(-1, (3, 4)).transpose(1, 2)

    k, v = layer.kv(x).chunk(2, -1)
    mixed = nn.functional.scaled_dot_product_attention(*map(heads, (layer.q(asked), k, v)))
    a = layer.norm1(asked + layer.proj(mixed.transpose(1, 2).flatten(2)))
    torch.testing.assert_close(layer(asked, x), layer.norm2(a + layer.feed(a)), rtol=1e-12, atol=1e-12)


REFUSED = ("agent", "nystrom", "sparse", "longformer", "reformer", "diagonal", "delta", "efla", "decay", "mlla")
REFUSED += ("nearfar",)
OPTIONS = {
    "angular": {"exact": True},
    "cosformer": {"length": 21},
    "general": {"sim": lambda q, k: (q @ k.mT).square()},
}


@pytest.mark.parametrize("pool", MODES)
@pytest.mark.parametrize("name", [name for name in list_mechanisms() if name not in REFUSED])
def test_funnel_and_strided_layers_ignore_padding_and_the_rest_of_the_batch(name: str, pool: str):
    made = mechanism(name, **OPTIONS.get(name, {}))
    encoder = FunnelEncoder(DIM, 3, (1, 1, 1), mechanism=made, pool=pool).double().eval()  # emanet's bases stay
    decoder, feed = FunnelDecoder(DIM, 3, 3, mechanism=made).double().eval(), StridedFeedForward(DIM).double()
    x, mask = torch.randn(2, 21, DIM, dtype=torch.float64), torch.ones(2, 21, dtype=torch.bool)
    mask[1, 6:] = False
    found, short = encoder(x, mask), feed(x, mask)
    out, alone = decoder(found), encoder(x[1:, :6])
    torch.testing.assert_close(out[1:, :6], decoder(alone), rtol=1e-12, atol=1e-12)
    assert found.short.key_mask[1].tolist() == [True] * 3 + [False] * 3
    torch.testing.assert_close(found.short.x[1:, :3], alone.short.x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(short.x[1:, :3], feed(x[1:, :6]).x, rtol=1e-12, atol=1e-12)
    poisoned = torch.where(mask[..., None], x, 1e4)
    again = decoder(encoder(poisoned, mask))
    torch.testing.assert_close(again[mask], out[mask], rtol=1e-12, atol=1e-12)


def test_every_parameter_of_funnel_and_strided_layers_gets_a_gradient():
    encoder, decoder = FunnelEncoder(DIM, 3, (1, 2)), FunnelDecoder(DIM, 3, 2)
    decoder(encoder(torch.randn(2, 9, DIM))).square()[..., 0].sum().backward()
    for name, parameter in (*encoder.named_parameters(), *decoder.named_parameters()):
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0 or name.endswith("kv.bias"), name


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: StridedFeedForward(DIM, stride=0), "stride 0 is not a whole number, at least 1"),
        (lambda: StridedFeedForward(DIM, stride=4, width=2), "width 2 must be at least the stride, 4"),
        (lambda: pool_tokens(torch.zeros(1, 4, 2), stride=0), "stride 0 and width 0 must be at least 1"),
        (lambda: pool_tokens(torch.zeros(1, 4, 2), stride=3, width=2), "stride 3 and width 2"),
        (lambda: pool_tokens(torch.zeros(1, 4, 2), mode="median"), "mode 'median' is not one of mean, max, first"),
        (lambda: pool_tokens(torch.zeros(1, 4, 2), prefix=-1), "prefix -1 is not a whole number, at least 0"),
        (lambda: pool_tokens(torch.zeros(1, 4, 2), prefix=5), "prefix 5 is more than the 4 tokens"),
        (lambda: repeat_tokens(torch.zeros(1, 4, 2), 2, 9), "4 tokens, 2 times each, are fewer than length 9"),
        (lambda: repeat_tokens(torch.zeros(1, 4, 2), 2, 6, prefix=-1), "prefix -1 is not a whole number"),
        (lambda: repeat_tokens(torch.zeros(1, 4, 2), 2, -1), "length -1 is not a whole number"),
        (lambda: repeat_tokens(torch.zeros(1, 4, 2), 0, 0), "stride 0 is not a whole number, at least 1"),
        (lambda: FunnelEncoder(DIM, 3, prefix=-1), "prefix -1 is not a whole number"),
        (lambda: FunnelDecoder(DIM, 3, 2, prefix=-1), "prefix -1 is not a whole number"),
        (lambda: FunnelEncoder(DIM, 3, ()), r"blocks \(\) must say"),
        (lambda: FunnelEncoder(DIM, 3, (2, 0)), r"blocks \(2, 0\) must say"),
        (lambda: FunnelEncoder(DIM, 3, pool="median"), "pool 'median' is not one of mean, max, first"),
        (lambda: FunnelEncoder(DIM, 3, mechanism="agent"), "'agent' mixes the queries"),
        (lambda: FunnelEncoder(DIM, 3, mechanism="nystrom"), "'nystrom' mixes the queries"),
        (lambda: FunnelEncoder(DIM, 3, mechanism="cosformer"), "'cosformer' would count padding .* give it a length="),
        (lambda: FunnelEncoder(DIM, 5), "dim 12 is not a multiple of heads 5"),
        (lambda: FunnelDecoder(DIM, 3, 0), "blocks 0 must be how many"),
        (lambda: FunnelEncoder(DIM, 3, (1, 1), mechanism="sparse")(torch.zeros(1, 9, DIM)), "as many queries as keys"),
        (lambda: FunnelEncoder(DIM, 3, (1, 1), mechanism="efla")(torch.zeros(1, 9, DIM)), "tokens in their order"),
    ],
)
def test_bad_options_of_funnel_and_strided_layers_are_refused_in_one_sentence(make, words: str):
    with pytest.raises(SoftlessError, match=words):
        make()


@pytest.mark.parametrize("mask", [torch.ones(2, 5).bool(), torch.ones(1, 7).bool(), torch.ones(2, 7)], ids=str)
@pytest.mark.parametrize("module", [pool_tokens, StridedFeedForward(DIM), FunnelEncoder(DIM, 3, (1, 1))])
def test_a_mask_of_another_size_is_refused(module, mask: Tensor):
    words = r"key_mask (is torch.float32 and must be a bool tensor|has shape .* = \[2, 7\])"
    with same_shapes(), pytest.raises(SoftlessError, match=words):
        module(torch.randn(2, 7, DIM), mask)


def test_pooling_keeps_half_precision():
    encoder, decoder = FunnelEncoder(DIM, 3, (1, 1)).bfloat16(), FunnelDecoder(DIM, 3, 2).bfloat16()
    out = decoder(encoder(torch.randn(2, 7, DIM).bfloat16(), torch.rand(2, 7) > 0.3))
    assert out.dtype == torch.bfloat16
    assert out.isfinite().all()
    assert StridedFeedForward(DIM, renormalize=True).half()(torch.randn(2, 7, DIM).half()).x.dtype == torch.float16
