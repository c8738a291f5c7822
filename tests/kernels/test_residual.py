"""Attention with the local residual, and from a packed projection: the kernels against a convolution written out.

The truth is the float64 explicit weights plus `F.conv2d` with one group for every sample and channel.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from softless import attention
from softless.errors import ArgumentError
from softless.functional import attention_qkv, attention_with_residual
from tests.kernels.cases import assert_near, assert_same, draw, regime
from tests.numerics import eager
from tests.numerics.budget import FORWARD, GRADIENT, assert_within_budget

pytestmark = pytest.mark.kernels

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
both_halves = pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)


def convolved(v: Tensor, taps: Tensor, grid: tuple[int, int], prefix: int, key_mask: Tensor | None) -> Tensor:
    """Each [sample, head, channel] is a picture and a group of its own; hidden tokens are zeros."""
    batch, heads, tokens, width = v.shape
    v = v if key_mask is None else torch.where(key_mask[:, None, :, None], v, 0.0)
    pictures = v[:, :, prefix:].transpose(2, 3).reshape(1, batch * heads * width, *grid)
    kernels = taps.transpose(2, 3).reshape(batch * heads * width, 1, 3, 3)
    out = F.conv2d(pictures, kernels, padding=1, groups=batch * heads * width)
    out = out.reshape(batch, heads, width, tokens - prefix).transpose(2, 3)
    return torch.cat([torch.zeros_like(v[:, :, :prefix]), out], 2)


def expected(q, k, v, taps, grid, prefix=0, key_mask=None, mechanism="inline") -> Tensor:
    out = attention(q, k, v, mechanism, key_mask=key_mask, backend="reference")
    return out + convolved(v, taps, grid, prefix, key_mask)


def plain(q, k, v, taps, grid, prefix) -> Tensor:
    """As anyone would type it, in the dtype that comes in."""
    seen = q.new_ones(q.shape[2], k.shape[2])
    return eager.inline("identity")(q, k, v, seen, {}) + convolved(v, taps, grid, prefix, None)


def gradients(function, leaves: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """[output, gradient of each leaf]."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


def picture(grid: tuple[int, int], prefix: int, *, batch: int = 2, heads: int = 2, width: int = 5) -> list[Tensor]:
    """q, k, v, taps."""
    tokens = prefix + grid[0] * grid[1]
    return [*draw(tokens, batch=batch, heads=heads, dims=(3, width)), torch.randn(batch, heads, 9, width)]


def hold_true(leaves: list[Tensor], **call) -> None:
    upstream = torch.randn(*leaves[0].shape[:3], leaves[2].shape[3])
    ours = gradients(lambda *x: attention_with_residual(*x, backend="triton", **call), leaves, upstream)
    exact = gradients(lambda *x: expected(*x, **call), [x.double() for x in leaves], upstream.double())
    for name, mine, right in zip(("output", "dq", "dk", "dv", "dtaps"), ours, exact, strict=True):
        assert_near(mine, right, name)


@pytest.mark.parametrize(
    ("grid", "prefix", "cut"),
    [
        ((1, 1), 0, "whole"),
        ((1, 7), 1, "whole"),
        ((5, 3), 0, "whole"),
        ((5, 3), 2, "whole"),
        ((1, 1), 2, "spans"),
        ((5, 3), 1, "spans"),
    ],
    ids=str,
)
def test_the_residual_is_a_convolution(grid, prefix, cut):
    with regime(cut):
        hold_true(picture(grid, prefix, batch=1), grid=grid, prefix=prefix)


def test_every_sample_and_head_has_its_own_taps():
    hold_true(picture((2, 2), 0, batch=3, heads=2), grid=(2, 2))


@pytest.mark.parametrize(
    ("grid", "prefix", "cut"), [((6, 6), 1, "whole"), ((3, 13), 0, "spans"), ((34, 1), 2, "one span")], ids=str
)
def test_neighbors_may_lie_in_another_tile(grid, prefix, cut):
    with regime(cut):
        hold_true(picture(grid, prefix, batch=1, heads=1), grid=grid, prefix=prefix)


def test_a_picture_of_272_tokens_is_cut_into_spans():
    hold_true(picture((16, 17), 1, batch=1, heads=1), grid=(16, 17), prefix=1)


@pytest.mark.parametrize("mechanism", ["linear", "taylor", "efficient"])
def test_every_mechanism_takes_a_residual(mechanism):
    hold_true(picture((2, 3), 1, batch=1, heads=1), grid=(2, 3), prefix=1, mechanism=mechanism)


