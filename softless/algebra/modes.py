"""How torch runs a call: at once, traced by torch.compile, or transformed by torch.func or forward mode."""

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

PLAIN = (Tensor, nn.Parameter)


def in_forward_mode() -> bool:
    """Return whether forward-mode derivatives may be active: `dual_level`, `torch.func.jvp`, `jacfwd` or `hessian`."""
    return forward_ad._current_level >= 0


def transformed() -> bool:
    """Return whether forward mode or a transform of torch.func is active: only plain operations go through them."""
    return in_forward_mode() or torch._C._are_functorch_transforms_active()


def eager() -> bool:
    """Return whether operations run at once, and are differentiated in reverse mode or not at all."""
    return not (torch.compiler.is_compiling() or transformed())


def recording(*tensors: Tensor) -> bool:
    """Return whether autograd records what is computed from these tensors."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def readable(x: Tensor) -> bool:
    """Return whether a check may read the numbers of x: eager, on a CPU, outside vmap. A GPU would have to wait."""
    if torch.compiler.is_compiling():
        return False
    return type(x) is Tensor and x.is_cpu and not torch._C._functorch.is_functorch_wrapped_tensor(x)


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
