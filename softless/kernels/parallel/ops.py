"""Non-causal attention as PyTorch operators: torch.compile traces them, autograd differentiates them once.

    softless::attend            q, k, v, or a packed projection  ->  output, records
    softless::attend_backward                                    ->  their gradients, and those of taps and factors

A packed projection [B, N, 3, H, d] is passed as q, with None for k and v. It is read in place, and its gradient is one
packed tensor. `records` holds what the backward pass needs to know about the keys. `factors` [H, 2] are the numbers of
every head that `blend` and `regress` read. Sequences of different lengths are q, k, v [1, H, T, d] with their offsets
[B + 1], the longest lengths and a divisor of all lengths.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from softless.algebra.kernel_spec import KernelSpec
from softless.kernels.common.launch import absent, fake, gradient, no_gradient, operator, present
from softless.kernels.common.rows import dense, output_like, packs_of
from softless.kernels.parallel import attend
from softless.kernels.parallel.attend import Operands, Picture


@operator("attend")
def attend_op(
    q: Tensor, k: Tensor | None, v: Tensor | None, key_mask: Tensor | None, taps: Tensor | None, factors: Tensor | None,
    phi_q: str, phi_k: str, reader: str, constant: bool, scale: float, t: float, ridge: float, centered: bool,
    picture: Sequence[int], q_offsets: Tensor | None = None, k_offsets: Tensor | None = None, longest_q: int = 0,
    longest_k: int = 0, multiple: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output [B, H, N, e] and the records, absent if the backward pass needs none."""
    spec = phi_q, phi_k, reader, constant, scale, t, ridge, centered
    packs = packs_of(q_offsets, k_offsets, longest_q, longest_k, multiple)
    x = _operands(dense_qkv(q, k, v), key_mask, taps, factors, spec, picture, packs)
    return attend.forward(x)  # type: ignore[return-value]


@operator("attend_backward")
def attend_backward_op(
    d_out: Tensor, q: Tensor, k: Tensor | None, v: Tensor | None, key_mask: Tensor | None, taps: Tensor | None,
    factors: Tensor | None, records: Tensor | None, phi_q: str, phi_k: str, reader: str, constant: bool, scale: float,
    t: float, ridge: float, centered: bool, picture: Sequence[int], q_offsets: Tensor | None = None,
    k_offsets: Tensor | None = None, longest_q: int = 0, longest_k: int = 0, multiple: int = 1,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of q, k and v, or of the packed projection, then those of taps and factors, if any."""
    qkv, packs = dense_qkv(q, k, v), packs_of(q_offsets, k_offsets, longest_q, longest_k, multiple)
    gradients, spec = gradients_like(qkv), (phi_q, phi_k, reader, constant, scale, t, ridge, centered)
    x = _operands(qkv, key_mask, taps, factors, spec, picture, packs)
    d_taps, d_factors = attend.backward(d_out, x, present(records), *heads_of(gradients))
    if taps is not None and d_taps is not None:
        gradients.append(d_taps.to(taps.dtype))
    return gradients if d_factors is None else [*gradients, d_factors]


def _operands(qkv, key_mask, taps, factors, spec, picture, packs) -> Operands:
    factors = None if factors is None else factors.contiguous()
    return Operands(*heads_of(qkv), key_mask, taps, KernelSpec(*spec), Picture(*picture), packs, factors)


@fake("attend")
def _(q, k, v, key_mask, taps, factors, phi_q, phi_k, reader, constant, scale, t, ridge, centered, picture, *packed):
    spec = phi_q, phi_k, reader, constant, scale, t, ridge, centered
    x = _operands(dense_qkv(q, k, v), key_mask, taps, factors, spec, picture, packs_of(*packed) if packed else None)
    out = output_like(x.q, x.v.shape[3])
    return out, attend.kept(x) if attend.keeps_records(x) else absent(q)


@fake("attend_backward")
def _(d_out, q, k, v, key_mask, taps, factors, *_):
    gradients = gradients_like(dense_qkv(q, k, v))
    return [*gradients, *(x.new_empty(x.shape) for x in (taps, factors) if x is not None)]


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:6], output[1], *inputs[15:17])  # the offsets
    ctx.options, ctx.lengths = inputs[6:15], inputs[17:]


def _backward(ctx, d_out, _d_records):
    q, k, v, key_mask, taps, factors, records, *offsets = ctx.saved_tensors
    tensors = q, k, v, key_mask, taps, factors, records
    d_q, *rest = attend_backward_op(d_out, *tensors, *ctx.options, *offsets, *ctx.lengths)
    d_factors = None if factors is None else rest.pop()
    d_taps = None if taps is None else rest.pop()
    d_k, d_v = rest if k is not None else (None, None)
    return d_q, d_k, d_v, None, d_taps, d_factors, *[None] * (9 + len(offsets) + len(ctx.lengths))


gradient("attend", _backward, _save)
no_gradient("attend_backward")


@register_flop_formula(torch.ops.softless.attend)
def attend_flops(
    q, k, v, key_mask, taps, factors, phi_q, phi_k, reader, constant, scale, t, ridge, centered, picture, *_, **__
):
    """Count phi(k)^T v, phi(q) S, and nine products per value where there are taps, for FlopCounterMode.

    Regression has phi(k)^T phi(k) too. Its solutions, one per head, are not counted.

    The arguments are shapes. A counter made before this module was first imported does not know the operator and counts
    nothing for it.
    """
    if k is None:
        (b, n, _three, h, d), keys, e = q, q[1], q[4]
    else:
        (b, h, n, d), keys, e = q, k[2], v[3]
    local = 0 if taps is None else 9 * picture[1] * picture[2] * e
    spread = keys * d * d if reader == "regress" else 0
    return 2 * b * h * ((n + keys) * (d + constant) * e + spread + local)


@register_flop_formula(torch.ops.softless.attend_backward)
def attend_backward_flops(d_out, q, k, v, key_mask, taps, factors, records, *options, **_):
    """A product has two gradients, each as large as itself."""
    return 2 * attend_flops(q, k, v, key_mask, taps, factors, *options)


def dense_qkv(q: Tensor, k: Tensor | None, v: Tensor | None) -> list[Tensor]:
    """Return q, k and v, or q alone if it is packed, each copied only if its last dimension is not contiguous."""
    return [dense(x) for x in (q, k, v) if x is not None]


def heads_of(qkv: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v [B, H, N, d]: views of [B, N, 3, H, d] if they are packed."""
    q, k, v = qkv[0].permute(2, 0, 3, 1, 4).unbind() if len(qkv) == 1 else qkv
    return q, k, v


def gradients_like(qkv: Sequence[Tensor]) -> list[Tensor]:
    return [x.new_empty(x.shape) if len(qkv) == 1 else output_like(x, x.shape[3]) for x in qkv]
