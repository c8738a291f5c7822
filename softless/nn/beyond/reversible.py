"""Reversible residual layers (Gomez et al. 2017; Reformer, Kitaev et al. 2020): memory does not grow with depth.

    y1 = x1 + F(x2)            x2 = y2 - G(y1)
    y2 = x2 + G(y1)            x1 = y1 - F(x2)

Only the last y1 and y2 are kept for the backward pass. It computes each layer's input from its output, and runs F and
G a second time for their gradients, with the random numbers, autocast and buffers of the first run.

Sums are in float64 on a grid of 2^-30, where they are exact up to 2^23. So the inverse returns the same bits, and a
choice made inside F (a hash, the k best keys) is repeated. Float64 streams are recovered up to rounding.

Shapes: B batch, N tokens, C channels.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import get_device_states, set_device_states

from softless.errors import ArgumentError
from softless.mechanisms.base import refuse_transforms
from softless.nn.inputs import BufferSnapshot

STEP = 2.0**-30


class PreNorm(nn.Module):
    """Computes inner(norm(x)), as F and G usually do.

    >>> import torch, softless
    >>> softless.nn.PreNorm(64, softless.nn.Attention(64, 2))(torch.randn(5, 9, 64)).shape        # [B, N, C]
    torch.Size([5, 9, 64])
    """

    def __init__(self, dim: int, inner: nn.Module):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(dim), inner

    def forward(self, x: Float[Tensor, "*b c"], **context: Any) -> Tensor:
        return self.inner(self.norm(x), **context)


class Reversible(nn.Module):
    """A stack of pairs (F, G) whose activations take the memory of one layer.

    >>> import torch, softless
    >>> from torch import nn
    >>> def attend(): return softless.nn.PreNorm(64, softless.nn.Attention(64, 2, "reformer"))
    >>> def feed(): return softless.nn.PreNorm(64, nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)))
    >>> stack = softless.nn.Reversible((attend(), feed()) for _ in range(12))
    >>> stack(torch.randn(5, 100, 64), key_mask=torch.ones(5, 100).bool()).shape          # [B, N, C]
    torch.Size([5, 100, 64])

    Both streams start as x, and their mean is returned; `streams` takes and returns the two. Keyword arguments go to
    every F, and tensors among them get gradients. The backward pass reads these tensors again, so it raises if one was
    changed in place. Gradients equal those of the plain stack, and cannot be differentiated again.

    Args:
        pairs: The layers, each a pair (F, G) of modules that keep the shape of x.
    """

    def __init__(self, pairs: Iterable[Any]):
        super().__init__()
        self.f, self.g = nn.ModuleList(), nn.ModuleList()
        for number, pair in enumerate(pairs):
            members = pair if isinstance(pair, tuple | list) else (pair,)
            if [isinstance(member, nn.Module) for member in members] != [True, True]:
                kinds = ", ".join(type(member).__name__ for member in members)
                raise ArgumentError(f"pair {number} is ({kinds}) and must be two modules, (F, G)")
            self.f.append(pair[0])
            self.g.append(pair[1])

    def forward(self, x: Float[Tensor, "b n c"], **context: Any) -> Float[Tensor, "b n c"]:
        one, two = self.streams(x, x, **context)
        return (one + two) / 2

    def streams(
        self, x1: Float[Tensor, "b n c"], x2: Float[Tensor, "b n c"], **context: Any
    ) -> tuple[Float[Tensor, "b n c"], Float[Tensor, "b n c"]]:
        """Return y1 and y2 of the last layer."""
        refuse_transforms("Reversible")
        leaves = [leaf for leaf in (*self.parameters(), *_tensors(context)) if leaf.requires_grad]
        return _Run.apply(self, context, x1, x2, *leaves)


class _Run(torch.autograd.Function):
    """Run the stack as one autograd function, which saves only the last streams."""

    @staticmethod
    def forward(
        ctx: Any, stack: Reversible, context: dict[str, Any], x1: Tensor, x2: Tensor, *leaves: Tensor
    ) -> tuple[Tensor, Tensor]:
        y1, y2, moments = _on_grid(x1), _on_grid(x2), []
        for f, g in zip(stack.f, stack.g, strict=True):
            here = Moment.now(f, y1)
            y1 = y1 + _on_grid(_checked(f, f(y2.to(x1.dtype), **context), y2))
            moments.append((here, Moment.now(g, y1)))
            y2 = y2 + _on_grid(_checked(g, g(y1.to(x1.dtype)), y1))
        ctx.stack, ctx.context, ctx.dtype, ctx.moments, ctx.leaves = stack, context, x1.dtype, moments, leaves
        ctx.versions = _versions(context)
        ctx.save_for_backward(y1, y2, *leaves)
        return y1.to(x1.dtype, copy=True), y2.to(x1.dtype, copy=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
        _check_unchanged(ctx.context, ctx.versions)
        y1, y2, *_ = ctx.saved_tensors
        dy1, dy2 = (part.double() for part in dy)
        gradients: dict[Tensor, Tensor] = {}
        layers = list(zip(ctx.stack.f, ctx.stack.g, ctx.moments, strict=True))
        for f, g, (before_f, before_g) in reversed(layers):
            with before_g.again(y1):
                out, dx = _again(g, y1.to(ctx.dtype), {}, dy2, gradients)
            y2, dy1 = y2 - out, dy1 + dx
            with before_f.again(y1):
                out, dx = _again(f, y2.to(ctx.dtype), ctx.context, dy1, gradients)
            y1, dy2 = y1 - out, dy2 + dx
        return None, None, dy1.to(ctx.dtype), dy2.to(ctx.dtype), *(gradients.get(leaf) for leaf in ctx.leaves)


def _again(
    module: nn.Module, x: Tensor, context: dict[str, Any], grad: Tensor, gradients: dict[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Run a module again. Return its output and the gradient at x, and add the other gradients to `gradients`."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}  # a running mean moves once a step
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        out = functional_call(module, buffers, (x,), context)
    read = [x, *(leaf for leaf in (*module.parameters(), *_tensors(context)) if leaf.requires_grad)]
    parts = torch.autograd.grad(out, read, grad.to(out.dtype), allow_unused=True) if out.requires_grad else ()
    for leaf, part in zip(read[1:], parts[1:], strict=False):
        if part is not None:
            gradients[leaf] = gradients[leaf] + part if leaf in gradients else part
    dx = parts[0] if parts and parts[0] is not None else torch.zeros_like(x)
    return _on_grid(out.detach()), dx.double()


def _tensors(context: Any) -> list[Tensor]:
    """Return every tensor in an argument, also inside tuples and dictionaries."""
    return [leaf for leaf in tree_leaves(context) if isinstance(leaf, Tensor)]


def _versions(context: dict[str, Any]) -> dict[str, list[int]]:
    """Return how often the tensors of each argument were written to. Tensors of inference mode do not count that."""
    return {name: [x._version for x in _tensors(value) if not x.is_inference()] for name, value in context.items()}


def _check_unchanged(context: dict[str, Any], versions: dict[str, list[int]]) -> None:
    now = _versions(context)
    if changed := [name for name in versions if now.get(name) != versions[name]]:
        raise ArgumentError(
            f"{', '.join(changed)} was changed in place between the forward and the backward pass of Reversible, which "
            f"reads it in both: pass a copy, {changed[0]}.clone()"
        )


class Moment(NamedTuple):
    """The state that a call reads besides its arguments: random numbers, autocast, buffers that training updates."""

    cpu: Tensor
    devices: list[int]
    states: list[Tensor]
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    before: BufferSnapshot

    @classmethod
    def now(cls, module: nn.Module, x: Tensor) -> "Moment":
        kinds = [kind for kind in {"cpu", x.device.type} if torch.amp.is_autocast_available(kind)]
        autocast = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
        return cls(torch.get_rng_state(), *get_device_states(x), autocast, BufferSnapshot(module))

    @contextmanager
    def again(self, x: Tensor) -> Iterator[None]:
        """Restore that moment inside this context, and the present one after it."""
        kind = "cuda" if x.is_cpu else x.device.type
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(self.devices, device_type=kind))
            torch.set_rng_state(self.cpu)
            set_device_states(self.devices, self.states, device_type=kind)
            for device, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype, enabled))
            stack.enter_context(self.before.restored())
            yield


def _checked(module: nn.Module, out: Any, x: Tensor) -> Tensor:
    if not isinstance(out, Tensor) or out.shape != x.shape:
        shape = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ArgumentError(f"{type(module).__name__} returned {shape} and must return the shape of x, {list(x.shape)}")
    return out


def _on_grid(x: Tensor) -> Tensor:
    """Return x in float64, rounded to multiples of STEP; a float64 x is returned as it is."""
    return x if x.dtype == torch.float64 else (x.double() / STEP).round() * STEP
