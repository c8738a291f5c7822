"""The kernels of near and far tokens: their outputs, the states they continue from, and what they refuse."""

from typing import Any

import pytest
import torch
from torch import Tensor

from softless import Mechanism, attention, attention_with_state, mechanism
from softless.errors import BackendError
from softless.kernels.near import check, ops
from tests.kernels.cases import draw
from tests.numerics import eager
from tests.numerics.budget import FORWARD, GRADIENT, assert_within_budget

pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:mkldnn_matmul")]

MADE = {
    "plain": mechanism("nearfar", window=16, first=2),
    "separate": mechanism("nearfar", window=40, first=0, maps="separate", features=12),
    "identity": mechanism("nearfar", window=7, first=0, maps="identity"),
    "first": mechanism("nearfar", window=0, first=3, maps="separate", features=5),
    "linear": mechanism("nearfar", window=0, first=0),
    "whole": mechanism("nearfar", window=200, first=4),
}
PADDED = torch.arange(70) >= torch.tensor([[23], [0]])
every_mechanism = pytest.mark.parametrize("made", MADE.values(), ids=MADE)


def learned(made: Mechanism, heads: int, dim: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) / 2 for name, shape in made.input_shapes(heads, dim).items()}


def in_double(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.double() for name, x in inputs.items()}


def by_weights(q: Tensor, k: Tensor, v: Tensor, made: Mechanism, inputs: dict[str, Tensor], **call: Any) -> Tensor:
    q, k, v = (x.double() for x in (q, k, v))
    return attention(q, k, v, made, is_causal=True, inputs=in_double(inputs), backend="reference", **call)


@every_mechanism
def test_outputs_match_the_weights_with_padding_and_shared_keys(made):
    q, k, v = draw(70, heads=4, groups=2, batch=2)
    inputs = learned(made, 4, 8)
    found = attention(q, k, v, made, is_causal=True, key_mask=PADDED, inputs=inputs, backend="triton")
    exact = by_weights(q, k, v, made, inputs, key_mask=PADDED)
    assert (found - exact).abs().max() <= 1e-5 * (1 + exact.abs().max())


