"""What a call must satisfy. Each failure is one sentence: what was given, and what was needed."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from softless.algebra.state import State
from softless.errors import ArgumentError, UnsupportedError
from softless.mechanisms import MECHANISMS, Mechanism

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BACKENDS = ("auto", "reference", "torch", "triton")


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """q [B, H, N, d], k [B, G, M, d], v [B, G, M, e], one dtype, one device, H a multiple of G."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ArgumentError(f"{name} is a {type(x).__name__} and must be a tensor [batch, heads, tokens, dim]")
        if x.is_nested:
            raise ArgumentError(
                f"{name} is a nested tensor, and only attention and attention_with_state take packed sequences: give "
                f"this call one sequence at a time, of {name}.unbind()"
            )
        if x.ndim != 4:
            raise ArgumentError(f"{name} has shape {list(x.shape)} and must be [batch, heads, tokens, dim]")
        if x.dtype not in DTYPES:
            raise ArgumentError(f"{name} is {x.dtype} and must be float16, bfloat16, float32 or float64")
    if not q.dtype == k.dtype == v.dtype:
        raise ArgumentError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype} and must share one dtype")
    if not q.device == k.device == v.device:
        raise ArgumentError(f"q, k, v are on {q.device}, {k.device}, {v.device} and must share one device")
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ArgumentError(f"{shapes}: the batch sizes must be equal")
    if q.shape[3] != k.shape[3] or q.shape[3] == 0:
        raise ArgumentError(f"{shapes}: q and k must have the same head dimension, at least 1")
    if k.shape[1:3] != v.shape[1:3]:
        raise ArgumentError(f"{shapes}: k and v must have the same heads and tokens")
    if k.shape[1] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ArgumentError(f"{shapes}: {q.shape[1]} query heads are not a multiple of {k.shape[1]} key heads")


def check_key_mask(key_mask: Tensor | None, k: Tensor) -> None:
    if key_mask is None:
        return
    if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool:
        given = key_mask.dtype if isinstance(key_mask, Tensor) else type(key_mask).__name__
        raise ArgumentError(f"key_mask is {given} and must be a bool tensor, True for a real token")
    if key_mask.shape != (k.shape[0], k.shape[2]):
        raise ArgumentError(
            f"key_mask has shape {list(key_mask.shape)} and must be [batch, keys] = {[k.shape[0], k.shape[2]]}"
        )
    check_device("key_mask", key_mask, k)


def check_bias(bias: Tensor | None, mechanism: Mechanism, q: Tensor, k: Tensor) -> None:
    if bias is None:
        return
    if not mechanism.takes_bias:
        takers = ", ".join(name for name, each in MECHANISMS.items() if each.takes_bias)
        raise UnsupportedError(
            f"bias is added to scores and mechanism '{mechanism.name}' has none to add it to; these have: {takers}"
        )
    needed = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        given = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
        raise ArgumentError(f"bias is {given} and must be a float tensor (key_mask takes the bool ones)")
    fits = bias.ndim <= 4 and all(b in (1, n) for b, n in zip(bias.shape[::-1], needed[::-1], strict=False))
    if not fits:
        raise ArgumentError(f"bias has shape {list(bias.shape)} and must broadcast to [B, H, N, M] = {list(needed)}")
    check_device("bias", bias, k)


def check_inputs(inputs: Mapping[str, Tensor] | None, mechanism: Mechanism, q: Tensor, k: Tensor) -> None:
    if inputs is not None and not isinstance(inputs, Mapping):
        raise ArgumentError(f"inputs is a {type(inputs).__name__} and must map names to tensors")
    needed, given = mechanism.needed(q, k), dict(inputs or {})
    if missing := [name for name in needed if name not in given]:
        raise ArgumentError(
            f"mechanism '{mechanism.name}' needs inputs {', '.join(missing)} and got "
            f"{', '.join(given) or 'none'}: pass inputs={{'{missing[0]}': tensor}}"
        )
    if extra := [name for name in given if name not in needed]:
        takes = ", ".join(needed) or "none"
        raise ArgumentError(f"mechanism '{mechanism.name}' takes inputs {takes} and got {', '.join(extra)}")
    for name, shape in needed.items():
        if not isinstance(given[name], Tensor) or given[name].shape != shape:
            was = list(given[name].shape) if isinstance(given[name], Tensor) else type(given[name]).__name__
            raise ArgumentError(f"input '{name}' is {was} and must be a tensor of shape {list(shape)}")
        if not given[name].is_floating_point():
            raise ArgumentError(f"input '{name}' is {given[name].dtype} and must be floating-point numbers")
        check_device(f"input '{name}'", given[name], q)


