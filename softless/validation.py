"""Check the arguments of a call. Each failure is one sentence that says what was passed and what was needed.

`prepare` runs once per public call. Nothing here reads a tensor's numbers: on a GPU that would make every call wait.
"""

import numbers
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from softless.algebra.state import NearState, State
from softless.errors import ArgumentError, UnsupportedError, check_choice, did_you_mean, shown
from softless.mechanisms import MECHANISMS, Call, Mechanism, resolve

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BACKENDS = ("auto", "reference", "torch", "triton")
LARGEST = sys.float_info.max
P = ParamSpec("P")
T = TypeVar("T")
INSTEAD = {  # arguments of F.scaled_dot_product_attention, and what to do here
    "attn_mask": "pass key_mask [batch, keys] for padding, is_causal=True, or a bias to add to the scores",
    "dropout_p": "dropout on the weights is attn_drop of softless.nn.Attention",
    "enable_gqa": "grouped queries need no switch, k and v may simply have fewer heads than q",
}


def explain_unknown_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Answer a keyword that the function does not have with what to pass instead of it."""
    known = tuple(signature(function).parameters)

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        try:
            return function(*args, **options)
        except TypeError:
            if name := next((each for each in options if each not in known), None):
                hint = INSTEAD.get(name) or did_you_mean(name, known) or f"it takes {', '.join(known)}"
                raise ArgumentError(f"{function.__name__} has no argument {name!r}: {hint}") from None
            raise

    return call


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mechanism: str | Mechanism,
    *,
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    grid: tuple[int, int] | None = None,
    backend: str = "auto",
    has_taps: bool = False,
) -> tuple[Mechanism, Call]:
    """Check every argument of an attention call, and return the mechanism and the call that it runs.

    With `has_taps`, the local residual reads the grid, and the mechanism need not.
    """
    mechanism = resolve(mechanism)
    grid = None if has_taps and not mechanism.reads_grid else grid
    check_tensors(q, k, v)
    check_is_causal(is_causal, mechanism)
    check_key_mask(key_mask, k)
    check_bias(bias, mechanism, q, k)
    check_inputs(inputs, mechanism, q, k)
    check_grid(grid, mechanism, q, k)
    check_choice("backend", backend, BACKENDS)
    call = Call(is_causal, key_mask, bias, resolve_scale(scale, mechanism, q.shape[3]), inputs or {}, grid)
    mechanism.check(q, k, v, call)
    return mechanism, call


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check q [B, H, N, d], k [B, G, M, d], v [B, G, M, e]: one dtype, one device, H a multiple of G."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_dense(name, x)
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
        kind = key_mask.dtype if isinstance(key_mask, Tensor) else type(key_mask).__name__
        raise ArgumentError(f"key_mask is {kind} and must be a bool tensor, True for a real token")
    check_dense("key_mask", key_mask)
    if key_mask.shape != (k.shape[0], k.shape[2]):
        raise ArgumentError(
            f"key_mask has shape {list(key_mask.shape)} and must be [batch, keys] = {[k.shape[0], k.shape[2]]}"
        )
    check_device("key_mask", key_mask, k)


def check_bias(bias: Tensor | None, mechanism: Mechanism, q: Tensor, k: Tensor) -> None:
    if bias is None:
        return
    if not mechanism.takes_bias:
        takers = ", ".join(name for name, other in MECHANISMS.items() if other.takes_bias)
        raise UnsupportedError(
            f"bias is added to scores and mechanism '{mechanism.name}' has none to add it to; these have: {takers}"
        )
    needed = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        kind = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
        raise ArgumentError(f"bias is {kind} and must be a float tensor (key_mask takes the bool ones)")
    check_dense("bias", bias)
    fits = bias.ndim <= 4 and all(b in (1, n) for b, n in zip(bias.shape[::-1], needed[::-1], strict=False))
    if not fits:
        raise ArgumentError(f"bias has shape {list(bias.shape)} and must broadcast to [B, H, N, M] = {list(needed)}")
    check_device("bias", bias, k)


def check_inputs(inputs: Mapping[str, Tensor] | None, mechanism: Mechanism, q: Tensor, k: Tensor) -> None:
    if inputs is not None and not isinstance(inputs, Mapping):
        raise ArgumentError(f"inputs is a {type(inputs).__name__} and must map names to tensors")
    needed, tensors = mechanism.needed(q, k), inputs or {}
    if not needed and not tensors:
        return
    if strange := [name for name in tensors if not isinstance(name, str)]:
        raise ArgumentError(
            f"inputs has the key {shown(strange[0])}, and must map names, which are strings, to tensors"
        )
    if missing := [name for name in needed if name not in tensors]:
        raise ArgumentError(
            f"mechanism '{mechanism.name}' needs inputs {', '.join(missing)} and got "
            f"{', '.join(tensors) or 'none'}: pass inputs={{'{missing[0]}': tensor}}"
        )
    if extra := [name for name in tensors if name not in needed]:
        takes = ", ".join(needed) or "none"
        raise ArgumentError(f"mechanism '{mechanism.name}' takes inputs {takes} and got {', '.join(extra)}")
    for name, shape in needed.items():
        x = tensors[name]
        check_dense(f"input '{name}'", x, f" of shape {list(shape)}")
        if x.shape != shape:
            raise ArgumentError(f"input '{name}' is {list(x.shape)} and must be a tensor of shape {list(shape)}")
        if not x.is_floating_point():
            raise ArgumentError(f"input '{name}' is {x.dtype} and must be floating-point numbers")
        check_device(f"input '{name}'", x, q)


def check_dense(name: str, x: object, needed: str = "") -> None:
    """Refuse whatever is not a dense tensor (sparse, MKL-DNN, nested) before its shape is read."""
    if not isinstance(x, Tensor):
        raise ArgumentError(f"{name} is a {type(x).__name__} and must be a tensor{needed}")
    if x.is_nested:
        raise ArgumentError(
            f"{name} is a nested tensor, and only attention and attention_with_state take packed sequences, as q, k "
            f"and v: pad them, or pass one at a time, of {name}.unbind()"
        )
    if x.layout is not torch.strided:
        raise ArgumentError(f"{name} is a tensor of layout {x.layout} and must be a dense one: {name}.to_dense()")


def check_device(name: str, x: Tensor, like: Tensor) -> None:
    if x.device != like.device:
        raise ArgumentError(f"{name} is on {x.device} and must be where q, k and v are, on {like.device}")


def check_is_causal(is_causal: object, mechanism: Mechanism) -> None:
    if not isinstance(is_causal, bool):
        raise ArgumentError(f"is_causal is {shown(is_causal)} and must be True or False")
    if reason := mechanism.lacks(is_causal):
        raise UnsupportedError(f"is_causal is {is_causal}, and mechanism '{mechanism.name}' {reason}")


def resolve_scale(scale: Any, mechanism: Mechanism, head_dim: int) -> float:
    default = mechanism.default_scale(head_dim)
    if scale is None:
        return 1.0 if default is None else default
    if default is None:
        raise UnsupportedError(f"scale {shown(scale)} would have no effect: mechanism '{mechanism.name}' cancels it")
    number = type(scale) in (float, int) or (isinstance(scale, numbers.Real) and not isinstance(scale, bool))
    if not number or not abs(scale if type(scale) is int else float(scale)) <= LARGEST:
        raise ArgumentError(f"scale {shown(scale)} is not a finite number")
    return float(scale)


def check_grid(grid: Any, mechanism: Mechanism, q: Tensor, k: Tensor) -> None:
    if not mechanism.reads_grid and grid is not None:
        raise UnsupportedError(f"grid {shown(grid)} was passed, and mechanism '{mechanism.name}' does not read one")
    if not (mechanism.needs_grid or grid is not None) or 0 in (q.shape[2], k.shape[2]):
        return
    inside = grid[0] * grid[1] if are_sides(grid, 0) else 0
    if mechanism.needs_grid and not inside == q.shape[2] == k.shape[2]:
        raise ArgumentError(
            f"mechanism '{mechanism.name}' needs grid=(height, width) of the picture that its tokens form, and got "
            f"{shown(grid)} with {q.shape[2]} queries and {k.shape[2]} keys"
        )
    if not 0 < inside <= q.shape[2] == k.shape[2]:
        raise ArgumentError(
            f"grid {shown(grid)} must be (height, width) of a picture, all of the tokens or the last of them, and "
            f"there are {q.shape[2]} queries and {k.shape[2]} keys"
        )


def check_packed(qkv: Any) -> None:
    """Check q, k and v of self-attention in one tensor [B, N, 3, H, d]."""
    check_dense("qkv", qkv, " [batch, tokens, 3, heads, dim]")
    if qkv.ndim != 5 or qkv.shape[2] != 3:
        raise ArgumentError(f"qkv is {list(qkv.shape)} and must be a tensor [batch, tokens, 3, heads, dim]")


def check_taps(taps: object, grid: Any, prefix: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int]:
    """Check taps [B, H, 9, e] and the picture that q, k and v end with, and return its (prefix, height, width)."""
    check_picture(grid, prefix)
    if not prefix + grid[0] * grid[1] == q.shape[2] == k.shape[2]:
        raise ArgumentError(
            f"a grid of {grid[0]} x {grid[1]} with prefix {prefix} needs {prefix + grid[0] * grid[1]} queries and "
            f"keys, got {q.shape[2]} and {k.shape[2]}"
        )
    needed = (q.shape[0], q.shape[1], 9, v.shape[3])
    check_dense("taps", taps, f" [B, H, 9, e] = {list(needed)}")
    assert isinstance(taps, Tensor)
    if taps.shape != needed or k.shape[1] != q.shape[1]:
        raise ArgumentError(
            f"taps are {list(taps.shape)} and must be [B, H, 9, e] = {list(needed)}, with a value head for each query "
            f"head"
        )
    if not taps.is_floating_point():
        raise ArgumentError(f"taps are {taps.dtype} and must be floating-point numbers")
    check_device("taps", taps, q)
    return prefix, grid[0], grid[1]


def check_picture(grid: Any, prefix: Any) -> None:
    """Check a picture of height x width tokens that follow `prefix` others."""
    if not are_sides(grid, prefix):
        raise ArgumentError(
            f"grid is {shown(grid)} with prefix {shown(prefix)}, and must be (height, width) of the tokens' picture, "
            f"at least 1 x 1, after a whole number of other tokens"
        )


def are_sides(grid: Any, prefix: Any) -> bool:
    """Whether `grid` is (height, width) of a picture, at least 1 x 1, and `prefix` a number of tokens before it."""
    if not isinstance(grid, tuple | list) or len(grid) != 2:
        return False
    return _is_side(grid[0], 1) and _is_side(grid[1], 1) and _is_side(prefix, 0)


def _is_side(side: Any, least: int) -> bool:
    """Return whether a side is an integer, not a bool. In an exported graph it may be a SymInt."""
    return isinstance(side, int | torch.SymInt) and not isinstance(side, bool) and bool(side >= least)


def check_state(state: object, k: Tensor) -> None:
    if state is None:
        return
    if not isinstance(state, State | NearState):
        raise ArgumentError(f"state is a {type(state).__name__} and must be None or the State of an earlier call")
    for name, part in state._asdict().items():
        check_dense(f"the state's {name}", part)
        check_device(f"the state's {name}", part, k)
