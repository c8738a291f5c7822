"""Short sequences: one program does a key head from end to end, and nothing is written in between.

Windows of 49 tokens and pictures of 197 are bound by launches and latency. `whole_kernel` and `whole_gradient_kernel`
are one launch forward and one backward; the State and its gradient never leave the registers. The query heads that
share the key head follow one another.

`short_kernel` is for so few keys that the weights of a head fit in registers. It makes no State:

    w_ij = f_i.phi(k_j)
    divide     o = sum_j w_ij v_j / sum_j w_ij                                    the mean of v where that is 0
    subtract   o = v_mean + gain sum_j (w_ij - mean_j w_ij) (v_j - v_mean)
    none       o = gain sum_j w_ij v_j

It loads each tensor once. Normalizers are sums of the rounded weights, so a row that should sum to one does.
Subtraction takes keys relative to what they have in common (`reference`) before they are rounded, unless keys are exact
as they come.
"""

import triton
import triton.language as tl

from softless.kernels.common.arithmetic import ONES, factor, product, summed
from softless.kernels.common.features import feature
from softless.kernels.common.launch import SIZES
from softless.kernels.common.reference import typical
from softless.kernels.common.rows import keep, load, sequence, store, visible
from softless.kernels.parallel.gradients import key_gradient_tokens, query_gradient_tokens
from softless.kernels.parallel.observe import observe_tokens
from softless.kernels.parallel.read import TINY, contrast, factors_of, read_tokens


@triton.jit(do_not_specialize=SIZES)
def whole_kernel(q, k, v, out, taps, mask, q_offsets, k_offsets, factors, N, M, G, scale, t, picture,
                 GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                 T: tl.constexpr, PHI_Q: tl.constexpr, PHI_K: tl.constexpr, READER: tl.constexpr, SIGNED: tl.constexpr,
                 CONSTANT: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """Observe, then read."""
    program = tl.program_id(0).to(tl.int64)
    b, g = program // G, program % G
    a, N = sequence(q_offsets, b, N)
    b, M = sequence(k_offsets, b, M)
    n, k_mean, v_mean, comoment, shift = observe_tokens(
        k, v, mask, b, g, 0, M, t, D, E, BD, BE, T, PHI_K, READER != "none", DTYPE, False)  # fmt: skip
    comoment = factor(comoment, DTYPE)
    for member in range(GROUP):
        share, gain = factors_of(factors, g * GROUP + member, 1.0, scale)
        read_tokens(q, v, out, taps, mask, a, g * GROUP + member, 0, N, n, k_mean, v_mean, comoment, shift, share, gain,
                    t, picture, D, E, BD, BE, T, PHI_Q, PHI_K, READER, SIGNED, CONSTANT, DTYPE,
                    False)  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def whole_gradient_kernel(q, k, v, d_out, mask, q_offsets, k_offsets, d_q, d_k, d_v, d_factors, local, factors,
                          N, M, G, scale, t, GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
                          BD: tl.constexpr, BE: tl.constexpr, T: tl.constexpr, PHI_Q: tl.constexpr, PHI_K: tl.constexpr,
                          READER: tl.constexpr, SIGNED: tl.constexpr, CONSTANT: tl.constexpr, DTYPE: tl.constexpr,
                          STAGES: tl.constexpr):  # fmt: skip
    """Observe again, then run both passes of `gradients`."""
    program = tl.program_id(0).to(tl.int64)
    b, g = program // G, program % G
    a, N = sequence(q_offsets, b, N)
    b, M = sequence(k_offsets, b, M)
    n, k_mean, v_mean, comoment, shift = observe_tokens(
        k, v, mask, b, g, 0, M, t, D, E, BD, BE, T, PHI_K, READER != "none", DTYPE, False)  # fmt: skip
    comoment = factor(comoment, DTYPE)
    d_k_total, d_v_mean = tl.zeros((BD,), tl.float32), tl.zeros((BE,), tl.float32)
    d_comoment = tl.zeros((BD, BE), tl.float32)
    for member in range(GROUP):
        share, gain = factors_of(factors, g * GROUP + member, 1.0, scale)
        of_k, of_v, of_comoment, d_share, d_scale = query_gradient_tokens(
            q, d_out, d_q, None, 0, a, g * GROUP + member, 0, N, n, k_mean, comoment, shift, share, gain, t, D, E, BD,
            BE, T, PHI_Q, PHI_K, READER, SIGNED, CONSTANT, DTYPE, False, STAGES)  # fmt: skip
        if READER == "blend":
            tl.store(d_factors + 2 * (program * GROUP + member), d_share)
            tl.store(d_factors + 2 * (program * GROUP + member) + 1, scale * d_scale)
        d_k_total, d_v_mean, d_comoment = d_k_total + of_k, d_v_mean + of_v, d_comoment + of_comoment
    key_gradient_tokens(
        k, v, d_out, None, local, mask, d_k, d_v, b, g, 0, M, n, k_mean, v_mean, shift, d_k_total, d_v_mean,
        factor(d_comoment, DTYPE), None, t, None, D, E, BD, BE, T, PHI_K, DTYPE, False)  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def short_kernel(q, k, v, out, mask, q_offsets, k_offsets, N, M, G, scale, t, GROUP: tl.constexpr, D: tl.constexpr,
                 E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, T: tl.constexpr, KEYS: tl.constexpr,
                 PHI_Q: tl.constexpr, PHI_K: tl.constexpr, READER: tl.constexpr, SIGNED: tl.constexpr,
                 CONSTANT: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """At most KEYS keys, T queries at a time.

    Exponential features, which would need a shift, and divisions whose mass may cancel are not for this kernel.
    """
    tl.static_assert(not SIGNED)
    program = tl.program_id(0).to(tl.int64)
    b, g = program // G, program % G
    a, N = sequence(q_offsets, b, N)
    b, M = sequence(k_offsets, b, M)
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
        x = load(q, a, h, rows, columns, here & (columns < D)[None, :])
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
        store(out, a, h, rows, channels, here & (channels < E)[None, :], o)
