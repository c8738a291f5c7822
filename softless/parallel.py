"""Attention over a sequence whose tokens are spread over ranks. Each rank builds a state, and the states are merged.

    not causal   every rank reads the state of all tokens
                 k_mean = sum_r (n_r/n) k_r        comoment = sum_r comoment_r + n_r (k_r - k_mean)(v_r - v_mean)^T
    causal       a rank reads the state of the ranks before it, then its own tokens in order

Ranks exchange states, d x e numbers per head, and never tokens. Ranks may hold different numbers of tokens, or none.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from softless import backends, validation
from softless.algebra.precision import autocast, full_precision, widen
from softless.algebra.state import State, merge, rescale
from softless.errors import ArgumentError, UnsupportedError
from softless.mechanisms import Mechanism
from softless.mechanisms.base import refuse_transforms, signature
from softless.mechanisms.kernelized import Kernelized

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@validation.explain_unknown_arguments
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mechanism: str | Mechanism = "inline",
    *,
    group: "ProcessGroup | None" = None,
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    inputs: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Compute `softless.attention` on a sequence whose tokens are spread over the ranks of a process group, in order.

    >>> import torch, softless
    >>> from torch import distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)       # torchrun says which
    >>> q, k, v = torch.randn(3, 2, 4, 100, 16).unbind()                # this rank's tokens, [B, H, N, d]
    >>> softless.parallel.attention(q, k, v, "inline").shape
    torch.Size([2, 4, 100, 16])
    >>> dist.destroy_process_group()

    All ranks must agree on the mechanism, the batch, the heads, the dims, and on whether k and v need gradients. The
    numbers of tokens may differ. Gradients flow through the exchange to the keys and values of every rank, so if one
    rank runs backward, all must.

    Args:
        q: This rank's queries [B, H, N, d].
        k: This rank's keys [B, G, M, d]. With `is_causal`, and for angular without `exact=True`, M must be N.
        v: This rank's values [B, G, M, e].
        mechanism: A kernelized mechanism whose features do not depend on a token's position. Others have no state
            that ranks could merge, and raise. Default: "inline".
        group: A process group. Default: None, all ranks.
        is_causal: Whether a query sees only the tokens up to its own, on this rank and the ones before. Default: False.
        key_mask: bool [B, M] of this rank's keys, True for a real token. Default: None, all real.
        scale: Factor on phi(q).phi(k). Default: None, the mechanism's own.
        inputs: Tensors that the mechanism needs beyond q, k and v, by name. Default: None.

    Returns:
        The output [B, H, N, e] of this rank's queries: what one device would compute from the full sequence.
    """
    refuse_transforms("attention over ranks")
    group = _group(group)
    q, k, v = autocast(q, k, v)
    mechanism, call = validation.prepare(
        q, k, v, mechanism, is_causal=is_causal, key_mask=key_mask, scale=scale, inputs=inputs
    )
    if mechanism.places:
        raise UnsupportedError(
            f"mechanism '{mechanism.name}' weighs a token by its position in the sequence, which a rank does not know"
        )
    if not isinstance(mechanism, Kernelized):
        raise UnsupportedError(
            f"mechanism '{mechanism.name}' keeps no state that ranks could merge: its queries need every key of every "
            "rank"
        )
    if mechanism.mixes_queries:
        raise UnsupportedError(
            f"mechanism '{mechanism.name}' weighs keys by the mean of all queries, which a rank does not know"
        )
    if (is_causal or mechanism.pairs_tokens) and q.shape[2] != k.shape[2]:
        raise ArgumentError(
            f"{q.shape[2]} queries and {k.shape[2]} keys on rank {dist.get_rank(group)}: "
            f"{'causal' if is_causal else mechanism.name} attention over ranks needs a key for every query, and a "
            "query for every key"
        )
    wide_q, wide_k, wide_v = (widen(x) for x in (q, *(backends.hide(x, key_mask) for x in (k, v))))
    with full_precision(q):
        _, own = mechanism.attend_with_state(wide_q[:, :, :0], wide_k, wide_v, None, call)
    own = own._replace(n=own.n.expand(own.v_mean.shape[:-1]))  # with or without a mask
    if is_causal:
        before = merged_before(own, group)
        spec = backends.choose(mechanism, call, q, k, v, "auto")
        route = backends.Route(mechanism, call, "auto", spec, (0, 0, 0), signature(mechanism))
        out, _ = backends.attend_with_state(route, call, q, k, v, before)
        if q.shape[2]:
            return out
        return out + (before.v_mean.sum() + q.sum()).to(out.dtype)  # a rank without tokens still joins the graph
    with full_precision(q):
        return mechanism.attend_to_state(wide_q, wide_k, wide_v, merged(own, group), call).to(q.dtype)