def test_values_in_slices_have_taps_in_slices():
    hold_true(picture((2, 3), 1, batch=1, width=130), grid=(2, 3), prefix=1)


@pytest.mark.parametrize("cut", ["whole", "spans"])
def test_hidden_tokens_add_nothing_to_their_neighbors(cut):
    mask = torch.arange(16)[None] % torch.tensor([[3], [17]]) == 1  # the class token and a column; one token
    mask[1, 1] = True
    with regime(cut):
        hold_true(picture((3, 5), 1, heads=1), grid=(3, 5), prefix=1, key_mask=mask)


@pytest.mark.parametrize("cut", ["whole", "spans"])
def test_the_contents_of_padding_reach_no_neighbor(cut):
    q, k, v, taps = picture((3, 5), 1, batch=1, heads=1)
    mask, upstream = torch.arange(16)[None] % 4 != 2, torch.randn(1, 1, 16, 5)
    found = []
    for junk in (0.0, torch.nan, torch.inf):
        dirty = [torch.where(mask[:, None, :, None], x, junk) for x in (k, v)]
        with regime(cut):
            found.append(
                gradients(
                    lambda *x: attention_with_residual(*x, grid=(3, 5), prefix=1, key_mask=mask, backend="triton"),
                    [q, *dirty, taps],
                    upstream,
                )
            )
    assert all(x.isfinite().all() for x in found[0])
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])


def test_a_sample_without_visible_tokens_gives_zeros():
    mask = torch.zeros(2, 7, dtype=torch.bool)
    found = gradients(
        lambda *x: attention_with_residual(*x, grid=(2, 3), prefix=1, key_mask=mask, backend="triton"),
        picture((2, 3), 1),
        torch.randn(2, 2, 7, 5),
    )
    assert all((x == 0).all() for x in found)


@both_halves
@pytest.mark.parametrize(("grid", "cut"), [((5, 3), "whole"), ((8, 9), "spans")], ids=str)
def test_half_precision_stays_within_budget(dtype, grid, cut):
    """Values with a mean: taps times values is then the larger part."""
    leaves = picture(grid, 1, batch=1, heads=1)
    leaves = [x.to(dtype) for x in (*leaves[:2], leaves[2] + 5, leaves[3])]
    upstream = torch.randn(*leaves[0].shape[:3], 5).to(dtype)
    with regime(cut):
        ours = gradients(
            lambda *x: attention_with_residual(*x, grid=grid, prefix=1, backend="triton"), leaves, upstream
        )
    exact = gradients(lambda *x: expected(*x, grid, 1), [x.double() for x in leaves], upstream.double())
    typed = gradients(lambda *x: plain(*x, grid, 1), leaves, upstream)
    bars = {"output": FORWARD, "dq": GRADIENT, "dk": GRADIENT, "dv": GRADIENT, "dtaps": GRADIENT}
    for (name, bar), mine, right, theirs in zip(bars.items(), ours, exact, typed, strict=True):
        assert mine.dtype == dtype
        assert_within_budget(mine, right, theirs, **bar, name=name)


