"""Confusion: different queries that get the same row of weights (InLine, Figure 2).

    p and q are confused   if p != q and |w(p) - w(q)| < 1e-3 over the whole row

N tokens have N (N - 1) / 2 pairs. Rows are compared block by block, |a - b|^2 = |a|^2 + |b|^2 - 2 a.b in float64, so
memory holds a few blocks, whatever N is. Large weights cancel in this sum: pairs for which its rounding could decide
are compared again, as |a - b|^2 itself.
"""

from dataclasses import replace
from math import isqrt

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from softless.algebra.feature_maps import unit
from softless.backends import widen
from softless.probes.injectivity import row_distance
from softless.probes.layer import Layer

BLOCK = 2**21  # numbers in a block: 16 MB
SAME_WAY = 0.1  # unit vectors this close have a cosine above 0.995


def confusions(
    weights: Float[Tensor, "b c n m"],
    tolerance: float = 1e-3,
    *,
    q: Float[Tensor, "b c n d"] | None = None,
    real: Bool[Tensor, "b n"] | None = None,
) -> Int[Tensor, "b c"]:
    """How many pairs of rows of each matrix are closer than `tolerance`.

    Pairs whose queries `q` are equal to the bit are no confusion; those of tokens that are not `real` do not count.
    """
    samples, matrices, tokens, keys = weights.shape
    room = BLOCK // max(samples * matrices, 1)
    size = max(1, min(room // max(keys, 1), isqrt(room)))
    names = None if q is None else _fingerprints(widen(q))
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
            if names is not None:
                close &= names[:, :, rows, None] != names[:, :, None, columns]
            count += close.sum((2, 3))
    return count


def collinear_pairs(q: Float[Tensor, "b h n d"], *, real: Bool[Tensor, "b n"] | None = None) -> Int[Tensor, "b h"]:
    """How many pairs of different queries point the same way: a homogeneous phi and division confuse them."""
    return confusions(unit(q.double()), SAME_WAY, q=q, real=real)


def collinear_distance(
    layer: Layer, weights: Float[Tensor, "b c n m"], *, factor: float = 2.0
) -> Float[Tensor, "b h n"]:
    """|w(q) - w(factor q)| for each query of a layer with these weights."""
    return row_distance(weights, replace(layer, q=factor * layer.q).weights(), layer.q.shape[1])


def _are_close(a: Float[Tensor, "b c n k"], b: Float[Tensor, "b c m k"], tolerance: float) -> Bool[Tensor, "b c n m"]:
    a, b = a.double(), b.double()
    product = a @ b.mT.contiguous()  # some CPUs take ten times as long for a transposed view
    sizes = a.square().sum(-1)[..., None] + b.square().sum(-1)[..., None, :]
    square, rounding = sizes - 2 * product, (a.shape[-1] + 4) * torch.finfo(a.dtype).eps * sizes
    close = square < tolerance**2
    pairs = ((square - tolerance**2).abs() <= rounding).nonzero()
    for some in pairs.split(max(1, BLOCK // max(a.shape[-1], 1))):
        sample, matrix, row, column = some.unbind(-1)
        apart = a[sample, matrix, row] - b[sample, matrix, column]
        close[sample, matrix, row, column] = apart.square().sum(-1) < tolerance**2
    return close


def _fingerprints(q: Float[Tensor, "b c n d"]) -> Int[Tensor, "b c n"]:
    """One whole number a query, the same for equal queries: their bits, weighted and summed modulo 2^64."""
    bits = (q + 0.0).contiguous().view(torch.int64 if q.dtype == torch.float64 else torch.int32)  # -0 becomes 0
    generator = torch.Generator().manual_seed(0)
    odd = torch.randint(-(2**62), 2**62, (q.shape[-1],), generator=generator) * 2 + 1
    return (bits.long() * odd.to(q.device)).sum(-1)
