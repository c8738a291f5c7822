"""The parts that both chunked forms share: chunks of tokens, sums before a chunk, and the view of each query.

With v' = v - v_ref and V = [v', 1], where v_ref is a point every query of the call may know,

    sum_j q.phi(k_j) V_j = [x, mass]        sum_j V_j = [y, n]        over the tokens that the query sees

are all a reader needs: its mean is v_ref + y/n and its correlation x - mass y/n. v_ref is the mean of the incoming
state, or without one the first token that the mask keeps. A later token would leak the future through rounding. Queries
before the first kept token see nothing and read zero.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from softless.algebra.readers import View
from softless.algebra.state import State, keep


def fold(x: Float[Tensor, "*b n d"], chunk: int, fill: float = 0.0) -> Float[Tensor, "*b c l d"]:
    """Cut tokens into chunks, and fill up the last chunk."""
    count = (x.shape[-2] + chunk - 1) // chunk
    return F.pad(x, (0, 0, 0, count * chunk - x.shape[-2]), value=fill).unflatten(-2, (count, chunk))


def unfold(x: Float[Tensor, "*b c l d"], tokens: int) -> Float[Tensor, "*b n d"]:
    """The inverse of `fold`."""
    return x.flatten(-3, -2)[..., :tokens, :]


def before(first: Tensor, blocks: Tensor, dim: int) -> Tensor:
    """Return what comes before each block: `first`, then every block but the last."""
    return torch.cat([first, blocks], dim).narrow(dim, 0, blocks.shape[dim])


def first_kept(x: Float[Tensor, "*b n d"], mask: Bool[Tensor, "*#b n"] | None) -> Float[Tensor, "*b 1 d"]:
    """Return the first token that the mask keeps, or the first token of a row that is all hidden.

    It is a point to measure from and cancels, so it needs no gradient, which would be a rounded sum over all tokens.
    """
    x = x.detach()
    return x[..., :1, :] if mask is None else x.take_along_dim(mask.int().argmax(-1, keepdim=True)[..., None], -2)


def relative(
    v: Float[Tensor, "*b n e"], mask: Bool[Tensor, "*#b n"] | None, state: State | None
) -> tuple[Float[Tensor, "*b 1 e"], Float[Tensor, "*b n e1"]]:
    """Return (v_ref, V)."""
    v = keep(v, mask)
    v_ref = first_kept(v, mask)
    if state is not None:
        v_ref = torch.where(state.n[..., None, None] > 0, state.v_mean[..., None, :], v_ref)
    return v_ref, keep(F.pad(v - v_ref, (0, 1), value=1.0), mask)


def incoming(state: State, *, centered: bool = False) -> Float[Tensor, "*b d e1"]:
    """Return sum_j phi(k_j) V_j over the tokens of a state: relative to its mean, the co-moment and the mass.

    If the keys are centered too, on the value of their mean, the mass is zero and only its gradient is left.
    """
    mean = state.k_mean - state.k_mean.detach() if centered else state.k_mean
    return torch.cat([state.comoment, (state.n[..., None] * mean)[..., None]], -1)


def view(
    sums: Float[Tensor, "*b n e1"],
    v: Float[Tensor, "*#b n e1"],
    v_ref: Tensor,
    state: State | None,
    log_gain: Tensor | None,
) -> View:
    """Return what each query sees, from [x, mass] and V."""
    x, mass = sums[..., :-1], sums[..., -1:]
    seen = v.cumsum(-2)
    n = seen[..., -1:] if state is None else seen[..., -1:] + state.n[..., None, None]
    drift = seen[..., :-1] / n.clamp(min=1)
    mean, correlation = (torch.where(n > 0, part, 0.0) for part in (v_ref + drift, x - mass * drift))
    return View(n, mass, mean, correlation, log_gain)
