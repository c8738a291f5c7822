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

from softless.kernels import assembler  # noqa: F401  it chooses the ptxas

SIZES = ("N", "M", "H", "G", "span", "splits")  # numbers that no kernel is compiled anew for

rehearsing = ContextVar("rehearsing", default=False)


@contextmanager
def rehearsal() -> Iterator[None]:
    """Inside, kernels are compiled, all at the same time, and not run: outputs stay as they were allocated."""
    token = rehearsing.set(True)
    try:
        with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool):
            yield
    finally:
        rehearsing.reset(token)


def launch(kernel: Any, programs: int, like: Tensor, *arguments: Any, **constants: Any) -> None:
    """Run `programs` copies of a kernel where `like` lives; num_warps and num_stages are among the constants."""
    if programs == 0:
        return
    with torch.cuda.device_of(like):
        if rehearsing.get():
            kernel.warmup(*arguments, grid=(programs,), **constants)
        else:
            kernel[(programs,)](*arguments, **constants)


def block(size: int, least: int = 32) -> int:
    """The power of two that holds `size`. At least 32: Triton 3.6 misplaces 16-column factors that were products."""
    return max(least, 1 << (size - 1).bit_length())


@cache
def as_triton(dtype: torch.dtype) -> tl.dtype:
    return getattr(tl, str(dtype).removeprefix("torch."))
