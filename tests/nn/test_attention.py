"""nn.Attention is the authors' module, and the mechanism is left open."""

import pytest
import torch
from torch import Tensor

import softless
from softless.errors import UnsupportedError
from softless.nn import Attention
from softless.nn.mixing import as_heads
from tests.golden.fill import load
from tests.numerics.cases import CASES, FORMS, STATEFUL

KERNELS = {
    "deit_n197": "inline",
    "deit_n50": "inline",
    "swin_n196": "inline",
    "swin_n49": "inline",
    "swin_n49_exp": softless.mechanism("inline", phi="exp", t=0.2),
    "swin_n49_relu": softless.mechanism("inline", phi="relu"),
    "swin_n49_leakyrelu": softless.mechanism("inline", phi="leaky_relu"),
    "pvt_n49": "inline",
    "pvt_n196": "inline",
    "pvt_7x14": "inline",
    "pvt_1head": "inline",
}


def packed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """PVT keeps q and kv apart; side by side they are qkv."""
    if "qkv.weight" in weights:
        return weights
    rest = {key: x for key, x in weights.items() if not key.startswith(("q.", "kv."))}
    return rest | {
        f"qkv.{part}": torch.cat([weights[f"q.{part}"], weights[f"kv.{part}"]]) for part in ("weight", "bias")
    }


def authors(case: str) -> tuple[Attention, Tensor, tuple[int, int], Tensor]:
    sizes, inputs, weights, output = load(case)
    layer = Attention(sizes["dim"], sizes["heads"], KERNELS[case], local=True).double()
    layer.load_state_dict(packed(weights))
    return layer, inputs["x"], (sizes["h"], sizes["w"]), output


@pytest.mark.parametrize("case", KERNELS)
def test_attention_matches_the_authors_module(case):
    layer, x, grid, output = authors(case)
    assert (layer(x, grid) - output).abs().max() <= 1e-12 * output.abs().max()


@pytest.mark.parametrize("case", ["deit_n50", "swin_n49_exp"])
def test_a_changed_parameter_or_mechanism_misses_the_golden_outputs(case):
    """Each change a port can get wrong moves the output by far more than the bar."""
    layer, x, grid, output = authors(case)
    size = output.abs().max()
    for key in ("residual.2.bias", "qkv.bias"):
        with torch.no_grad():
            parameter = layer.get_parameter(key)
            saved = parameter.clone()
            parameter.zero_()
            assert (layer(x, grid) - output).abs().max() > 1e-3 * size
            parameter.copy_(saved)
    other = Attention(layer.qkv.in_features, layer.heads, "linear", local=True).double()
    other.load_state_dict(layer.state_dict())
    assert (other(x, grid) - output).abs().max() > 1e-3 * size


def test_parameters_have_the_authors_names():
    keys = ["qkv.weight", "qkv.bias", "proj.weight", "proj.bias"]
    residual = ["residual.0.weight", "residual.0.bias", "residual.2.weight", "residual.2.bias"]
    assert sorted(Attention(12, 3, local=True).state_dict()) == sorted(keys + residual)
    assert sorted(Attention(12, 3, "softmax").state_dict()) == sorted(keys)
    assert sorted(Attention(12, 3, qkv_bias=False).state_dict()) == sorted(set(keys) - {"qkv.bias"})


def test_the_softmax_module_is_multi_head_attention():
    layer = Attention(12, 3, "softmax").double()
    twin = torch.nn.MultiheadAttention(12, 3, batch_first=True).double()
    twin.load_state_dict(
        {
            "in_proj_weight": layer.qkv.weight,
            "in_proj_bias": layer.qkv.bias,
            "out_proj.weight": layer.proj.weight,
            "out_proj.bias": layer.proj.bias,
        }
    )
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    mask = torch.rand(2, 7) > 0.4
    mask[:, 0] = True
    expected = twin(x, x, x, key_padding_mask=~mask, need_weights=False)[0]
    torch.testing.assert_close(layer(x, key_mask=mask), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("local", [False, True])
def test_every_parameter_gets_a_finite_gradient(case, local):
    layer, order = Attention(12, 3, CASES[case], local=local), {"is_causal": FORMS[case] == [True]}
    tokens = 8 if layer.mechanism.needs_grid else 9  # a class token is not in the picture
    if local and order["is_causal"]:
        with pytest.raises(UnsupportedError, match="it is not causal"):
            layer(torch.randn(2, tokens, 12), grid=(2, 4), **order)
        return
    out = layer(torch.randn(2, tokens, 12), grid=(2, 4), **order)
    assert out.shape == (2, tokens, 12)
    out.square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), f"{name} has no influence"


