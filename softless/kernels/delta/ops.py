"""The delta rule as a PyTorch operator: differentiable, compilable, from one State of the algebra to the next.

    delta(q, k, v, beta, key_mask, state, rule, scale) -> out, State          gradients in all but the mask and means

The memory is the State's comoment. The State's means are zero and stay so.
"""

from typing import Any

import torch
from torch import Tensor

from softless.algebra.state import State
from softless.kernels.common.launch import absent, fake, gradient, no_gradient, operator
from softless.kernels.common.rows import dense, output_like
from softless.kernels.delta import attend as delta_attend
from softless.kernels.delta.attend import Filled, Solved, memory_like, solved_like


def delta(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, key_mask: Tensor | None, state: State | None, rule: str, scale: float
) -> tuple[Tensor, State]:
    """Apply the rule `delta` or `efla`, continuing from `state`; return the output and the State after it."""
    q, k, v = dense(q), dense(k), dense(v)
    heads = (*k.shape[:2], 1) if k.shape[1] != q.shape[1] else tuple(k.shape[:2])
    memory = None if state is None else state.comoment.reshape(*k.shape[:2], *state.comoment.shape[-2:]).contiguous()
    out, after = _delta(q, k, v, beta, key_mask, memory, rule, scale)[:2]
    after = after.reshape(*heads, *after.shape[-2:])
    seen = torch.full((1,), k.shape[2], device=k.device) if key_mask is None else key_mask.sum(-1)
    seen = seen.reshape(-1, *(1 for _ in heads[1:]))
    if state is not None:
        return out, state._replace(n=state.n + seen, comoment=after)
    k_mean, v_mean, shift = (after.new_zeros(*heads, size) for size in (k.shape[3], v.shape[3], k.shape[3]))
    return out, State(seen, k_mean, v_mean, after, shift)


Tensors4 = tuple[Tensor, Tensor, Tensor, Tensor]
Tensors5 = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@operator("delta")
def _delta(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, key_mask: Tensor | None, memory: Tensor | None, rule: str,
    scale: float,
) -> Tensors4:  # fmt: skip
    """Return out, the memory after the last token, and what the backward pass needs to know about the keys."""
    out, solved = output_like(q, v.shape[3]), delta_attend.solve(k, beta, key_mask, rule)
    return out, delta_attend.forward(q, k, v, key_mask, memory, solved, out, scale), *solved


@fake("delta")
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensors4:
    return output_like(q, v.shape[3]), memory_like(k, v), *solved_like(k)


@operator("delta_backward")
def _backward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, d_out: Tensor, key_mask: Tensor | None, memory: Tensor | None,
    scalars: Tensor, inverse: Tensor, last: Tensor | None, rule: str, scale: float,
) -> Tensors5:  # fmt: skip
    """Return the gradients of q, k, v, beta, and of the incoming memory if there is one."""
    into = _room(q, k, v, beta, memory)
    d_out = dense(d_out)
    last = None if last is None else last.contiguous()
    delta_attend.backward(q, k, v, beta, d_out, key_mask, memory, Solved(scalars, inverse), last, into, rule, scale)
    return into  # type: ignore[return-value]


def _room(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, memory: Tensor | None) -> Filled:
    filled = output_like(q, q.shape[3]), output_like(k, k.shape[3]), output_like(v, v.shape[3])
    return Filled(*filled, beta.new_empty(beta.shape), None if memory is None else memory_like(k, v))


@fake("delta_backward")
def _(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, d_out: Tensor, key_mask: Tensor | None, memory: Tensor | None,
    *_: Any,
) -> Tensors5:  # fmt: skip
    *filled, of_memory = _room(q, k, v, beta, memory)
    return *filled, absent(q) if of_memory is None else of_memory  # type: ignore[return-value]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensors4) -> None:
    out, _, *solved = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:6], *solved)
    ctx.rule = inputs[6:]
    ctx.shape = out.shape


def _differentiate(ctx: Any, d_out: Tensor | None, last: Tensor | None, *_: None) -> tuple[Any, ...]:
    q, k, v, beta, key_mask, memory, *solved = ctx.saved_tensors
    d_out = q.new_zeros(ctx.shape) if d_out is None else d_out
    *gradients, of_memory = _backward(q, k, v, beta, d_out, key_mask, memory, *solved, last, *ctx.rule)
    return *gradients, None, None if memory is None else of_memory, None, None


gradient("delta", _differentiate, _save)
no_gradient("delta_backward")
