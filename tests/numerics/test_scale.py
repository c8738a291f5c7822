"""`scale` may have any sign and any size, and the fast path agrees with the specification: R4, R32.

Scales are negative, zero, so small that float32 has no such number, and so large that a softmax picks one key.
"""

import pytest
import torch

from softless import attention, mechanism
from softless.errors import ArgumentError
from tests.numerics.cases import CASES, FORMS, attend, draw, forms, gradients, judged

SCALES = (-1.0, -1e-3, -1e-300, 0.0, -0.0, 1e-300, 1e-40, 1e-3, 1e6, -1e6, 1e30, -1e30)
POSITIVE = ("soft",)  # its Gaussian falls with the scale, so it refuses the others
SCALED = [case for case, made in CASES.items() if made.default_scale(4) is not None and case not in POSITIVE]


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-5, torch.float64: 1e-12}[dtype]


@forms(SCALED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("tokens", [2, 70])
def test_any_scale_gives_what_the_specification_gives(case, is_causal, dtype, tokens):
    given = draw(case, tokens, 4).to(dtype)
    rows = judged(case, given.q.double(), given.k.double(), is_causal=is_causal)
    for scale in SCALES:
        fast, exact = (
            attend(case, given, is_causal=is_causal, scale=scale, backend=backend) for backend in ("torch", "reference")
        )
        assert exact.isfinite().all(), f"scale {scale}: there is no finite truth"
        assert fast.isfinite().all(), f"scale {scale}: not finite"
        if abs(scale) > 1 and picks_keys(case):  # rounding decides between scores that are nearly equal
            continue
        error, size = (fast - exact)[rows].abs().max().item(), exact[rows].abs().max().item()
        assert error <= tolerance(dtype) * (1 + size), f"scale {scale}: off by {error:.1e} of {size:.1e}"


def picks_keys(case: str) -> bool:
    return not CASES[case].carries_state


@forms(SCALED)
def test_a_scale_that_is_not_positive_has_the_gradients_of_the_specification(case, is_causal):
    for scale in (-1.0, 0.0):
        given = draw(case, 9, 4)
        leaves = [x.requires_grad_() for x in given.leaves()]
        fast, exact = (
            attend(case, given, is_causal=is_causal, scale=scale, backend=backend) for backend in ("torch", "reference")
        )
        upstream = torch.randn_like(exact)
        for mine, truth in zip(gradients(fast, upstream, leaves), gradients(exact, upstream, leaves), strict=True):
            torch.testing.assert_close(mine, truth, rtol=1e-10, atol=1e-10 * (1 + truth.abs().max().item()))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_negative_scale_is_a_negative_query(is_causal, dtype):
    q, k, v = torch.randn(3, 2, 2, 70, 8).to(dtype).unbind()
    turned = attention(-q, k, v, "softmax", is_causal=is_causal, scale=0.3)
    assert torch.equal(attention(q, k, v, "softmax", is_causal=is_causal, scale=-0.3), turned)


@pytest.mark.parametrize("case", POSITIVE)
@pytest.mark.parametrize("scale", [-1.0, 0.0])
def test_a_mechanism_without_such_a_scale_says_so(case, scale):
    with pytest.raises(ArgumentError, match=f"scale {scale} is not positive"):
        attend(case, draw(case, 5, 4), is_causal=FORMS[case][0], scale=scale)


@pytest.mark.parametrize("made", [mechanism("linear"), mechanism("taylor"), mechanism("efficient")], ids=str)
def test_a_mechanism_that_cancels_the_scale_refuses_it(made):
    q, k, v = torch.randn(3, 1, 1, 4, 4).unbind()
    with pytest.raises(ValueError, match="would have no effect"):
        attention(q, k, v, made, scale=-1.0)