@pytest.mark.parametrize(
    ("made", "shapes"),
    [
        (softless.mechanism("linear", phi="affine_relu"), {"weight": (3, 4, 4), "bias": (3, 4)}),
        (softless.mechanism("inline", phi="affine_relu"), {"weight": (3, 4, 4), "bias": (3, 4)}),
        (softless.mechanism("focused", learned_scale=True), {"scale": (3, 4)}),
    ],
)
def test_what_a_mechanism_learns_belongs_to_the_module_and_trains(made, shapes):
    layer = Attention(12, 3, made)
    assert {name: tuple(x.shape) for name, x in layer.inputs.named_parameters()} == shapes
    x, target = torch.randn(8, 10, 12), torch.randn(8, 10, 12)
    before = {name: parameter.detach().clone() for name, parameter in layer.inputs.named_parameters()}
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (layer(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(not torch.equal(before[name], layer.inputs.get_parameter(name)) for name in shapes)
    again = Attention(12, 3, made)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x), layer(x))


@pytest.mark.parametrize(
    ("made", "drawn"),
    [
        (softless.mechanism("performer", features=9), {"projection": (9, 4)}),
        (softless.mechanism("reformer", buckets=4, window=1, rounds=2), {"rotations": (3, 2, 4, 2)}),
        (softless.mechanism("emanet", bases=5), {"bases": (3, 5, 4)}),
    ],
)
def test_what_a_mechanism_draws_is_a_buffer_that_is_saved_and_can_be_drawn_again(made, drawn):
    layer, again, x = Attention(12, 3, made), Attention(12, 3, made), torch.randn(2, 9, 12)
    assert {name: tuple(x.shape) for name, x in layer.inputs.named_buffers()} == drawn
    assert not list(layer.inputs.parameters())
    assert not torch.equal(again(x), layer(x))
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x), layer(x))
    for each in (layer, again):
        each.inputs.redraw(torch.Generator().manual_seed(5))
    assert torch.equal(again(x), layer(x))
    before = layer(x)
    layer.inputs.redraw()
    assert not torch.equal(layer(x), before)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_what_a_mechanism_needs_for_each_token_is_predicted_from_it(kv_heads):
    layer = Attention(12, 4, "efla", kv_heads=kv_heads).double()
    names = {name for name, _ in layer.inputs.named_parameters()}
    assert names == {"predicted.beta.weight", "predicted.beta.bias"}
    x, mask = torch.randn(2, 9, 12, dtype=torch.float64), torch.arange(9).expand(2, 9) > 2
    q, k, v = as_heads(layer.project(x))
    beta = (x @ layer.inputs.predicted["beta"].weight.mT + layer.inputs.predicted["beta"].bias).sigmoid().mT
    expected = softless.attention(q, k, v, "efla", is_causal=True, key_mask=mask, inputs={"beta": beta})
    expected = layer.proj(expected.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, key_mask=mask, is_causal=True), expected, rtol=1e-12, atol=1e-12)
    windowed = softless.nn.Attention(12, 3, "efla", window=2).double()
    for each, grid in ((layer, None), (windowed, (3, 3))):
        with pytest.raises(UnsupportedError, match="'efla' goes through tokens in their order"):
            each(x, grid)


@pytest.mark.parametrize(
    ("name", "biased"), [("inline", False), ("soft", False), ("reformer", False), ("softmax", True)]
)
@pytest.mark.parametrize("grid", [(2, 4), (8, 1)])
@pytest.mark.parametrize("prefix", [0, 1])
def test_attention_with_residual_ignores_padding(name, biased, grid, prefix):
    """Hidden tokens give nothing: not to the sums, not to the mean that predicts the kernels, not to the picture."""
    layer = Attention(12, 3, name, local=True).double()
    x = torch.randn(2, prefix + 8, 12, dtype=torch.float64)
    bias = torch.randn(3, prefix + 8, prefix + 8, dtype=torch.float64) if biased else None
    mask = torch.rand(2, prefix + 8) > 0.4
    mask[:, 0] = True
    clean = layer(x, grid, key_mask=mask, bias=bias)
    poisoned = layer(torch.where(mask[..., None], x, 1e3), grid, key_mask=mask, bias=bias)
    torch.testing.assert_close(poisoned[mask], clean[mask], rtol=1e-12, atol=1e-12)

    q, k, v = as_heads(layer.project(x))
    context = torch.stack([row[keep].mean(0) for row, keep in zip(x, mask, strict=True)])
    v = torch.where(mask[:, None, :, None], v, 0.0)
    options = {"bias": bias, "inputs": layer.inputs(x), "grid": grid if layer.mechanism.reads_grid else None}
    whole = softless.attention(q, k, v, name, key_mask=mask, **options) + layer.residual(context, v, grid, prefix)
    torch.testing.assert_close(clean, layer.proj(whole.transpose(1, 2).flatten(2)), rtol=1e-12, atol=1e-12)


