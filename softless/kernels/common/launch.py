"""Start kernels on the device of their tensors, and register the functions that do so as PyTorch operators.

`torch.library.custom_op` would import PyTorch's compiler on the first call, which takes seconds; `operator`, `fake` and
`gradient` register the same things without it. The first call of an operator in a process is rehearsed, so that its
kernels are compiled in parallel.

Triton 3.6 calls ptxas 12.8 for Hopper, which makes code that reads registers before writing them: the delta rule's
backward walk adds up wrong rows for heads of 33, 40 and 63 in bfloat16. The same Triton brings ptxas 12.9 for later
chips, which assembles these kernels correctly, and later Tritons use 12.9 for Hopper too. Importing this module chooses
12.9, unless TRITON_PTXAS_PATH names another ptxas. The choice holds for all kernels of the process, not only for ours.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad

from softless.errors import UnsupportedError
from softless.kernels.common.arithmetic import INTERPRETED

LIBRARY = torch.library.Library("softless", "DEF")
# Arguments that Triton does not specialize on: a new value needs no new compilation.
SIZES = ("N", "M", "H", "G", "span", "splits", "heads", "groups", "tokens", "chunks", "segments", "skipped", "length",
         "size")  # fmt: skip
PTXAS_NEEDED = 12, 9


def ptxas_version() -> tuple[int, ...] | None:
    """Return the version of the ptxas in use, or None where Triton has none."""
    try:
        from triton.backends.nvidia.compiler import get_ptxas

        return tuple(map(int, get_ptxas(90).version.split(".")))
    except (ImportError, RuntimeError, OSError):
        return None


def choose_ptxas() -> None:
    """Replace a ptxas that is too old. Do this before compiling: Triton reads the version once, for its cache keys."""
    if "TRITON_PTXAS_PATH" not in os.environ and (ptxas_version() or PTXAS_NEEDED) < PTXAS_NEEDED:
        triton.knobs.nvidia.ptxas = triton.knobs.nvidia.ptxas_blackwell.path


choose_ptxas()
PTXAS = ptxas_version()

rehearsed: ContextVar[list[tuple[Tensor, Any]] | None] = ContextVar("rehearsed", default=None)


@contextmanager
def rehearsal() -> Iterator[None]:
    """Inside, kernels are compiled and loaded in parallel, but not run: outputs stay as they were allocated."""
    kernels: list[tuple[Tensor, Any]] = []
    token = rehearsed.set(kernels)
    try:
        with ThreadPoolExecutor() as pool:
            with triton.AsyncCompileMode(pool):
                yield
            list(pool.map(load, kernels))
    finally:
        rehearsed.reset(token)


def load(compiled: tuple[Tensor, Any]) -> None:
    """Build a kernel's launcher and load its code on the device of its tensors."""
    like, kernel = compiled
    with torch.cuda.device_of(like):
        _ = (kernel.result() if hasattr(kernel, "result") else kernel).run


def launch(kernel: Any, programs: int, like: Tensor, *arguments: Any, **constants: Any) -> None:
    """Run `programs` copies of a kernel on the device of `like`; constants include num_warps and num_stages."""
    if programs == 0:
        return
    with torch.cuda.device_of(like):
        if (kernels := rehearsed.get()) is not None:
            kernels.append((like, kernel.warmup(*arguments, grid=(programs,), **constants)))
        else:
            kernel[(programs,)](*arguments, **constants)


def block(size: int) -> int:
    """Return the power of two that holds `size`: at least 32, as Triton 3.6 misplaces factors of 16 columns."""
    return max(32, 1 << (size - 1).bit_length())


@cache
def as_triton(dtype: torch.dtype) -> tl.dtype:
    return getattr(tl, str(dtype).removeprefix("torch."))


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Register the function as softless::name, with the schema that its annotations give."""

    def define(run: Callable[..., Any]) -> Any:
        LIBRARY.define(name + torch.library.infer_schema(run, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, run if INTERPRETED.value else rehearsed_once(run), "CompositeExplicitAutograd")
        return getattr(torch.ops.softless, name).default

    return define


def rehearsed_once(run: Callable[..., Any]) -> Callable[..., Any]:
    """Rehearse the first call of `run`."""
    new = True

    @wraps(run)
    def call(*arguments: Any) -> Any:
        nonlocal new
        if new:
            new = False
            with rehearsal():
                run(*arguments)
        return run(*arguments)

    return call


def fake(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Register the function that gives the shapes of softless::name's outputs where there are no numbers."""
    return torch.library.register_fake(f"softless::{name}", lib=LIBRARY)


def gradient(name: str, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
    """Register a reverse-mode derivative for one upstream gradient; a batch of them, or a dual, is an error."""

    @wraps(backward)
    def alone(ctx: Any, *upstream: Any) -> Any:
        tensors, dual_level = [x for x in upstream if isinstance(x, Tensor)], forward_ad._current_level >= 0
        if any(map(is_legacy_batchedtensor, tensors)) or (
            dual_level and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)
        ):
            raise UnsupportedError(
                f"the backward pass of the kernels' operator softless::{name} takes one upstream gradient at a time, "
                "neither a batch (is_grads_batched, vectorize=True) nor a forward-mode dual: use backend='torch' there"
            )
        return backward(ctx, *upstream)

    torch.library.register_autograd(f"softless::{name}", alone, setup_context=setup_context, lib=LIBRARY)


def no_gradient(name: str) -> None:
    """Make differentiating softless::name an error, so that gradients are never silently missing."""

    def refuse(_ctx: Any, *_gradients: Any) -> None:
        raise UnsupportedError(
            f"the kernels' operator softless::{name} has no derivative; backend='reference' can be differentiated twice"
        )

    gradient(name, refuse, lambda ctx, inputs, output: None)  # noqa: ARG005
