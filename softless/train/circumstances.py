"""With what and where a training ran: what its numbers may be compared with."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch


def circumstances(device: str) -> dict[str, dict[str, Any]]:
    """Versions and machine, for the record of a run."""
    gpu = device != "cpu" and torch.cuda.is_available()
    return {
        "versions": {name: _version(name) for name in ("softless", "torch", "timm")}
        | {"python": platform.python_version()},
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "device": torch.cuda.get_device_name() if gpu else "cpu",
            "cores": os.cpu_count(),
        },
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
