"""What regression attention tends to, and what it leaves unchanged: InLine, least squares, affine maps, few keys."""

import pytest
import torch
from torch import Tensor

from softless import attention, mechanism
from softless.algebra import merge, observe, regression
from softless.algebra.state import State
from softless.errors import ArgumentError, UnsupportedError


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


def test_a_causal_ridge_cannot_be_relative():
    q, k, v = draw(queries=40)
    with pytest.raises(UnsupportedError, match="its causal form needs relative=False"):
        attention(q, k, v, "regress", is_causal=True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ridge": -1.0}, "ridge -1.0 is not a finite number from 0 on"),
        ({"ridge": float("nan")}, "ridge nan is not a finite number from 0 on"),
        ({"gain": "two"}, "gain 'two' is not one of dim, one"),
        ({"phi": "exp"}, "regress needs the features themselves"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(options, says):
    with pytest.raises(ArgumentError, match=says):
        mechanism("regress", **options)
