"""What stands before the first real token costs no digits: R3 for padding at the left, as batches for generation have.

Values with a mean are summed relative to a point that every query may know. A hidden token is no such point: sums
around it lose what the mean takes, four digits of float32 where v has a mean of 1e4 and k of 30.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from softless import attention, attention_with_state, mechanism
from tests.numerics.budget import FORWARD, GRADIENT, worst
from tests.numerics.cases import CASES, HEADS, NORMALIZED, STATEFUL, Draw, attend, draw, gradients

BATCH, TOKENS = 5, 130
every_kernelized_case = pytest.mark.parametrize("case", [x for x in STATEFUL if CASES[x].family == "kernelized"])


def alone(case: str, whole: Draw, hidden: int, **how: str) -> Tensor:
    """The real tokens by themselves."""
    return attend(case, whole.tokens(slice(hidden, None)), is_causal=True, **how)


def padded(case: str, whole: Draw, hidden: int, **how: str) -> Tensor:
    mask = (torch.arange(whole.k.shape[2]) >= hidden).expand(BATCH, -1)
    return attend(case, whole, is_causal=True, key_mask=mask, **how)[:, :, hidden:]


def after_an_empty_state(case: str, whole: Draw, hidden: int, **how: str) -> Tensor:
    """A first call whose tokens were all padding."""
    if how:
        return alone(case, whole, hidden, **how)
    (*first, inputs), (*rest, rest_inputs) = whole.tokens(slice(hidden)), whole.tokens(slice(hidden, None))
    nothing = torch.zeros(BATCH, hidden, dtype=torch.bool)
    _, state = attention_with_state(*first, CASES[case], key_mask=nothing, inputs=inputs)
    return attention_with_state(*rest, CASES[case], state, inputs=rest_inputs)[0]


def more_queries_than_keys(case: str, whole: Draw, hidden: int, **how: str) -> Tensor:
    """The first queries see no key."""
    rest = whole.tokens(slice(hidden, None))
    return attend(case, rest._replace(q=whole.q), is_causal=True, **how)[:, :, hidden:]


def errors(layout: Callable[..., Tensor], case: str, whole: Draw, hidden: int, upstream: Tensor) -> list[float]:
    """In ulp, of the output and of the gradient of k."""
    found = []
    for dtype, how in ((torch.float32, {}), (torch.float64, {"backend": "reference"})):
        leaves = [x.to(dtype).requires_grad_() for x in whole.leaves()]
        out = layout(case, whole.rebuilt(*leaves), hidden, **how)
        found.append((out.detach(), *gradients(out, upstream, leaves[1:2])))
    return [typical(actual, exact) for actual, exact in zip(*found, strict=True)]


def typical(actual: Tensor, exact: Tensor) -> float:
    """The worst error of a sample, and of them the median: a row that nearly cancels says little."""
    error, size = (x.abs().flatten(1).amax(1) for x in (actual.double() - exact, exact))
    return (error / (torch.finfo(torch.float32).eps * size)).nan_to_num(torch.inf).median().item()


@every_kernelized_case
@pytest.mark.parametrize("hidden", [5, 70], ids=["inside a chunk", "beyond a chunk"])
def test_padding_on_the_left_costs_no_digits(case, hidden):
    q, k, v, inputs = draw(case, hidden + TOKENS, 8, batch=BATCH, heads=HEADS[case])
    whole = Draw(q, k + 30, v + 1e4, inputs).to(torch.float32)
    upstream = torch.randn(BATCH, HEADS[case], TOKENS, v.shape[3])
    of_out, of_k = errors(alone, case, whole, hidden, upstream)
    for layout in (padded, after_an_empty_state, more_queries_than_keys):
        here, here_k = errors(layout, case, whole, hidden, upstream)
        assert here <= FORWARD["ratio"] * of_out + 1, f"{layout.__name__}: {here:.2f} ulp, alone {of_out:.2f}"
        if case not in NORMALIZED:  # the gradient of h / |h| is as large as 1 / |h|
            assert here_k <= GRADIENT["ratio"] * of_k + 1, f"dk, {layout.__name__}: {here_k:.2f} ulp, alone {of_k:.2f}"


@every_kernelized_case
def test_a_state_of_no_tokens_is_no_state_bit_for_bit(case):
    q, k, v, inputs = draw(case, 5 + TOKENS, 8, batch=BATCH, heads=HEADS[case])
    whole = Draw(q, k, v + 1, inputs).to(torch.float32)
    assert torch.equal(after_an_empty_state(case, whole, 5), alone(case, whole, 5))


@pytest.mark.parametrize("case", ["linear", "linear-exp", "inline", "inline-exp", "efficient"])
def test_the_first_token_has_a_gradient_as_good_as_the_others(case):
    """The point that values are centered on cancels: a sum over all tokens for its gradient would only be rounded."""
    q, k, v, inputs = draw(case, 1000, 8)
    whole, upstream = Draw(q, k, v + 10, inputs).to(torch.float32), torch.randn(1, 2, 1000, 8)
    found = []
    for dtype, how in ((torch.float32, {}), (torch.float64, {"backend": "reference"})):
        leaves = [x.to(dtype).requires_grad_() for x in whole.leaves()]
        out = attend(case, whole.rebuilt(*leaves), is_causal=True, **how)
        found.append(gradients(out, upstream, leaves[2:3])[0])
    actual, exact = found
    first, rest = (worst(actual[:, :, here], exact[:, :, here]) for here in (slice(1), slice(1, None)))
    ulp = torch.finfo(torch.float32).eps * exact.abs().max().item()
    assert first <= 2 * rest + ulp, f"{first / ulp:.2f} ulp, the others {rest / ulp:.2f}"


@pytest.mark.parametrize(("phi", "phi_k", "of_q", "of_k"), [("exp", "exp", 43.5, 43.5), ("elu", "exp", 1, 88)])
def test_queries_that_see_nothing_have_no_gradient(phi, phi_k, of_q, of_k):
    """Not even where they are measured in units of e^87: ten times that is infinite, and 0 inf is no number."""
    q, k, v = 0.001 * torch.randn(3, 1, 1, 140, 4)
    leaves = [x.requires_grad_() for x in (q + of_q, k + of_k, v)]
    seen = torch.arange(140) >= 70
    out = attention(*leaves, mechanism("inline", phi=phi, phi_k=phi_k), is_causal=True, key_mask=seen[None])
    assert out.isfinite().all()
    for name, gradient in zip("qkv", torch.autograd.grad(out[:, :, ~seen].sum() * 10, leaves), strict=True):
        assert torch.equal(gradient, torch.zeros_like(gradient)), f"d{name}"
