"""Readers: how a query reads a State. Every one is the mean plus a gain times the correlation.

    o = v_mean + g(q) * phi(q)^T comoment

    divide    g = 1 / (n phi(q).k_mean)      classical linear attention
    subtract  g = s / n                      InLine (eq. 4, with the authors' factor s / n)
    channel   o = v_mean + (rho(q) / (n k_mean))^T comoment     Efficient Attention, sum rho(q) = 1
    none      o = s phi(q)^T (comoment + n k_mean v_mean^T)

Division cancels any positive rescaling of phi(q): that one line is why linear attention is not
injective (InLine, Proposition 2). Subtraction does not cancel it (Proposition 3).
A query with phi(q) = 0 reads the mean, and a query that sees no token reads zero.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from softless.algebra.state import Log, State, rescale

READERS = ("divide", "subtract", "channel", "none")


class View(NamedTuple):
    """What one query sees, up to the common factor e^log_gain that kept it in range."""

    n: Int[Tensor, "*#b #n 1"] | Float[Tensor, "*#b #n 1"]  # tokens
    mass: Float[Tensor, "*b n 1"]  # n phi(q).k_mean
    v_mean: Float[Tensor, "*#b #n m"]
    correlation: Float[Tensor, "*b n m"]  # phi(q)^T comoment
    log_gain: Float[Tensor, "*#b #n 1"] | None  # None means 0


def read(
    phi_q: Float[Tensor, "*#b n d"] | Log, state: State, reader: str, scale: float = 1.0
) -> Float[Tensor, "*b n m"]:
    """Answer queries from a state."""
    total, comoment = state.n[..., None] * state.k_mean, state.comoment  # sum of phi(k): [*b, d]
    log_gain = None
    if reader == "channel":
        assert isinstance(phi_q, Tensor), "channel reads a softmax over channels, not a logarithm"
        q = per_channel(phi_q, total[..., None, :])
    elif isinstance(phi_q, Log):
        q, log_gain = settle(phi_q.value + state.shift[..., None, :])
    elif reader == "divide":
        q, units = level(phi_q), rescale(state.shift, state.shift.amax(-1, keepdim=True))
        total, comoment = total * units, comoment * units[..., None]
    else:
        q, total, comoment = phi_q, grow(total, state.shift), grow(comoment, state.shift[..., None])
    view = View(state.n[..., None, None], q @ total[..., None], state.v_mean[..., None, :], q @ comoment, log_gain)
    return answer(view, reader, scale)


def answer(view: View, reader: str, scale: float) -> Float[Tensor, "*b n m"]:
    """The readers themselves."""
    n, mass, v_mean, correlation, log_gain = view
    if reader == "divide":
        return v_mean + correlation / torch.where(mass != 0, mass, torch.inf)
    if reader == "subtract":
        return v_mean + scale * grow(correlation, log_gain) / n.clamp(min=1)
    if reader == "channel":
        return v_mean + correlation
    return scale * grow(correlation + mass * v_mean, log_gain)


def grow(x: Float[Tensor, "*b"], log_gain: Float[Tensor, "*#b"] | None) -> Float[Tensor, "*b"]:
    """x e^log_gain, where 0 stays 0 even if the gain overflows."""
    return x if log_gain is None else x * torch.where(x == 0, 0.0, log_gain).exp()


def settle(logs: Float[Tensor, "*b n d"]) -> tuple[Float[Tensor, "*b n d"], Float[Tensor, "*b n 1"]]:
    """(features / e^top, top), top the largest logarithm of each query."""
    top = logs.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(logs.dtype).min)
    return (logs - top).exp(), top


def level(phi_q: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
    """Queries with largest entry 1: division cancels the factor, so neither end of the range is lost."""
    largest = phi_q.detach().abs().amax(-1, keepdim=True)
    return phi_q / torch.where(largest > 0, largest, 1.0)


def per_channel(rho: Float[Tensor, "*#b n d"], total: Float[Tensor, "*#b #n d"]) -> Float[Tensor, "*b n d"]:
    """rho(q) / sum phi(k), channel by channel; a channel no key uses reads the mean."""
    return rho / torch.where(total != 0, total, torch.inf)
