"""What regression attention tends to, and what it leaves unchanged: InLine, least squares, affine maps, few keys.

And its causal form: all queries at once give what one token after the other gives, and so do their gradients.
"""

import pytest
import torch
from torch import Tensor

from softless import attention, attention_weights, attention_with_state, mechanism
from softless.algebra import merge, observe, regression
from softless.algebra.state import State
from softless.errors import ArgumentError, UnsupportedError
from softless.nn.inputs import Inputs


def draw(queries: int = 7, keys: int = 40, dim: int = 5, width: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 3, queries, dim), (2, 3, keys, dim), (2, 3, keys, width)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q, k, v


def state(k: Tensor, v: Tensor) -> State:
    return observe(k, regression.with_keys(k, v))


def test_a_large_ridge_is_inline_for_centered_queries():
    q, k, v = draw()
    seen = state(k, v)
    trace = (seen.comoment[..., 4:] / 40).diagonal(dim1=-2, dim2=-1).mean(-1)
    inline = attention(q - k.mean(2, keepdim=True), k, v, "inline", scale=0.3, backend="reference")
    found = regression.read(q, seen, 1e9, 0.3 * 1e9 * trace)
    torch.testing.assert_close(found, inline, rtol=0, atol=1e-8)


def test_no_ridge_and_gain_one_are_least_squares():
    q, k, v = draw()
    ones = torch.ones(2, 3, 40, 1, dtype=torch.float64)
    solution = torch.linalg.lstsq(torch.cat([k, ones], -1), v).solution
    expected = torch.cat([q, ones[:, :, :7]], -1) @ solution
    found = attention(q, k, v, mechanism("regress", ridge=0.0, gain="one"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)


def test_without_a_ridge_no_affine_map_of_queries_and_keys_matters():
    q, k, v = draw()
    generator = torch.Generator().manual_seed(1)
    turn, offset = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((5, 5), (5,)))
    made = mechanism("regress", ridge=0.0)
    torch.testing.assert_close(
        attention(q @ turn + offset, k @ turn + offset, v, made), attention(q, k, v, made), rtol=0, atol=1e-11
    )


def test_states_merge():
    q, k, v = draw()
    both = merge(state(k[:, :, :11], v[:, :, :11]), state(k[:, :, 11:], v[:, :, 11:]))
    torch.testing.assert_close(regression.read(q, both, 0.1), regression.read(q, state(k, v), 0.1), rtol=0, atol=1e-13)


FEW = {
    "one token": lambda k: k[:, :, :1],
    "equal keys": lambda k: k[:, :, :1].expand_as(k),
    "keys of rank one": lambda k: k[..., :1] * torch.ones(5, dtype=k.dtype),
    "fewer keys than channels": lambda k: k[:, :, :3],
    "tiny keys": lambda k: 1e-150 * k,
}


@pytest.mark.parametrize("kind", FEW)
def test_few_keys_give_finite_outputs_and_gradients(kind):
    q, k, v = draw()
    k = FEW[kind](k).clone().requires_grad_()
    v = v[:, :, : k.shape[2]].clone().requires_grad_()
    out = attention(q, k, v, "regress")
    assert out.isfinite().all()
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.square().sum(), (k, v)))
    if kind in ("one token", "equal keys"):
        torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out))


def test_a_causal_form_knows_neither_all_keys_nor_all_queries():
    q, k, v = draw(queries=40)
    with pytest.raises(UnsupportedError, match="its causal form needs relative=False"):
        attention(q, k, v, "regress", is_causal=True)
    with pytest.raises(UnsupportedError, match="its causal form needs weighting=None"):
        attention(q, k, v, mechanism("regress", weighting="query", relative=False), is_causal=True)


@pytest.mark.parametrize("option", ["ridge", "gain"])
def test_what_is_learned_starts_at_the_default(option):
    q, k, v = draw()
    layer = Inputs(mechanism("regress", **{option: "learned"}), 15, 3, 3).double()
    given = attention(q, k, v, layer.mechanism, inputs=layer(None))
    torch.testing.assert_close(given, attention(q, k, v, "regress"), rtol=0, atol=1e-3)  # softplus(-2.25) = 0.1002


def test_equal_scores_of_keys_weigh_them_alike():
    """Queries that add up to zero have a mean that no key is nearer to."""
    q, k, v = draw()
    q = q - q.mean(2, keepdim=True)
    torch.testing.assert_close(
        attention(q, k, v, mechanism("regress", weighting="query")), attention(q, k, v, "regress"), rtol=0, atol=1e-12
    )


