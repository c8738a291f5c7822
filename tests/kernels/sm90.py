"""Compile kernels for an H200 on a machine without one: what would be launched is compiled, and ptxas reports on it.

with sm90.compiling() as built:
    softless.attention(q, k, v, backend="triton")
built[0].name, built[0].registers, built[0].spilled, built[0].shared
"""

import re
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True)
class Built:
    name: str
    registers: int
    spilled: int  # bytes of stack a thread
    shared: int  # bytes a program
    warps: int
    programs: int
    kernel: Any


class Hopper:
    """Just enough of a driver to compile for sm_90."""

    launcher_cls = None

    @property
    def utils(self) -> "Hopper":
        return self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: object = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


@contextmanager
def compiling() -> Iterator[list[Built]]:
    """Inside, kernels are compiled and not run: their outputs stay as they were allocated."""
    from softless.kernels.common import launch as launching

    built: list[Built] = []

    def compile_only(kernel: Any, programs: int, like: torch.Tensor, *arguments: Any, **constants: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*FP_FUSION.*")
            made = kernel.warmup(*arguments, grid=(programs,), **constants)
        built.append(_report(made.result() if hasattr(made, "result") else made, programs))  # 3.6: a promise of one

    users = [module for module in _kernel_modules() if hasattr(module, "launch")]
    real = driver._active
    driver.set_active(Hopper())
    try:
        with _all(patch.object(module, "launch", compile_only) for module in users if module is not launching):
            yield built
    finally:
        driver._active = real


@contextmanager
def _all(patches: Any) -> Iterator[None]:
    from contextlib import ExitStack

    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield


def _kernel_modules() -> list[Any]:
    import importlib
    import pkgutil

    import softless.kernels as package

    names = [each.name for each in pkgutil.walk_packages(package.__path__, "softless.kernels.")]
    return [importlib.import_module(name) for name in names]


def _report(made: Any, programs: int) -> Built:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        said = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{word}:(\d+)", said)[1]) for word in ("REG", "STACK"))
    meta = made.metadata
    return Built(meta.name, registers, stack, meta.shared, meta.num_warps, programs, made)
