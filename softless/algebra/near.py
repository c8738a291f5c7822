"""Near tokens by their scores, far tokens by their features, and one denominator for both.

    o_i = (sum_near e^{s_ij - m_i} v_j + c sum_far phi(q_i).phi(k_j) v_j)
          / (sum_near e^{s_ij - m_i} + c sum_far phi(q_i).phi(k_j))

m_i is the largest score of a near token, so the largest near weight is 1. It does not cancel, because far weights are
not divided by e^{m_i}; it is part of the definition. c = e^gain, one gain per head. Features are never negative, so no
sum cancels. Without near tokens c cancels, and the output is that of linear attention. Where all weights are zero, the
output is zero.

Queries are cut into blocks. A block reads the tokens around it one by one, and of all others only the sum:

    rest = sum_{j not around} phi(k_j) V_j^T          V_j = [v_j - v_ref, 1]

So the cost is linear in the number of tokens. `near_causal` and `near_around` find what is around a block.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from softless.algebra.readers import level, quotient


class Around(NamedTuple):
    """What blocks of queries see: the tokens around each block, and the sum of all others.

    A token has zero features if it is never far: a hidden one, or one of the first.
    """

    k: Float[Tensor, "*#b c m d"]
    v: Float[Tensor, "*#b c m e1"]
    phi: Float[Tensor, "*#b c m f"]
    near: Bool[Tensor, "*#b c n m"]
    far: Bool[Tensor, "*#b #c n m"]
    rest: Float[Tensor, "*#b c f e1"]


class First(NamedTuple):
    """Tokens that are never far: those of all blocks, and which query sees them."""

    k: Float[Tensor, "*#b m d"]
    v: Float[Tensor, "*#b m e1"]
    near: Bool[Tensor, "*#b #c #n m"]


class Compact:
    """Move real tokens in front of hidden ones, and back."""

    def __init__(self, real: Tensor | None, like: Tensor):
        heads = [1] * (like.ndim - 3)
        self.order = None
        if real is None:
            self.count = torch.full((1, *heads), like.shape[-2], device=like.device)
            return
        self.real, self.count = real.view(real.shape[0], *heads, -1, 1), real.sum(-1).view(-1, *heads)
        self.order = (~self.real).long().argsort(dim=-2, stable=True)

    def first_real(self, x: Tensor) -> Tensor:
        return x if self.order is None else x.take_along_dim(self.order, -2)

    def back(self, x: Tensor) -> Tensor:
        """Return tokens to their places; hidden ones become zero."""
        if self.order is None:
            return x
        return torch.where(self.real, x.take_along_dim(self.order.argsort(-2), -2), 0.0)


def weights(
    scores: Float[Tensor, "*b n m"],
    phi_q: Float[Tensor, "*b n f"],
    phi_k: Float[Tensor, "*b m f"],
    gain: Float[Tensor, "*#b 1 1"],
    near: Bool[Tensor, "*#b #n m"],
    far: Bool[Tensor, "*#b #n m"],
) -> Float[Tensor, "*b n m"]:
    """Return the explicit weights of keys that are near, far, or neither."""
    phi_q, size = _leveled(phi_q)
    close, unit = _close(scores, near, size, gain)
    both = close + unit * torch.where(far, phi_q @ phi_k.mT, 0.0)
    return quotient(both, both.sum(-1, keepdim=True))


def read(
    q: Float[Tensor, "*b c n d"],
    phi_q: Float[Tensor, "*b c n f"],
    around: Around,
    first: First,
    gain: Float[Tensor, "*#b 1 1"],
    v_ref: Float[Tensor, "*#b 1 e"],
) -> Float[Tensor, "*b c n e"]:
    """Return the output of blocks of queries; q is scaled. Many blocks are read in several runs."""
    rows = q[..., 0, 0, 0].numel() * q.shape[-2] * around.k.shape[-2]  # scores per block
    blocks = max(_at_once(q) // max(rows, 1), 1)
    if blocks >= q.shape[-3] or torch.compiler.is_compiling():  # one graph for any length
        return _read(q, phi_q, around, first, gain, v_ref)
    outputs = []
    for start in range(0, q.shape[-3], blocks):
        run = slice(start, start + blocks)
        part = Around(*(_some(x, run) for x in around))
        near = first._replace(near=_some(first.near, run))
        outputs.append(_read(q[..., run, :, :], phi_q[..., run, :, :], part, near, gain, v_ref))
    return torch.cat(outputs, -3)


def _some(x: Tensor, run: slice) -> Tensor:
    return x if x.shape[-3] == 1 else x[..., run, :, :]


def pick(x: Float[Tensor, "*#b m d"], at: Int[Tensor, "*#b n"]) -> Float[Tensor, "*b n d"]:
    """Return the tokens at these places. torch.take_along_dim would compile for one length only."""
    batch = torch.broadcast_shapes(x.shape[:-2], at.shape[:-1])
    return x.expand(*batch, -1, -1).gather(-2, at[..., None].expand(*batch, -1, x.shape[-1]))


def with_ones(v: Float[Tensor, "*b m e"], v_ref: Float[Tensor, "*#b 1 e"]) -> Float[Tensor, "*b m e1"]:
    """Return V = [v - v_ref, 1]."""
    return F.pad(v - v_ref, (0, 1), value=1.0)


def _read(q: Tensor, phi_q: Tensor, around: Around, first: First, gain: Tensor, v_ref: Tensor) -> Tensor:
    (phi_q, size), count = _leveled(phi_q), first.k.shape[-2]
    scores, near = q @ around.k.mT, around.near
    if count:
        scores = torch.cat([q @ first.k[..., None, :, :].mT, scores], -1)
        rows = torch.broadcast_shapes(first.near.shape[:-1], near.shape[:-1])
        near = torch.cat([x.expand(*rows, -1) for x in (first.near, near)], -1)
    close, unit = _close(scores, near, size, gain[..., None, :, :])
    both = close[..., count:] + unit * torch.where(around.far, phi_q @ around.phi.mT, 0.0)
    sums = both @ around.v + unit * (phi_q @ around.rest)  # [*b, c, n, e + 1]
    if count:
        sums = sums + close[..., :count] @ first.v[..., None, :, :]
    mass = sums[..., -1:]
    return torch.where(mass == 0, 0.0, v_ref[..., None, :, :] + quotient(sums[..., :-1], mass))


def _leveled(phi_q: Tensor) -> tuple[Tensor, Tensor]:
    """Return features with largest entry 1, and the factor that was taken out."""
    return level(phi_q), phi_q.detach().amax(-1, keepdim=True)


def _close(scores: Tensor, near: Tensor, size: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of near tokens, 0 for others, and the factor of leveled products of far tokens."""
    some = near.any(-1, keepdim=True)
    largest = torch.where(near, scores, -torch.inf).amax(-1, keepdim=True)
    shifted = scores - torch.where(some, largest, 0.0)
    return torch.where(near, shifted, -torch.inf).exp(), torch.where(some, gain.exp() * size, 1.0)


def _at_once(q: Tensor) -> int:
    """Return how many scores to form at once: what the cache of a CPU holds, or the memory of a GPU."""
    return 2**20 if q.is_cpu else 2**27
