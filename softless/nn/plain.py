"""Whether a layer is its weights and nothing more, so that they may be used without calling it."""

from torch import nn


def is_plain(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Of exactly this kind: neither wrapped, parametrized (its class is another then), nor with hooks to be run."""
    hooks = (layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks)
    return type(layer) is kind and not any(hooks)