def test_local_with_everything_hidden_is_finite():
    layer = Attention(12, 3, local=True)
    x = torch.randn(2, 8, 12, requires_grad=True)
    out = layer(x, (2, 4), key_mask=torch.zeros(2, 8, dtype=torch.bool))
    out.sum().backward()
    assert out.isfinite().all()
    assert x.grad.isfinite().all()


def test_nan_in_hidden_tokens_reaches_no_parameter():
    """A row of padding may hold anything: no gradient of a loss over real tokens knows."""
    layer = Attention(12, 3, local=True)
    x = torch.randn(2, 8, 12)
    mask = torch.tensor([[True] * 8, [True] * 5 + [False] * 3])
    out = layer(torch.where(mask[..., None], x, float("nan")), (2, 4), key_mask=mask)
    assert out[mask].isfinite().all()


def test_local_sees_later_tokens_and_so_is_not_causal():
    layer = Attention(12, 3, local=True)
    with pytest.raises(UnsupportedError, match="causal"):
        layer(torch.randn(2, 8, 12), (2, 4), is_causal=True)
    with pytest.raises(UnsupportedError, match="state"):
        layer.with_state(torch.randn(2, 8, 12))


@pytest.mark.parametrize("case", STATEFUL)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_with_state_is_the_causal_forward_in_pieces(case, kv_heads):
    layer = Attention(12, 4, CASES[case], kv_heads=kv_heads).double()
    x = torch.randn(2, 70, 12, dtype=torch.float64)
    state, outputs = None, []
    for here in (slice(0, 30), slice(30, 31), slice(31, 69), slice(69, 70)):
        out, state = layer.with_state(x[:, here], state)
        outputs.append(out)
    whole = layer(x, is_causal=True)
    bound = 1e-10 if case in ("linear-identity", "linear-leaky_relu") else 1e-12  # their sums may nearly cancel
    assert (torch.cat(outputs, 1) - whole).abs().max() <= bound * (1 + whole.abs().max())


@pytest.mark.parametrize("name", ["softmax", "inline", "linear", "efficient"])
def test_grouped_queries_equal_repeated_key_heads(name):
    """With kv_heads=2 of 4, heads 0 and 1 read key head 0: the same as a full module with copied rows."""
    layer, full = Attention(12, 4, name, kv_heads=2).double(), Attention(12, 4, name).double()
    q, k, v = layer.qkv.weight.split((12, 6, 6))
    q_bias, k_bias, v_bias = layer.qkv.bias.split((12, 6, 6))

    def twice(x: Tensor) -> Tensor:
        return x.unflatten(0, (2, 3)).repeat_interleave(2, 0).flatten(0, 1)

    full.load_state_dict(
        layer.state_dict()
        | {
            "qkv.weight": torch.cat([q, twice(k), twice(v)]),
            "qkv.bias": torch.cat([q_bias, twice(k_bias), twice(v_bias)]),
        }
    )
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    torch.testing.assert_close(layer(x), full(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_attn_drop_needs_a_scored_mechanism(case):
    made = CASES[case]
    if made.family != "scored":
        with pytest.raises(UnsupportedError, match=f"0.5.*{made.name}"):
            Attention(12, 3, made, attn_drop=0.5)
        return
    layer = Attention(12, 3, made, attn_drop=0.5)
    x = torch.randn(4, 9, 12)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    plain = Attention(12, 3, made)
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), plain(x))


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("scored", [case for case, made in CASES.items() if made.family == "scored"])
def test_a_drop_rate_of_zero_changes_nothing(scored, local):
    """What follows the weights, a norm or the local residual, follows dropped weights too; padding stays hidden."""
    layer, plain = (Attention(12, 3, CASES[scored], local=local, attn_drop=rate).double() for rate in (1e-15, 0.0))
    plain.load_state_dict(layer.state_dict())
    x, mask = torch.randn(2, 8, 12, dtype=torch.float64), torch.arange(8) < torch.tensor([[8], [5]])
    expected = plain(x, (2, 4), key_mask=mask)
    torch.testing.assert_close(layer(x, (2, 4), key_mask=mask)[mask], expected[mask], rtol=1e-10, atol=1e-10)


