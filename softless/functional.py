"""The front door: validate, choose a backend, call.

    attention                 the output
    attention_weights         the N x M matrix behind it, to look at
    attention_with_state      the output and what to remember: prefill, decode, streaming
    attention_with_residual   the output plus InLine's local residual, from taps
    attention_qkv             the same of a packed projection

Half precision is rounded once, at the end: torch computes it in float32, the kernels sum in float32.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from softless import backends, packed, validation
from softless.algebra.neighbors import local_residual
from softless.algebra.state import State, keep
from softless.errors import ArgumentError, BackendError
from softless.mechanisms import Call, Mechanism, resolve
from softless.mechanisms.base import check_signed, repeat_heads, sign


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mechanism: str | Mechanism = "inline",
    *,
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    grid: tuple[int, int] | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention by any mechanism, in the layout of `F.scaled_dot_product_attention`.

    >>> import torch, softless
    >>> q, k, v = torch.randn(3, 2, 4, 100, 16).unbind()        # [batch, heads, tokens, dim]
    >>> softless.attention(q, k, v).shape                       # InLine
    torch.Size([2, 4, 100, 16])
    >>> softless.attention(q, k, v, "linear", is_causal=True).shape
    torch.Size([2, 4, 100, 16])

    q [B, H, N, d], k [B, G, M, d], v [B, G, M, e] give [B, H, N, e]; H is a multiple of G.

    mechanism  a name from `list_mechanisms()`, or `mechanism(name, **options)`
    is_causal  query i sees keys up to its own; with N != M the last query is aligned with the last key
    key_mask   bool [B, M], True for a real token; what it hides may even be NaN
    bias       added to the scores, broadcastable to [B, H, N, M]; scored mechanisms only
    scale      the factor on phi(q).phi(k); None is the mechanism's own; raises where it would cancel
    inputs     tensors that `mechanism.inputs` names
    grid       (height, width), for mechanisms that read tokens as a picture
    backend    auto | reference (explicit weights, the specification) | torch | triton

    A query that sees no key gives zeros. q, k and v may be packed sequences, jagged nested tensors [B, H, j, d].
    """
    if packed.among(q, k, v):
        given: dict[str, Any] = {"is_causal": is_causal, "key_mask": key_mask, "bias": bias, "scale": scale}
        return packed.attend(attention, q, k, v, mechanism, **given, inputs=inputs, grid=grid, backend=backend)
    q, k, v = autocast(q, k, v)
    made, call = prepare(q, k, v, mechanism, is_causal, key_mask, bias, scale, inputs, grid, backend)
    recipe = backends.fused(made, call, q, k, v, backend)
    if recipe is not None:
        return backends.run((q, k, v), recipe, call)
    k, v = hide(k, key_mask), hide(v, key_mask)
    if q.shape[2] == 0 or k.shape[2] == 0:
        return (q @ repeat_heads(k, q.shape[1]).mT) @ repeat_heads(v, q.shape[1])
    with full_precision(q):
        if backend == "reference":
            return made.combine(made.weights(widen(q), widen(k), call), widen(v), call).to(q.dtype)
        if made.fused_on_gpu and not q.is_cpu:
            return made.attend(q, k, v, call)
        return made.attend(widen(q), widen(k), widen(v), call).to(q.dtype)


def attention_weights(
    q: Tensor,
    k: Tensor,
    mechanism: str | Mechanism = "inline",
    *,
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    grid: tuple[int, int] | None = None,
    backend: str = "auto",
) -> Tensor:
    """The explicit weights behind `attention`: quadratic, to look at.

    >>> import torch, softless
    >>> q, k = torch.randn(2, 1, 4, 50, 16).unbind()            # [batch, heads, tokens, dim]
    >>> w = softless.attention_weights(q, k, "inline")          # [batch, heads, queries, keys]
    >>> w.shape, torch.allclose(w.sum(-1), torch.ones(1, 4, 50), atol=1e-5)
    (torch.Size([1, 4, 50, 50]), True)

    Weights may be negative (inline) and need not sum to one (hydra, angular, linear without a
    normalizer). hydra has one matrix a channel: [B, H d, N, M].
    """
    q, k = autocast(q, k)
    made, call = prepare(q, k, k, mechanism, is_causal, key_mask, bias, scale, inputs, grid, backend)
    if backend in ("torch", "triton"):
        raise BackendError(f"backend '{backend}' never forms the weights: use 'auto' or 'reference'")
    k = hide(k, key_mask)
    if q.shape[2] == 0 or k.shape[2] == 0:
        return q.new_zeros(q.shape[0], made.matrices(q.shape[1], q.shape[3]), q.shape[2], k.shape[2])
    with full_precision(q):
        return made.weights(widen(q), widen(k), call).to(q.dtype)


