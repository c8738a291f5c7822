"""The parallel form without a State: two products forward, four backward.

    subtract, contrast   o_i = v_mean + g q_i^T C       C = sum_j k'_j v'_j^T, g = s/n or s
    divide               o_i = v_mean + x_i / m_i       x_i = q_i^T C, C = sum_j k_j v'_j^T, m_i = q_i.s, s = sum_j k_j

q and k are features, k' = k - k_mean and v' = v - v_mean. The result is that of `read(q, observe(k, v))`, for tokens
without a mask and one key head per query head. At few tokens a call costs as much as it has operations, so each reader
is one node of autograd. With t the gradient of o, or of x, u that of m, and G that of C:

    subtract, contrast   dq = g t C^T           G = g q^T t     dk = v' G^T                   dv = k' G + mean t
    divide               dq = t C^T + u s^T     G = q^T t       dk = v' G^T + sum_i u_i q_i   dv = k G

The means need no gradient: v' and k' add up to 0, and v_mean cancels from a division.

A division needs no centered keys where no feature is negative: x_i is then a mean of v' times the mass m_i, and its
error a rounding of v'. Where m_i or x_i is so small or so large that a product could leave the range of the dtype,
`read` answers, because it scales each query first.
"""

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from softless.algebra.modes import eager, readable, recording
from softless.algebra.state import Log

BLOCK = 640  # tokens
LEAST = {dtype: torch.finfo(dtype).tiny ** 0.5 for dtype in (torch.float32, torch.float64)}  # of a mass
READS = ("subtract", "contrast", "divide")
FeatureMap = Callable[[Tensor], Tensor]
BlockMap = Callable[[slice], Tensor]  # features of the tokens that a slice names
Steps = Callable[[Tensor, Tensor, Tensor], Tensor | None]
Gradients = tuple[Tensor | None, ...]


def parallel(
    q: Float[Tensor, "*#b n d"] | Log,
    k: Float[Tensor, "*#b m d"] | Log,
    v: Float[Tensor, "*#b m e"],
    reader: str,
    scale: float,
    *,
    signed: bool,
) -> Float[Tensor, "*b n e"] | None:
    """Return the output of a reader, or None where only a State gives it."""
    if isinstance(q, Log) or isinstance(k, Log) or not eager() or not q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
        return None
    recorded = recording(q, k, v)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()  # else every product would copy them
    if reader in ("subtract", "contrast"):
        gain = scale / v.shape[-2] if reader == "subtract" else scale
        return _Subtract.apply(q, k, v, gain) if recorded else _subtract(q, _centered(k, v), gain)
    if reader == "divide" and not signed and readable(v):
        sums = _sums(q.detach(), k.detach(), v.detach()) if recorded else _sums(q, k, v)
        if in_range(*sums[-2:]):
            return _Divide.apply(q, k, v, *sums) if recorded else _divide(q, sums)
    return None