def test_dropped_weights_are_right_on_average():
    """Dropout keeps the mean: 2,000 draws of one row come back to the undropped output."""
    layer = Attention(4, 2, "softmax", attn_drop=0.25).double()
    x = torch.randn(1, 5, 4, dtype=torch.float64).expand(2000, -1, -1)
    mean, exact = layer(x).mean(0), layer.eval()(x[:1])[0]
    deviation = layer.train()(x).std(0) / 2000**0.5
    assert ((mean - exact).abs() <= 5 * deviation).all()


def test_proj_drop_works_with_every_mechanism():
    layer = Attention(12, 3, proj_drop=0.5)
    x = torch.randn(2, 9, 12)
    assert (layer(x) == 0).any()
    assert not (layer.eval()(x) == 0).any()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_module_runs_forward_and_backward(case, dtype):
    order = {"is_causal": FORMS[case] == [True]}
    layer = Attention(12, 3, CASES[case], local=not order["is_causal"]).to(dtype)
    x = torch.randn(2, 8, 12).to(dtype).requires_grad_()
    out = layer(x, (2, 4), key_mask=torch.tensor([[True] * 8, [True] * 5 + [False] * 3]), **order)
    assert out.dtype == dtype
    assert out.isfinite().all()
    out.float().square().mean().backward()
    assert x.grad.isfinite().all()


def test_the_bias_reaches_the_scores():
    layer = Attention(12, 3, "softmax").double()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    blocked = torch.zeros(5, 5, dtype=torch.float64).masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf)
    torch.testing.assert_close(layer(x, bias=blocked), layer(x, is_causal=True), rtol=1e-12, atol=1e-12)
    with pytest.raises(UnsupportedError, match="bias"):
        Attention(12, 3)(x.float(), bias=blocked.float())


def test_the_repr_names_heads_and_mechanism():
    text = repr(Attention(12, 4, softless.mechanism("linear", phi="relu"), local=True))
    for words in ("heads=4", "relu", "qkv", "proj", "LocalResidual"):
        assert words in text
    assert "kv_heads=2" in repr(Attention(12, 4, kv_heads=2))


def test_attention_moves_and_copies_like_any_module():
    layer = Attention(12, 3, softless.mechanism("linear", phi="affine_relu"), local=True)
    with torch.device("meta"):
        ghost = Attention(12, 3, softless.mechanism("linear", phi="affine_relu"), local=True)
    assert ghost(torch.empty(2, 8, 12, device="meta"), (2, 4)).shape == (2, 8, 12)
    real = ghost.to_empty(device="cpu")
    real.load_state_dict(layer.state_dict())
    x = torch.randn(2, 8, 12)
    assert torch.equal(real(x, (2, 4)), layer(x, (2, 4)))


@pytest.mark.parametrize("name", ["reformer", "soft"])
def test_one_projection_serves_queries_and_keys(name):
    layer = Attention(12, 3, name)
    assert layer.qkv.out_features == 2 * 12
    x = torch.randn(2, 9, 12)
    q, v = (part.unflatten(-1, (3, 4)).transpose(1, 2) for part in layer.qkv(x).chunk(2, -1))
    out = softless.attention(q, q, v, name, inputs=layer.inputs(x))
    torch.testing.assert_close(layer(x), layer.proj(out.transpose(1, 2).flatten(2)))
    with pytest.raises(softless.errors.ArgumentError, match=f"'{name}', which has k = q"):
        Attention(12, 4, name, kv_heads=2)


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("kv_heads", [3, 1])
def test_training_moves_the_bases_of_emanet_and_nothing_else_does(detach, kv_heads):
    """bases <- 0.9 bases + 0.1 mu: their loop of three rounds, sample by sample, padding left out."""
    layer = Attention(12, 3, softless.mechanism("emanet", bases=5, detach=detach), kv_heads=kv_heads).double()
    x, mask = torch.randn(3, 9, 12, dtype=torch.float64), torch.arange(9) < torch.tensor([[9], [6], [0]])
    old = layer.inputs.bases.clone()
    out = layer.eval()(x, key_mask=mask)
    assert torch.equal(layer.inputs.bases, old)
    torch.testing.assert_close(layer.train()(x, key_mask=mask), out, rtol=1e-12, atol=1e-12)
    k = as_heads(layer.project(x))[1]
    for head in range(3):
        ends = []
        for b, count in enumerate((9, 6)):  # the third sample has no token
            tokens, mu = k[b, head * kv_heads // 3, :count].T, old[head].T  # [d, n], [d, bases]
            for _ in range(3):
                z = (tokens.T @ mu).softmax(-1)
                mu = torch.nn.functional.normalize(tokens @ (z / z.sum(0)), dim=0)
            ends.append(mu.T)
        expected = 0.9 * old[head] + 0.1 * torch.stack(ends).mean(0)
        torch.testing.assert_close(layer.inputs.bases[head], expected, rtol=1e-10, atol=1e-12)


def test_bases_may_move_before_the_backward_pass():
    layer, x = Attention(12, 3, softless.mechanism("emanet", bases=5, detach=False)), torch.randn(2, 9, 12)
    first = layer(x)
    (first + layer(x)).square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())
    before = layer.inputs.bases.clone()
    layer(x, key_mask=torch.zeros(2, 9, dtype=torch.bool))  # nothing to learn from
    assert torch.equal(layer.inputs.bases, before)


