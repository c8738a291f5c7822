"""A bias is read where a key is visible, and nowhere else.

What stands at hidden keys may be NaN or infinite: outputs and gradients are those of a bias of zero there.
"""

import math

import pytest
import torch
from torch import Tensor

from softless import attention
from tests.laws.cases import CASES, EITHER, Case, ask

BIASED = [
    pytest.param(case, form, id=f"{case}-{'causal' if form else 'all'}")
    for case in CASES
    if case.made.takes_bias
    for form in EITHER
    if form in case.forms
]
every_biased_form = pytest.mark.parametrize(("case", "is_causal"), BIASED)
both_backends = pytest.mark.parametrize("backend", ["torch", "reference"])
LOWER = torch.ones(9, 9).bool().tril()


def run(case: Case, bias: Tensor, seen: Tensor, *, is_causal: bool, backend: str) -> list[Tensor]:
    """The output, and the gradients of the bias, of q, k, v and of the inputs."""
    at = ask(case, 9)
    leaves = [x.clone().requires_grad_() for x in (bias, *at[:3], *at.inputs.values())]
    bias, q, k, v, *others = leaves
    call = at.extra | {"inputs": dict(zip(at.inputs, others, strict=True)), "is_causal": is_causal, "backend": backend}
    out = attention(q, k, v, case.made, key_mask=seen, bias=bias, **call)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    found = torch.autograd.grad(out, leaves, upstream, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True))]


@every_biased_form
@both_backends
@pytest.mark.parametrize("other", [math.nan, math.inf, -math.inf, 1e300])
def test_a_bias_at_hidden_keys_reaches_no_output_and_no_gradient(case, is_causal, backend, other):
    """One row of the batch has padding at its start, and one is padding alone: it sees nothing."""
    seen = torch.tensor([[False] * 3 + [True] * 6, [False] * 9])
    hidden = ~seen[:, None, None].expand(2, 2, 9, 9) | (~LOWER & is_causal)
    bias = torch.randn(2, 2, 9, 9, dtype=torch.float64)
    options = {"is_causal": is_causal, "backend": backend}
    expected = run(case, torch.where(hidden, 0.0, bias), seen, **options)
    found = run(case, torch.where(hidden, other, bias), seen, **options)
    names = ("output", "gradient of the bias", "gradient of q", "gradient of k", "gradient of v", *case.inputs)
    for name, mine, truth in zip(names, found, expected, strict=True):
        assert mine.isfinite().all(), f"{name}: not finite"
        torch.testing.assert_close(mine, truth, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
    assert not found[0][1].any(), "a query that sees nothing reads zero"
    assert not found[1][hidden].any(), "a bias at a hidden key has no gradient"


@every_biased_form
@both_backends
def test_a_row_of_minus_infinities_reads_zero_and_has_no_gradient(case, is_causal, backend):
    bias = torch.zeros(9, 9, dtype=torch.float64)
    bias[4] = -math.inf
    seen = torch.ones(2, 9).bool()
    out, dbias, dq, *others = run(case, bias, seen, is_causal=is_causal, backend=backend)
    assert not out[:, :, 4].any()
    assert not dbias[4].any()
    assert not dq[:, :, 4].any()
    assert all(x.isfinite().all() for x in (out, dbias, dq, *others))


@pytest.mark.parametrize("is_causal", [False, True])
@both_backends
def test_a_nan_bias_at_a_visible_key_is_not_hidden(is_causal, backend):
    """A NaN in a real score spoils its row, as a NaN in a real token does: it must not pass for -inf."""
    q, k, v = torch.randn(3, 1, 1, 5, 4, dtype=torch.float64).unbind()
    bias = torch.zeros(5, 5, dtype=torch.float64)
    bias[2, 1] = math.nan
    out = attention(q, k, v, "softmax", bias=bias, is_causal=is_causal, backend=backend)
    assert out[0, 0, 2].isnan().all()
    assert out[0, 0, [0, 1, 3, 4]].isfinite().all()
