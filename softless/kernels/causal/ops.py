"""Causal attention as PyTorch operators: differentiable, compilable, from one State of the algebra to the next.

    causal(q, k, v, key_mask, spec) -> out                               gradients in q, k, v
    continued(q, k, v, key_mask, state, spec) -> out, State              and in the state's means and comoment
    continued(..., step=True)                                            the decode step, no gradient

The gradient of the outgoing State stands for later queries that see every token: the sums of the keys' gradient start
from it. Where these sums end, they are the gradient of the incoming State:

    outer = dcomoment         of_queries = -dk_mean / n         of_outputs = dv_mean / n - outer^T k_mean
    dcomoment = outer         dk_mean = n (outer (v_mean - v_ref) - of_queries)
                              dv_mean = n (outer^T k_mean + of_outputs)

The operator also takes sequences of different lengths: q, k, v [1, H, T, d], their `offsets` [B + 1], and the longest
length.

A constant feature (Taylor attention) has no gradient: the algebra's State contains it, the kernels' State does not.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softless.algebra.kernel_spec import KernelSpec
from softless.algebra.modes import recording
from softless.algebra.state import State
from softless.kernels.causal import attend as causal_attend
from softless.kernels.causal.attend import Past, Sums, SumsInUnits, past_like
from softless.kernels.common.launch import absent, fake, gradient, no_gradient, operator
from softless.kernels.common.plan import Plan
from softless.kernels.common.rows import dense, output_like, packs_of


def causal(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, spec: KernelSpec) -> Tensor:
    """Return the output of a sequence. Its State is kept only for the backward pass."""
    if spec.phi_k == "exp":
        return exponential_op(dense(q), dense(k), dense(v), key_mask, spec.reader, spec.t)[0]
    return causal_op(dense(q), dense(k), dense(v), key_mask, *NOTHING, *spec[:5], recording(q, k, v))[0]


def continued(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: State | None, spec: KernelSpec, step: bool = False
) -> tuple[Tensor, State]:
    """Continue from `state`; return the output and the State after the last token. A `step` has one token."""
    q, k, v, past = dense(q), dense(k), dense(v), _enter(state, k, spec.constant)
    if step:
        out, *after = _decode(q, k, v, key_mask, *past, *spec[:5])
    else:
        out, *after = causal_op(q, k, v, key_mask, *past, *spec[:5], True)[:5]
    return out, _leave(Past(*after), q, spec.constant, state)


def plan_of_causal(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, spec: KernelSpec) -> Plan | None:
    """Return the steps of `causal` without gradients, if it copies none of these tensors."""
    if not all(x.stride(-1) == 1 for x in (q, k, v)):
        return None
    if spec.phi_k == "exp":
        return exponential_op.planned.plan(q, k, v, key_mask, spec.reader, spec.t)
    return causal_op.planned.plan(q, k, v, key_mask, None, None, None, None, *spec[:5], False)


def plan_of_step(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: State, spec: KernelSpec
) -> Plan | None:
    """Return the steps of a decode step, if the kernels take these tensors and this State as they are."""
    past = _enter(state, k, spec.constant)
    as_it_is = all(a is b for a, b in zip(past, state[:4], strict=True)) and q.shape[1] == k.shape[1]
    if not as_it_is or any(x.stride(-1) != 1 for x in (q, k, v)):
        return None
    return _decode.planned.plan(q, k, v, key_mask, *past, *spec[:5])


def _enter(state: State | None, k: Tensor, constant: bool) -> tuple[Tensor | None, ...]:
    """Return n [B, G], k_mean [B, G, d], v_mean [B, G, e], comoment [B, G, d, e] of the algebra's State."""
    if state is None:
        return None, None, None, None
    heads, skip = k.shape[:2], int(constant)
    if skip == 0 and state.n.shape == heads and all(x.is_contiguous() for x in state[:4]):
        return state[:4]
    n = state.n.reshape(state.n.shape[:2]).expand(heads).contiguous()
    k_mean, v_mean = state.k_mean.reshape(*heads, -1), state.v_mean.reshape(*heads, -1)
    comoment = state.comoment.reshape(*heads, *state.comoment.shape[-2:])
    return n, k_mean[..., skip:].contiguous(), v_mean.contiguous(), comoment[..., skip:, :].contiguous()


def _leave(past: Past, q: Tensor, constant: bool, before: State | None) -> State:
    """Return the algebra's State, with a dimension for the queries that share a key head; its shift never changes."""
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


