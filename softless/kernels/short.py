"""Few tokens: the weights of a head fit in registers, and no State is made.

    w_ij = f_i.phi(k_j)
    divide     o = sum_j w_ij v_j / sum_j w_ij                                    the mean of v where that is 0
    subtract   o = v_mean + gain sum_j (w_ij - mean_j w_ij) (v_j - v_mean)
    none       o = gain sum_j w_ij v_j

One program a key head loads each tensor once and loops over nothing. Normalizers are sums of the weights as they are
rounded, so a row that should sum to one does. Subtraction is relative to what keys have in common (`reference`) before
they are rounded, unless they are exact as they come.
"""

import triton
import triton.language as tl

from softless.kernels.arithmetic import ONES, column_sums, factor, product, summed
from softless.kernels.features import feature
from softless.kernels.launch import SIZES
from softless.kernels.mask import visible
from softless.kernels.query import TINY, contrast
from softless.kernels.reference import typical
from softless.kernels.rows import load, store


@triton.jit(do_not_specialize=SIZES)
def short_kernel(q, k, v, out, mask, N, M, G, scale, t, GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
                 BD: tl.constexpr, BE: tl.constexpr, T: tl.constexpr, PHI_Q: tl.constexpr, PHI_K: tl.constexpr,
                 READER: tl.constexpr, CONSTANT: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """At most T queries and T keys; no exponential features, which would need a shift."""
    program = tl.program_id(0).to(tl.int64)
    b, g = program // G, program % G
    tokens, columns, channels = tl.arange(0, T), tl.arange(0, BD), tl.arange(0, BE)
    seen = visible(mask, b, tokens, M)
    of_keys, of_values = seen[:, None] & (columns < D)[None, :], seen[:, None] & (channels < E)[None, :]
    keys = feature(load(k, b, g, tokens, columns, of_keys), t, D, PHI_K)
    values = factor(load(v, b, g, tokens, channels, of_values), DTYPE)
    if READER == "subtract" and PHI_K != "identity":
        keys -= typical(k, mask, b, g, 0, M, t, columns, D, PHI_K)[None, :]
    keys = factor(keys, DTYPE)
    n = tl.maximum(tl.sum(seen.to(tl.float32)), 1.0)
    ones = factor(tl.full((T, ONES), 1.0, tl.float32), DTYPE)
    v_mean = summed(column_sums(values, tl.zeros((BE, ONES), tl.float32), DTYPE))[None, :] / n
    for member in range(GROUP):
        h = g * GROUP + member
        here = (tokens < N)[:, None]
        x = load(q, b, h, tokens, columns, here & (columns < D)[None, :])
        f = feature(x, t, D, PHI_Q)
        f = factor(contrast(f, D, PHI_K, READER == "subtract"), DTYPE)
        weights = product(f, tl.trans(keys), tl.zeros((T, T), tl.float32), DTYPE) + (1.0 if CONSTANT else 0.0)
        if READER == "subtract":
            weights -= tl.sum(tl.where(seen[None, :], weights, 0.0), 1)[:, None] / n
        weights = factor(tl.where(seen[None, :], weights, 0.0), DTYPE)
        o = product(weights, values, tl.zeros((T, BE), tl.float32), DTYPE)
        total = summed(product(weights, ones, tl.zeros((T, ONES), tl.float32), DTYPE))[:, None]
        if READER == "divide":
            alive = tl.abs(total) > TINY
            o = tl.where(alive, o * (1.0 / tl.where(alive, total, 1.0)), v_mean)
        elif READER == "subtract":
            o = v_mean + (o - total * v_mean) * (scale / n)
        else:
            o *= scale
        store(out, b, h, tokens, channels, here & (channels < E)[None, :], o)
