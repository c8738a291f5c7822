"""The front door: validate a call once, choose a backend, run it.

    attention                 the output
    attention_weights         the N x M weight matrix behind the output, for inspection
    attention_with_state      the output and the state to continue from: prefill, decode, streaming
    attention_with_residual   the output plus InLine's local residual, computed from taps
    attention_qkv             self-attention on a packed projection

Half precision is rounded once, at the end: torch computes in float32, and the kernels sum in float32.

Shapes: B batch, H query heads, G key heads (H is a multiple of G), N queries, M keys, d and e head dimensions.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from softless import backends, packed, routes, validation
from softless.algebra.precision import autocast, full_precision, widen
from softless.algebra.state import AnyState
from softless.errors import ArgumentError, BackendError
from softless.mechanisms import Mechanism
from softless.mechanisms.base import mark


@validation.explain_unknown_arguments
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
    """Compute attention with any mechanism, in the layout of `F.scaled_dot_product_attention`.

    >>> import torch, softless
    >>> q, k, v = torch.randn(3, 2, 4, 100, 16).unbind()        # [batch, heads, tokens, dim]
    >>> softless.attention(q, k, v).shape                       # InLine
    torch.Size([2, 4, 100, 16])
    >>> softless.attention(q, k, v, "linear", is_causal=True).shape
    torch.Size([2, 4, 100, 16])

    Args:
        q: Queries [B, H, N, d]. q, k and v may also be packed sequences: jagged nested tensors [B, H, j, d], as
            `torch.nested.nested_tensor_from_jagged(tokens, cu_seqlens).transpose(1, 2)` makes them.
        k: Keys [B, G, M, d]. H must be a multiple of G: fewer key heads give grouped-query attention.
        v: Values [B, G, M, e].
        mechanism: A name from `list_mechanisms()`, or `mechanism(name, **options)`. Default: "inline".
        is_causal: Whether query i sees only the keys up to its own. If N != M, the last query is aligned with the
            last key. Default: False.
        key_mask: bool [B, M], True for a real token. Hidden keys and values may even be NaN. Default: None, all real.
        bias: Added to the scores, float, broadcastable to [B, H, N, M]. Scored mechanisms only. Default: None.
        scale: Factor on phi(q).phi(k). Default: None, the mechanism's own. Raises where the factor would cancel.
        inputs: Tensors that the mechanism needs beyond q, k and v, by the names in `mechanism.inputs`. Default: None.
        grid: (height, width) of the picture, for mechanisms that read tokens as a picture. Default: None.
        backend: "auto", "reference" (explicit weights, the specification), "torch" or "triton". Default: "auto".

    Returns:
        The output [B, H, N, e]. A query that sees no key gives zeros.
    """
    if packed.among(q, k, v):  # without kernels, this pads the sequences and calls this function with a key mask
        return packed.attend(
            attention, q, k, v, mechanism, is_causal=is_causal, key_mask=key_mask, bias=bias, scale=scale,
            inputs=inputs, grid=grid, backend=backend,
        )  # fmt: skip
    q, k, v = autocast(q, k, v)
    route, call = routes.find(
        q, k, v, mechanism, is_causal=is_causal, key_mask=key_mask, bias=bias, scale=scale, inputs=inputs, grid=grid,
        backend=backend,
    )  # fmt: skip
    return backends.attend(route, call, q, k, v)


@validation.explain_unknown_arguments
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
    """Return the explicit weights behind `attention`. Time and memory are quadratic: this is for inspection.

    >>> import torch, softless
    >>> q, k = torch.randn(2, 1, 4, 50, 16).unbind()            # [batch, heads, tokens, dim]
    >>> w = softless.attention_weights(q, k, "inline")          # [batch, heads, queries, keys]
    >>> w.shape, torch.allclose(w.sum(-1), torch.ones(1, 4, 50), atol=1e-5)
    (torch.Size([1, 4, 50, 50]), True)

    Args:
        q: Queries [B, H, N, d].
        k: Keys [B, G, M, d].
        mechanism: A name from `list_mechanisms()`, or `mechanism(name, **options)`. Default: "inline".
        is_causal: Whether query i sees only the keys up to its own. Default: False.
        key_mask: bool [B, M], True for a real token. Default: None, all real.
        bias: Added to the scores, float, broadcastable to [B, H, N, M]. Scored mechanisms only. Default: None.
        scale: Factor on phi(q).phi(k). Default: None, the mechanism's own.
        inputs: Tensors that the mechanism needs beyond q and k, by name. Default: None.
        grid: (height, width) of the picture, for mechanisms that read tokens as a picture. Default: None.
        backend: "auto" or "reference"; the other backends never form the weights. Default: "auto".

    Returns:
        The weights [B, H, N, M]. They may be negative (inline) and need not sum to one (hydra, angular, linear
        without a normalizer). Hydra has one matrix per channel: [B, H d, N, M].
    """
    q, k = autocast(q, k)
    options: dict[str, Any] = {"key_mask": key_mask, "scale": scale, "inputs": inputs, "grid": grid, "backend": backend}
    mechanism, call = validation.prepare(q, k, k, mechanism, is_causal=is_causal, bias=bias, **options)
    if backend in ("torch", "triton"):
        raise BackendError(f"backend '{backend}' never forms the weights: use 'auto' or 'reference'")
    k = backends.hide(k, key_mask)
    if q.shape[2] == 0 or k.shape[2] == 0:
        return q.new_zeros(q.shape[0], mechanism.matrices(q.shape[1], q.shape[3]), q.shape[2], k.shape[2])
    with full_precision(q):
        return mechanism.weights(widen(q), widen(k), call).to(q.dtype)


@validation.explain_unknown_arguments
def attention_with_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mechanism: str | Mechanism = "inline",
    state: AnyState | None = None,
    *,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    grid: tuple[int, int] | None = None,
    backend: str = "auto",
) -> tuple[Tensor, AnyState]:
    """Compute causal attention that continues where an earlier call stopped: prefill, decode, streaming.

    >>> import torch, softless
    >>> q, k, v = torch.randn(3, 1, 4, 100, 16).unbind()        # [batch, heads, tokens, dim]
    >>> prompt, state = softless.attention_with_state(q[:, :, :99], k[:, :, :99], v[:, :, :99], "linear")
    >>> token, state = softless.attention_with_state(q[:, :, 99:], k[:, :, 99:], v[:, :, 99:], "linear", state)
    >>> at_once = softless.attention(q, k, v, "linear", is_causal=True)
    >>> torch.allclose(torch.cat([prompt, token], 2), at_once, atol=1e-5), state.n.item()
    (True, 100)

    Args:
        q: Queries [B, H, N, d], or packed sequences, as in `attention`.
        k: Keys [B, G, M, d] of this call's tokens.
        v: Values [B, G, M, e] of this call's tokens.
        mechanism: A kernelized or recurrent one. Scored mechanisms have no state and raise. Default: "inline".
        state: The state that an earlier call returned. Default: None, which starts a sequence. A state of another
            mechanism raises; a state from a tensor file is checked by its shapes.
        key_mask: bool [B, M] of this call's tokens, True for a real token. The state never absorbs padding.
            Default: None, all real.
        scale: Factor on phi(q).phi(k). Default: None, the mechanism's own.
        inputs: Tensors that the mechanism needs beyond q, k and v, by name. Default: None.
        grid: (height, width) of the picture, for mechanisms that read tokens as a picture. Default: None.
        backend: "auto", "torch" or "triton"; "reference" has no state. Default: "auto".

    Returns:
        The output [B, H, N, e] and the new state. The state has a fixed size, is float32 (float64 for float64
        tensors), and carries gradients. `state._asdict()` can be saved in any tensor file.
    """
    options: dict[str, Any] = {"key_mask": key_mask, "scale": scale, "inputs": inputs, "grid": grid, "backend": backend}
    if packed.among(q, k, v):  # pads the sequences, and calls this function with a key mask
        return packed.attend_with_state(attention_with_state, q, k, v, mechanism, state, **options)
    q, k, v = autocast(q, k, v)
    route, call = routes.find(q, k, v, mechanism, is_causal=True, state=state, **options)
    if backend == "reference":
        raise BackendError("backend 'reference' forms all weights at once and has no state: use 'auto' or 'torch'")
    if q.shape[2] > k.shape[2]:
        raise ArgumentError(f"{q.shape[2]} queries and {k.shape[2]} keys: every query needs its own token's key")
    out, state = backends.attend_with_state(route, call, q, k, v, state)
    return out, mark(state, route.signature)


@validation.explain_unknown_arguments
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
    """Compute attention plus the local residual: a 3x3 kernel on v for every sample and channel.

    >>> import torch
    >>> from softless.functional import attention_with_residual
    >>> q, k, v = torch.randn(3, 2, 4, 1 + 5 * 7, 16).unbind()          # one class token, then 5 x 7 patches
    >>> attention_with_residual(q, k, v, torch.randn(2, 4, 9, 16), grid=(5, 7), prefix=1).shape
    torch.Size([2, 4, 36, 16])

    Args:
        q: Queries [B, H, N, d], with N = prefix + height * width.
        k: Keys [B, H, N, d].
        v: Values [B, H, N, e].
        taps: The 3x3 kernels [B, H, 9, e], row by row; tap 4 is the center.
        mechanism: A name from `list_mechanisms()`, or `mechanism(name, **options)`. Default: "inline".
        grid: (height, width) of the picture that the last tokens form.
        prefix: How many tokens (class tokens) come before the picture. Default: 0.
        key_mask: bool [B, N], True for a real token. Default: None, all real.
        scale: Factor on phi(q).phi(k). Default: None, the mechanism's own.
        inputs: Tensors that the mechanism needs beyond q, k and v, by name. Default: None.
        backend: As in `attention`. Default: "auto".

    Returns:
        The output [B, H, N, e].
    """
    q, k, v, taps = autocast(q, k, v, taps)
    if not isinstance(taps, Tensor):
        raise ArgumentError(f"taps is a {type(taps).__name__} and must be a tensor [B, H, 9, e]")
    options: dict[str, Any] = {"key_mask": key_mask, "scale": scale, "inputs": inputs, "grid": grid, "backend": backend}
    route, call = routes.find(q, k, v, mechanism, taps=taps, prefix=prefix, **options)
    return backends.attend(route, call, q, k, v, taps)


@validation.explain_unknown_arguments
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
    """Compute self-attention on a packed projection, with the local residual if taps are passed.

    >>> import torch
    >>> from softless.functional import attention_qkv
    >>> attention_qkv(torch.randn(2, 100, 3, 4, 16)).shape              # [B, H, N, d]
    torch.Size([2, 4, 100, 16])

    The kernels read the packed tensor in place and write its gradient as one tensor.

    Args:
        qkv: Queries, keys and values [B, N, 3, H, d].
        mechanism: A name from `list_mechanisms()`, or `mechanism(name, **options)`. Default: "inline".
        taps: The 3x3 kernels [B, H, 9, d] of the local residual. Default: None, no residual.
        grid: (height, width) of the picture. Raises unless taps are passed or the mechanism reads pictures.
            Default: None.
        prefix: How many tokens come before the picture. Raises unless taps are passed. Default: 0.
        key_mask: bool [B, N], True for a real token. Default: None, all real.
        inputs: Tensors that the mechanism needs beyond q, k and v, by name. Default: None.
        backend: As in `attention`. Default: "auto".

    Returns:
        The output [B, H, N, d].
    """
    qkv, taps = autocast(qkv, taps)
    if taps is None and prefix != 0:
        raise ArgumentError(f"prefix {prefix!r} is only read with taps, and no taps were passed")
    options: dict[str, Any] = {"key_mask": key_mask, "inputs": inputs, "grid": grid, "backend": backend}
    route, call = routes.find(qkv, None, None, mechanism, packed=True, taps=taps, prefix=prefix, **options)
    return backends.attend(route, call, qkv, None, None, taps)
