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

from softless.kernels.common.arithmetic import ONES, factor, product, summed
from softless.kernels.common.features import feature
from softless.kernels.common.launch import SIZES
from softless.kernels.common.mask import visible
from softless.kernels.common.reference import typical
from softless.kernels.common.rows import keep, load, store
from softless.kernels.parallel.query import TINY, contrast


@triton.jit(do_not_specialize=SIZES)
def short_kernel(q, k, v, out, mask, N, M, G, scale, t, GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
                 BD: tl.constexpr, BE: tl.constexpr, T: tl.constexpr, KEYS: tl.constexpr, PHI_Q: tl.constexpr,
                 PHI_K: tl.constexpr, READER: tl.constexpr, SIGNED: tl.constexpr, CONSTANT: tl.constexpr,
                 DTYPE: tl.constexpr):  # fmt: skip
    """At most KEYS keys, T queries at a time; no exponential features, which would need a shift, and no division whose
    mass may cancel.
    """
    tl.static_assert(not SIGNED)
    program = tl.program_id(0).to(tl.int64)
    b, g = program // G, program % G
    tokens, columns, channels = tl.arange(0, KEYS), tl.arange(0, BD), tl.arange(0, BE)
    seen = visible(mask, b, tokens, M)
    of_keys = seen[:, None] & (columns < D)[None, :]
    keys = feature(load(k, b, g, tokens, columns, of_keys), t, D, PHI_K)
    values = factor(load(v, b, g, tokens, channels, seen[:, None] & (channels < E)[None, :]), DTYPE)
    if READER == "subtract" and PHI_K != "identity":
        keys -= typical(k, mask, b, g, 0, M, t, columns, D, PHI_K)[None, :]
    keys = factor(keep(keys, of_keys, 0.0, PHI_K == "identity"), DTYPE)
    counted = factor(tl.where(seen[:, None], 1.0, tl.zeros((KEYS, ONES), tl.float32)), DTYPE)
    n = tl.maximum(tl.sum(seen.to(tl.float32)), 1.0)
    v_mean = summed(product(tl.trans(values), counted, tl.zeros((BE, ONES), tl.float32), DTYPE))[None, :] / n
    tiles = (N + T - 1) // T
    for step in range(GROUP * tiles):
        h, rows = g * GROUP + step // tiles, step % tiles * T + tl.arange(0, T)
        here = (rows < N)[:, None]
        x = load(q, b, h, rows, columns, here & (columns < D)[None, :])
        f = factor(contrast(feature(x, t, D, PHI_Q), D, PHI_K, READER == "subtract"), DTYPE)
        weights = product(f, tl.trans(keys), tl.zeros((T, KEYS), tl.float32), DTYPE)
        if READER == "subtract":
            weights -= tl.sum(weights, 1)[:, None] / n
        weights = factor(weights, DTYPE)
        o = product(weights, values, tl.zeros((T, BE), tl.float32), DTYPE)
        total = summed(product(weights, counted, tl.zeros((T, ONES), tl.float32), DTYPE))[:, None]
        if READER == "divide":
            alive = tl.abs(total) > TINY
            o = tl.where(alive, o * (1.0 / tl.where(alive, total, 1.0)), v_mean)
        elif READER == "subtract":
            o = v_mean + (o - total * v_mean) * (scale / n)
        else:
            o *= scale
        store(out, b, h, rows, channels, here & (channels < E)[None, :], o)
