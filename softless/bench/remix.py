"""A model of ours with its linear attention computed in another way: the plain formulas, or a backend by name.

    plain    what its authors run: the formula as typed, and the local residual as convolutions with many groups
    backend  `attention_qkv(..., backend=...)`, which raises where that backend cannot run

Weights, projections, windows and everything else stay the model's own, and so do its softmax layers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from softless.bench.plain import plain, plain_padded, plain_residual, plain_taps
from softless.functional import attention_qkv
from softless.nn.mixing import AttentionCall, Grid, Mixing, as_heads

Attend = Callable[
    [Mixing, AttentionCall, Tensor | None, int], Tensor
]  # a layer, its tokens, the taps and prefix: [B, H, N, d]


def by_plain_formulas(model: nn.Module) -> nn.Module:
    """The model, changed in place; a mechanism without a plain formula raises before anything is."""
    layers = linear_layers(model)
    for layer in layers:
        plain(layer.mechanism)
    for layer in layers:
        if layer.residual is not None:
            layer.residual.taps = partial(plain_taps, layer.residual)  # type: ignore[method-assign]
    return remixed(model, _plain)


def by_backend(model: nn.Module, backend: str) -> nn.Module:
    """The model, changed in place; 'auto' is what it does anyway."""
    return model if backend == "auto" else remixed(model, partial(_on, backend))


def remixed(model: nn.Module, attend: Attend) -> nn.Module:
    """`attend` in the place of every linear layer's own attention."""
    for layer in linear_layers(model):
        layer.mix = partial(_mix, layer, attend)  # type: ignore[method-assign]
    return model


def linear_layers(model: nn.Module) -> list[Mixing]:
    layers = (module for module in model.modules() if isinstance(module, Mixing))
    return [layer for layer in layers if layer.mechanism.family == "kernelized"]


def _mix(layer: Mixing, attend: Attend, qkv: Tensor, grid: Grid | None = None, **options: Any) -> Tensor:
    asked, cut = layer.as_call(qkv, grid, **options)
    taps, prefix = layer.taps(asked.source, asked.grid, asked.key_mask)
    out = attend(layer, asked, taps, prefix).transpose(1, 2).flatten(2)  # [B, N, C]
    return out if cut is None else cut.join(out)


def _plain(layer: Mixing, asked: AttentionCall, taps: Tensor | None, prefix: int) -> Tensor:
    q, k, v = as_heads(asked.qkv)
    made, mask = layer.mechanism, asked.key_mask
    out = (plain(made) if mask is None else plain_padded(made, mask))(q, k, v)
    if taps is None:
        return out
    assert asked.grid is not None
    return out + plain_residual(v, taps, asked.grid, prefix)


def _on(backend: str, layer: Mixing, asked: AttentionCall, taps: Tensor | None, prefix: int) -> Tensor:
    assert isinstance(asked.qkv, Tensor)
    inputs = layer.inputs(asked.source)
    grid = asked.grid if taps is not None or layer.mechanism.reads_grid else None
    picture: dict[str, Any] = {"taps": taps, "grid": grid, "prefix": prefix}
    return attention_qkv(asked.qkv, layer.mechanism, **picture, key_mask=asked.key_mask, inputs=inputs, backend=backend)
