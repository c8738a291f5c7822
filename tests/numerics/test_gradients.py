"""Gradients are right: R2.

Finite differences in float64 judge the formulas; explicit weights judge the chunks. Inputs are drawn
away from corners and thresholds, where there is no derivative to be right about.
"""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from softless import NearState, attention, attention_weights, attention_with_state
from softless.algebra.state import AnyState
from softless.functional import attention_qkv
from tests.annotations import same_shapes
from tests.numerics.cases import (
    CASES,
    HEADS,
    NORMALIZED,
    STATEFUL,
    Draw,
    attend,
    draw,
    draw_smooth,
    every_form,
    forms,
    gradients,
    grid,
    one_form,
)

every_stateful_case = pytest.mark.parametrize("case", STATEFUL)


def asking(given: Draw) -> list[Tensor]:
    return [x.requires_grad_() for x in given.leaves()]


def exactly(check, function, leaves) -> bool:
    """Finite differences repeat a call hundreds of times: its shapes are checked against their annotations once."""
    function(*leaves)
    with same_shapes():
        return check(function, leaves, nondet_tol=0.0)


@every_form
def test_the_specification_is_differentiated_right(case, is_causal):
    given = draw_smooth(case, tokens=3, dim=2, heads=HEADS[case], is_causal=is_causal)

    def output(*leaves):
        return attend(case, given.rebuilt(*leaves), is_causal=is_causal, backend="reference")

    assert exactly(gradcheck, output, asking(given))


@one_form
def test_the_specification_is_differentiated_right_twice(case, is_causal):
    given = draw_smooth(case, tokens=3, dim=2, heads=HEADS[case], is_causal=is_causal)

    def output(*leaves):
        return attend(case, given.rebuilt(*leaves), is_causal=is_causal, backend="reference")

    assert exactly(gradgradcheck, output, asking(given))


@every_form
def test_gradients_of_the_fast_path_match_finite_differences(case, is_causal):
    given = draw_smooth(case, tokens=3, dim=2, heads=HEADS[case], is_causal=is_causal)

    def output(*leaves):
        return attend(case, given.rebuilt(*leaves), is_causal=is_causal, backend="torch")

    assert exactly(gradcheck, output, asking(given))


@every_form
def test_the_fast_path_is_differentiated_right_with_padding_and_shared_key_heads(case, is_causal):
    given = draw_smooth(case, tokens=3, dim=2, kv_heads=1, is_causal=is_causal)
    mask = torch.tensor([[False, True, False]])

    def output(*leaves):
        return attend(case, given.rebuilt(*leaves), is_causal=is_causal, backend="torch", key_mask=mask)

    assert exactly(gradcheck, output, asking(given))


@forms([case for case, made in CASES.items() if made.takes_bias])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_the_bias_is_differentiated_right(case, is_causal, backend):
    given = draw_smooth(case, tokens=3, dim=2, heads=HEADS[case], is_causal=is_causal)
    bias = 1e-3 * torch.randn(1, 1, 3, 3, dtype=torch.float64)

    def output(bias, *leaves):
        return attend(case, given.rebuilt(*leaves), is_causal=is_causal, backend=backend, bias=bias)

    assert exactly(gradcheck, output, [bias.requires_grad_(), *asking(given)])


def test_differentiating_fused_softmax_twice_raises_and_the_specification_is_the_way():
    q, k, v = (torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True) for _ in "qkv")
    first = torch.autograd.grad(attention(q, k, v, "softmax").square().sum(), q, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="not implemented"):
        first.square().sum().backward()
    exact = attention(q, k, v, "softmax", backend="reference")
    first = torch.autograd.grad(exact.square().sum(), q, create_graph=True)[0]
    first.square().sum().backward()
    assert q.grad.isfinite().all()


def known(state: AnyState) -> list[Tensor]:
    """What a state says, in units of one: the shift is a unit, and its choice has no derivative."""
    if isinstance(state, NearState):
        return list(state[1:])
    units = state.shift.exp()
    return [state.k_mean * units, state.v_mean, state.comoment * units[..., None]]


def earlier_state(case: str, given: Draw, tokens: int) -> AnyState:
    """The state of some other tokens, as a leaf."""
    q, k, v, own = draw(case, tokens, given.q.shape[-1], heads=given.q.shape[1], width=given.v.shape[-1])
    inputs = {name: own[name] if name == "beta" else x for name, x in given.inputs.items()}
    state = attention_with_state(q, k, v, CASES[case], inputs=inputs)[1]
    return state._replace(k_mean=state.k_mean.abs()) if case in ("linear-identity", "linear-leaky_relu") else state


