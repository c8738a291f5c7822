"""The local residual is a grouped 3x3 convolution of v, its kernels predicted from the mean token."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

from softless import attention, mechanism
from softless.algebra.neighbors import local_residual
from softless.functional import attention_with_residual
from softless.nn import LocalResidual
from tests.golden.fill import load


def by_convolution(residual: LocalResidual, context: Tensor, v: Tensor, grid: tuple[int, int], prefix: int) -> Tensor:
    """As published: the batch folded into the groups of one convolution."""
    batch, heads, _, width = v.shape
    channels, (height, across) = heads * width, grid
    hidden = F.gelu(F.conv1d(context[..., None], residual[0].weight, residual[0].bias, groups=heads))
    kernels = F.conv1d(hidden, residual[2].weight, residual[2].bias, groups=heads)
    picture = v[:, :, prefix:].transpose(2, 3).reshape(1, batch * channels, height, across)
    out = F.conv2d(picture, kernels.reshape(batch * channels, 1, 3, 3), padding=1, groups=batch * channels)
    out = out.reshape(batch, heads, width, height * across).transpose(2, 3)
    return torch.cat([torch.zeros_like(v[:, :, :prefix]), out], 2)


@pytest.mark.parametrize("grid", [(7, 7), (1, 1), (1, 5), (5, 1), (2, 3), (3, 2), (6, 4), (4, 9)])
@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize(("dim", "heads"), [(12, 3), (6, 1), (4, 4)])
def test_the_local_residual_is_a_grouped_convolution(grid, prefix, dim, heads):
    residual = LocalResidual(dim, heads).double()
    context = torch.randn(2, dim, dtype=torch.float64)
    v = torch.randn(2, heads, prefix + grid[0] * grid[1], dim // heads, dtype=torch.float64)
    actual = residual(context, v, grid, prefix)
    torch.testing.assert_close(actual, by_convolution(residual, context, v, grid, prefix), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("change", ["pruned", "normalized"])
def test_a_weight_that_follows_from_others_is_worked_out_at_each_call(change):
    residual, context, v = LocalResidual(6, 3).double(), *(torch.randn(2, *x).double() for x in ((6,), (3, 6, 2)))
    if change == "pruned":
        prune.l1_unstructured(residual[0], "weight", 0.5)
    else:
        weight_norm(residual[0])
    before = residual(context, v, (2, 3))
    with torch.no_grad():
        for parameter in residual[0].parameters():
            parameter.mul_(2)
    after = residual(context, v, (2, 3))
    assert not torch.allclose(after, before)
    torch.testing.assert_close(after, by_convolution(residual, context, v, (2, 3), 0), rtol=1e-12, atol=1e-12)
    assert (residual[0].weight == 0).sum() == (6 if change == "pruned" else 0)


def test_rows_and_columns_are_told_apart():
    """A 2 x 3 picture is not a 3 x 2 one."""
    residual = LocalResidual(4, 2).double()
    context, v = torch.randn(1, 4, dtype=torch.float64), torch.randn(1, 2, 6, 2, dtype=torch.float64)
    assert not torch.allclose(residual(context, v, (2, 3)), residual(context, v, (3, 2)))


def test_class_tokens_neither_give_nor_get_a_residual():
    residual = LocalResidual(4, 2)
    context, v = torch.randn(1, 4), torch.randn(1, 2, 2 + 6, 2)
    out = residual(context, v, (2, 3), prefix=2)
    assert (out[:, :, :2] == 0).all()
    v[:, :, :2] = 1e6
    assert torch.equal(residual(context, v, (2, 3), prefix=2), out)


def test_gradients_are_those_of_the_convolution():
    residual = LocalResidual(6, 3).double()
    leaves = [torch.randn(2, 6, dtype=torch.float64), torch.randn(2, 3, 1 + 6, 2, dtype=torch.float64)]
    leaves = [x.requires_grad_() for x in leaves] + list(residual.parameters())
    upstream = torch.randn(2, 3, 7, 2, dtype=torch.float64)
    ours = torch.autograd.grad(residual(leaves[0], leaves[1], (3, 2), 1), leaves, upstream)
    theirs = torch.autograd.grad(by_convolution(residual, leaves[0], leaves[1], (3, 2), 1), leaves, upstream)
    for mine, expected in zip(ours, theirs, strict=True):
        assert expected.abs().max() > 0
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


def test_parameters_have_the_authors_names_and_shapes():
    shapes = {name: tuple(x.shape) for name, x in LocalResidual(12, 3).state_dict().items()}
    assert shapes == {"0.weight": (12, 4, 1), "0.bias": (12,), "2.weight": (108, 4, 1), "2.bias": (108,)}
    count = sum(p.numel() for p in LocalResidual(192, 6).parameters())
    assert count == 10 * 192 * 32 + 10 * 192


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_local_residual_runs_in_half_precision(dtype):
    residual = LocalResidual(6, 3).to(dtype)
    out = residual(torch.randn(2, 6).to(dtype), torch.randn(2, 3, 6, 2).to(dtype), (3, 2))
    assert out.dtype == dtype
    assert out.isfinite().all()


def ulps(actual: Tensor, exact: Tensor) -> float:
    """The largest distance, in steps of the largest number: rounding once costs half of one."""
    step = torch.finfo(actual.dtype).eps * exact.abs().max()
    return ((actual.double() - exact).abs().max() / step).item()


def assert_rounded_once(function, leaves: list[Tensor]) -> None:
    """Output and gradients in half precision, against float64 on the same numbers."""
    found, upstream = [], None
    for kind in (torch.float64, leaves[0].dtype):
        given = [x.to(kind).requires_grad_() for x in leaves]
        out = function(*given)
        upstream = torch.randn(out.shape).to(leaves[0].dtype) if upstream is None else upstream
        found.append([out, *torch.autograd.grad(out, given, upstream.to(kind))])
    worst = [ulps(mine, exact) for exact, mine in zip(*found, strict=True)]
    assert max(worst) <= 0.51, f"output and gradients are off by {worst} ulp"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mean", [0.0, 3.0])
def test_a_half_precision_residual_is_rounded_once(dtype, mean):
    v, taps = torch.randn(2, 3, 1 + 9 * 14, 16) + mean, torch.randn(2, 3, 9, 16)
    assert_rounded_once(lambda v, taps: local_residual(v, taps, (9, 14), 1), [v.to(dtype), taps.to(dtype)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("made", ["inline", "softmax", mechanism("linear", phi="relu")], ids=str)
def test_attention_and_residual_are_rounded_together(dtype, made):
    q, k, v = torch.randn(3, 2, 3, 1 + 9 * 14, 16).unbind()
    leaves = [x.to(dtype) for x in (q, k, v, torch.randn(2, 3, 9, 16))]
    assert_rounded_once(lambda *x: attention_with_residual(*x, made, grid=(9, 14), prefix=1, backend="torch"), leaves)


@pytest.mark.parametrize("case", ["cswin_n49", "cswin_n196"])
def test_attention_and_residual_and_lepe_are_the_authors_cswin(case):
    """CSwin predicts its kernels from the mean of the block's input, and adds a depthwise convolution of v."""
    sizes, inputs, weights, output = load(case)
    dim, heads, grid = sizes["dim"], sizes["heads"], (sizes["h"], sizes["w"])
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in inputs["qkv"])
    residual = LocalResidual(dim, heads).double()
    residual.load_state_dict({key[len("residual.") :]: x for key, x in weights.items() if key.startswith("residual.")})
    picture = v.transpose(2, 3).reshape(-1, dim, *grid)
    lepe = F.conv2d(picture, weights["get_v.weight"], weights["get_v.bias"], padding=1, groups=dim)
    heads_out = attention(q, k, v, "inline") + residual(inputs["x_mean"], v, grid)
    actual = heads_out.transpose(1, 2).flatten(2) + lepe.flatten(2).transpose(1, 2)
    assert (actual - output).abs().max() <= 1e-12 * output.abs().max()
