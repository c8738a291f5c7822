"""The precision of a call: sums are float32 or float64, whatever the inputs are and whatever autocast says."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)


def widen(x: Tensor) -> Tensor:
    """Return half precision as float32, and everything else unchanged."""
    return x.float() if x.dtype in HALVES else x


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Keep autocast away from the float32 sums inside this context."""
    return torch.autocast(x.device.type, enabled=False) if autocasting(x) else nullcontext()


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """Cast as SDPA does where autocast is on: everything but float64."""
    if not torch._C._is_any_autocast_enabled():
        return tensors
    return tuple(
        x.to(torch.get_autocast_dtype(x.device.type))
        if isinstance(x, Tensor) and autocasting(x) and x.is_floating_point() and x.dtype != torch.float64
        else x
        for x in tensors
    )


def autocasting(x: Tensor) -> bool:
    """Return whether autocast is on for the device of x. Meta tensors have no autocast state."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)
