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

import math
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
    scores = torch.where(near, scores, -torch.inf)
    base, far_q = _against(scores.amax(-1, keepdim=True), phi_q, gain)
    both = torch.where(far, far_q @ phi_k.mT, (scores - base).exp())
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
    q = math.log2(math.e) * q  # for 2^s: on Intel's processors, e^s takes 25 times as long where s is -inf
    scores = torch.where(around.near, q @ around.k.mT, -torch.inf)
    to_first = torch.where(first.near, q @ first.k[..., None, :, :].mT, -torch.inf)
    largest = scores.amax(-1, keepdim=True)
    if to_first.shape[-1]:
        largest = torch.maximum(largest, to_first.amax(-1, keepdim=True))
    base, far_q = _against(largest, phi_q, gain[..., None, :, :])
    both = torch.where(around.far, far_q @ around.phi.mT, (scores - base).exp2())
    sums = both @ around.v + far_q @ around.rest + (to_first - base).exp2() @ first.v[..., None, :, :]
    mass = sums[..., -1:]  # of [*b, c, n, e + 1]
    return torch.where(mass == 0, 0.0, v_ref[..., None, :, :] + quotient(sums[..., :-1], mass))


def _against(largest: Tensor, phi_q: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """Return m and c phi(q); without a near score, 0 and phi(q) with largest entry 1, because c cancels there."""
    some = largest != -torch.inf
    return torch.where(some, largest, 0.0), torch.where(some, gain.exp() * phi_q, level(phi_q))


def _at_once(q: Tensor) -> int:
    """Return how many scores to form at once: what the cache of a CPU holds, or the memory of a GPU."""
    return 2**20 if q.is_cpu else 2**27