def steps(reader: str, scale: float, tokens: int, phi_q: FeatureMap, phi_k: FeatureMap) -> Steps:
    """Return what calls of one kind run without gradients: `parallel` without its questions, to the same bit.

    The steps return None where a mass is out of range.
    """
    gain = scale / tokens if reader == "subtract" else scale

    def subtract(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _subtract(phi_q(q).contiguous(), _centered(phi_k(k).contiguous(), v.contiguous()), gain)

    def divide(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        sums = _sums(phi_q(q).contiguous(), phi_k(k).contiguous(), v.contiguous())
        return _divide(q, sums) if in_range(*sums[-2:]) else None

    return divide if reader == "divide" else subtract


def in_blocks(
    queries: int,
    v: Float[Tensor, "*b m e"],
    reader: str,
    scale: float,
    phi_q: BlockMap,
    phi_k: BlockMap,
    size: int,
) -> Float[Tensor, "*b n e"] | None:
    """Return the output of a reader in `READS` without gradients, or None where a mass is out of range.

    Features and v' are never larger than a block of tokens, so the memory is that of the output and a part of it.
    """
    v_mean, gain = v.mean(-2, keepdim=True), scale / v.shape[-2] if reader == "subtract" else scale
    total, moment = _gather(v, v_mean, phi_k, 2 * size, centered=reader != "divide")
    out = v.new_empty((*v.shape[:-2], queries, v.shape[-1]))
    for at in blocks(queries, size):
        phi, rows = phi_q(at), out[..., at, :]
        torch.matmul(phi, moment, out=rows)
        mass = phi @ total if reader == "divide" else None
        del phi  # or it would be there while the next features are made
        if mass is None:
            torch.add(v_mean, rows, alpha=gain, out=rows)
        elif in_range(rows, mass):
            torch.addcdiv(v_mean, rows, mass, out=rows)
        else:
            return None
    return out


def blocks(tokens: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, tokens, size)]


def _gather(v: Tensor, v_mean: Tensor, phi_k: BlockMap, size: int, *, centered: bool) -> tuple[Tensor, Tensor]:
    """Return (sum k, sum k v'^T); centered, with keys measured from the mean of the first block.

    The second sum is C wherever keys are measured from, if v' adds up to 0. What rounding of v_mean leaves of that sum
    is taken out at the end.
    """
    origin: Any = None
    total: Any = 0
    moment: Any = 0
    rest: Any = 0
    for at in blocks(v.shape[-2], size):
        phi, deviation = phi_k(at), v[..., at, :] - v_mean
        if centered:
            origin = phi.mean(-2, keepdim=True) if origin is None else origin
            phi, rest = phi - origin, rest + deviation.sum(-2, keepdim=True)
        total, moment = total + phi.sum(-2)[..., None], moment + phi.mT @ deviation
    return total, moment - total * (rest / v.shape[-2]) if centered else moment


def heads(x: Float[Tensor, "*b n d"]) -> Float[Tensor, "h n d"]:
    """Return contiguous x with one dimension for all heads: products of more dimensions take twice as long to begin."""
    return x.flatten(0, -3) if x.ndim > 2 else x[None]


def _centered(k: Tensor, v: Tensor) -> list[Tensor]:
    """Return sum v, k', v' and C, by head."""
    k, v = heads(k), heads(v)
    part, v_sum = 1 / k.shape[-2], v.sum(-2, keepdim=True)
    k, v = torch.sub(k, k.sum(-2, keepdim=True), alpha=part), torch.sub(v, v_sum, alpha=part)
    return [v_sum, k, v, torch.bmm(k.mT, v)]


def _subtract(q: Tensor, centered: list[Tensor], gain: float) -> Tensor:
    v_sum, k, _, comoment = centered
    out = torch.baddbmm(v_sum, heads(q), comoment, beta=1 / k.shape[-2], alpha=gain)
    return out.view(*q.shape[:-1], out.shape[-1])


class _Subtract(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, gain: float) -> Tensor:
        centered = _centered(k, v)
        ctx.save_for_backward(q, k, v, *centered)
        ctx.gain = gain
        return _subtract(q, centered, gain)

    @staticmethod
    def backward(ctx: Any, t: Tensor) -> Gradients:
        saved = ctx.saved_tensors
        inputs, (_, k, v, comoment) = saved[:3], saved[3:]
        if torch.is_grad_enabled():  # this gradient will be differentiated, so its parts must depend on k and v
            _, k, v, comoment = _centered(*inputs[1:])
        q, t = heads(inputs[0]), heads(t.contiguous())
        of_comoment = ctx.gain * torch.bmm(q.mT, t)
        dv = torch.baddbmm(t.sum(-2, keepdim=True), k, of_comoment, beta=1 / v.shape[-2])
        dq, dk = torch.bmm(t, _turned(ctx.gain * comoment)), torch.bmm(v, _turned(of_comoment))
        return *_as_inputs(inputs, dq, dk, dv), None


def _sums(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Return v_mean, v', C, s, x and m, by head."""
    q, k, v = heads(q), heads(k), heads(v)
    v_mean, total = v.detach().mean(-2, keepdim=True), k.sum(-2, keepdim=True)
    v = v - v_mean
    moment = torch.bmm(k.mT, v)
    return [v_mean, v, moment, total, torch.bmm(q, moment), torch.bmm(q, total.mT)]


def in_range(sums: Tensor, mass: Tensor) -> bool:
    """Return whether every mass is far from the ends of its dtype's range, and every sum is finite."""
    if mass.numel() == 0:
        return True
    least = LEAST[mass.dtype]
    low, high = mass.aminmax()
    return low.item() > least and high.item() < 1 / least and isfinite(sums.sum().item())


def _divide(q: Tensor, sums: list[Tensor]) -> Tensor:
    out = torch.addcdiv(sums[0], sums[-2], sums[-1])
    return out.view(*q.shape[:-1], out.shape[-1])


class _Divide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *sums: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v, *sums)
        return _divide(q, [*sums])

    @staticmethod
    def backward(ctx: Any, t: Tensor) -> Gradients:
        saved = ctx.saved_tensors
        inputs, sums = saved[:3], saved[3:]
        _, v, moment, total, x, mass = _sums(*inputs) if torch.is_grad_enabled() else sums
        q, k, t = heads(inputs[0]), heads(inputs[1]), heads(t.contiguous()) / mass
        of_mass = (t * x).sum(-1, keepdim=True) / -mass
        of_moment = torch.bmm(q.mT, t)
        dq = torch.addcmul(torch.bmm(t, _turned(moment)), of_mass, total)
        dk = torch.baddbmm(torch.bmm(of_mass.mT, q), v, _turned(of_moment))
        return *_as_inputs(inputs, dq, dk, torch.bmm(k, of_moment)), *[None] * len(sums)


def _as_inputs(inputs: Sequence[Tensor], *gradients: Tensor) -> list[Tensor]:
    return [gradient.view(x.shape) for x, gradient in zip(inputs, gradients, strict=True)]


def _turned(matrix: Float[Tensor, "*b d e"]) -> Float[Tensor, "*b e d"]:
    """Return the transpose as a matrix of its own: some BLAS take ten times as long for x @ y.mT with a small y."""
    return matrix.mT.contiguous()
