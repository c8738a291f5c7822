"""Layers of this library: each is asked what it mixes, and mixes it as ever."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from softless.algebra.neighbors import local_residual
from softless.backends import hide
from softless.errors import UnsupportedError
from softless.nn.global_tokens import LongformerAttention
from softless.nn.mixing import AttentionCall, Grid, Heads, Mixing, as_heads
from softless.probes.layer import Layer

Keep = Callable[[Layer], Tensor | None]  # takes a layer; what it returns stands for the layer's output


@contextmanager
def mixing_kept(model: nn.Module, keep: Keep) -> Iterator[None]:
    """Within, every layer of ours is kept as it runs."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Mixing)}
    before = {name: vars(module)["mix"] for name, module in layers.items() if "mix" in vars(module)}
    for name, module in layers.items():
        module.mix = partial(_mix, name, module, module.mix, keep)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for name, module in layers.items():
            del module.mix
            if name in before:
                module.mix = before[name]  # type: ignore[method-assign]


def _mix(
    name: str,
    module: Mixing,
    mix: Callable[..., Tensor],
    keep: Keep,
    qkv: Tensor | Heads,
    grid: Grid | None = None,
    **options: Any,
) -> Tensor:
    asked, cut = module.as_call(qkv, grid, **options)
    edited = keep(_layer(name, module, asked))
    if edited is None:
        return mix(qkv, grid, **options)
    out = edited.transpose(1, 2).flatten(2)  # [B, N, C]
    return out if cut is None else cut.join(out)


def _layer(name: str, module: Mixing, asked: AttentionCall) -> Layer:
    if isinstance(module, LongformerAttention):
        raise UnsupportedError(
            f"'{name}' is a LongformerAttention, with two sets of q, k and v, and a probe sees one: "
            "softless.nn.maps has its weights"
        )
    q, k, v = as_heads(asked.qkv)
    taps, _ = module.taps(asked.source, asked.grid, asked.key_mask, asked.is_causal)
    local, prefix = None, 0
    if asked.grid is not None:
        prefix = q.shape[2] - asked.grid[0] * asked.grid[1]
        if taps is not None:
            local = local_residual(hide(v, asked.key_mask), taps, asked.grid, prefix)
    return Layer(
        name,
        q,
        k,
        v,
        module.mechanism,
        bias=as_four(asked.bias),
        key_mask=asked.key_mask,
        is_causal=asked.is_causal,
        inputs=module.inputs(asked.source) or None,
        grid=asked.grid and (asked.grid[0], asked.grid[1]),
        prefix=prefix,
        local=local,
    )


def as_four(x: Tensor | None) -> Tensor | None:
    """With the leading dimensions that broadcasting would add."""
    return x if x is None else x[(None,) * (4 - x.ndim)]