NOTHING = None, None, None, None
Tensors5 = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Tensors6 = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Tensors9 = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@operator("causal")
def causal_op(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, n: Tensor | None, k_mean: Tensor | None,
    v_mean: Tensor | None, comoment: Tensor | None, phi_q: str, phi_k: str, reader: str, constant: bool, scale: float,
    final: bool, offsets: Tensor | None = None, longest: int = 0,
) -> Tensors9:  # fmt: skip
    """Return out, the State after the last token if `final`, and the States before each of several segments."""
    out, past = output_like(q, v.shape[3]), _past(n, k_mean, v_mean, comoment)
    packs = packs_of(offsets, offsets, longest, longest)
    after = past_like(k, v, packs=packs) if final else None
    spec = KernelSpec(phi_q, phi_k, reader, constant, scale)
    before = causal_attend.forward(q, k, v, key_mask, past, out, after, spec, packs)
    return out, *(after or NOTHING), *(before or NOTHING)


@fake("causal")
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensors9:
    final, offsets, longest = (*rest, None, 0)[10:13] if len(rest) == 11 else rest[10:]
    packs = packs_of(offsets, offsets, longest, longest)
    segments = causal_attend.segments_of(q, k, packs)[0]
    after = past_like(k, v, packs=packs) if final else (absent(q) for _ in NOTHING)
    before = past_like(k, v, segments, packs=packs) if segments > 1 else (absent(q) for _ in NOTHING)
    return output_like(q, v.shape[3]), *after, *before


@operator("causal_step")
def _decode(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, n: Tensor | None, k_mean: Tensor | None,
    v_mean: Tensor | None, comoment: Tensor | None, phi_q: str, phi_k: str, reader: str, constant: bool, scale: float,
) -> Tensors5:  # fmt: skip
    """Return out and the State after the token."""
    out, past = output_like(q, v.shape[3]), _past(n, k_mean, v_mean, comoment)
    after = causal_attend.decode(q, k, v, key_mask, past, out, KernelSpec(phi_q, phi_k, reader, constant, scale))
    return out, *after


@fake("causal_step")
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensors5:
    return output_like(q, v.shape[3]), *past_like(k, v)


@operator("causal_backward")
def _backward(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, key_mask: Tensor | None, n: Tensor | None, k_mean: Tensor | None,
    v_mean: Tensor | None, comoment: Tensor | None, n_cut: Tensor | None, k_cut: Tensor | None, v_cut: Tensor | None,
    comoment_cut: Tensor | None,
    n_ref: Tensor, k_ref: Tensor, v_ref: Tensor, dk_mean: Tensor | None, dv_mean: Tensor | None,
    dcomoment: Tensor | None, phi_q: str, phi_k: str, reader: str, constant: bool, scale: float,
    offsets: Tensor | None = None, longest: int = 0,
) -> Tensors6:  # fmt: skip
    """Return the gradients of q, k, v, and of the incoming k_mean, v_mean and comoment, if there is a State."""
    filled = output_like(q, q.shape[3]), output_like(k, k.shape[3]), output_like(v, v.shape[3])
    past, cut = _past(n, k_mean, v_mean, comoment), _past(n_cut, k_cut, v_cut, comoment_cut)
    last = _after(n_ref, k_ref, v_ref, dk_mean, dv_mean, dcomoment)
    d_out = dense(d_out)
    sums = causal_attend.backward(
        q, k, v, d_out, key_mask, past if cut is None else cut, v_ref, last, filled, past is not None,
        KernelSpec(phi_q, phi_k, reader, constant, scale), packs_of(offsets, offsets, longest, longest),
    )  # fmt: skip
    if past is None or sums is None:
        return *filled, None, None, None  # type: ignore[return-value]
    tokens = past.n[..., None]  # [B, G, 1]
    of_keys = (sums.outer * (past.v_mean - v_ref)[..., None, :]).sum(-1) - sums.of_queries
    of_values = (sums.outer * past.k_mean[..., None]).sum(-2) + sums.of_outputs
    return *filled, tokens * of_keys, tokens * of_values, sums.outer.contiguous()


@fake("causal_backward")
def _(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, key_mask: Tensor | None, n: Tensor | None, *_: Any) -> Tensors6:
    filled = output_like(q, q.shape[3]), output_like(k, k.shape[3]), output_like(v, v.shape[3])
    return *filled, *((absent(q) for _ in range(3)) if n is None else past_like(k, v)[1:])


