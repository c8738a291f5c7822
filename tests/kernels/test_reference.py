"""What tokens have in common, as the kernels find it: the ninther of nine, whatever a few of them are."""

from itertools import combinations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from softless.kernels.common.reference import typical
from softless.kernels.common.rows import mask_of, rows

pytestmark = pytest.mark.kernels


@triton.jit
def typical_kernel(x, mask, begin, end, out, D: tl.constexpr, BD: tl.constexpr, PHI: tl.constexpr):
    columns = tl.arange(0, BD)
    b = tl.program_id(0).to(tl.int64)
    tl.store(out + b * BD + columns, typical(x, mask, b, b * 0, begin, end, 1.0, columns, D, PHI))


def found(x: Tensor, begin: int, end: int, key_mask: Tensor | None = None, phi: str = "identity") -> Tensor:
    """Of tokens begin..end of x [B, N, D], [B, 32]."""
    out = torch.full((len(x), 32), torch.nan)
    typical_kernel[(len(x),)](rows(x[:, None]), mask_of(key_mask), begin, end, out, D=x.shape[2], BD=32, PHI=phi)
    return out


def sampled(tokens: int) -> list[int]:
    """The middle of each ninth."""
    return [tokens * (2 * index + 1) // 18 for index in range(9)]


@pytest.mark.parametrize("tokens", [1, 17, 45, 1000])
def test_the_typical_token_is_the_median_of_three_medians(tokens):
    x = torch.randn(2, tokens, 20)
    nine = x[:, sampled(tokens)]  # [2, 9, 20]
    expected = torch.stack([nine[:, index::3].median(1).values for index in range(3)], 1).median(1).values
    assert torch.equal(found(x, 0, tokens)[:, :20], expected)
    assert (found(x, 0, tokens)[:, 20:] == 0).all()


def test_three_outliers_do_not_move_the_typical_token_far():
    """All 84 choices of three of the nine, one a sample: it stays within what the others span."""
    choices = list(combinations(range(9), 3))
    x = torch.rand(len(choices), 9, 4)
    for sample, choice in enumerate(choices):
        x[sample, list(choice)] = 1e6
    middle = found(x, 0, 9)[:, :4]
    assert ((middle >= 0) & (middle <= 1)).all()


def test_a_third_of_the_span_does_not_move_the_typical_token():
    x = torch.rand(1, 90, 4)
    x[:, 30:60] = -1e6
    assert (found(x, 0, 90)[:, :4] >= 0).all()


def test_hidden_tokens_do_not_change_the_typical_token():
    x, seen = torch.full((1, 40, 4), torch.inf), torch.zeros(1, 40, dtype=torch.bool)
    x[:, 17:19], seen[:, 17:19] = 3.0, True
    assert (found(x, 0, 40, seen)[:, :4] == 3).all()


def test_the_typical_token_is_zero_where_all_tokens_are_hidden():
    x = torch.full((1, 40, 4), torch.inf)
    assert (found(x, 0, 40, torch.zeros(1, 40, dtype=torch.bool), "elu") == 0).all()


def test_tokens_outside_the_span_do_not_change_the_typical_token():
    x = torch.full((1, 40, 4), torch.inf)
    x[:, 10:13] = 2.0
    assert (found(x, 10, 13)[:, :4] == 2).all()
    assert (found(x, 10, 13, phi="elu")[:, :4] == 3).all()