def check_device(name: str, x: Tensor, like: Tensor) -> None:
    if x.device != like.device:
        raise ArgumentError(f"{name} is on {x.device} and must be where q, k and v are, on {like.device}")


def check_is_causal(is_causal: object, mechanism: Mechanism) -> None:
    if not isinstance(is_causal, bool):
        raise ArgumentError(f"is_causal is {is_causal!r} and must be True or False")
    if reason := mechanism.lacks(is_causal):
        raise UnsupportedError(f"is_causal is {is_causal}, and mechanism '{mechanism.name}' {reason}")


def resolve_scale(scale: float | None, mechanism: Mechanism, head_dim: int) -> float:
    default = mechanism.default_scale(head_dim)
    if scale is None:
        return 1.0 if default is None else default
    if default is None:
        raise UnsupportedError(f"scale {scale} would have no effect: mechanism '{mechanism.name}' cancels it")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not abs(scale) < float("inf"):
        raise ArgumentError(f"scale {scale!r} is not a finite number")
    return float(scale)


def check_grid(grid: Any, mechanism: Mechanism, q: Tensor, k: Tensor) -> None:
    if not mechanism.reads_grid and grid is not None:
        raise UnsupportedError(f"grid {grid!r} was given and mechanism '{mechanism.name}' does not read one")
    if not (mechanism.needs_grid or grid is not None) or 0 in (q.shape[2], k.shape[2]):
        return
    inside = grid[0] * grid[1] if _are_sides(grid, 0) else 0
    if mechanism.needs_grid and not inside == q.shape[2] == k.shape[2]:
        raise ArgumentError(
            f"mechanism '{mechanism.name}' needs grid=(height, width) of the picture that its tokens are, and got "
            f"{grid!r} with {q.shape[2]} queries and {k.shape[2]} keys"
        )
    if not 0 < inside <= q.shape[2] == k.shape[2]:
        raise ArgumentError(
            f"grid {grid!r} must be (height, width) of a picture, all of the tokens or the last of them, and there "
            f"are {q.shape[2]} queries and {k.shape[2]} keys"
        )


def check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ArgumentError(f"backend {backend!r} is not one of {', '.join(BACKENDS)}")


def check_taps(taps: object, grid: Any, prefix: Any, q: Tensor, k: Tensor, v: Tensor) -> None:
    """taps [B, H, 9, e] on a picture of height x width tokens, the last ones of q, k and v."""
    check_picture(grid, prefix)
    if not prefix + grid[0] * grid[1] == q.shape[2] == k.shape[2]:
        raise ArgumentError(
            f"a grid of {grid[0]} x {grid[1]} after {prefix} other tokens needs {prefix + grid[0] * grid[1]} queries "
            f"and keys, got {q.shape[2]} and {k.shape[2]}"
        )
    needed = (q.shape[0], q.shape[1], 9, v.shape[3])
    if not isinstance(taps, Tensor) or taps.shape != needed or k.shape[1] != q.shape[1]:
        given = list(taps.shape) if isinstance(taps, Tensor) else type(taps).__name__
        raise ArgumentError(
            f"taps are {given} and must be [B, H, 9, e] = {list(needed)}, with a value head for each query head"
        )
    if not taps.is_floating_point():
        raise ArgumentError(f"taps are {taps.dtype} and must be floating-point numbers")
    check_device("taps", taps, q)


def check_picture(grid: Any, prefix: Any) -> None:
    """A picture of height x width tokens after `prefix` others."""
    if not _are_sides(grid, prefix):
        raise ArgumentError(
            f"grid is {grid!r} with prefix {prefix!r}, and must be (height, width) of the tokens' picture, at least "
            f"1 x 1, after a whole number of other tokens"
        )


def _are_sides(grid: Any, prefix: Any) -> bool:
    if not isinstance(grid, tuple | list) or len(grid) != 2:
        return False
    return all(isinstance(side, int) and side >= least for side, least in zip((*grid, prefix), (1, 1, 0), strict=True))


def check_state(state: object, k: Tensor) -> None:
    if state is None:
        return
    if not isinstance(state, State):
        raise ArgumentError(f"state is a {type(state).__name__} and must be None or the State of an earlier call")
    for name, part in state._asdict().items():
        if not isinstance(part, Tensor):
            raise ArgumentError(f"the state's {name} is {part!r} and must be a tensor")
        check_device(f"the state's {name}", part, k)