@pytest.mark.parametrize("cut", ["whole", "spans"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_projection_gives_the_results_of_its_three_parts(cut, dtype):
    """Bit for bit, and its gradient is one contiguous tensor of its shape."""
    qkv, upstream = torch.randn(1, 7, 3, 2, 5).to(dtype), torch.randn(1, 2, 7, 5)
    with regime(cut):
        one = gradients(lambda x: attention_qkv(x, backend="triton"), [qkv], upstream)
        other = gradients(lambda x: attention(*apart(x), backend="triton"), [qkv], upstream)
    assert_same(one, other)
    assert one[1].shape == qkv.shape
    assert one[1].is_contiguous()


def apart(qkv: Tensor) -> list[Tensor]:
    return [x.contiguous() for x in qkv.permute(2, 0, 3, 1, 4).unbind()]


@pytest.mark.parametrize("cut", ["whole", "spans"])
def test_a_packed_projection_takes_a_residual(cut):
    qkv, taps, upstream = torch.randn(1, 7, 3, 2, 5), torch.randn(1, 2, 9, 5), torch.randn(1, 2, 7, 5)
    place = {"grid": (2, 3), "prefix": 1, "backend": "triton"}
    with regime(cut):
        one = gradients(lambda x, taps: attention_qkv(x, taps=taps, **place), [qkv, taps], upstream)
        other = gradients(lambda x, taps: attention_with_residual(*apart(x), taps, **place), [qkv, taps], upstream)
    assert_same(one, other)
    assert one[1].is_contiguous()


def test_the_output_of_a_packed_projection_has_its_heads_side_by_side():
    """[B, N, H d] is a view: what the output projection reads."""
    out = attention_qkv(torch.randn(2, 7, 3, 2, 5), backend="triton")
    assert out.transpose(1, 2).flatten(2).data_ptr() == out.data_ptr()


def test_a_strided_projection_gives_the_results_of_its_copy():
    wide = torch.randn(2, 7, 4, 2, 10)
    strided = wide[:, :, 1:, :, ::2]
    assert_same([attention_qkv(strided, backend="triton")], [attention_qkv(strided.contiguous(), backend="triton")])


def test_strided_taps_give_the_results_of_their_copy():
    leaves, upstream = picture((2, 3), 0, batch=1), torch.randn(1, 2, 6, 5)
    strided = torch.stack([leaves[3], leaves[3] + 1], -1)[..., 0].mT.contiguous().mT

    def run(taps: Tensor) -> list[Tensor]:
        return gradients(
            lambda *x: attention_with_residual(*x, grid=(2, 3), backend="triton"), [*leaves[:3], taps], upstream
        )

    assert_same(run(strided), run(leaves[3]))


BAD = {
    "no grid": ({"grid": None}, "grid is None"),
    "a number": ({"grid": 6}, "grid is 6"),
    "three sides": ({"grid": (1, 2, 3)}, r"\(1, 2, 3\)"),
    "too many tokens": ({"grid": (3, 3)}, "9 .*queries"),
    "negative sides": ({"grid": (-2, -3)}, r"-2"),
    "no pixels": ({"grid": (0, 0), "prefix": 6}, r"\(0, 0\)"),
    "a negative prefix": ({"grid": (1, 7), "prefix": -1}, "-1"),
    "sides that are not whole": ({"grid": (2.0, 3.0)}, "2.0"),
    "sides that are words": ({"grid": ("2", "3")}, "2"),
    "a prefix that is not whole": ({"grid": (2, 3), "prefix": 0.0}, "0.0"),
    "taps without nine rows": ({"grid": (2, 3), "taps": torch.randn(2, 2, 8, 5)}, r"\[2, 2, 8, 5\]"),
    "taps of other heads": ({"grid": (2, 3), "taps": torch.randn(2, 1, 9, 5)}, r"\[2, 1, 9, 5\]"),
    "taps that are a list": ({"grid": (2, 3), "taps": [1.0]}, "list"),
    "taps of whole numbers": ({"grid": (2, 3), "taps": torch.ones(2, 2, 9, 5, dtype=torch.int64)}, "int64"),
}


@pytest.mark.parametrize("wrong", BAD)
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_bad_taps_and_grids_are_refused_in_one_sentence(wrong, backend):
    """It repeats what was given."""
    q, k, v, taps = picture((2, 3), 0)
    call, given = {"taps": taps, **BAD[wrong][0]}, BAD[wrong][1]
    with pytest.raises(ArgumentError, match=given) as caught:
        attention_with_residual(q, k, v, call.pop("taps"), **call, backend=backend)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_the_output_has_the_dtype_of_q_whatever_that_of_the_taps(backend):
    q, k, v, taps = picture((2, 3), 0, batch=1)
    half = [x.bfloat16() for x in (q, k, v)]
    assert attention_with_residual(*half, taps, grid=(2, 3), backend=backend).dtype == torch.bfloat16


def test_a_residual_with_shared_key_heads_is_refused():
    q, k, v = draw(6, heads=2, groups=1)
    with pytest.raises(ArgumentError, match="a value head for each query head"):
        attention_with_residual(q, k, v, torch.randn(1, 2, 9, 5), grid=(2, 3), backend="triton")


@pytest.mark.parametrize(
    "given", [torch.randn(2, 7, 2, 5), torch.randn(2, 7, 4, 2, 5), [1.0]], ids=["4", "four", "list"]
)
def test_a_projection_of_the_wrong_shape_is_refused_in_one_sentence(given):
    with pytest.raises(ArgumentError, match=r"must be a tensor \[batch, tokens, 3, heads, dim\]"):
        attention_qkv(given, backend="triton")
