"""The delta rule's kernels in half precision are as good as the dtype allows: R3.

Keys that are alike are the hard case: each token takes back nearly all that the one before it wrote, and what is
written are differences of large numbers. A first key unlike all others, and values with a mean, make them larger.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from softless import attention
from softless.kernels.delta.ops import delta
from tests.numerics.budget import FORWARD, GRADIENT, assert_within_budget, worst
from tests.numerics.eager import FORMULAS, visible

pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:mkldnn_matmul")]

TOKENS, WIDTH = 100, 32
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Family(NamedTuple):
    """Offset of q; spread and offset of k; what the first key is multiplied by; offset of v; a beta of 1 for all."""

    q: float = 0.0
    spread: float = 1.0
    k: float = 0.0
    first: float = 1.0
    v: float = 0.0
    whole: bool = False


FAMILIES = {
    "plain": Family(),
    "alike": Family(q=1, spread=0.1, k=3, v=20),
    "differences": Family(q=1, spread=0.1, k=3),
    "whole": Family(q=1, spread=0.1, k=1, whole=True),
    "outlier": Family(first=30, k=1, v=20),
}
QUICK = ("delta", "alike", "bf16"), ("efla", "alike", "fp16")


def draw(family: Family, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, TOKENS, WIDTH) for _ in "qkv")
    beta = torch.rand(1, 1, TOKENS)
    k = k * family.spread
    k[:, :, 0] *= family.first
    beta = torch.ones_like(beta) if family.whole else beta
    return [x.to(dtype) for x in (q + family.q, k + family.k, v + family.v, beta)]


def numbers(formula, given: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients, computed in `dtype`."""
    leaves = [x.to(dtype).requires_grad_() for x in given]
    out = formula(*leaves)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(given[0].dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


@pytest.mark.parametrize(
    ("rule", "family", "kind"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in ((rule, family, kind) for rule in ("delta", "efla") for family in FAMILIES for kind in HALF)
    ],
)
def test_delta_errors_stay_within_the_budget(rule, family, kind):
    dtype = HALF[kind]
    given = draw(FAMILIES[family], dtype)

    def by_weights(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        return attention(q, k, v, rule, is_causal=True, inputs={"beta": beta}, backend="reference")

    def typed(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        return FORMULAS[rule](q, k, v, visible(q, k, True), {"beta": beta})

    exact, single = numbers(by_weights, given, torch.float64), numbers(typed, given, torch.float32)
    ours = numbers(lambda *x: delta(*x, None, None, rule, 1.0)[0], given, dtype)
    plain = numbers(typed, given, dtype)
    names = "output", "dq", "dk", "dv", "dbeta"
    for name, truth, mine, theirs, float32 in zip(names, exact, ours, plain, single, strict=True):
        limits, size = torch.finfo(dtype), truth.abs().max().item()
        told = worst(float32, truth) <= 0.25 * limits.eps * size  # elsewhere the truth's terms cancel, in any dtype
        if size < limits.max and (told or name == "output"):
            assert_within_budget(mine, truth, theirs, **FORWARD if name == "output" else GRADIENT, name=name)


def test_differences_of_large_writes_keep_the_bits_of_two_factors():
    """One rounding of T, or of the scores, before it is multiplied costs two or three ulp here."""
    q, k, v, beta = draw(FAMILIES["differences"], torch.bfloat16)
    out, _ = delta(q, k, v, beta, None, None, "efla", 1.0)
    wide = [x.double() for x in (q, k, v)]
    exact = attention(*wide, "efla", is_causal=True, inputs={"beta": beta.double()}, backend="reference")
    assert worst(out, exact) <= torch.finfo(torch.bfloat16).eps * exact.abs().max()


@pytest.mark.parametrize("kind", [pytest.param("bf16", marks=pytest.mark.slow), "fp16"])
def test_delta_errors_stay_within_the_budget_after_a_state(kind):
    given, cut = draw(FAMILIES["alike"], HALF[kind]), 50
    first, state = delta(*(x[:, :, :cut] for x in given), None, None, "delta", 1.0)
    second, _ = delta(*(x[:, :, cut:] for x in given), None, state, "delta", 1.0)
    q, k, v, beta = (x.double() for x in given)
    exact = attention(q, k, v, "delta", is_causal=True, inputs={"beta": beta}, backend="reference")
    plain = FORMULAS["delta"](*given[:3], visible(q, k, True), {"beta": given[3]})
    assert_within_budget(torch.cat([first, second], 2), exact, plain, **FORWARD, name="output")


def test_the_gradient_of_beta_keeps_its_bits_where_terms_cancel():
    """It is a sum over the columns of what was written: one rounding before that costs hundreds of ulp here."""
    q, k, v, beta = (x[:, :, :1] for x in draw(FAMILIES["plain"], torch.bfloat16))
    upstream = torch.randn(v.shape)
    upstream = (upstream - (upstream * v).sum() / (v * v).sum() * v).bfloat16()
    strength, exact = beta.clone().requires_grad_(), beta.double().requires_grad_()
    out, _ = delta(q, k, v, strength, None, None, "efla", 1.0)
    wide = [x.double() for x in (q, k, v)]
    truth = attention(*wide, "efla", is_causal=True, inputs={"beta": exact}, backend="reference")
    (ours,), (exact,) = (
        torch.autograd.grad(x, of, upstream.to(x.dtype)) for x, of in ((out, strength), (truth, exact))
    )
    assert worst(ours, exact) <= torch.finfo(torch.bfloat16).eps * exact.abs().max()
