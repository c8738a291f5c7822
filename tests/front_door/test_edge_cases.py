"""Input that is unusual but no mistake (no tokens, one token, padding full of NaN) has a defined result."""

import pytest
import torch
from torch import Tensor

from softless import attention, attention_with_state
from tests.front_door.refusals import (
    ANY_FORM,
    INF,
    KERNELIZED,
    NAN,
    SCORED,
    every_form,
    inputs,
    made,
    some,
)


@every_form
def test_no_tokens_one_token_and_no_visible_token_are_answered(name, is_causal):
    q, k, v = (some(2, 4, 5, 3) for _ in "qkv")
    one = made(name)

    def run(q: Tensor, k: Tensor, v: Tensor, **call: Tensor) -> Tensor:
        return attention(q, k, v, one, is_causal=is_causal, inputs=inputs(name, q, k), **call)

    assert run(q[:, :, :0], k[:, :, :0], v[:, :, :0]).shape == (2, 4, 0, 3)
    assert (run(q, k[:, :, :0], v[:, :, :0]) == 0).all()
    single = run(q[:, :, :1], k[:, :, :1], v[:, :, :1])
    if one.rows_sum_to_one:
        torch.testing.assert_close(single, v[:, :, :1])
    assert (run(q, k, v, key_mask=torch.zeros(2, 5, dtype=torch.bool)) == 0).all()
    assert run(q[:0], k[:0], v[:0]).shape == (0, 4, 5, 3)


NARROW = [each for each in ANY_FORM if each[0] != "hydra"]  # which needs values as wide as queries


@pytest.mark.parametrize(("name", "is_causal"), NARROW)
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_values_without_channels_give_outputs_without_channels(name, is_causal, backend):
    q, v, one = some(2, 4, 5, 3), some(2, 4, 5, 0), made(name)
    own = inputs(name, q, q)
    assert attention(q, q, v, one, is_causal=is_causal, inputs=own, backend=backend).shape == (2, 4, 5, 0)
    if one.carries_state and is_causal:
        assert attention_with_state(q, q, v, one, inputs=own)[0].shape == (2, 4, 5, 0)


@pytest.mark.parametrize("name", [name for name in SCORED if made(name).takes_bias])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_bias_may_have_another_precision(name, backend):
    q, k, v = (some(2, 4, 5, 3) for _ in "qkv")
    bias = some(5, 5, dtype=torch.bfloat16)
    call = {"inputs": inputs(name, q, k), "backend": backend}
    same = attention(q, k, v, made(name), bias=bias.float(), **call)
    for dtype in (torch.bfloat16, torch.float64):
        assert torch.equal(attention(q, k, v, made(name), bias=bias.to(dtype), **call), same)


@every_form
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_nothing_in_padding_changes_an_output_or_a_gradient(name, is_causal, backend, poison):
    mask = torch.tensor([[True, False, True, True, False, False], [False, True, True, False, True, True]])
    q, k, v = (some(2, 4, 6, 3) for _ in "qkv")

    def run(fill: float) -> list[Tensor]:
        hidden = mask[:, None, :, None]
        leaves = [x.clone().requires_grad_() for x in (q, torch.where(hidden, k, fill), torch.where(hidden, v, fill))]
        call = {"key_mask": mask, "inputs": inputs(name, q, k), "backend": backend}
        out = attention(*leaves, made(name), is_causal=is_causal, **call)
        found = torch.autograd.grad(out.sin().sum(), leaves, materialize_grads=True)  # emanet's reach v alone
        return [out, *found]

    for what, clean, poisoned in zip(("output", "q", "k", "v"), run(0.5), run(poison), strict=True):
        assert poisoned.isfinite().all(), f"{what} is not finite"
        torch.testing.assert_close(poisoned, clean, msg=lambda text, what=what: f"{what}: {text}")


@pytest.mark.parametrize("name", KERNELIZED)
def test_nothing_in_padding_enters_a_state(name):
    mask = torch.tensor([[True, False, True, True, False]])
    q, k, v = (some(1, 4, 5, 3) for _ in "qkv")
    hidden = mask[:, None, :, None]
    clean, poisoned = (
        attention_with_state(q, torch.where(hidden, k, fill), torch.where(hidden, v, fill), name, key_mask=mask)
        for fill in (0.5, NAN)
    )
    torch.testing.assert_close(poisoned[0], clean[0])
    torch.testing.assert_close(tuple(poisoned[1]), tuple(clean[1]))


@every_form
def test_a_nan_in_a_real_token_is_not_hidden(name, is_causal):
    q, k, v = (some(1, 1, 5, 3) for _ in "qkv")
    v[0, 0, 2] = NAN
    assert attention(q, k, v, made(name), is_causal=is_causal, inputs=inputs(name, q, k))[0, 0].isnan().any()


@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_callers_tensors_stay_as_they_are(name, is_causal, dtype):
    tensors = [some(2, 4, 70, 3, dtype=dtype) for _ in "qkv"]
    mask = torch.rand(2, 70) > 0.3
    copies, kept, own = [x.clone() for x in tensors], mask.clone(), inputs(name, *tensors[:2])
    for backend in ("torch", "reference"):
        attention(*tensors, made(name), is_causal=is_causal, key_mask=mask, inputs=own, backend=backend)
    assert all(torch.equal(x, y) for x, y in zip(own.values(), inputs(name, *tensors[:2]).values(), strict=True))
    if name in KERNELIZED:
        state = attention_with_state(*tensors, name)[1]
        before = [x.clone() for x in state]
        attention_with_state(*tensors, name, state, key_mask=mask)
        assert all(map(torch.equal, state, before))
    assert all(map(torch.equal, tensors, copies))
    assert torch.equal(mask, kept)
