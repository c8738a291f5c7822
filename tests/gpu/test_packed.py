"""Packed sequences on a GPU: each is as on its own, and no other sequence reaches it."""

import warnings

import pytest
import torch
from torch import Tensor

import softless
from softless.kernels.causal.ops import causal_op
from softless.kernels.parallel.ops import attend_op

pytestmark = pytest.mark.gpu

LENGTHS = {"short": [49, 0, 1, 130, 7], "long": [700, 3, 1500, 0, 64], "equal": [512] * 3}
NAMES = {False: ("inline", "linear", "taylor", "efficient"), True: ("inline", "linear", "taylor")}
CALLS = [(name, is_causal) for is_causal, names in NAMES.items() for name in names]


def pack(values: list[Tensor], lengths: list[int]) -> list[Tensor]:
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    return [torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2) for x in values]


def draw(lengths: list[int], dtype: torch.dtype, *, heads: int = 4, groups: int = 2, dim: int = 64) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(sum(lengths), n, dim) for n in (heads, groups, groups)]
    return [torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes]


def run(values: list[Tensor], lengths: list[int], name: str, is_causal: bool) -> list[Tensor]:
    """The output and the gradients of q, k and v: [tokens, heads, dim] each."""
    leaves = [x.clone().requires_grad_() for x in values]
    out = softless.attention(*pack(leaves, lengths), name, is_causal=is_causal).values().transpose(0, 1)
    weights = torch.linspace(-1, 1, out.numel(), device="cuda", dtype=torch.float64).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


def alone(values: list[Tensor], lengths: list[int], name: str, is_causal: bool) -> list[Tensor]:
    """The same in float64, sequence by sequence."""
    leaves = [x.double().requires_grad_() for x in values]
    parts = zip(*(x.split(lengths) for x in leaves), strict=True)
    rows = [[x.transpose(0, 1)[None] for x in part] for part in parts]
    outs = [softless.attention(*row, name, is_causal=is_causal, backend="torch")[0].transpose(0, 1) for row in rows]
    out = torch.cat(outs)
    weights = torch.linspace(-1, 1, out.numel(), device="cuda", dtype=torch.float64).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights.to(values[0].dtype).double()).sum(), leaves)]


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(("name", "is_causal"), CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_sequence_is_as_on_its_own(lengths, name, is_causal, dtype):
    values = draw(lengths, dtype)
    tolerance = 2e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    for found, exact in zip(
        run(values, lengths, name, is_causal), alone(values, lengths, name, is_causal), strict=True
    ):
        for a, b in zip(found.split(lengths), exact.split(lengths), strict=True):
            assert not b.numel() or (a - b).abs().max() <= tolerance * (1 + b.abs().max())
    assert (causal_op if is_causal else attend_op).planned.plans  # and not padded, on torch


@pytest.mark.parametrize(("name", "is_causal"), CALLS)
def test_nan_in_a_neighbor_changes_nothing(name, is_causal):
    lengths = LENGTHS["long"]
    clean = draw(lengths, torch.bfloat16)
    spoiled = [x.clone() for x in clean]
    for x in spoiled:
        x[:703], x[2203:] = float("nan"), float("inf")
    for a, b in zip(run(spoiled, lengths, name, is_causal), run(clean, lengths, name, is_causal), strict=True):
        assert torch.equal(a[703:2203], b[703:2203])


def test_lengths_are_read_from_the_gpu_once():
    q, k, v = pack(draw([40, 9], torch.bfloat16), [40, 9])
    softless.attention(q, k, v)
    with warnings.catch_warnings(action="ignore"):  # PyTorch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            softless.attention(q, k, v)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_layer_trains_on_packed_sequences():
    torch.manual_seed(0)
    layer = softless.nn.Attention(128, 4, "linear").cuda()
    x = torch.randn(60, 128, device="cuda", requires_grad=True)
    packed = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 45, 60], device="cuda"))
    out = layer(packed, is_causal=True).values()
    expected = torch.cat([layer(part[None], is_causal=True)[0] for part in x.split([45, 15])])
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.square().sum(), x)[0], rtol=1e-3, atol=1e-3)