def merged(state: State, group: "ProcessGroup") -> State:
    """Return the state of the tokens of all ranks."""
    n, shift = state.n.clone(), state.shift.clone()
    dist.all_reduce(n, group=group)
    dist.all_reduce(shift, dist.ReduceOp.MAX, group=group)
    units = rescale(state.shift, shift)
    share = (state.n / n.clamp(min=1).to(shift.dtype))[..., None]
    k, v = state.k_mean * units, state.v_mean
    k_mean, v_mean = total((share * k, share * v), group)
    between = (state.n[..., None] * (k - k_mean))[..., :, None] * (v - v_mean)[..., None, :]
    (comoment,) = total((state.comoment * units[..., None] + between,), group)
    return State(n, k_mean, v_mean, comoment, shift)


def merged_before(state: State, group: "ProcessGroup") -> State:
    """Return the state of the tokens of all ranks before this one. The first rank gets an empty state.

    The later ranks are merged as well, as empty states: so the graph is the same on every rank, and all ranks take part
    in the backward pass.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    mine = torch.arange(ranks, device=state.n.device) == rank

    def spread(part: Tensor) -> Tensor:
        """Return [ranks, ...], zero except in this rank's row: the sum over ranks then holds every rank's part."""
        return torch.where(mine.view(-1, *(1,) * part.ndim), part, 0)

    (n,), (shift,) = (total((spread(part),), group) for part in (state.n, state.shift))
    k_mean, v_mean, comoment = total([spread(part) for part in state[1:4]], group)
    every = State(n, k_mean, v_mean, comoment, shift)
    states = [State(*(part[other] for part in every)) for other in range(ranks)]
    nothing = torch.zeros((), dtype=torch.bool, device=n.device)
    for other in range(rank, ranks):
        empty = State(*(torch.where(nothing, part, 0) for part in states[other]))
        states[other] = empty._replace(shift=torch.full_like(empty.shift, -torch.inf))
    return reduce(merge, states)


def total(parts: Sequence[Tensor], group: "ProcessGroup") -> list[Tensor]:
    """Return the sums over ranks, in one exchange."""
    flat = Total.apply(torch.cat([part.flatten() for part in parts]), group)
    return [x.view_as(part) for x, part in zip(flat.split([part.numel() for part in parts]), parts, strict=True)]


class Total(torch.autograd.Function):
    """The sum over ranks. A rank's part reaches every rank's sum, so its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: "ProcessGroup") -> Tensor:
        ctx.group = group
        total = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _group(group: "ProcessGroup | None") -> "ProcessGroup":
    if not (dist.is_available() and dist.is_initialized()):
        raise ArgumentError(
            "no process group: call torch.distributed.init_process_group first, as torchrun's programs do"
        )
    outside: object = dist.GroupMember.NON_GROUP_MEMBER  # what new_group gives a rank that it leaves out
    if not (group is None or group is outside or isinstance(group, dist.ProcessGroup)):
        raise ArgumentError(f"group is a {type(group).__name__} and must be a torch.distributed process group or None")
    group = dist.group.WORLD if group is None else group
    if group is None or dist.get_rank(group) < 0:
        raise ArgumentError(f"rank {dist.get_rank()} is not in the group that was passed")
    return group
