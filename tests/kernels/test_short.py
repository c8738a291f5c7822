"""Few tokens in bfloat16, whose weights stay in registers: as good as the dtype allows, in every shape they come in."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from softless import attention
from softless.kernels.parallel import attend
from tests.kernels.cases import CASES, INLINE_ELU, SIGN_CHANGING, draw, truth
from tests.kernels.test_attend_precision import FAMILIES, plain, question
from tests.numerics.budget import FORWARD, assert_within_budget, worst

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning"),  # the plain formula's, on an old CPU
]
# Without a mass that may cancel, which takes products in float32.
SHORT = [name for name in CASES if "exp" not in name and name not in ("efficient", "taylor", *SIGN_CHANGING)]


def answered(case: str, q: Tensor, k: Tensor, v: Tensor, **call: Tensor) -> Tensor:
    """What the kernels answer, and that it was this kernel."""
    launched = []
    with patch.object(attend, "launch", lambda *a, **o: launched.append(a[0]) or real(*a, **o)):
        found = attention(q, k, v, CASES[case].mechanism, backend="triton", **call)
    assert [kernel.fn.__name__ for kernel in launched] == ["short_kernel"]
    return found


real = attend.launch


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", SHORT)
def test_the_short_kernel_stays_within_budget(case, family):
    asked = question(case, family, torch.bfloat16, 70, (64, 64))
    upstream = torch.randn_like(asked[2])
    exact, eager = truth(case, asked, upstream), plain(case, asked, upstream)
    assert_within_budget(answered(case, *asked), exact.out, eager.out, **FORWARD, name=f"{case}, {family}")


@pytest.mark.parametrize("case", ["linear-elu", INLINE_ELU, "none-softmax"])
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "groups", "dims"),
    [(1, 1, 1, 1, (64, 64)), (64, 65, 2, 1, (64, 64)), (129, 3, 4, 2, (64, 33)), (17, 128, 1, 1, (40, 64))],
)
def test_the_short_kernel_takes_any_shape(case, queries, keys, heads, groups, dims):
    asked = draw(queries, keys, batch=2, heads=heads, groups=groups, dims=dims, dtype=torch.bfloat16)
    mask = torch.arange(keys) < torch.tensor([[keys], [(keys + 1) // 2]])
    for key_mask in (None, mask):
        exact = attention(*(x.double() for x in asked), CASES[case].mechanism, key_mask=key_mask, backend="reference")
        found = answered(case, *asked, **({} if key_mask is None else {"key_mask": key_mask}))
        assert worst(found, exact) <= 2 * torch.finfo(torch.bfloat16).eps * exact.abs().max()


def test_the_short_kernel_skips_hidden_keys_and_a_query_without_mass_reads_the_mean():
    q, k, v = draw(20, batch=2, dims=(64, 64), dtype=torch.bfloat16)
    mask = torch.arange(20) < torch.tensor([[13], [0]])
    k[:, :, 13:], v[:, :, 13:] = torch.nan, torch.inf
    q[0, :, 3] = -1
    found = answered("linear-relu", q, k, v, key_mask=mask)
    assert torch.allclose(found[0, 0, 3].double(), v[0, 0, :13].double().mean(0), rtol=2**-7)
    assert found.isfinite().all()
    assert (found[1] == 0).all()