NONE, BOTH = "no state", "state in and out"


@every_stateful_case
@pytest.mark.parametrize(
    ("tokens", "carried"),
    [(2, NONE), (1, BOTH), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, NONE), (2, BOTH)))],
)
def test_a_carried_state_is_differentiated_right(case, carried, tokens):
    """In the tokens and in the state before them: the output, and the state after them."""
    given = draw_smooth(case, tokens=tokens, dim=2, heads=HEADS[case], is_causal=True)
    if case in ("linear-identity", "linear-leaky_relu"):  # with positive features no denominator nears zero
        given = Draw(given.q.abs(), given.k.abs(), given.v, given.inputs)
    state = None if carried == NONE else earlier_state(case, given, tokens=9 if case.startswith("nearfar") else 4)
    parts = {} if state is None else {name: x for name, x in state._asdict().items() if name not in ("n", "shift")}

    def output(*leaves):
        q, k, v, inputs = given.rebuilt(*leaves[len(parts) :])
        before = None if state is None else state._replace(**dict(zip(parts, leaves, strict=False)))
        out, after = attention_with_state(q, k, v, CASES[case], before, inputs=inputs)
        return (out, *known(after))

    assert exactly(gradcheck, output, [*(x.detach().requires_grad_() for x in parts.values()), *asking(given)])


def close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        error, bound = (a - b).abs().max().item(), 1e-10 * max(1.0, b.abs().max().item())
        assert error <= bound, f"{error:.1e} > {bound:.1e}"


@every_form
def test_chunked_gradients_are_those_of_the_weights(case, is_causal):
    given = draw(case, 131, 3, batch=2)
    leaves = asking(given)
    fast = attend(case, given, is_causal=is_causal, backend="torch")
    exact = attend(case, given, is_causal=is_causal, backend="reference")
    upstream = torch.randn_like(exact)
    close(gradients(fast, upstream, leaves), gradients(exact, upstream, leaves))


@every_stateful_case
@pytest.mark.parametrize("cut", [1, 57, 64, 130])
def test_gradients_through_a_carried_state_are_those_of_the_weights(case, cut):
    given = draw(case, 131, 3, kv_heads=1)
    leaves = asking(given)
    early, late = given.tokens(slice(cut)), given.tokens(slice(cut, None))
    first, state = attention_with_state(*early[:3], CASES[case], inputs=early.inputs)
    second, _ = attention_with_state(*late[:3], CASES[case], state, inputs=late.inputs)
    exact = attend(case, given, is_causal=True, backend="reference")
    upstream = torch.randn_like(exact)
    close(gradients(torch.cat([first, second], 2), upstream, leaves), gradients(exact, upstream, leaves))


@forms([case for case in CASES if case not in NORMALIZED])
@pytest.mark.parametrize("value", ["zero", "constant", "one dead channel"])
def test_the_gradient_in_v_is_the_weights_whatever_v_is(case, is_causal, value):
    """The output is linear in v, so dead and constant values have the derivative that all others have."""
    given = draw(case, 5, 3, width=3)
    v = torch.zeros_like(given.v) if value != "one dead channel" else given.v * torch.tensor([0.0, 1.0, 1.0])
    v = (v + 1 if value == "constant" else v).requires_grad_()
    out = attend(case, given._replace(v=v), is_causal=is_causal, backend="torch")
    upstream = torch.randn_like(out)
    call = {"is_causal": is_causal, "inputs": given.inputs, "grid": grid(case, given.q)}
    weights = attention_weights(given.q, given.k, CASES[case], **call)
    if case == "hydra":
        expected = (weights.unflatten(1, (2, 3)) * upstream.permute(0, 1, 3, 2)[..., None]).sum(-2).mT
    else:
        expected = weights.mT @ upstream
    close(gradients(out, upstream, [v]), [expected])


@pytest.mark.parametrize("name", ["softmax", "inline", "hydra"])
def test_gradients_of_queries_keys_and_values_meet_in_one_dense_tensor(name):
    """Nothing is copied to where the projection reads it, by us or by a compiler that may copy it wrong."""
    packed, dense = torch.randn(2, 5, 3, 4, 8, requires_grad=True).clone(), []
    packed.register_hook(lambda gradient: dense.append(gradient.is_contiguous()))
    attention_qkv(packed, name).square().sum().backward()
    assert dense == [True]