def test_a_key_that_the_queries_turn_from_counts_for_nothing():
    q, k, v = draw()
    q[:], k[:, :, :10] = 10.0, -100.0
    made = mechanism("regress", weighting="query")
    torch.testing.assert_close(
        attention(q, k, v, made), attention(q, k[:, :, 10:], v[:, :, 10:], made), rtol=0, atol=1e-12
    )


CAUSAL = mechanism("regress", relative=False)


def token_by_token(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state, outputs = None, []
    for i in range(q.shape[2]):
        out, state = attention_with_state(*(x[:, :, i : i + 1] for x in (q, k, v)), CAUSAL, state)
        outputs.append(out)
    return torch.cat(outputs, 2)


@pytest.mark.parametrize(
    "offset", [pytest.param(0.0, marks=pytest.mark.slow), 30.0], ids=["centered keys", "keys with a mean"]
)
def test_4096_tokens_at_once_are_one_after_the_other(offset):
    """Within 1e-5 in float32 of outputs and of the sums that make them: R1's measure."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 4096, 32).unbind()
    k, q = k + offset, q + offset
    given, expected = attention(q, k, v, CAUSAL, is_causal=True), token_by_token(q, k, v)
    rows = attention_weights(q[:, :, :64], k[:, :, :64], CAUSAL, is_causal=True).abs().sum(-1).max()
    assert (given - expected).abs().max() <= 1e-5 * (1 + expected.abs().max() + rows * v.abs().max())
    assert (given - expected)[:, :, 128:].abs().max() <= 1e-5  # where keys are more than channels, no sum cancels


def test_gradients_of_the_steps_are_those_of_the_weights():
    leaves = [x.requires_grad_() for x in draw(queries=70, keys=70)]
    upstream = torch.randn(2, 3, 70, 4, dtype=torch.float64)
    found = [attention(*leaves, CAUSAL, is_causal=True, backend=how) for how in ("torch", "reference")]
    for mine, true in zip(*(torch.autograd.grad(out, leaves, upstream) for out in found), strict=True):
        torch.testing.assert_close(mine, true, rtol=0, atol=1e-10 * (1 + true.abs().max().item()))


def test_the_steps_can_be_differentiated_twice(monkeypatch):
    monkeypatch.setattr(type(CAUSAL), "chunk", 2)
    q, k, v = draw(queries=5, keys=5, dim=2, width=1)
    leaves = [x[:1, :1].clone().requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(lambda *x: attention(*x, CAUSAL, is_causal=True), leaves)
    assert torch.autograd.gradgradcheck(lambda *x: attention(*x, CAUSAL, is_causal=True), leaves)


def test_the_steps_end_also_where_the_ridge_is_lost_in_rounding():
    q, k, v = (x.float() for x in draw(queries=40))
    for ridge, size in ((0.0, 1.0), (0.1, 1e6), (1e-30, 1e-3), (1e30, 1.0)):
        made = mechanism("regress", ridge=ridge, relative=False)
        leaves = [x.requires_grad_() for x in (q * size, k * size, v.clone())]
        out = attention(*leaves, made, is_causal=True)
        assert out.isfinite().all(), (ridge, size)
        assert all(x.isfinite().all() for x in torch.autograd.grad(out.square().sum(), leaves)), (ridge, size)


def test_a_key_that_is_no_number_makes_all_later_outputs_none():
    q, k, v = draw(queries=40)
    k[0, 0, 35, 1] = torch.nan
    lost = attention(q, k, v, CAUSAL, is_causal=True).isnan()
    assert lost[0, 0, 35:].all()
    assert not lost[0, 0, :35].any()
    assert not lost[:, 1:].any()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ridge": -1.0}, "ridge -1.0 is not a finite number from 0 on, or 'learned'"),
        ({"ridge": float("nan")}, "ridge nan is not a finite number from 0 on, or 'learned'"),
        ({"ridge": "large"}, "ridge 'large' is not a finite number from 0 on, or 'learned'"),
        ({"gain": "two"}, "gain 'two' is not one of dim, one, learned"),
        ({"weighting": "key"}, "weighting 'key' is not one of None, query"),
        ({"center": 1}, "takes center=True or False, got 1"),
        ({"phi": "exp"}, "regress needs the features themselves"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(options, says):
    with pytest.raises(ArgumentError, match=says):
        mechanism("regress", **options)
