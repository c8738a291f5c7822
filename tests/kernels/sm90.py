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
    from softless.kernels.common import plan

    built: list[Built] = []

    def report(launch: plan.Launch, _device: torch.device) -> None:
        made = launch.compiled
        built.append(_report(made.result() if hasattr(made, "result") else made, launch.programs))

    real = driver._active
    driver.set_active(Hopper())
    plan.forget()
    try:
        with warnings.catch_warnings(), patch.object(plan.Launch, "load", report):
            warnings.filterwarnings("ignore", message=".*FP_FUSION.*")
            with patch.object(plan.Launch, "__call__", lambda *_: None):
                yield built
    finally:
        driver._active = real
        plan.forget()


def _report(made: Any, programs: int) -> Built:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        said = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{word}:(\d+)", said)[1]) for word in ("REG", "STACK"))
    meta = made.metadata
    return Built(meta.name, registers, stack, meta.shared, meta.num_warps, programs, made)
