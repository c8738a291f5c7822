"""The machine and the package versions behind a measurement: numbers are comparable only if these are equal."""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypedDict

from softless.errors import ArgumentError

DRIVERS = "/proc/driver/nvidia/version", "/sys/module/amdgpu/version"


class Machine(TypedDict):
    """The machine of a measurement."""

    system: str  # Linux x86_64
    processor: str  # the GPU's name, or the CPU's
    cores: int | None
    threads: int
    device: str  # cpu | cuda
    load_average: float | None  # processes that ran or waited in the last minute, this one included


class Circumstances(TypedDict):
    """The part that all documents of measurements share."""

    versions: dict[str, str]
    machine: Machine


def circumstances(device: str, *packages: str) -> Circumstances:
    """Return the machine and the versions behind a measurement on cpu, cuda or auto; `packages` adds versions."""
    import torch

    on_gpu = device != "cpu" and torch.cuda.is_available()
    return {
        "versions": {
            "softless": installed_version(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            **{name: installed_version(name) for name in packages},
        },
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "processor": torch.cuda.get_device_name() if on_gpu else _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": "cuda" if on_gpu else "cpu",
            "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        },
    }


def pick_device(device: str) -> str:
    """Return cpu or cuda. "auto" is cuda if torch finds a GPU; "cuda" without a GPU is an error."""
    import torch

    has_gpu = device != "cpu" and torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise ArgumentError("device is 'cuda', and torch finds no CUDA device: use 'cpu' or 'auto'")
    return "cuda" if has_gpu else "cpu"


def installed_version(package: str = "softless") -> str:
    """Return the version of an installed package, or "unknown"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def driver() -> str:
    """Return the version of the GPU's driver."""
    import torch

    for path in map(Path, DRIVERS):
        try:
            return path.read_text(encoding="utf-8").splitlines()[0]
        except (OSError, IndexError):
            continue
    return str(torch.version.hip or torch._C._cuda_getDriverVersion())  # type: ignore[attr-defined]


def timestamp() -> str:
    """Return the time in UTC, to the second: 2026-11-16T12:30:00+00:00."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
