"""When kernels start without PyTorch's dispatcher: where nothing differentiates, traces, counts or transforms."""

import torch
from torch import Tensor, nn

from softless.algebra.modes import transformed

PLAIN = (Tensor, nn.Parameter)


def is_watched() -> bool:
    """Return whether PyTorch must see every operator."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0 or transformed()


def is_special(x: Tensor) -> bool:
    """Return whether only the dispatcher knows what x holds: a subclass, or a view with the other sign."""
    return type(x) not in PLAIN or x.is_neg()


def starts_at_once(*tensors: Tensor | None) -> bool:
    """Return whether kernels that read these tensors may be started without the dispatcher and without autograd."""
    if is_watched():
        return False
    differentiable = torch.is_grad_enabled()
    for x in tensors:
        if x is not None and (type(x) not in PLAIN or (differentiable and x.requires_grad) or x.is_neg()):
            return False
    return True
