"""Causal attention as torch operators: differentiable, compilable, and in the algebra's State.

    causal(q, k, v, key_mask, state, ...) -> out, State          gradients in q, k, v and the state's means and comoment
    decode(q, k, v, key_mask, state, ...) -> out, State          one token, no gradient

The gradient of the State that goes out is that of later queries which see every token: with it the sums of the keys'
gradient begin. Where they end, they are the gradient of the State that came in:

    outer = dcomoment         of_queries = -dk_mean / n         of_outputs = dv_mean / n - outer^T k_mean
    dcomoment = outer         dk_mean = n (outer (v_mean - v_ref) - of_queries)
                              dv_mean = n (outer^T k_mean + of_outputs)

A constant feature (Taylor attention) has no gradient: it stands in the algebra's State, not in the kernels'.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softless.algebra.state import State
from softless.kernels.causal import attend as causal_attend
from softless.kernels.causal import tiles as causal_tiles
from softless.kernels.causal.attend import Past, Recipe, Sums, past_like
from softless.kernels.common.operator import fake, gradient, no_gradient, operator
from softless.kernels.common.rows import dense, output_like


def causal(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: State | None, phi_q: str, phi_k: str, reader: str,
    scale: float, constant: bool,
) -> tuple[Tensor, State]:  # fmt: skip
    """Causal attention that goes on from `state`; the output and the State after it."""
    q, k, v, past = dense(q), dense(k), dense(v), _enter(state, k, constant)
    out, *after = _causal(q, k, v, key_mask, *past, phi_q, phi_k, reader, scale, constant)[:5]
    return out, _leave(Past(*after), q, constant, state)


def decode(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: State | None, phi_q: str, phi_k: str, reader: str,
    scale: float, constant: bool,
) -> tuple[Tensor, State]:  # fmt: skip
    """`causal` for one token, without gradients."""
    q, k, v, past = dense(q), dense(k), dense(v), _enter(state, k, constant)
    out, *after = _decode(q, k, v, key_mask, *past, phi_q, phi_k, reader, scale, constant)
    return out, _leave(Past(*after), q, constant, state)


def _enter(state: State | None, k: Tensor, constant: bool) -> tuple[Tensor | None, ...]:
    """n [B, G], k_mean [B, G, d], v_mean [B, G, e], comoment [B, G, d, e] of the algebra's State."""
    if state is None:
        return None, None, None, None
    heads, skip = k.shape[:2], int(constant)
    n = state.n.reshape(state.n.shape[:2]).expand(heads).contiguous()
    k_mean, v_mean = state.k_mean.reshape(*heads, -1), state.v_mean.reshape(*heads, -1)
    comoment = state.comoment.reshape(*heads, *state.comoment.shape[-2:])
    return n, k_mean[..., skip:].contiguous(), v_mean.contiguous(), comoment[..., skip:, :].contiguous()


def _leave(past: Past, q: Tensor, constant: bool, before: State | None) -> State:
    """The algebra's State, with a dimension for the queries that share a key head; no feature here moves its shift."""
    n, k_mean, v_mean, comoment = past
    if constant:
        k_mean = torch.cat([(n > 0).to(k_mean.dtype)[..., None], k_mean], -1)
        comoment = F.pad(comoment, (0, 0, 1, 0))
    if q.shape[1] != n.shape[1]:
        n, k_mean, v_mean, comoment = (x.unsqueeze(2) for x in (n, k_mean, v_mean, comoment))
    return State(n, k_mean, v_mean, comoment, torch.zeros_like(k_mean) if before is None else before.shift)


def _past(n: Tensor | None, k_mean: Tensor | None, v_mean: Tensor | None, comoment: Tensor | None) -> Past | None:
    if n is None or k_mean is None or v_mean is None or comoment is None or n.numel() == 0:
        return None
    return Past(n, k_mean, v_mean, comoment)


def _empty(q: Tensor, k: Tensor, v: Tensor) -> tuple[Past, Past]:
    """Room for the State after the call, and for those before its segments if there is more than one."""
    segments, _ = causal_tiles.cut(q.shape[2], q.shape[0] * q.shape[1], q.shape[3])
    return past_like(k, v), past_like(k, v, 0 if segments == 1 else segments)


