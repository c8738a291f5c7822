"""Start kernels on the device of their tensors, and register the functions that do so as PyTorch operators.

An `Operator` repeats a plan (`plan`). It is registered with PyTorch, so that torch.compile, counters and transforms see
it. A plain call does not go through the registration, which costs more than the launches.

`torch.library.custom_op` would import PyTorch's compiler on the first call, which takes seconds; `operator`, `fake` and
`gradient` register the same things without it.

Triton 3.6 calls ptxas 12.8 for Hopper, which makes code that reads registers before writing them: the delta rule's
backward walk adds up wrong rows for heads of 33, 40 and 63 in bfloat16. The same Triton brings ptxas 12.9 for later
chips, which assembles these kernels correctly, and later Tritons use 12.9 for Hopper too. Importing this module chooses
12.9, unless TRITON_PTXAS_PATH names another ptxas. The choice holds for all kernels of the process, not only for ours.
"""

import os
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, get_origin, get_type_hints

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad

from softless.algebra.modes import is_special, is_watched
from softless.errors import UnsupportedError
from softless.kernels.common.plan import Planned, recording

LIBRARY = torch.library.Library("softless", "DEF")
# Arguments that Triton does not specialize on: a new value needs no new compilation.
SIZES = ("N", "M", "H", "G", "span", "splits", "heads", "groups", "tokens", "chunks", "segments", "skipped", "length",
         "size")  # fmt: skip
PTXAS_NEEDED = 12, 9


def ptxas_version() -> tuple[int, ...] | None:
    """Return the version of the ptxas in use, or None where Triton has none."""
    try:
        from triton.backends.nvidia.compiler import get_ptxas

        return tuple(map(int, get_ptxas(90).version.split(".")))
    except (ImportError, RuntimeError, OSError):
        return None


def choose_ptxas() -> None:
    """Replace a ptxas that is too old. Do this before compiling: Triton reads the version once, for its cache keys."""
    if "TRITON_PTXAS_PATH" not in os.environ and (ptxas_version() or PTXAS_NEEDED) < PTXAS_NEEDED:
        triton.knobs.nvidia.ptxas = triton.knobs.nvidia.ptxas_blackwell.path


choose_ptxas()
PTXAS = ptxas_version()


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Run `programs` copies of a kernel; constants include num_warps and num_stages. Operators call this in a plan."""
    recorder = recording.get()
    assert recorder is not None, "kernels run as steps of a plan"
    if programs > 0:
        recorder.launch(kernel, programs, arguments, {**constants, "enable_fp_fusion": True})


def block(size: int) -> int:
    """Return the power of two that holds `size`: at least 32, as Triton 3.6 misplaces factors of 16 columns."""
    return max(32, 1 << (size - 1).bit_length())


@cache
def as_triton(dtype: torch.dtype) -> tl.dtype:
    return getattr(tl, str(dtype).removeprefix("torch."))


class Operator:
    """softless::name. Plain calls repeat its plan; calls that something watches go through PyTorch's dispatcher.

    An output that is not needed is None in a plain call, and `absent` in the dispatcher, which knows no other way.
    """

    def __init__(self, name: str, run: Callable[..., Any]):
        LIBRARY.define(name + torch.library.infer_schema(run, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,))
        self.planned = Planned(run)
        LIBRARY.impl(name, self._run_registered(run), "CompositeExplicitAutograd")
        self.registered = getattr(torch.ops.softless, name).default
        self.function: Any = None  # with the derivative that `gradient` registers

    def __call__(self, *arguments: Any) -> Any:
        if is_watched():
            return self.registered(*arguments)
        differentiated = False
        for x in arguments:
            if isinstance(x, Tensor):
                if is_special(x):
                    return self.registered(*arguments)
                differentiated = differentiated or x.requires_grad
        if differentiated and torch.is_grad_enabled():
            return self.function.apply(*arguments)
        return self.planned(*arguments)

    def _run_registered(self, run: Callable[..., Any]) -> Callable[..., Any]:
        returns_list = get_origin(get_type_hints(run)["return"]) is list

        @wraps(run)
        def call(*arguments: Any) -> Any:
            out = [absent(arguments[0]) if x is None else x for x in self.planned(*arguments)]
            return out if returns_list else tuple(out)

        return call


def absent(like: Tensor) -> Tensor:
    """Return an empty tensor, which stands for None among the outputs of an operator."""
    return like.new_empty(0)


def present(x: Tensor | None) -> Tensor | None:
    """Return x, or None if it is `absent`."""
    return None if x is None or x.numel() == 0 else x


OPERATORS: dict[str, Operator] = {}


def operator(name: str) -> Callable[[Callable[..., Any]], Operator]:
    """Make the function softless::name, with the schema that its annotations give."""
    return lambda run: OPERATORS.setdefault(name, Operator(name, run))


def fake(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Register the function that gives the shapes of softless::name's outputs where there are no numbers."""
    return torch.library.register_fake(f"softless::{name}", lib=LIBRARY)


def gradient(name: str, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
    """Register a reverse-mode derivative for one upstream gradient; a batch of them, or a dual, is an error."""

    @wraps(backward)
    def alone(ctx: Any, *upstream: Any) -> Any:
        tensors, dual_level = [x for x in upstream if isinstance(x, Tensor)], forward_ad._current_level >= 0
        if any(map(is_legacy_batchedtensor, tensors)) or (
            dual_level and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)
        ):
            raise UnsupportedError(
                f"the backward pass of the kernels' operator softless::{name} takes one upstream gradient at a time, "
                "neither a batch (is_grads_batched, vectorize=True) nor a forward-mode dual: use backend='torch' there"
            )
        return backward(ctx, *upstream)

    torch.library.register_autograd(f"softless::{name}", alone, setup_context=setup_context, lib=LIBRARY)
    planned = OPERATORS[name].planned

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
            out = planned(*arguments)
            setup_context(ctx, arguments, out)
            return out

        @staticmethod
        def backward(ctx: Any, *upstream: Any) -> Any:
            return alone(ctx, *upstream)

    OPERATORS[name].function = Function


def no_gradient(name: str) -> None:
    """Make differentiating softless::name an error, so that gradients are never silently missing."""

    def refuse(_ctx: Any, *_gradients: Any) -> None:
        raise UnsupportedError(
            f"the kernels' operator softless::{name} has no derivative; backend='reference' can be differentiated twice"
        )

    gradient(name, refuse, lambda ctx, inputs, output: None)  # noqa: ARG005
