"""Readers: how a query reads a State. Every one is the mean plus a gain times the correlation.

    o = v_mean + g(q) * phi(q)^T comoment

    divide    g = 1 / (n phi(q).k_mean)      classical linear attention
    subtract  g = s / n                      InLine as the authors' code has it
    contrast  g = s                          InLine's eq. 4 as printed: a sum over keys instead of their mean
    blend     g = a / (n phi(q).k_mean) + s / n     divide and subtract in one gain
    channel   o = v_mean + (rho(q) / (n k_mean))^T comoment     Efficient Attention, sum rho(q) = 1
    none      o = s phi(q)^T (comoment + n k_mean v_mean^T)

Division cancels any positive rescaling of phi(q): that one line is why linear attention is not
injective (InLine, Proposition 2). Subtraction does not cancel it (Proposition 3).
A query with phi(q) = 0, or whose mass is 0, reads the mean; a query that sees no token reads zero.

Where features may be negative, the mass is a sum that may cancel: sum_c phi(q)_c K_c over the d features, with
K = sum_j phi(k_j). It is 0 where nothing but rounding is left of it:

    |mass| <= 2 sqrt(R) eps sum_c |phi(q)_c K_c|            R = 64 + 2 d + n / 64

R counts the roundings of a term: 2 d for its two features and the sum over channels, 64 + n/64 for a sum of n tokens
in chunks of 64. Each is at most eps/2 of the term, and R of random sign add up to sqrt(R) of them (Higham and Mary
2019); the bound is four times that. Features that are never negative need no such test.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from softless.algebra.state import Log, State
from softless.errors import ArgumentError

READERS = ("divide", "subtract", "contrast", "blend", "channel", "none")


class Gains(NamedTuple):
    """The `scale` of reader `blend`: a and s, one of each per head.

    >>> import torch
    >>> from softless.algebra import Gains, observe, read
    >>> phi_k, v = torch.rand(2, 4, 10, 16), torch.randn(2, 4, 10, 8)           # [B, H, M, d], [B, H, M, e]
    >>> gains = Gains(torch.ones(4, 1, 1), torch.zeros(4, 1, 1))                # [H, 1, 1]
    >>> phi_q, state = torch.rand(2, 4, 5, 16), observe(phi_k, v)
    >>> torch.allclose(read(phi_q, state, "blend", gains), read(phi_q, state, "divide"))
    True
    """

    divide: Float[Tensor, "*#b 1 1"]
    subtract: Float[Tensor, "*#b 1 1"]


class View(NamedTuple):
    """The sums and means that a reader needs, per query. Their common factor e^log_gain is taken out."""

    n: Int[Tensor, "*#b #n 1"] | Float[Tensor, "*#b #n 1"]  # tokens
    mass: Float[Tensor, "*b n 1"]  # n phi(q).k_mean
    v_mean: Float[Tensor, "*#b #n m"]
    correlation: Float[Tensor, "*b n m"]  # phi(q)^T comoment
    log_gain: Float[Tensor, "*#b #n 1"] | None  # None means 0
    lost: Float[Tensor, "*b n 1"] | None = None  # a mass no larger is 0; None means 0


def read(
    phi_q: Float[Tensor, "*#b n d"] | Log,
    state: State,
    reader: str,
    scale: float | Gains = 1.0,
    *,
    shifted: bool = True,
    signed: bool = False,
) -> Float[Tensor, "*b n m"]:
    """Answer queries from a state. Reader `blend` takes `Gains` as its scale.

    >>> import torch
    >>> from softless.algebra import observe, read
    >>> phi_k, v = torch.rand(2, 4, 10, 16), torch.randn(2, 4, 10, 8)           # [B, H, M, d], [B, H, M, e]
    >>> read(torch.rand(2, 4, 5, 16), observe(phi_k, v), "divide").shape        # [B, H, N, e]
    torch.Size([2, 4, 5, 8])

    shifted  False says that the state's shift is zero, and saves the rescaling
    signed   True says that features may be negative, so that the mass of a division may cancel
    """
    views = (_view(phi_q, state, each, shifted, signed) for each in parts(reader))
    return answer(*views, reader=reader, scale=scale)


def parts(reader: str) -> tuple[str, ...]:
    """Return the readers whose views a reader needs."""
    return ("divide", "subtract") if reader == "blend" else (reader,)


def _view(phi_q: Tensor | Log, state: State, reader: str, shifted: bool, signed: bool) -> View:
    """Return what queries see of a state."""
    total, comoment = state.n[..., None] * state.k_mean, state.comoment  # sum of phi(k): [*b, d]
    log_gain = lost = None
    if reader == "channel":
        q = per_channel(shares(phi_q), total[..., None, :])
    elif isinstance(phi_q, Log):
        used = total.detach().abs() + comoment.detach().abs().sum(-1)  # a channel may have covariance and no mean
        q, log_gain = settle(phi_q.value + state.shift[..., None, :], used[..., None, :])
    else:
        q = level(phi_q) if reader == "divide" else phi_q
        if shifted:
            units, log_gain = settle(state.shift[..., None, :].expand_as(q), q)
            q = q * units
        if signed and reader == "divide":
            terms = q.detach().abs() @ total.detach().abs()[..., None]
            lost = rounding(terms, state.n[..., None, None], q.shape[-1])
    return View(
        state.n[..., None, None], q @ total[..., None], state.v_mean[..., None, :], q @ comoment, log_gain, lost
    )


def answer(view: View, *others: View, reader: str, scale: float | Gains) -> Float[Tensor, "*b n m"]:
    """Return the output of a reader for the views of its `parts`."""
    n, mass, v_mean, correlation, log_gain, lost = view
    if isinstance(scale, Gains):
        subtracted = scale.subtract * others[0].correlation / n.clamp(min=1)
        return v_mean + scale.divide * quotient(correlation, mass, lost) + grow(subtracted, others[0].log_gain)
    if reader == "divide":
        return v_mean + quotient(correlation, mass, lost)
    if reader == "subtract":
        return v_mean + grow(scale * correlation / n.clamp(min=1), log_gain)
    if reader == "contrast":
        return v_mean + grow(scale * correlation, log_gain)
    if reader == "channel":
        return v_mean + correlation
    return grow(scale * (correlation + mass * v_mean), log_gain)


def rounding(
    terms: Float[Tensor, "*b n 1"], n: Int[Tensor, "*#b #n 1"] | Float[Tensor, "*#b #n 1"], features: int
) -> Float[Tensor, "*b n 1"]:
    """Return what rounding alone may leave of a mass whose terms add up to `terms` in absolute value."""
    roundings = 64 + 2 * features + n.to(terms.dtype) / 64
    return 2 * torch.finfo(terms.dtype).eps * roundings.sqrt() * terms


def empty(mass: Float[Tensor, "*b n 1"], lost: Float[Tensor, "*b n 1"] | None) -> Bool[Tensor, "*b n 1"]:
    """Return whether a mass is 0."""
    return mass == 0 if lost is None else (mass == 0) | (mass.abs() <= lost)


def quotient(
    x: Float[Tensor, "*b n m"], mass: Float[Tensor, "*#b n 1"], lost: Float[Tensor, "*#b n 1"] | None = None
) -> Float[Tensor, "*b n m"]:
    """Return x / mass, and 0 where the mass is 0. A mass too small for a finite gradient gets no gradient."""
    none = empty(mass, lost)
    live = alive(mass) if lost is None else alive(mass) & ~none
    mass = torch.where(live, mass, torch.where(none, torch.inf, mass).detach())
    return (torch.where(live, x, x.detach()) if x.requires_grad else x) / mass


def alive(size: Float[Tensor, "*b"]) -> Bool[Tensor, "*b"]:
    """Return whether 1/size is finite with room to spare: size is above 2^26 times the smallest normal number."""
    return size.abs() > 2**26 * torch.finfo(size.dtype).tiny


def grow(x: Float[Tensor, "*b"], log_gain: Float[Tensor, "*#b"] | None) -> Float[Tensor, "*b"]:
    """Return x e^log_gain, computed in two steps so that only the result can overflow; 0 stays 0."""
    if log_gain is None:
        return x
    half = (log_gain / 2).exp()
    half = torch.where((x == 0) & (half * half == torch.inf), 0.0, half)
    return x * half * half


def settle(
    logs: Float[Tensor, "*b n d"], partner: Float[Tensor, "*#b #n d"]
) -> tuple[Float[Tensor, "*b n d"], Float[Tensor, "*b n 1"]]:
    """Return (e^logs / e^top, top), with top the largest logarithm of the channels whose partner is not 0."""
    floor = torch.finfo(logs.dtype).min / 4
    logs = torch.where(partner != 0, logs.clamp(min=floor), floor)
    top = logs.detach().amax(-1, keepdim=True)
    return (logs - top).exp(), top


def level(phi_q: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
    """Return queries with largest entry 1. The division cancels the factor, and no small entry underflows."""
    largest = phi_q.detach().abs().amax(-1, keepdim=True)
    if phi_q.requires_grad:
        phi_q = torch.where(alive(largest), phi_q, phi_q.detach())
    return phi_q / torch.where(largest > 0, largest, 1.0)


def shares(phi_q: Float[Tensor, "*b n d"] | Log) -> Float[Tensor, "*b n d"]:
    """Return phi_q, a softmax over channels, for reader `channel`; raise if it is a logarithm."""
    if isinstance(phi_q, Log):
        raise ArgumentError("reader 'channel' needs phi_q as a softmax over channels, got its logarithm")
    return phi_q


def per_channel(rho: Float[Tensor, "*#b n d"], total: Float[Tensor, "*#b #n d"]) -> Float[Tensor, "*b n d"]:
    """Return rho(q) / sum phi(k), channel by channel; a channel that no key uses reads the mean."""
    return rho / torch.where(total != 0, total, torch.inf)
