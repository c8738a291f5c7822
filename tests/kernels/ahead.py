"""Compile kernels ahead of time, for GPUs that are not here: what would be launched is compiled and not run.

with ahead.compiling(ahead.HOPPER) as built:
    softless.attention(q, k, v, backend="triton")
built[0].name, built[0].shared, ahead.resources(built[0]).registers
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
HOPPER = GPUTarget("cuda", 90, 32)
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": HOPPER,
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Built:
    name: str
    shared: int  # bytes a program
    warps: int
    programs: int
    kernel: Any


class Driver:
    """Just enough of a driver to compile for a target."""

    launcher_cls = None

    def __init__(self, target: GPUTarget):
        self.target = target

    @property
    def utils(self) -> "Driver":
        return self

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return str(self.target)  # a kernel remembers the target of each device

    def get_current_stream(self, device: object = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


@contextmanager
def compiling(target: GPUTarget = HOPPER) -> Iterator[list[Built]]:
    """Inside, kernels are compiled and not run: their outputs stay as they were allocated."""
    from softless.kernels.common import plan

    built: list[Built] = []

    def report(launch: plan.Launch, _device: torch.device) -> None:
        made = launch.compiled
        made = made.result() if hasattr(made, "result") else made
        built.append(Built(made.metadata.name, made.metadata.shared, made.metadata.num_warps, launch.programs, made))

    real = driver._active
    driver.set_active(Driver(target))
    plan.forget()
    try:
        with patch.object(plan.Launch, "load", report), patch.object(plan.Launch, "__call__", lambda *_: None):
            yield built
    finally:
        driver._active = real
        plan.forget()


class Resources(NamedTuple):
    """What ptxas gave each thread of a kernel."""

    registers: int
    spilled: int  # bytes of stack


def resources(built: Built) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.kernel.asm["cubin"])
        file.flush()
        said = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return Resources(*(int(re.search(rf"{word}:(\d+)", said)[1]) for word in ("REG", "STACK")))
