"""A function as a PyTorch operator, without PyTorch's compiler.

`torch.library.custom_op` imports that on the first call, which takes seconds. What it registers is registered here.

The first call of an operator in a process is rehearsed: its kernels are compiled at the same time, not in turn.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from softless.errors import UnsupportedError
from softless.kernels.arithmetic import INTERPRETED
from softless.kernels.launch import rehearsal

LIBRARY = torch.library.Library("softless", "DEF")


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """The function as softless::name, its schema from its annotations."""

    def define(run: Callable[..., Any]) -> Any:
        LIBRARY.define(name + torch.library.infer_schema(run, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, run if INTERPRETED.value else rehearsed(run), "CompositeExplicitAutograd")
        return getattr(torch.ops.softless, name).default

    return define


def rehearsed(run: Callable[..., Any]) -> Callable[..., Any]:
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
    """The function as what softless::name answers where there are shapes and no numbers."""
    return torch.library.register_fake(f"softless::{name}", lib=LIBRARY)


def gradient(name: str, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
    torch.library.register_autograd(f"softless::{name}", backward, setup_context=setup_context, lib=LIBRARY)


def no_gradient(name: str) -> None:
    """Its gradient is an error, not a silent nothing."""

    def refuse(_ctx: Any, *_gradients: Any) -> None:
        raise UnsupportedError(
            f"the kernels' operator softless::{name} has no derivative; backend='reference' can be differentiated twice"
        )

    gradient(name, refuse, lambda ctx, inputs, output: None)  # noqa: ARG005