@pytest.mark.parametrize("made", [MADE["plain"], MADE["separate"]], ids=["plain", "separate"])
def test_a_head_that_is_cut_into_segments_matches_its_weights(made, monkeypatch):
    monkeypatch.setattr(ops, "LEAST", 1)
    q, k, v = draw(130)
    inputs = learned(made, 1, 8)
    found, exact = (
        attention(q, k, v, made, is_causal=True, inputs=inputs, backend="triton"),
        by_weights(q, k, v, made, inputs),
    )
    assert (found - exact).abs().max() <= 1e-5 * (1 + exact.abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("offset", [0.0, 20.0])
def test_half_precision_stays_within_its_budget(dtype, offset):
    made = mechanism("nearfar", window=5, first=2)
    q, k, v = (x.to(dtype) for x in draw(100, heads=2, dims=(32, 32)))
    v, inputs = v + offset, {name: x.to(dtype) for name, x in learned(made, 2, 32).items()}
    found = attention(q, k, v, made, is_causal=True, inputs=inputs, backend="triton")
    assert found.dtype == dtype
    typed = eager.FORMULAS["nearfar"](q, k, v, eager.visible(q, k, True), inputs)
    assert_within_budget(found, by_weights(q, k, v, made, inputs), typed, **FORWARD, name="output")


@pytest.mark.parametrize("made", [MADE["plain"], MADE["first"]], ids=["plain", "first"])
@pytest.mark.parametrize("backends", [("triton", "triton"), ("torch", "triton"), ("triton", "torch")], ids="-".join)
def test_a_prompt_a_piece_and_a_token_match_one_call_on_both_backends(made, backends):
    q, k, v = draw(60, heads=2, groups=1)
    inputs, state, found = learned(made, 2, 8), None, []
    for i, piece in enumerate((slice(0, 35), slice(35, 59), slice(59, 60))):
        pieces = q[:, :, piece], k[:, :, piece], v[:, :, piece]
        out, state = attention_with_state(*pieces, made, state, inputs=inputs, backend=backends[min(i, 1)])
        found.append(out)
    exact = by_weights(q, k, v, made, inputs)
    assert (torch.cat(found, 2) - exact).abs().max() <= 1e-5 * (1 + exact.abs().max())
    assert state.comoment.dtype == torch.float32


def test_half_precision_continues_with_a_state_in_float32():
    made, (q, k, v) = MADE["plain"], (x.bfloat16() for x in draw(30, heads=2, groups=1))
    inputs, call = learned(made, 2, 8), {"backend": "triton"}
    _, state = attention_with_state(q[:, :, :29], k[:, :, :29], v[:, :, :29], made, inputs=inputs, **call)
    out, after = attention_with_state(q[:, :, 29:], k[:, :, 29:], v[:, :, 29:], made, state, inputs=inputs, **call)
    assert out.dtype == torch.bfloat16
    assert all(x.dtype == torch.float32 for x in (*state[1:], *after[1:]))
    exact = by_weights(q, k, v, made, inputs)[:, :, 29:]
    assert (out - exact).abs().max() <= 0.01 * exact.abs().max()


def test_nan_in_hidden_tokens_reaches_no_output():
    q, k, v = draw(70, batch=2)
    inputs, call = learned(MADE["plain"], 1, 8), {"is_causal": True, "key_mask": PADDED, "backend": "triton"}
    clean = attention(q, k, v, MADE["plain"], inputs=inputs, **call)
    for x in (q, k, v):
        x.transpose(1, 2)[~PADDED] = torch.nan
    assert torch.equal(attention(q, k, v, MADE["plain"], inputs=inputs, **call), clean)


def test_a_call_without_real_tokens_reads_nothing_of_its_padding():
    q, k, v = (x.requires_grad_() for x in draw(20, heads=2, batch=2))
    hidden, gain = torch.arange(2)[:, None] == torch.zeros(20), torch.zeros(2)
    with torch.no_grad():
        k[0], v[0] = torch.nan, torch.nan
    out = check.on_kernels(q, k, v, ~hidden, 0.3, gain)
    assert (out[0] == 0).all()
    assert all(x.isfinite().all() for x in (out, *torch.autograd.grad(out.sin().sum(), (q, k, v))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_a_query_that_no_token_weighs_gives_zeros(dtype):
    """The two features of each key that are not zero are zero in every query."""
    made = mechanism("nearfar", window=0, first=0, maps="identity")
    q, k = (200.0 * torch.eye(4, dtype=dtype)[i].repeat(1, 1, 40, 1) for i in (0, 2))
    q, k = q - q.roll(1, -1), k - k.roll(1, -1)
    v = torch.full((1, 1, 40, 5), 3.0, dtype=dtype, requires_grad=True)
    out = attention(q, k, v, made, is_causal=True, inputs=learned(made, 1, 4), backend="triton")
    assert (out == 0).all()
    assert (torch.autograd.grad(out.sum(), v)[0] == 0).all()


def test_a_later_token_changes_no_output_before_it():
    made, (q, k, v) = MADE["plain"], draw(70, heads=2)
    inputs, later = learned(made, 2, 8), draw(70, heads=2)
    found = []
    for stop in (70, 20):
        given = (torch.cat([x[:, :, :stop], y[:, :, stop:]], 2) for x, y in zip((q, k, v), later, strict=True))
        found.append(attention(*given, made, is_causal=True, inputs=inputs, backend="triton")[:, :, :20])
    assert torch.equal(*found)


def gradients(
    given: list[Tensor], made: Mechanism, dtype: torch.dtype, plain: bool = False, **call: Any
) -> list[Tensor]:
    """The output, and the gradients of q, k, v and what is learned, by weights in float64 or on the kernels."""
    leaves = [x.to(dtype).requires_grad_() for x in given]
    (q, k, v), inputs = leaves[:3], dict(zip(made.input_shapes(1, 1), leaves[3:], strict=True))
    if plain:
        out = eager.FORMULAS["nearfar"](q, k, v, eager.visible(q, k, True), inputs)
    else:
        backend = "reference" if dtype == torch.float64 else "triton"
        out = attention(q, k, v, made, is_causal=True, inputs=inputs, backend=backend, **call)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(given[0].dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


@pytest.mark.parametrize("name", ["plain", "separate", "identity", "first", "linear"])
def test_gradients_match_those_of_the_weights(name, monkeypatch):
    """With padding, two query heads for each key head, and several segments."""
    monkeypatch.setattr(ops, "LEAST", 1)
    made, tensors = MADE[name], draw(70, heads=4, groups=2, batch=2)
    given = [*tensors, *learned(made, 4, 8).values()]
    exact = gradients(given, made, torch.float64, key_mask=PADDED)
    for mine, truth in zip(gradients(given, made, torch.float32, key_mask=PADDED), exact, strict=True):
        assert (mine - truth).abs().max() <= 1e-5 * (1 + truth.abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("offset", [0.0, 20.0])
def test_gradients_in_half_precision_stay_within_their_budget(dtype, offset):
    made, (q, k, v) = mechanism("nearfar", window=5, first=2), draw(100, heads=2, dims=(32, 32))
    given = [x.to(dtype) for x in (q, k, v + offset, *learned(made, 2, 32).values())]
    exact, typed = gradients(given, made, torch.float64), gradients(given, made, dtype, plain=True)
    for mine, truth, theirs in zip(gradients(given, made, dtype), exact, typed, strict=True):
        assert_within_budget(mine, truth, theirs, **GRADIENT, name="a gradient")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_an_offset_that_all_values_share_costs_a_gradient_no_digits(dtype):
    """Multiples of 1/4 take the offset without rounding, so the true gradients stay as they are."""
    made, (q, k, v) = mechanism("nearfar", window=5, first=2), draw(200, dims=(32, 32))
    given = [x.to(dtype) for x in (q, k, (4 * v).round() / 4, *learned(made, 1, 32).values())]
    moved = [x + 16 if i == 2 else x for i, x in enumerate(given)]
    calls = (given, torch.float64), (given, dtype), (moved, dtype)
    found = (gradients(tensors, made, kind)[1:] for tensors, kind in calls)
    for exact, plain, offset in zip(*found, strict=True):
        ulp = torch.finfo(dtype).eps * exact.abs().max()
        assert (offset - exact).abs().max() <= (plain - exact).abs().max() + ulp


def test_a_gradient_flows_back_through_the_states_of_pieces():
    made, (q, k, v) = MADE["plain"], draw(60, heads=2)
    found, inputs = [], learned(made, 2, 8)
    for backend in ("triton", "torch"):
        leaves, state, total = [x.clone().requires_grad_() for x in (q, k, v)], None, 0
        for piece in (slice(0, 20), slice(20, 50), slice(50, 60)):
            pieces = [x[:, :, piece] for x in leaves]
            out, state = attention_with_state(*pieces, made, state, inputs=inputs, backend=backend)
            total = total + (out * torch.arange(1, 9)[:5]).square().sum()
        found.append(torch.autograd.grad(total, leaves))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-3)


def test_heads_too_wide_for_a_gradient_run_torch_and_triton_says_why():
    made, (q, k, v) = MADE["plain"], (x.requires_grad_() for x in draw(9, dims=(65, 5)))
    inputs = learned(made, 1, 65)
    with pytest.raises(
        BackendError, match="have gradients for heads and maps up to 64 wide, got 65; 'auto' runs torch"
    ):
        attention(q, k, v, made, is_causal=True, inputs=inputs, backend="triton")
    with pytest.raises(BackendError, match="have gradients for heads and maps up to 64 wide, got 65"):
        attention_with_state(q, k, v, made, inputs=inputs, backend="triton")


@pytest.mark.parametrize(
    ("options", "call", "word"),
    [
        ({}, {}, "mechanism 'nearfar' has only a causal kernel"),
        ({"neighborhood": 3}, {"grid": (3, 3)}, "no kernel computes mechanism 'nearfar' with these options"),
        ({"features": 129}, {"is_causal": True}, "no kernel computes mechanism 'nearfar' with these options"),
    ],
)
def test_what_the_kernels_lack_is_one_sentence(options, call, word):
    made, (q, k, v) = mechanism("nearfar", **options), draw(9)
    with pytest.raises(BackendError, match=f"cannot run: {word}"):
        attention(q, k, v, made, inputs=learned(made, 1, 8), backend="triton", **call)