def test_a_half_precision_module_moves_its_bases():
    layer = Attention(12, 3, softless.mechanism("emanet", bases=5)).bfloat16()
    before = layer.inputs.bases.clone()
    layer(torch.randn(2, 9, 12).bfloat16())
    assert layer.inputs.bases.isfinite().all()
    assert not torch.equal(layer.inputs.bases, before)


def neighbors(picture: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A depthwise 3x3 convolution [B, h, w, C], written out."""
    padded = torch.nn.functional.pad(picture, (0, 0, 1, 1, 1, 1))
    height, width = picture.shape[1:3]
    taps = (padded[:, i : i + height, j : j + width] * weight[:, 0, i, j] for i in range(3) for j in range(3))
    return sum(taps) + bias


def test_qk_conv_adds_its_neighbors_to_q_and_k_and_leaves_class_tokens_and_values():
    torch.manual_seed(0)
    layer = Attention(8, 2, "softmax", qk_conv=True).double()
    x = torch.randn(2, 1 + 3 * 4, 8, dtype=torch.float64)
    qk, v = layer.qkv(x).split((16, 8), -1)
    picture = qk[:, 1:].unflatten(1, (3, 4))
    picture = picture + neighbors(picture, layer.qk_conv.weight, layer.qk_conv.bias)
    q, k = torch.cat([qk[:, :1], picture.flatten(1, 2)], 1).chunk(2, -1)
    heads = [part.unflatten(-1, (2, 4)).transpose(1, 2) for part in (q, k, v)]
    exact = layer.proj(softless.attention(*heads, "softmax").transpose(1, 2).flatten(2))
    assert torch.allclose(layer(x, grid=(3, 4)), exact, atol=1e-12)


def test_qk_conv_reads_no_hidden_token():
    layer, x = Attention(8, 2, qk_conv=True), torch.randn(1, 12, 8)
    mask = torch.arange(12)[None] < 9
    changed = torch.where(mask[..., None], x, 100 * torch.randn(1, 12, 8))
    a, b = (layer(each, grid=(3, 4), key_mask=mask)[:, :9] for each in (x, changed))
    assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize(
    ("mechanism", "options", "call", "sentence"),
    [
        ("inline", {}, {}, r"qk_conv=True needs grid=\(height, width\)"),
        ("inline", {}, {"grid": (3, 4), "is_causal": True}, "3x3 neighbors .* got is_causal=True"),
        ("inline", {}, {"context": torch.zeros(1, 3, 8)}, "qk_conv needs queries and keys of the same tokens"),
        ("inline", {"kv_heads": 1}, {}, "for each of 2 heads, got kv_heads 1"),
        ("reformer", {}, {}, "got mechanism 'reformer', which has k = q"),
    ],
)
def test_qk_conv_says_what_it_needs(mechanism, options, call, sentence):
    with pytest.raises(softless.errors.SoftlessError, match=sentence):
        Attention(8, 2, mechanism, qk_conv=True, **options)(torch.randn(1, 12, 8), **call)


def test_qk_conv_has_no_state():
    with pytest.raises(UnsupportedError, match=r"qk_conv=True .* has no state"):
        Attention(8, 2, "linear", qk_conv=True).with_state(torch.randn(1, 12, 8))
