"""Attention maps: the explicit weights of every layer of a model, computed one layer at a time.

    o_i = sum_j w_ij v_j [+ residual_i]            w [B, heads, N, M], and with it the mean of the head's 3x3 kernels

A local residual has one kernel per channel: the map of a head shows their mean, at the 3x3 neighbors of each token.
Weights within windows are placed in a matrix of all tokens, with zeros where a token sees nothing. A map is quadratic
in the tokens of its layer, so maps are computed one at a time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from softless.algebra.neighbors import local_residual
from softless.nn.mixing import Heads, Mixing
from softless.nn.windows import Windows

RecordedCall = tuple[str, Mixing, Tensor | Heads, dict[str, Any]]  # name of the layer, layer, arguments of its `mix`


class AttentionMap(NamedTuple):
    """The weights of one layer: one matrix per head, or per channel for hydra.

    `mechanism.combine` computes the output from the weights and v. Angular, transnormer and diagonal's t1 also divide
    the output by its length, which no matrix can express.
    """

    layer: str
    weights: Float[Tensor, "b matrices n m"]
    local: Float[Tensor, "b heads n m"] | None  # the local residual's, in the same units


def attention_maps(model: nn.Module, *inputs: Tensor) -> Iterator[AttentionMap]:
    """Run a model once, and yield the map of each of its layers in the order they ran.

    >>> import torch, softless
    >>> from softless.nn.maps import attention_maps
    >>> layer = softless.nn.Attention(dim=8, heads=2)
    >>> [(one.layer, one.weights.shape) for one in attention_maps(layer, torch.randn(1, 6, 8))]
    [('', torch.Size([1, 2, 6, 6]))]

    Only the inputs of the layers are stored; a map is computed when the iterator reaches it.
    """
    calls: list[RecordedCall] = []
    with torch.no_grad(), _recorded(model, calls):
        model(*inputs)
    while calls:
        yield _map(*calls.pop(0))


@contextmanager
def _recorded(model: nn.Module, calls: list[RecordedCall]) -> Iterator[None]:
    """Record the calls of every attention layer inside this context."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Mixing)}

    def record(
        layer: str, module: Mixing, qkv: Tensor | Heads, grid: tuple[int, int] | None = None, **options: Any
    ) -> Tensor:
        calls.append((layer, module, qkv, {"grid": grid, **options}))
        return Mixing.mix(module, qkv, grid, **options)

    for name, module in layers.items():
        module.mix = partial(record, name, module)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in layers.values():
            del module.mix


@torch.no_grad()
def _map(layer: str, module: Mixing, qkv: Tensor | Heads, options: dict[str, Any]) -> AttentionMap:
    call, cut = module.as_call(qkv, **options)
    weights, local = module.weights(call), None
    taps, prefix = module.taps(call.source, call.grid, call.key_mask)
    if taps is not None and call.grid is not None:
        local = _neighbors(taps.mean(-1, keepdim=True), call.grid, prefix, call.key_mask)
    if cut is not None:
        weights, local = _placed(weights, cut), None if local is None else _placed(local, cut)
    return AttentionMap(layer, weights, local)


def _neighbors(
    taps: Float[Tensor, "b heads 9 1"], grid: tuple[int, int], prefix: int, key_mask: Tensor | None
) -> Float[Tensor, "b heads n n"]:
    """Return a 3x3 kernel as a matrix: the residual of the N values that are 1 at one token and 0 elsewhere."""
    tokens = prefix + grid[0] * grid[1]
    ones = torch.eye(tokens, dtype=taps.dtype, device=taps.device).expand(*taps.shape[:2], -1, -1)
    matrix = local_residual(ones, taps.expand(-1, -1, -1, tokens), grid, prefix)
    return matrix if key_mask is None else torch.where(key_mask[:, None, None], matrix, 0.0)


def _placed(pieces: Float[Tensor, "bw heads m m"], cut: Windows) -> Float[Tensor, "b heads n n"]:
    """Return weights within windows as weights between all tokens of the picture."""
    tokens, (rows, columns) = cut.grid[0] * cut.grid[1], cut.counts
    numbers = torch.arange(1, tokens + 1, device=pieces.device)
    where = cut.cut(numbers[None, :, None])[..., 0]  # [windows, m]; 0 for what pads them
    pieces = pieces.unflatten(0, (-1, rows * columns))
    weights = pieces.new_zeros(pieces.shape[0], pieces.shape[2], tokens + 1, tokens + 1)
    for window, at in enumerate(where):
        weights[:, :, at[:, None], at[None]] = pieces[:, window]
    return weights[:, :, 1:, 1:]