Tensors5 = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Tensors6 = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Tensors9 = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _no_gradients(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Stands for the gradients of a State that is not there."""
    _, of_keys, of_values, of_both = past_like(k[:, :0], v[:, :0])
    return of_keys, of_values, of_both


@operator("causal")
def _causal(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, n: Tensor | None, k_mean: Tensor | None,
    v_mean: Tensor | None, comoment: Tensor | None, phi_q: str, phi_k: str, reader: str, scale: float, constant: bool,
) -> Tensors9:  # fmt: skip
    """(out, the State after the last token, the States before each segment: none where there is one)."""
    out, past = output_like(q, v.shape[3]), _past(n, k_mean, v_mean, comoment)
    recipe = Recipe(phi_q, phi_k, reader, scale, constant)
    after, before = causal_attend.forward(q, k, v, key_mask, past, out, recipe)
    return out, *after, *(past_like(k, v, 0) if before is None else before)


@fake("causal")
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensors9:
    after, before = _empty(q, k, v)
    return output_like(q, v.shape[3]), *after, *before


@operator("causal_step")
def _decode(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, n: Tensor | None, k_mean: Tensor | None,
    v_mean: Tensor | None, comoment: Tensor | None, phi_q: str, phi_k: str, reader: str, scale: float, constant: bool,
) -> Tensors5:  # fmt: skip
    """(out, the State after the token)."""
    out, past = output_like(q, v.shape[3]), _past(n, k_mean, v_mean, comoment)
    after = causal_attend.decode(q, k, v, key_mask, past, out, Recipe(phi_q, phi_k, reader, scale, constant))
    return out, *after


@fake("causal_step")
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensors5:
    return output_like(q, v.shape[3]), *past_like(k, v)


@operator("causal_backward")
def _backward(
    q: Tensor, k: Tensor, v: Tensor, given: Tensor, key_mask: Tensor | None, n: Tensor | None, k_mean: Tensor | None,
    v_mean: Tensor | None, comoment: Tensor | None, n_cut: Tensor, k_cut: Tensor, v_cut: Tensor, comoment_cut: Tensor,
    n_ref: Tensor, k_ref: Tensor, v_ref: Tensor, dk_mean: Tensor | None, dv_mean: Tensor | None,
    dcomoment: Tensor | None, phi_q: str, phi_k: str, reader: str, scale: float, constant: bool,
) -> Tensors6:  # fmt: skip
    """Gradients of q, k, v, and of the incoming k_mean, v_mean and comoment: empty where there is no State."""
    filled = output_like(q, q.shape[3]), output_like(k, k.shape[3]), output_like(v, v.shape[3])
    past, cut = _past(n, k_mean, v_mean, comoment), _past(n_cut, k_cut, v_cut, comoment_cut)
    last = _after(n_ref, k_ref, v_ref, dk_mean, dv_mean, dcomoment)
    given = dense(given)
    sums = causal_attend.backward(
        q, k, v, given, key_mask, past if cut is None else cut, v_ref, last, filled, past is not None,
        Recipe(phi_q, phi_k, reader, scale, constant),
    )  # fmt: skip
    if past is None or sums is None:
        return *filled, *_no_gradients(k, v)
    tokens = past.n[..., None]  # [B, G, 1]
    of_keys = (sums.outer * (past.v_mean - v_ref)[..., None, :]).sum(-1) - sums.of_queries
    of_values = (sums.outer * past.k_mean[..., None]).sum(-2) + sums.of_outputs
    return *filled, tokens * of_keys, tokens * of_values, sums.outer.contiguous()


@fake("causal_backward")
def _(q: Tensor, k: Tensor, v: Tensor, given: Tensor, key_mask: Tensor | None, n: Tensor | None, *_: Any) -> Tensors6:
    filled = output_like(q, q.shape[3]), output_like(k, k.shape[3]), output_like(v, v.shape[3])
    return *filled, *(_no_gradients(k, v) if n is None else past_like(k, v)[1:])


def _after(
    n: Tensor, k_ref: Tensor, v_ref: Tensor, dk_mean: Tensor | None, dv_mean: Tensor | None, dcomoment: Tensor | None
) -> Sums | None:
    """What the gradient of the outgoing State adds to the sums; None where it has none."""
    if dk_mean is None and dv_mean is None and dcomoment is None:
        return None
    tokens = n.clamp(min=1)[..., None]
    outer = k_ref.new_zeros(*k_ref.shape, v_ref.shape[2]) if dcomoment is None else dcomoment
    of_queries = torch.zeros_like(k_ref) if dk_mean is None else -dk_mean / tokens
    of_outputs = torch.zeros_like(v_ref) if dv_mean is None else dv_mean / tokens
    return Sums(outer, of_queries, of_outputs - (outer * k_ref[..., None]).sum(-2))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensors9) -> None:
    out, n_ref, k_ref, v_ref, _, *cut = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:8], *cut, n_ref, k_ref, v_ref)
    ctx.recipe = inputs[8:]
    ctx.shape = out.shape


def _differentiate(ctx: Any, given: Tensor | None, _n: None, *state: Tensor | None) -> tuple[Any, ...]:
    q, k, v, key_mask, n, *rest = ctx.saved_tensors
    given = q.new_zeros(ctx.shape) if given is None else given
    dq, dk, dv, *of_state = _backward(q, k, v, given, key_mask, n, *rest, *state[:3], *ctx.recipe)
    of_state = [None, None, None] if n is None else of_state
    return dq, dk, dv, None, None, *of_state, *(None for _ in ctx.recipe)


gradient("causal", _differentiate, _save)
no_gradient("causal_step")
no_gradient("causal_backward")
