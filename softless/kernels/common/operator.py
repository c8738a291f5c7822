"""A function as a PyTorch operator, without PyTorch's compiler.

`torch.library.custom_op` imports that on the first call, which takes seconds. What it registers is registered here.

The first call of an operator in a process is rehearsed: its kernels are compiled at the same time, not in turn.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad

from softless.errors import UnsupportedError
from softless.kernels.common.arithmetic import INTERPRETED
from softless.kernels.common.launch import rehearsal

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
    """Reverse mode, one upstream gradient at a time: a batch of them or a forward-mode one is an error."""

    @wraps(backward)
    def alone(ctx: Any, *upstream: Any) -> Any:
        if any(isinstance(x, Tensor) and (is_legacy_batchedtensor(x) or is_dual(x)) for x in upstream):
            raise UnsupportedError(
                f"the backward pass of the kernels' operator softless::{name} takes one upstream gradient at a time, "
                "neither a batch (is_grads_batched, vectorize=True) nor a forward-mode dual: use backend='torch' there"
            )
        return backward(ctx, *upstream)

    torch.library.register_autograd(f"softless::{name}", alone, setup_context=setup_context, lib=LIBRARY)


def is_dual(x: Tensor) -> bool:
    """Whether forward-mode differentiation follows x."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def no_gradient(name: str) -> None:
    """Its gradient is an error, not a silent nothing."""

    def refuse(_ctx: Any, *_gradients: Any) -> None:
        raise UnsupportedError(
            f"the kernels' operator softless::{name} has no derivative; backend='reference' can be differentiated twice"
        )

    gradient(name, refuse, lambda ctx, inputs, output: None)  # noqa: ARG005
