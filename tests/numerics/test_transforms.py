"""Every way to differentiate is right, or refused in one sentence: R30, for backends `torch` and `reference`.

    reverse       torch.autograd.grad, torch.func.grad, vjp, jacrev
    forward       forward_ad, torch.func.jvp, jacfwd
    both          a Hessian times a vector: jvp of grad
    vmap          over the batch, and over gradients of samples

Finite differences in float64 judge forward mode. The reverse mode of the specification judges the rest: it is held to
finite differences in test_gradients.py.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import softless
from softless import State, attention_with_state
from softless.errors import UnsupportedError
from softless.functional import attention_qkv, attention_with_residual
from softless.nn import Attention, Reversible
from tests.numerics.cases import (
    CASES,
    HEADS,
    STATEFUL,
    Draw,
    attend,
    draw,
    draw_smooth,
    every_form,
    gradients,
    one_form,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # SDPA on a CPU has no batching rule
    pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning"),  # torch's own, as forward mode is first used
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]
both_backends = pytest.mark.parametrize("backend", ["torch", "reference"])
STEP = 1e-6


def smooth(case: str, *, is_causal: bool) -> Draw:
    return draw_smooth(case, tokens=3, dim=2, heads=HEADS[case], is_causal=is_causal)


def tangents(leaves: list[Tensor]) -> list[Tensor]:
    return [torch.randn_like(x) for x in leaves]


def dual(function, leaves: list[Tensor], directions: list[Tensor]) -> Tensor:
    """The directional derivative by `forward_ad`."""
    with forward_ad.dual_level():
        out = function(*(forward_ad.make_dual(x, t) for x, t in zip(leaves, directions, strict=True)))
        tangent = forward_ad.unpack_dual(out).tangent
        assert tangent is not None, "the output has no tangent"
        return tangent


def difference(function, leaves: list[Tensor], directions: list[Tensor]) -> Tensor:
    """The directional derivative by central differences."""
    ahead, back = (
        function(*(x + sign * STEP * t for x, t in zip(leaves, directions, strict=True))) for sign in (1, -1)
    )
    return (ahead - back) / (2 * STEP)


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    error, size = (actual - expected).abs().max().item(), expected.abs().max().item()
    assert error <= tolerance * (1 + size), f"off by {error:.1e} of {size:.1e}"


@every_form
@both_backends
def test_forward_mode_is_the_finite_difference(case, is_causal, backend):
    given = smooth(case, is_causal=is_causal)
    leaves, directions = given.leaves(), tangents(given.leaves())

    def output(*tensors: Tensor) -> Tensor:
        return attend(case, given.rebuilt(*tensors), is_causal=is_causal, backend=backend)

    expected = difference(output, leaves, directions)
    assert_near(dual(output, leaves, directions), expected, 1e-6)
    out, tangent = torch.func.jvp(output, tuple(leaves), tuple(directions))
    assert_near(tangent, expected, 1e-6)
    assert_near(out, output(*leaves))


@every_form
def test_forward_mode_crosses_chunks(case, is_causal):
    """70 tokens are two chunks, or several blocks."""
    given = draw(case, 70, 3)
    leaves, directions = given.leaves(), tangents(given.leaves())
    found = {}
    for backend in ("torch", "reference"):
        found[backend] = dual(
            lambda *x, how=backend: attend(case, given.rebuilt(*x), is_causal=is_causal, backend=how),
            leaves,
            directions,
        )
    assert_near(found["torch"], found["reference"])


@every_form
@both_backends
def test_functional_gradients_are_those_of_the_specification(case, is_causal, backend):
    """grad, vjp and jacrev, against `backward` of the explicit weights."""
    given = smooth(case, is_causal=is_causal)
    leaves = given.leaves()

    def output(*tensors: Tensor) -> Tensor:
        return attend(case, given.rebuilt(*tensors), is_causal=is_causal, backend=backend)

    asking = [x.clone().requires_grad_() for x in leaves]
    exact = attend(case, given.rebuilt(*asking), is_causal=is_causal, backend="reference")
    upstream, every = torch.randn_like(exact), tuple(range(len(leaves)))
    expected = gradients(exact, upstream, asking)
    jacobians = torch.func.jacrev(output, argnums=every)(*leaves)
    ways = {
        "grad": torch.func.grad(lambda *x: (output(*x) * upstream).sum(), argnums=every)(*leaves),
        "vjp": torch.func.vjp(output, *leaves)[1](upstream),
        "jacrev": [torch.tensordot(upstream, matrix, upstream.ndim) for matrix in jacobians],
    }
    for found in ways.values():
        for mine, truth in zip(found, expected, strict=True):
            assert_near(mine, truth)


def sample_of(given: Draw, *sample: Tensor) -> Draw:
    """One sample as a batch: q, k, v and, where there is one, beta."""
    q, k, v, *beta = (x[None] for x in sample)
    return Draw(q, k, v, given.inputs | ({"beta": beta[0]} if beta else {}))


def samples(given: Draw) -> list[Tensor]:
    return [*given[:3], *([given.inputs["beta"]] if "beta" in given.inputs else [])]


@one_form
@both_backends
def test_vmap_is_a_loop_for_outputs_gradients_and_tangents(case, is_causal, backend):
    given = draw(case, 5, 3, batch=3)

    def output(*sample: Tensor) -> Tensor:
        return attend(case, sample_of(given, *sample), is_causal=is_causal, backend=backend)[0]

    def gradient(*sample: Tensor) -> Tensor:
        return torch.func.grad(lambda *x: output(*x).sin().sum())(*sample)

    def tangent(*sample: Tensor) -> Tensor:
        return torch.func.jvp(output, sample, tuple(torch.ones_like(x) for x in sample))[1]

    for each in (output, gradient, tangent):
        looped = torch.stack([each(*one) for one in zip(*samples(given), strict=True)])
        assert_near(torch.func.vmap(each)(*samples(given)), looped)


@every_form
def test_a_hessian_times_a_vector_is_that_of_the_specification(case, is_causal):
    """Forward over reverse, on the fast path too: SDPA alone could not."""
    given = smooth(case, is_causal=is_causal)

    def product(backend: str, direction: Tensor) -> Tensor:
        def loss(q: Tensor) -> Tensor:
            return attend(case, given._replace(q=q), is_causal=is_causal, backend=backend).sin().sum()

        return torch.func.jvp(torch.func.grad(loss), (given.q,), (direction,))[1]

    direction = torch.randn_like(given.q)
    assert_near(product("torch", direction), product("reference", direction))


@pytest.mark.parametrize("case", STATEFUL)
def test_a_carried_state_has_tangents_and_takes_vmap(case):
    given = draw(case, 6, 3, batch=2)
    leaves, directions = samples(given), tangents(samples(given))

    def stream(*sample: Tensor) -> tuple[Tensor, State]:
        one, state, outputs = sample_of(given, *sample), None, []
        for here in (slice(0, 4), slice(4, 5), slice(5, 6)):
            q, k, v, inputs = one.tokens(here)
            out, state = attention_with_state(q, k, v, CASES[case], state, inputs=inputs)
            outputs.append(out)
        return torch.cat(outputs, 2)[0], state

    def whole(*sample: Tensor) -> Tensor:
        return attend(case, sample_of(given, *sample), is_causal=True, backend="reference")[0]

    found, states = torch.func.vmap(stream)(*leaves)
    for b, (one, way) in enumerate(zip(zip(*leaves, strict=True), zip(*directions, strict=True), strict=True)):
        assert_near(found[b], whole(*one))
        assert_near(states.comoment[b], stream(*one)[1].comoment)
        ours, theirs = (torch.func.jvp(each, one, way)[1] for each in (lambda *x: stream(*x)[0], whole))
        assert_near(ours, theirs)


@pytest.mark.parametrize("name", ["inline", "softmax", "hydra"])
def test_the_packed_call_and_the_residual_take_all_transforms(name):
    qkv, taps = torch.randn(2, 6, 3, 2, 4, dtype=torch.float64), torch.randn(2, 2, 9, 4, dtype=torch.float64)
    calls = {
        "packed": lambda qkv, taps: attention_qkv(qkv, name, taps=taps, grid=(2, 3)),
        "residual": lambda qkv, taps: attention_with_residual(
            *qkv.transpose(1, 3).unbind(2), taps, name, grid=(2, 3), backend="torch"
        ),
    }
    leaves, directions = [qkv, taps], tangents([qkv, taps])
    for call in calls.values():
        asking = [x.clone().requires_grad_() for x in leaves]
        upstream = torch.randn(2, 2, 6, 4, dtype=torch.float64)
        expected = gradients(call(*asking), upstream, asking)
        for mine, truth in zip(torch.func.vjp(call, *leaves)[1](upstream), expected, strict=True):
            assert_near(mine, truth)
        assert_near(dual(call, leaves, directions), difference(call, leaves, directions), 1e-6)


@pytest.mark.parametrize("name", ["inline", "softmax", "delta"])
def test_a_module_has_per_sample_gradients_and_tangents(name):
    layer = Attention(8, 2, name).double()
    x, weights = torch.randn(3, 5, 8, dtype=torch.float64), dict(layer.named_parameters())

    def loss(weights: dict[str, Tensor], one: Tensor) -> Tensor:
        return torch.func.functional_call(layer, weights, (one[None],), {"is_causal": True}).sin().sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)
    looped = [torch.func.grad(loss)(weights, one) for one in x]
    for key, mine in found.items():
        assert_near(mine, torch.stack([each[key] for each in looped]))
    direction = torch.randn_like(x[0])
    slope = torch.func.jvp(lambda one: loss(weights, one), (x[0],), (direction,))[1]
    assert_near(slope, difference(lambda one: loss(weights, one), [x[0]], [direction]), 1e-6)


def test_what_has_gradients_of_its_own_refuses_transforms_in_one_sentence():
    stack = Reversible([(nn.Linear(4, 4), nn.Linear(4, 4))])
    x = torch.randn(1, 3, 4)
    calls = {
        "Reversible has gradients in reverse mode only": stack,
        "attention over ranks has gradients in reverse mode only": lambda x: softless.parallel.attention(
            x[None], x[None], x[None], "linear"
        ),
    }
    for words, call in calls.items():
        for way in (
            lambda call: torch.func.jvp(call, (x,), (x,)),
            lambda call: torch.func.grad(lambda x: call(x).sum())(x),
            lambda call: torch.func.vmap(call)(x[None]),
            lambda call: dual(call, [x], [x]),
        ):
            with pytest.raises(UnsupportedError, match=words):
                way(call)
