"""A mask as a model wrote it, as its simplest equal: a causal order, hidden keys, or a bias of minus infinity.

    visible_ij = j <= i                    is_causal
    visible_ij = key_mask_j                key_mask, the same for every query
    visible_ij = both                      both
    anything else, or scores added to      bias

A number below -800 is minus infinity too: e to that power is 0 even in float64, and libraries use such numbers. A
query that sees no key weighs nothing here, where theirs weighs all keys alike: it is padding, read by no one.

Of attention that is written out, the bias is what was added to scale q.k. It is known up to the rounding of both, and
the same number for every key of a query changes no weight: what is that, to rounding, is no bias.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from softless.algebra.state import causal
from softless.functional import widen

FAR = -800.0
EMPTY = -3e4  # as the bias of all keys of a query: it sees none; half precision has -65504 at least


class Hidden(NamedTuple):
    """What of an attention call keeps keys from queries."""

    bias: Float[Tensor, "#b #h #n #m"] | None = None
    key_mask: Bool[Tensor, "b m"] | None = None
    is_causal: bool = False


def from_bias(bias: Float[Tensor, "#b #h #n #m"], batch: int, queries: int) -> Hidden:
    """Of what is added to scores."""
    bias = torch.where(bias < FAR, -torch.inf, bias)
    seen = bias > -torch.inf
    if torch.where(seen, bias, 0.0).any():
        keys = seen.any(2).any(1)  # [b, M]
        return Hidden(bias, key_mask=None if keys.all() else keys.expand(batch, bias.shape[3]))
    return from_visible(seen, batch, queries)


def from_scores(
    scores: Float[Tensor, "b h n m"], q: Float[Tensor, "b h n d"], k: Float[Tensor, "b h m d"], scale: float, eps: float
) -> Hidden:
    """Of the scores that reached a softmax; `eps` is the unit of rounding they were computed in."""
    if not scores.numel():
        return Hidden()
    q, k, scores = widen(q), widen(k), widen(scores)
    plain = scale * (q @ k.mT)
    bias = scores - plain
    top, most = bias.amax(-1, keepdim=True), scores.amax(-1, keepdim=True)
    masked = (bias - top < FAR).any() | (top < EMPTY)  # else the same low number for all keys hides none of them
    top = torch.where(masked & (top < FAR) & (most < FAR), 0.0, top)  # a query that sees no key
    seen = bias - top >= FAR
    least = torch.where(seen, bias, torch.inf).amin(-1, keepdim=True)
    middle = torch.where(seen.any(-1, keepdim=True), (top + least) / 2, 0.0)
    size = q.norm(dim=-1)[..., None] * k.norm(dim=-1)[..., None, :]
    noise = 4 * eps * (scores.abs() + plain.abs()) + q.shape[-1] * torch.finfo(q.dtype).eps * abs(scale) * size
    noise = torch.where(seen, noise, 0.0)
    plainly, alike = (torch.where(seen, x, 0.0).abs() for x in (bias, bias - middle))
    largest = noise.amax(-1, keepdim=True)  # the middle is as far off
    if ((plainly <= noise).all(-1) | (alike <= 2 * largest).all(-1)).all():
        return from_visible(seen, q.shape[0], q.shape[2])
    bias = torch.where(middle < FAR / 2, bias - middle, bias)
    return from_bias(torch.where(seen, bias, -torch.inf), q.shape[0], q.shape[2])


def from_visible(seen: Bool[Tensor, "#b #h #n m"], batch: int, queries: int) -> Hidden:
    """Of a mask that is True where a query sees a key."""
    if seen.all():
        return Hidden()
    keys = seen.any(2).any(1)  # [b, M]
    key_mask = None if keys.all() else keys.expand(batch, -1)
    rest, order = keys[:, None, None, :], causal(queries, seen.shape[3], seen.device)
    if (seen == rest).all():
        return Hidden(key_mask=key_mask)
    if (seen == rest & order).all():
        return Hidden(key_mask=key_mask, is_causal=True)
    return Hidden(torch.where(seen, 0.0, -torch.inf))