def attention_with_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mechanism: str | Mechanism = "inline",
    state: State | None = None,
    *,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    grid: tuple[int, int] | None = None,
    backend: str = "auto",
) -> tuple[Tensor, State]:
    """Causal attention that goes on where an earlier call stopped: prefill, decode, streaming.

    >>> import torch, softless
    >>> q, k, v = torch.randn(3, 1, 4, 100, 16).unbind()        # [batch, heads, tokens, dim]
    >>> prompt, state = softless.attention_with_state(q[:, :, :99], k[:, :, :99], v[:, :, :99], "linear")
    >>> token, state = softless.attention_with_state(q[:, :, 99:], k[:, :, 99:], v[:, :, 99:], "linear", state)
    >>> whole = softless.attention(q, k, v, "linear", is_causal=True)
    >>> torch.allclose(torch.cat([prompt, token], 2), whole, atol=1e-5), state.n.item()
    (True, 100)

    The state has a fixed size, is float32 (float64 for float64 input), carries gradients, and `state._asdict()` goes
    through any tensor file. `key_mask` [B, M] covers this call's tokens: padding is never absorbed. Scored mechanisms
    have no state and raise. Another mechanism's state is refused; one from a tensor file is checked by its shapes.
    """
    if packed.among(q, k, v):
        given: dict[str, Any] = {"key_mask": key_mask, "scale": scale, "inputs": inputs, "grid": grid}
        return packed.attend_with_state(attention_with_state, q, k, v, mechanism, state, **given, backend=backend)
    q, k, v = autocast(q, k, v)
    made, call = prepare(q, k, v, mechanism, True, key_mask, None, scale, inputs, grid, backend)
    validation.check_state(state, k)
    check_signed(state, made)
    if backend == "reference":
        raise BackendError("backend 'reference' forms all weights at once and has no state: use 'auto' or 'torch'")
    if q.shape[2] > k.shape[2]:
        raise ArgumentError(f"{q.shape[2]} queries and {k.shape[2]} keys: every query needs its own token's key")
    recipe = backends.fused(made, call, q, k, v, backend, *(state or ()))
    if recipe is not None:
        return sign(*backends.run_with_state(q, k, v, state, recipe, call), made)
    k, v = hide(k, key_mask), hide(v, key_mask)
    with full_precision(q):
        out, after = made.attend_with_state(widen(q), widen(k), widen(v), state, call)
    return sign(out.to(q.dtype), after, made)


