"""What lies around and beneath the kernels' tensors reaches no result: poisoned memory (R5) and far strides (R6)."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import softless

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # said once in a thread by torch 2.11
]

CALLS = {
    **{name: (name, False) for name in ("linear", "inline", "taylor", "efficient")},
    **{f"causal {name}": (name, True) for name in ("linear", "inline", "taylor", "delta", "efla")},
}
SHAPES = ((49, 32), (130, 33), (300, 64), (3000, 64), (200, 128))
FAR = 2**31 + 2**10  # numbers from one sample to the next

every_call = pytest.mark.parametrize(("name", "is_causal"), CALLS.values(), ids=CALLS)


def drawn(name: str, tokens: int, dim: int) -> list[Tensor]:
    """q, k, v [2, 2, tokens, dim], and beta for a rule that asks for it."""
    qkv = [torch.randn(2, 2, tokens, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    return [*qkv, torch.rand(2, 2, tokens, device="cuda").bfloat16()] if name in ("delta", "efla") else qkv


def results(name: str, is_causal: bool, given: list[Tensor]) -> list[Tensor]:
    """o and the gradients."""
    leaves = [x.detach().requires_grad_() for x in given]
    inputs = {"beta": leaves[3]} if len(leaves) > 3 else None
    out = softless.attention(*leaves[:3], name, is_causal=is_causal, inputs=inputs, backend="triton")
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, memory that nobody has written is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def among_nan(x: Tensor) -> Tensor:
    """The same numbers with NaN before, after and between their rows."""
    room = torch.full((x.shape[0] + 2, x.shape[1] + 2, x.shape[2] + 64, *(n + 64 for n in x.shape[3:])), torch.nan)
    room = room.to(x)
    inner = room[1:-1, 1:-1, 32:-32, 32:-32] if x.dim() == 4 else room[1:-1, 1:-1, 32:-32]
    inner.copy_(x)
    return inner


def far_apart(x: Tensor) -> Tensor:
    """The same numbers, the second sample more than 2^31 numbers after the first."""
    stride = (FAR, *x.stride()[1:])
    return torch.empty(FAR + x[0].numel(), device=x.device, dtype=x.dtype).as_strided(x.shape, stride).copy_(x)


@every_call
@pytest.mark.parametrize(("tokens", "dim"), SHAPES)
def test_memory_that_nobody_wrote_is_read_by_nobody(name: str, is_causal: bool, tokens: int, dim: int) -> None:
    given = drawn(name, tokens, dim)
    exact = results(name, is_causal, given)
    with poisoned():
        found = results(name, is_causal, given)
    assert all(torch.equal(a, b) for a, b in zip(found, exact, strict=True))


@every_call
@pytest.mark.parametrize(("tokens", "dim"), SHAPES)
def test_what_lies_beside_the_tensors_is_read_by_nobody(name: str, is_causal: bool, tokens: int, dim: int) -> None:
    given = drawn(name, tokens, dim)
    exact = results(name, is_causal, given)
    found = results(name, is_causal, [among_nan(x) for x in given])
    for ours, same in zip(found, exact, strict=True):
        assert (ours - same).abs().max() <= 2 * torch.finfo(torch.bfloat16).eps * same.abs().max()


@every_call
def test_samples_may_lie_farther_apart_than_32_bits_reach(name: str, is_causal: bool) -> None:
    given = drawn(name, 300, 64)
    exact = results(name, is_causal, given)
    found = results(name, is_causal, [far_apart(x) for x in given])
    assert all(torch.equal(a, b) for a, b in zip(found, exact, strict=True))
