"""A mask as a model wrote it, as its simplest equal: a causal order, hidden keys, or a bias of minus infinity.

    visible_ij = j <= i                    is_causal
    visible_ij = key_mask_j                key_mask, the same for every query
    visible_ij = both                      both
    anything else, or scores added to      bias

A number below -5000 is minus infinity too: e to that power is 0 even in float64, and libraries use such numbers. A
query that sees no key weighs nothing here, where theirs weighs all keys alike: it is padding, read by no one.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from softless.algebra.masks import causal

FAR = -5000.0


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
        return Hidden(bias)
    return from_visible(seen, batch, queries)


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
