"""Injectivity: whether different queries get different rows of weights (InLine, Figure 2, Propositions 1 to 3).

confusion           queries p != q with |w(p) - w(q)| < 1e-3 over the whole row

softmax, subtract   w(p) = w(q)  <=>  phi(K) (phi(p) - phi(q)) = c 1      (1 and 3; softmax: phi = identity)
                    so none collide if phi is injective and [phi(K), 1] has rank D + 1, with D features
divide              w(p) = w(q)  <=   phi(p) = a phi(q), a > 0            (2: any continuous phi has such a pair)
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isqrt

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from softless.algebra.feature_maps import unit
from softless.algebra.precision import widen
from softless.algebra.state import Log
from softless.backends import hide
from softless.mechanisms import Call, Mechanism, resolve
from softless.mechanisms.linear import FeatureMapped
from softless.probes.layer import Layer

Inputs = Mapping[str, Tensor]
BLOCK = 2**21  # numbers in a block: 16 MB
SAME_WAY = 0.1  # unit vectors this close have a cosine above 0.995


def confusions(
    weights: Float[Tensor, "b c n m"],
    tolerance: float = 1e-3,
    *,
    q: Float[Tensor, "b c n d"] | None = None,
    real: Bool[Tensor, "b n"] | None = None,
) -> Int[Tensor, "b c"]:
    """Count the pairs of rows of each matrix that are closer than `tolerance`.

    Pairs whose queries `q` are equal to the bit do not count, nor do pairs with a token that is not `real`.

    Rows are compared block by block, |a - b|^2 = |a|^2 + |b|^2 - 2 a.b in float64, so that memory does not grow with
    the N (N - 1) / 2 pairs of N tokens. Large weights cancel in this sum: a pair that its rounding could decide is
    compared again, as |a - b|^2 itself.
    """
    samples, matrices, tokens, keys = weights.shape
    room = BLOCK // max(samples * matrices, 1)
    size = max(1, min(room // max(keys, 1), isqrt(room)))
    prints = None if q is None else _fingerprints(widen(q))
    count = torch.zeros(samples, matrices, dtype=torch.long, device=weights.device)
    for start in range(0, tokens, size):
        rows = slice(start, start + size)
        for other in range(start, tokens, size):
            columns = slice(other, other + size)
            close = _are_close(weights[:, :, rows], weights[:, :, columns], tolerance)
            if start == other:
                close = close.triu(1)
            if real is not None:
                close &= (real[:, rows, None] & real[:, None, columns])[:, None]
            if prints is not None:
                close &= prints[:, :, rows, None] != prints[:, :, None, columns]
            count += close.sum((2, 3))
    return count


def collinear_pairs(q: Float[Tensor, "b h n d"], *, real: Bool[Tensor, "b n"] | None = None) -> Int[Tensor, "b h"]:
    """Count the pairs of different queries that point the same way: a homogeneous phi and division confuse them."""
    return confusions(unit(q.double()), SAME_WAY, q=q, real=real)


def collinear_distance(
    layer: Layer, weights: Float[Tensor, "b c n m"], *, factor: float = 2.0
) -> Float[Tensor, "b h n"]:
    """Return |w(q) - w(factor q)| for each query of a layer with these weights.

    It is 0 for every factor > 0 if phi is homogeneous (relu) and rows are normalized by division: the factor cancels.
    """
    return row_distance(weights, replace(layer, q=factor * layer.q).weights(), layer.q.shape[1])


def row_distance(a: Float[Tensor, "b c n m"], b: Float[Tensor, "b c n m"], heads: int) -> Float[Tensor, "b {heads} n"]:
    """Return |a_i - b_i| over the keys, and over all matrices of a head that has several (hydra)."""
    return (a - b).unflatten(1, (heads, -1)).square().sum((2, 4)).sqrt()


def rows_per_head(weights: Float[Tensor, "b c n m"], heads: int) -> Float[Tensor, "b {heads} n k"]:
    """Return one row per head and query; the rows of a head with several matrices (hydra) are concatenated."""
    if weights.shape[1] == heads:
        return weights
    return weights.unflatten(1, (heads, -1)).transpose(2, 3).flatten(3)


def _are_close(a: Float[Tensor, "b c n k"], b: Float[Tensor, "b c m k"], tolerance: float) -> Bool[Tensor, "b c n m"]:
    a, b = a.double(), b.double()
    product = a @ b.mT.contiguous()  # some CPUs take ten times as long for a transposed view
    sizes = a.square().sum(-1)[..., None] + b.square().sum(-1)[..., None, :]
    square, rounding = sizes - 2 * product, (a.shape[-1] + 4) * torch.finfo(a.dtype).eps * sizes
    close = square < tolerance**2
    unsure = ((square - tolerance**2).abs() <= rounding).nonzero()
    for pairs in unsure.split(max(1, BLOCK // max(a.shape[-1], 1))):
        sample, matrix, row, column = pairs.unbind(-1)
        apart = a[sample, matrix, row] - b[sample, matrix, column]
        close[sample, matrix, row, column] = apart.square().sum(-1) < tolerance**2
    return close


def _fingerprints(q: Float[Tensor, "b c n d"]) -> Int[Tensor, "b c n"]:
    """Return one integer per query, the same for equal queries: their bits, weighted and summed modulo 2^64."""
    bits = (q + 0.0).contiguous().view(torch.int64 if q.dtype == torch.float64 else torch.int32)  # -0 becomes 0
    generator = torch.Generator().manual_seed(0)
    odd = torch.randint(-(2**62), 2**62, (q.shape[-1],), generator=generator) * 2 + 1
    return (bits.long() * odd.to(q.device)).sum(-1)


@dataclass(frozen=True)
class RankCondition:
    """The rank of [phi(K), 1] for every sample and head. The propositions need features + 1.

    A rank does not depend on the scale of keys, so it is counted in [phi(K) / c, 1], where c is the root mean square of
    the entries of phi(K): without it, small keys would be lost beside the ones, and the ones beside large keys.
    """

    features: int
    rank: Int[Tensor, "b g"]  # of [phi(K), 1]
    singular_values: Float[Tensor, "b g r"]  # of [phi(K), 1], the largest first


def rank_condition(
    k: Float[Tensor, "b g m d"],
    mechanism: str | Mechanism,
    *,
    inputs: Inputs | None = None,
    key_mask: Bool[Tensor, "b m"] | None = None,
) -> RankCondition:
    """Return the rank of [phi(K), 1] over real keys; phi is the identity for mechanisms that have none of their own."""
    k = hide(widen(k), key_mask)
    phi = hide(key_features(k, resolve(mechanism), inputs or {}), key_mask)
    values, scaled = (
        torch.linalg.svdvals(hide(torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1), key_mask))
        for x in (phi.double(), _unit_size(phi.double(), key_mask))  # float32 gives NaN for subnormal keys
    )
    return RankCondition(phi.shape[-1], count_rank(scaled, scaled[..., :1], phi), values)


def _unit_size(phi: Float[Tensor, "b g m f"], key_mask: Bool[Tensor, "b m"] | None) -> Float[Tensor, "b g m f"]:
    """Return phi(K) / c, whose entries over real keys have a mean square of 1; zero keys stay zero."""
    largest = phi.abs().amax((2, 3), keepdim=True) if phi.numel() else phi.new_ones(*phi.shape[:2], 1, 1)
    phi = phi / torch.where(largest > 0, largest, 1.0)  # squares neither overflow nor vanish
    real = phi.shape[2] if key_mask is None else key_mask.sum(1)[:, None, None, None].clamp(min=1)
    mean = phi.square().sum((2, 3), keepdim=True) / (real * phi.shape[3])
    return phi / torch.where(mean > 0, mean, 1.0).sqrt()


def key_features(k: Float[Tensor, "b g m d"], mechanism: Mechanism, inputs: Inputs) -> Float[Tensor, "b h m f"]:
    """Return phi(K). Exponentials are divided by the largest of their channel, which changes no rank."""
    if not isinstance(mechanism, FeatureMapped):
        return k
    phi = mechanism.features_k(k, Call(inputs=inputs))
    return (phi.value - phi.value.amax(-2, keepdim=True)).exp() if isinstance(phi, Log) else phi


def count_rank(
    values: Float[Tensor, "*b r"], largest: Float[Tensor, "*b 1"], of: Float[Tensor, "*b m f"]
) -> Int[Tensor, "*b"]:
    """Count the singular values that are more than rounding in a matrix like `of` with this largest one."""
    least = largest * max(of.shape[-2], of.shape[-1] + 1) * torch.finfo(of.dtype).eps
    return (values > least).sum(-1)
