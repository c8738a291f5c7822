"""One way to start a kernel: a one-dimensional grid on the device of its tensors."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from softless.kernels.common import assembler  # noqa: F401  it chooses the ptxas

SIZES = ("N", "M", "H", "G", "span", "splits")  # numbers that no kernel is compiled anew for

rehearsed: ContextVar[list[tuple[Tensor, Any]] | None] = ContextVar("rehearsed", default=None)


@contextmanager
def rehearsal() -> Iterator[None]:
    """Inside, kernels are compiled and loaded, all at the same time, and not run: outputs stay as allocated."""
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
    """A kernel's launcher is built and its code put on the device where its tensors live."""
    like, kernel = compiled
    with torch.cuda.device_of(like):
        _ = (kernel.result() if hasattr(kernel, "result") else kernel).run


def launch(kernel: Any, programs: int, like: Tensor, *arguments: Any, **constants: Any) -> None:
    """Run `programs` copies of a kernel where `like` lives; num_warps and num_stages are among the constants."""
    if programs == 0:
        return
    with torch.cuda.device_of(like):
        if (kernels := rehearsed.get()) is not None:
            kernels.append((like, kernel.warmup(*arguments, grid=(programs,), **constants)))
        else:
            kernel[(programs,)](*arguments, **constants)


def block(size: int, least: int = 32) -> int:
    """The power of two that holds `size`. At least 32: Triton 3.6 misplaces 16-column factors that were products."""
    return max(least, 1 << (size - 1).bit_length())


@cache
def as_triton(dtype: torch.dtype) -> tl.dtype:
    return getattr(tl, str(dtype).removeprefix("torch."))
