"""The kernels as PyTorch operators: traceable by torch.compile, differentiable, refusing a second derivative.

    softless::attend            q, k, v, or a packed projection  ->  output, records
    softless::attend_backward                                    ->  their gradients, and that of the taps

A packed projection [B, N, 3, H, d] comes in q's place, without k and v; it is read in place, and its gradient is one
packed tensor. `records` is what the backward pass needs to know of the keys.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from softless.algebra.recipe import Recipe
from softless.kernels.common.operator import fake, gradient, no_gradient, operator
from softless.kernels.common.record import numbers
from softless.kernels.common.rows import dense, output_like
from softless.kernels.parallel import attend
from softless.kernels.parallel.attend import Picture


@operator("attend")
def attend_op(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    key_mask: Tensor | None,
    taps: Tensor | None,
    phi_q: str,
    phi_k: str,
    reader: str,
    constant: bool,
    scale: float,
    t: float,
    picture: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """(output [B, H, N, e], records)."""
    recipe = Recipe(phi_q, phi_k, reader, constant, scale, t)
    return attend.forward(*heads_of(given(q, k, v)), key_mask, _contiguous(taps), recipe, Picture(*picture))


@operator("attend_backward")
def attend_backward_op(
    d_out: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    key_mask: Tensor | None,
    taps: Tensor | None,
    records: Tensor,
    phi_q: str,
    phi_k: str,
    reader: str,
    constant: bool,
    scale: float,
    t: float,
    picture: Sequence[int],
) -> list[Tensor]:
    """The gradients of q, k and v, or of the packed projection, then dtaps if there are taps."""
    qkv = given(q, k, v)
    gradients, recipe = gradients_like(qkv), Recipe(phi_q, phi_k, reader, constant, scale, t)
    d_taps = attend.backward(
        d_out, *heads_of(qkv), key_mask, _contiguous(taps), records, recipe, Picture(*picture), *heads_of(gradients)
    )
    return gradients if taps is None or d_taps is None else [*gradients, d_taps.to(taps.dtype)]


@fake("attend")
def _(q, k, v, key_mask, taps, phi_q, phi_k, reader, constant, scale, t, picture):
    q, k, v = heads_of(given(q, k, v))
    heads = k.shape[0] * k.shape[1] if attend.keeps_records(q, k, v, phi_k) else 0
    return output_like(q, v.shape[3]), q.new_empty(heads, numbers(q.shape[3], v.shape[3]), dtype=torch.float32)


@fake("attend_backward")
def _(d_out, q, k, v, key_mask, taps, records, phi_q, phi_k, reader, constant, scale, t, picture):
    gradients = gradients_like(given(q, k, v))
    return gradients if taps is None else [*gradients, taps.new_empty(taps.shape)]


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:5], output[1])
    ctx.options = inputs[5:]


def _backward(ctx, d_out, _d_records):
    q, k, v, key_mask, taps, records = ctx.saved_tensors
    d_q, *rest = attend_backward_op(d_out, q, k, v, key_mask, taps, records, *ctx.options)
    d_k, d_v = rest[:2] if k is not None else (None, None)
    return d_q, d_k, d_v, None, None if taps is None else rest[-1], *[None] * len(ctx.options)


gradient("attend", _backward, _save)
no_gradient("attend_backward")


@register_flop_formula(torch.ops.softless.attend)
def attend_flops(q, k, v, key_mask, taps, phi_q, phi_k, reader, constant, scale, t, picture, **_):
    """For FlopCounterMode: phi(k)^T v and phi(q) S, and nine products a value where there are taps. Shapes come in.

    A counter made before this module was first imported does not know it, and counts nothing here.
    """
    if k is None:
        (b, n, _three, h, d), keys, e = q, q[1], q[4]
    else:
        (b, h, n, d), keys, e = q, k[2], v[3]
    local = 0 if taps is None else 9 * picture[1] * picture[2] * e
    return 2 * b * h * ((n + keys) * (d + constant) * e + local)


@register_flop_formula(torch.ops.softless.attend_backward)
def attend_backward_flops(d_out, q, k, v, key_mask, taps, records, *options, **_):
    """A product has two gradients, each as large as itself."""
    return 2 * attend_flops(q, k, v, key_mask, taps, *options)


def given(q: Tensor, k: Tensor | None, v: Tensor | None) -> list[Tensor]:
    """Those there are, each copied only if its last dimension is not contiguous."""
    return [dense(x) for x in (q, k, v) if x is not None]


def heads_of(qkv: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [B, H, N, d], as views of [B, N, 3, H, d] where they are packed."""
    q, k, v = qkv[0].permute(2, 0, 3, 1, 4).unbind() if len(qkv) == 1 else qkv
    return q, k, v


def gradients_like(qkv: Sequence[Tensor]) -> list[Tensor]:
    return [x.new_empty(x.shape) if len(qkv) == 1 else output_like(x, x.shape[3]) for x in qkv]


def _contiguous(taps: Tensor | None) -> Tensor | None:
    return None if taps is None else dense(taps)
