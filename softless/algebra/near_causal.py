"""Near and far tokens in causal order, carried from call to call by a state of constant size.

    near(i)   the last `window` tokens up to i, and the `first` tokens of the sequence
    far(i)    the tokens between

Token t leaves the window when token t + window comes, and joins the far ones. So a query reads the state of the far
tokens before the call, the sums of the blocks that left its window, and the blocks around it token by token:

    held | block block ... [block block] block        the last two are around the query's block if window <= block

A state holds the first tokens and the last `window` of the others as they are: keys and values. How many of them are
real follows from n, the number of tokens: padding is never held.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from softless.algebra.chunks import fold, incoming, unfold
from softless.algebra.near import Around, First, pick, read, with_ones
from softless.algebra.readers import quotient
from softless.algebra.state import NearState, State, merge, observe

FeatureMap = Callable[[Tensor], Tensor]


class Reach(NamedTuple):
    """Which tokens are near: the last `window`, and the `first` of the sequence."""

    window: int
    first: int


class Held(NamedTuple):
    """The tokens that a state holds, and those of a call after them. Places count from 1."""

    k: Float[Tensor, "*#b w+n d"]  # the window, then the new tokens
    v: Float[Tensor, "*#b w+n e"]
    place: Int[Tensor, "*#b w+n"]
    real: Bool[Tensor, "*#b w+n"]  # a token that is in the window at some time
    first_k: Float[Tensor, "*#b first d"]
    first_v: Float[Tensor, "*#b first e"]
    arrived: Int[Tensor, "*#b"]  # how many of the new tokens are real; the others come after them


def empty(k: Tensor, v: Tensor, phi_k: Tensor, reach: Reach) -> NearState:
    """Return the state of no tokens, for keys, values and features of these shapes."""
    slots, heads = reach.first + reach.window, torch.broadcast_shapes(phi_k.shape[:-2], v.shape[:-2])
    return NearState(
        torch.zeros((1,) * len(heads), dtype=torch.int64, device=k.device),
        phi_k.new_zeros(*phi_k.shape[:-2], phi_k.shape[-1]),
        v.new_zeros(*v.shape[:-2], v.shape[-1]),
        v.new_zeros(*heads, phi_k.shape[-1], v.shape[-1]),
        k.new_zeros(*k.shape[:-2], slots, k.shape[-1]),
        v.new_zeros(*v.shape[:-2], slots, v.shape[-1]),
    )


def far(state: NearState, reach: Reach) -> State:
    """Return the state of the far tokens."""
    count = (state.n - reach.first - reach.window).clamp(min=0)
    return State(count, state.k_mean, state.v_mean, state.comoment, torch.zeros_like(state.k_mean))


def hold(
    state: NearState,
    k: Float[Tensor, "*#b n d"],
    v: Float[Tensor, "*#b n e"],
    count: Int[Tensor, "*#b"],
    reach: Reach,
) -> Held:
    """Put the tokens of a call after those of a state."""
    window, first = reach
    k_all, v_all = (torch.cat([held[..., first:, :], x], -2) for held, x in ((state.keys, k), (state.values, v)))
    index = torch.arange(-window, k.shape[-2], device=k.device)
    place = state.n[..., None] + index + 1
    real = (place > first) & (index < count[..., None])
    firsts = state.keys[..., :first, :], state.values[..., :first, :]
    if k.shape[-2] and first:
        slot = torch.arange(1, first + 1, device=k.device)
        at = slot - state.n[..., None] - 1  # where the first tokens of the sequence are among the new ones
        old, new = (at < 0)[..., None], (at < count[..., None])[..., None]
        where = at.clamp(0, k.shape[-2] - 1)
        firsts = tuple(  # type: ignore[assignment]
            torch.where(old, held, torch.where(new, pick(x, where), 0.0))
            for held, x in zip(firsts, (k, v), strict=True)
        )
    return Held(k_all, v_all, place, real, *firsts, count)


def absorb(state: NearState, held: Held, phi: Float[Tensor, "*#b n f"], reach: Reach) -> NearState:
    """Return the state after the tokens of a call. `phi` are the features of the tokens that may leave the window."""
    window, leaves = reach.window, _leaving(held, phi)
    past = merge(far(state, reach), observe(phi, held.v[..., : phi.shape[-2], :], leaves))
    at = held.arrived[..., None] + torch.arange(window, device=phi.device)
    stays = (held.place.take_along_dim(at, -1) > reach.first)[..., None]
    last = (torch.where(stays, pick(x, at), 0.0) for x in (held.k, held.v))
    keys, values = (torch.cat(parts, -2) for parts in zip((held.first_k, held.first_v), last, strict=True))
    return NearState(state.n + held.arrived, past.k_mean, past.v_mean, past.comoment, keys, values)


def attend(
    q: Float[Tensor, "*b n d"],
    held: Held,
    phi_q: Float[Tensor, "*b n f"],
    phi: Float[Tensor, "*#b n f"],
    gain: Float[Tensor, "*#b 1 1"],
    state: NearState,
    reach: Reach,
    chunk: int,
) -> Float[Tensor, "*b n e"]:
    """Return the output of the tokens of a call, for scaled queries."""
    window, tokens = reach.window, q.shape[-2]
    size = min(chunk, tokens)
    back = -(-window // size) * size  # whole blocks before that of the query
    ends = (back - window, -tokens % size)
    past = far(state, reach)
    v_ref = torch.where(
        past.n[..., None, None] > 0, past.v_mean[..., None, :], held.v.detach()[..., window:, :][..., :1, :]
    )
    phi = F.pad(torch.where(_leaving(held, phi)[..., None], phi, 0.0), (0, 0, 0, window))
    keys, values, phi = (F.pad(x, (0, 0, *ends)) for x in (held.k, with_ones(held.v, v_ref), phi))
    real = F.pad(held.real, ends).unfold(-1, back + size, size)[..., None, :]  # [*b, c, 1, m]
    left = (real.shape[-3] - 1) * size  # tokens that the last block no longer sees one by one
    sums = fold(phi[..., :left, :], size).mT @ fold(values[..., :left, :], size)
    rest = torch.cat([incoming(past)[..., None, :, :].expand(*sums.shape[:-3], 1, -1, -1), sums], -3).cumsum(-3)
    apart = torch.arange(size, device=q.device)[:, None] - torch.arange(back + size, device=q.device) + back
    near = (apart >= 0) & (apart < window)
    keys, values, phi = (x.unfold(-2, back + size, size).mT for x in (keys, values, phi))
    seen = Around(keys, values, phi, near & real, ((apart >= 0) & ~near)[None], rest)
    first = First(held.first_k, with_ones(held.first_v, v_ref), _sees_first(held, reach, tokens, size))
    return unfold(read(fold(q, size), fold(phi_q, size), seen, first, gain, v_ref), tokens)


def step(
    q: Float[Tensor, "*b 1 d"],
    k: Float[Tensor, "*#b 1 d"],
    v: Float[Tensor, "*#b 1 e"],
    phi_q: FeatureMap,
    phi_k: FeatureMap,
    gain: Float[Tensor, "*#b 1 1"],
    state: NearState,
    reach: Reach,
    scale: float,
    real: Bool[Tensor, "*#b"] | None = None,
) -> tuple[Float[Tensor, "*b 1 e"], NearState]:
    """Return the output of one token, and the state after it. A hidden token gives zeros, and changes no state.

    The token that leaves the window is far from this token already, so the query reads the State after it.
    """
    (window, first), n, past = reach, state.n[..., None], far(state, reach)
    old_k, old_v = (x[..., first : first + 1, :] if window else new for x, new in ((state.keys, k), (state.values, v)))
    from_k, from_v = phi_k(old_k)[..., 0, :] - past.k_mean, old_v[..., 0, :] - past.v_mean
    leaves, before = (n - window >= first).to(v.dtype), past.n[..., None].to(v.dtype)
    share = leaves / (before + leaves).clamp(min=1)
    k_mean, v_mean = past.k_mean + share * from_k, past.v_mean + share * from_v
    comoment = past.comoment + (before * share * from_k)[..., None] * from_v[..., None, :]

    slot = torch.arange(first + window, device=q.device)
    near = torch.where(slot < first, slot <= n, slot >= window + 2 * first - n - 1)[..., None]
    arrives = ((slot == n) & (slot < first))[..., None]
    keys, values = (
        torch.where(arrives, new, torch.where(near, _shifted(held, new, reach), 0.0))
        for held, new in ((state.keys, k), (state.values, v))
    )
    features, unit = phi_q(q), gain.exp() if len(slot) else 1.0
    scores = torch.where(near.mT, scale * (q @ keys.mT), -torch.inf)
    close = (scores - scores.amax(-1, keepdim=True)).exp() if len(slot) else scores
    v_ref = torch.where((before + leaves)[..., None] > 0, v_mean[..., None, :], v)
    far_mass = unit * (before + leaves)[..., None] * (features @ k_mean[..., None])
    sums = close @ (values - v_ref) + unit * (features @ comoment) + far_mass * (v_mean[..., None, :] - v_ref)
    mass = close.sum(-1, keepdim=True) + far_mass
    out = torch.where(mass == 0, 0.0, v_ref + quotient(sums, mass))
    after = NearState(state.n + 1, k_mean, v_mean, comoment, keys, values)
    if real is None:
        return out, after
    row, matrix = real[..., None], real[..., None, None]
    shapes = real, row, row, matrix, matrix, matrix
    return torch.where(matrix, out, 0.0), NearState(*map(torch.where, shapes, after, state))


def _shifted(held: Tensor, new: Tensor, reach: Reach) -> Tensor:
    """Return the first tokens and the window after a new token: the oldest of the window leaves."""
    if reach.window == 0:
        return held
    return torch.cat([held[..., : reach.first, :], held[..., reach.first + 1 :, :], new], -2)


def _leaving(held: Held, phi: Tensor) -> Bool[Tensor, "*#b n"]:
    """Return which of the tokens with features become far during the call."""
    tokens = phi.shape[-2]
    index = torch.arange(tokens, device=phi.device)
    return held.real[..., :tokens] & (index < held.arrived[..., None])


def _sees_first(held: Held, reach: Reach, tokens: int, size: int) -> Bool[Tensor, "*#b c n first"]:
    """Return which of the first tokens of the sequence each query sees: those up to itself."""
    slot = torch.arange(1, reach.first + 1, device=held.place.device)
    seen = slot <= held.place[..., reach.window :, None]  # [*b, n, first]
    return F.pad(seen, (0, 0, 0, -tokens % size)).unflatten(-2, (-1, size))
