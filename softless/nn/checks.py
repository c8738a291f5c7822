"""Check the arguments of modules, as `softless.validation` checks those of functions."""

import numbers
from typing import Any

import torch
from torch import Tensor, nn

from softless.errors import ArgumentError, shown
from softless.mechanisms.scored import check_count
from softless.validation import DTYPES, are_sides, check_dense, check_key_mask

MOST_CHANNELS = 2**20  # a square matrix of this size takes 4 TB
MOST_LAYERS = 10_000


def check_tokens(x: Any, dim: int, *, packed: bool = False, name: str = "x") -> None:
    """Check the tokens x [B, N, C] of a module, or packed sequences [B, j, C] if it takes them."""
    if not isinstance(x, Tensor):
        raise ArgumentError(f"{name} is a {type(x).__name__} and must be a tensor [batch, tokens, {dim}]")
    if not (packed and x.is_nested and x.layout is torch.jagged):
        check_dense(name, x)
    if x.dtype not in DTYPES:
        raise ArgumentError(f"{name} is {x.dtype} and must be float16, bfloat16, float32 or float64")
    if x.ndim != 3 or x.shape[-1] != dim:
        raise ArgumentError(f"{name} has shape {list(x.shape)} and must be [batch, tokens, {dim}]")


def check_token_mask(key_mask: Tensor | None, x: Tensor) -> None:
    """Check a mask of the tokens x [B, N, C]."""
    check_key_mask(key_mask, x[:, None])


def check_fits(grid: Any, tokens: int, *, all_of_them: bool = False) -> None:
    """Check that a picture fits the tokens: the last of them, or all of them."""
    inside = grid[0] * grid[1] if are_sides(grid, 0) else 0
    if not 0 < inside <= tokens or (all_of_them and inside != tokens):
        text = f"a {grid.dtype} tensor {list(grid.shape)}" if isinstance(grid, Tensor) else shown(grid)
        which = f"all {tokens} tokens" if all_of_them else f"all {tokens} tokens, or the last of them"
        hint = ": a mask is given as key_mask=" if isinstance(grid, Tensor) else ""
        sides = f", and has {inside}" if inside else ""
        raise ArgumentError(f"grid is {text} and must be (height, width) of a picture of {which}{sides}{hint}")


def check_rate(name: str, rate: Any) -> None:
    number = isinstance(rate, numbers.Real) and not isinstance(rate, bool)
    if not number or not 0 <= rate < 1:
        raise ArgumentError(f"{name} {shown(rate)} is not a rate between 0 and 1")


def check_switch(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} is {shown(value)} and must be True or False")


def check_heads(dim: object, heads: object) -> None:
    """Check that dim and heads are whole numbers, and that dim is a multiple of heads."""
    check_count("dim", dim, most=MOST_CHANNELS)
    if type(heads) is not int or heads < 1 or dim % heads:  # type: ignore[operator]
        raise ArgumentError(f"dim {dim} is not a multiple of heads {shown(heads)}")


def is_plain(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a layer is only its weights, so that they may be used without calling it.

    The layer must be exactly of this kind: not wrapped, not parametrized (that changes its class), and without hooks.
    """
    hooks = (layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks)
    return type(layer) is kind and not any(hooks)