def _after(
    n: Tensor, k_ref: Tensor, v_ref: Tensor, dk_mean: Tensor | None, dv_mean: Tensor | None, dcomoment: Tensor | None
) -> Sums | None:
    """Return what the gradient of the outgoing State adds to the sums, or None if it has no gradient."""
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
    ctx.save_for_backward(*inputs[:8], *cut, n_ref, k_ref, v_ref, *inputs[14:15])  # the offsets
    ctx.spec, ctx.longest = inputs[8:13], inputs[15:]
    ctx.shape = out.shape


def _differentiate(ctx: Any, d_out: Tensor | None, _n: None, *state: Tensor | None) -> tuple[Any, ...]:
    (q, k, v, key_mask, n, *rest), offsets = ctx.saved_tensors[:15], ctx.saved_tensors[15:]
    d_out = q.new_zeros(ctx.shape) if d_out is None else d_out
    dq, dk, dv, *of_state = _backward(q, k, v, d_out, key_mask, n, *rest, *state[:3], *ctx.spec, *offsets, *ctx.longest)
    of_state = [None, None, None] if n is None else of_state
    return dq, dk, dv, None, None, *of_state, *(None for _ in ctx.spec), None, *(None for _ in (*offsets, *ctx.longest))


gradient("causal", _differentiate, _save)
no_gradient("causal_step")
no_gradient("causal_backward")


@operator("causal_exponential")
def exponential_op(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, reader: str, t: float, offsets: Tensor | None = None,
    longest: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return out, and the sums before each of several segments."""
    out, packs = output_like(q, v.shape[3]), packs_of(offsets, offsets, longest, longest)
    sums = causal_attend.exponential_forward(q, k, v, key_mask, out, _exponential(reader, t), packs)
    return out, *(sums or (None, None, None))


@fake("causal_exponential")
def _(q: Tensor, k: Tensor, v: Tensor, _m: Any, _r: Any, _t: Any, offsets: Any = None, longest: int = 0) -> Any:
    packs = packs_of(offsets, offsets, longest, longest)
    cut = causal_attend.segments_of(q, k, packs)[0] > 1
    sums = causal_attend.sums_like(q, v, k.shape[1], packs) if cut else (absent(q) for _ in range(3))
    return output_like(q, v.shape[3]), *sums


@operator("causal_exponential_backward")
def _exponential_backward(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, key_mask: Tensor | None, outer: Tensor | None,
    of_values: Tensor | None, rest: Tensor | None, reader: str, t: float, offsets: Tensor | None = None,
    longest: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, and those of k and v for every query head."""
    filled = _exponential_gradients(q, k, v)
    packs = packs_of(offsets, offsets, longest, longest)
    before = None
    if outer is not None and of_values is not None and rest is not None and outer.numel() > 0:
        before = SumsInUnits(outer, of_values, rest)
    causal_attend.exponential_backward(q, k, v, dense(d_out), key_mask, before, filled, _exponential(reader, t), packs)
    return filled


@fake("causal_exponential_backward")
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _exponential_gradients(q, k, v)


def _exponential_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if q.shape[1] == k.shape[1]:
        return output_like(q, q.shape[3]), output_like(k, k.shape[3]), output_like(v, v.shape[3])
    dk, dv = (q.new_empty(*q.shape[:3], x.shape[3], dtype=torch.float32) for x in (k, v))
    return output_like(q, q.shape[3]), dk, dv


def _exponential(reader: str, t: float) -> KernelSpec:
    return KernelSpec("softmax" if reader == "channel" else "exp", "exp", reader, t=t)


def _save_exponential(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:4], *output[1:], *inputs[6:7])  # the offsets
    ctx.rest, ctx.longest = inputs[4:6], inputs[7:]


def _differentiate_exponential(ctx: Any, d_out: Tensor, *_sums: None) -> tuple[Any, ...]:
    (q, k, v, key_mask, *before), offsets = ctx.saved_tensors[:7], ctx.saved_tensors[7:]
    dq, dk, dv = _exponential_backward(q, k, v, d_out, key_mask, *before, *ctx.rest, *offsets, *ctx.longest)
    if q.shape[1] != k.shape[1]:
        dk, dv = (g.unflatten(1, (k.shape[1], -1)).sum(2).to(k.dtype) for g in (dk, dv))
    return dq, dk, dv, *(None for _ in range(3 + len(offsets) + len(ctx.longest)))


gradient("causal_exponential", _differentiate_exponential, _save_exponential)
no_gradient("causal_exponential_backward")