def attention_with_residual(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    taps: Tensor,
    mechanism: str | Mechanism = "inline",
    *,
    grid: tuple[int, int],
    prefix: int = 0,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention plus the local residual of `taps` [B, H, 9, e]: a 3x3 kernel on v for every sample and channel.

    >>> import torch
    >>> from softless.functional import attention_with_residual
    >>> q, k, v = torch.randn(3, 2, 4, 1 + 5 * 7, 16).unbind()          # one class token, then 5 x 7 patches
    >>> attention_with_residual(q, k, v, torch.randn(2, 4, 9, 16), grid=(5, 7), prefix=1).shape
    torch.Size([2, 4, 36, 16])
    """
    q, k, v, taps = autocast(q, k, v, taps)
    own = _own_grid(mechanism, grid)
    made, call = prepare(q, k, v, mechanism, False, key_mask, None, scale, inputs, own, backend)
    validation.check_taps(taps, grid, prefix, q, k, v)
    recipe = backends.fused(made, call, q, k, v, backend, taps)
    if recipe is not None:
        return backends.run((q, k, v), recipe, call, taps, (prefix, *grid))
    wide = (q, k, v) if made.fused_on_gpu and not q.is_cpu else (widen(q), widen(k), widen(v))
    with full_precision(q):  # one rounding, of the sum
        out = attention(*wide, made, key_mask=key_mask, scale=scale, inputs=inputs, grid=own, backend=backend)
        out = out + local_residual(hide(widen(wide[2]), key_mask), widen(taps), (grid[0], grid[1]), prefix)
    return out.to(q.dtype)


def attention_qkv(
    qkv: Tensor,
    mechanism: str | Mechanism = "inline",
    *,
    taps: Tensor | None = None,
    grid: tuple[int, int] | None = None,
    prefix: int = 0,
    key_mask: Tensor | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    backend: str = "auto",
) -> Tensor:
    """Self-attention of a packed projection [B, N, 3, H, d], with the local residual if there are taps.

    >>> import torch
    >>> from softless.functional import attention_qkv
    >>> attention_qkv(torch.randn(2, 100, 3, 4, 16)).shape              # [B, H, N, d]
    torch.Size([2, 4, 100, 16])

    The kernels read it in place and write its gradient as one tensor. `prefix` is read with taps, and `grid` with
    taps or by a mechanism that reads pictures: given without, they raise.
    """
    qkv = autocast(qkv)[0]
    validation.check_packed(qkv)
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # split first: their gradients meet in one dense tensor
    own = grid if taps is None else _own_grid(mechanism, grid)
    made, call = prepare(q, k, v, mechanism, False, key_mask, None, None, inputs, own, backend)
    picture = (0, 0, 0)
    if taps is not None:
        validation.check_taps(taps, grid, prefix, q, k, v)
        assert grid is not None
        picture = (prefix, *grid)
    elif prefix != 0:
        raise ArgumentError(f"prefix {prefix!r} is only read with taps, and none were given")
    recipe = backends.fused(made, call, q, k, v, backend, taps)
    if recipe is not None:
        return backends.run((qkv,), recipe, call, taps, picture)
    options: dict[str, Any] = {"key_mask": key_mask, "inputs": inputs, "backend": backend}
    if taps is None:
        return attention(q, k, v, made, grid=own, **options)
    return attention_with_residual(q, k, v, taps, made, grid=picture[1:], prefix=prefix, **options)


def _own_grid(mechanism: str | Mechanism, grid: tuple[int, int] | None) -> tuple[int, int] | None:
    """The picture, for a mechanism that reads one itself."""
    return grid if resolve(mechanism).reads_grid else None


def hide(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Zeros for what the mask hides, before anything reads it: a NaN there reaches no output and no gradient."""
    return keep(x, None if key_mask is None else key_mask[:, None])


def widen(x: Tensor) -> Tensor:
    """float32 for half precision, unchanged otherwise."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mechanism: str | Mechanism,
    is_causal: bool,
    key_mask: Tensor | None,
    bias: Tensor | None,
    scale: float | None,
    inputs: Mapping[str, Tensor] | None,
    grid: tuple[int, int] | None,
    backend: str,
) -> tuple[Mechanism, Call]:
    """Refuse what is wrong with a call, in one sentence; make the rest ready."""
    made = resolve(mechanism)
    validation.check_tensors(q, k, v)
    validation.check_is_causal(is_causal, made)
    validation.check_key_mask(key_mask, k)
    validation.check_bias(bias, made, q, k)
    validation.check_inputs(inputs, made, q, k)
    validation.check_grid(grid, made, q, k)
    validation.check_backend(backend)
    call = Call(is_causal, key_mask, bias, validation.resolve_scale(scale, made, q.shape[3]), inputs or {}, grid)
    made.check(q, k, v, call)
    return made, call


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as SDPA does where autocast is on: everything but float64."""
    return tuple(
        x.to(torch.get_autocast_dtype(x.device.type))
        if isinstance(x, Tensor) and _autocasting(x) and x.is_floating_point() and x.dtype != torch.float64
        else x
        for x in tensors
    )


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Inside, autocast does not touch our float32 sums."""
    return torch.autocast(x.device.type, enabled=False) if _autocasting(x) else nullcontext()


def _autocasting(x: Tensor) -> bool:
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)  # meta tensors have no autocast to ask about
