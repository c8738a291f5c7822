"""The machine and the package versions behind a measurement: what its numbers may be compared with."""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypedDict

from softless.errors import ArgumentError


class Machine(TypedDict):
    """Where a measurement ran."""

    system: str  # Linux x86_64
    processor: str  # the GPU's name, or the CPU's
    cores: int | None
    threads: int
    device: str  # cpu | cuda
    load_average: float | None


class Circumstances(TypedDict):
    """What every document of measurements records."""

    versions: dict[str, str]
    machine: Machine


def circumstances(device: str, *packages: str) -> Circumstances:
    """Record machine and versions, those of further `packages` included, for a measurement on cpu, cuda or auto."""
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
            "load_average": load_average(),
        },
    }


def pick_device(device: str) -> str:
    """Return cpu or cuda for cpu, cuda or auto, which is cuda where torch finds a GPU; cuda without a GPU raises."""
    import torch

    has_gpu = device != "cpu" and torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise ArgumentError("device cuda was asked for and torch finds none: use --device cpu")
    return "cuda" if has_gpu else "cpu"


def installed_version(package: str = "softless") -> str:
    """The version of an installed package, or "unknown"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def load_average() -> float | None:
    """The mean number of processes that ran or waited for a processor during the last minute, this one included."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def timestamp() -> str:
    """Now, in UTC, to the second: 2026-11-16T12:30:00+00:00."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
