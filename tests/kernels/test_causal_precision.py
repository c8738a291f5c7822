"""The causal kernels in half precision are as good as the dtype allows: R3.

Keys and values with a common offset punish factors that are rounded before they are centered; a first token unlike
all others punishes what is centered on it; one that its own query hardly sees has all the weight there is.
"""

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor

from softless import attention
from softless.algebra.kernel_spec import KernelSpec
from softless.kernels.causal import tiles as causal_tiles
from softless.kernels.causal.ops import continued
from tests.kernels.cases import INLINE_ELU, LINEAR_SOFTMAX
from tests.numerics.budget import FORWARD, GRADIENT, assert_within_budget
from tests.numerics.cases import CASES
from tests.numerics.eager import FORMULAS, visible

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.filterwarnings("ignore:mkldnn_matmul"),
    pytest.mark.filterwarnings("ignore:overflow encountered"),  # numpy, where elu's branch not taken is e^x
]

TOKENS, WIDTH = 100, 32
SPECS = {
    "linear": ("elu", "divide", 1.0),
    "inline": ("identity", "subtract", WIDTH**-0.5),
    INLINE_ELU: ("elu", "subtract", WIDTH**-0.5),
    "linear-none": ("elu", "none", 1.0),
    LINEAR_SOFTMAX: ("softmax", "divide", 1.0),
    "inline-softmax": ("softmax", "subtract", WIDTH**-0.5),
}


def draw(family: str, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, TOKENS, WIDTH) for _ in "qkv")
    if "offset" in family:
        k, v = k + 30, v + 30
    if "outlier" in family:
        k[:, :, 0] *= 100
    if "unseen" in family:
        k *= 0.1
        q[:, :, 0], k[:, :, 0] = 8 * torch.eye(2, WIDTH)
    return [x.to(dtype) for x in (q, k, v)]


def numbers(formula, given: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients, computed in `dtype`."""
    leaves = [x.to(dtype).requires_grad_() for x in given]
    out = formula(*leaves)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(given[0].dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


FAMILIES = ("plain", "offset", "outlier", "unseen")
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def in_turn() -> Iterator[object]:
    """Of the two half precisions one in turn; make slow takes both."""
    for (i, case), (j, family), (k, dtype) in product(*map(enumerate, (SPECS, FAMILIES, HALF))):
        marks = [pytest.mark.slow] if (i + j + k) % 2 else []
        yield pytest.param(case, family, HALF[dtype], id=f"{dtype}-{family}-{case}", marks=marks)


@pytest.mark.parametrize(("case", "family", "dtype"), list(in_turn()))
def test_causal_errors_stay_within_the_budget(monkeypatch, case, family, dtype):
    if family == "offset":
        monkeypatch.setattr(causal_tiles, "cut", lambda *_: (2, 64))
    phi, reader, scale = SPECS[case]
    spec = KernelSpec(phi, phi, reader, scale=scale)
    given = draw(family, dtype)
    exact = numbers(
        lambda q, k, v: attention(q, k, v, CASES[case], is_causal=True, backend="reference"), given, torch.float64
    )
    ours = numbers(lambda q, k, v: continued(q, k, v, None, None, spec)[0], given, dtype)
    plain = numbers(lambda q, k, v: FORMULAS[case](q, k, v, visible(q, k, True), {}), given, dtype)
    for name, truth, mine, theirs in zip(("output", "dq", "dk", "dv"), exact, ours, plain, strict=True):
        if truth.abs().max() < torch.finfo(dtype).max:
            budget = FORWARD if name == "output" else GRADIENT
            assert_within_budget(mine, truth, theirs, **budget, name=name)


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_causal_errors_stay_within_the_budget_after_a_state(dtype):
    given = draw("offset", dtype)
    cut, spec = 50, KernelSpec("elu", "elu", "divide")
    first, state = continued(*(x[:, :, :cut] for x in given), None, None, spec)
    second, _ = continued(*(x[:, :, cut:] for x in given), None, state, spec)
    wide = [x.double() for x in given]
    exact = attention(*wide, CASES["linear"], is_causal=True, backend="reference")
    plain = FORMULAS["linear"](*given, visible(given[0], given[1], True), {})
    assert_within_budget(torch.cat([first, second], 2), exact, plain, **FORWARD, name="output")


def test_the_first_query_of_a_subtraction_has_weight_one_in_the_keys_gradient():
    """In the keys' gradient it is 1 less a sum, plus a score as large: both are made of queries rounded alike."""
    q, k, v = draw("outlier", torch.bfloat16)
    upstream = torch.randn_like(v) * (torch.arange(TOKENS) == 0)[:, None]
    v.requires_grad_()
    out, _ = continued(q + 3, k, v, None, None, KernelSpec("elu", "identity", "subtract", scale=0.3))
    (gradient,) = torch.autograd.grad(out, v, upstream)
    assert torch.allclose(gradient, upstream, rtol=torch.finfo(torch.bfloat16).eps, atol=0)
