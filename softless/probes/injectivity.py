"""Whether different queries get different rows of weights (InLine, Propositions 1 to 3).

    w(q) = w(c q)      for every c > 0, if phi is homogeneous (relu) and rows are normalized by division:
                       phi(c q).phi(k) / sum phi(c q).phi(k), the c cancels
    w(q) != w(c q)     under subtraction, if phi is injective and [phi(K), 1] has rank d + 1

Two queries collide when |w(p) - w(q)| < tolerance over the whole row; 1e-3 is the paper's (Figure 2).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from softless.functional import attention_weights
from softless.mechanisms import Mechanism


@dataclass(frozen=True)
class Collisions:
    """Pairs (q, factor q) and how many collide, with the distances between their rows.

    `key_rank` is the smallest rank of [K, 1] over the sets of keys; d + 1 is full.
    """

    pairs: int
    collisions: int
    smallest: float
    median: float
    factor: float
    tolerance: float
    key_rank: int


def collinear_collisions(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g m d"],
    mechanism: str | Mechanism,
    *,
    factor: float = 2.0,
    tolerance: float = 1e-3,
) -> Collisions:
    """Does the mechanism tell q from `factor` q? Every query of q is one pair."""
    distance = row_distance(attention_weights(q, k, mechanism), attention_weights(factor * q, k, mechanism), q.shape[1])
    ones = k.new_ones(*k.shape[:-1], 1)
    return Collisions(
        distance.numel(),
        int((distance < tolerance).sum()),
        distance.min().item(),
        distance.median().item(),
        factor,
        tolerance,
        int(torch.linalg.matrix_rank(torch.cat([k, ones], -1)).min()),
    )


def row_distance(a: Float[Tensor, "b c n m"], b: Float[Tensor, "b c n m"], heads: int) -> Float[Tensor, "b {heads} n"]:
    """|a_i - b_i| over the keys, and over a head's matrices where it has several (hydra)."""
    return (a - b).unflatten(1, (heads, -1)).square().sum((2, 4)).sqrt()


def side_by_side(weights: Float[Tensor, "b c n m"], heads: int) -> Float[Tensor, "b {heads} n k"]:
    """A query's row of each head: where a head has several matrices (hydra), their rows one after the other."""
    if weights.shape[1] == heads:
        return weights
    return weights.unflatten(1, (heads, -1)).transpose(2, 3).flatten(3)
