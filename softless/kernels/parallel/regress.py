"""Regression: the step between observe and read (`softless.algebra.regression`), and its gradient.

    K = spread / n      C = comoment / n      A = K + r I, r = ridge trace(K) / d      W = A^-1 C
    o = v_mean + g (phi(q) - k_mean)^T W

The read pass takes W for a comoment, and g for a gain. Queries that are factors as they come (phi identity) stay so:
v_mean - g k_mean^T W stands for v_mean, with W as it enters products. Other features are centered on k_mean before they
are rounded (reader `regress centered` of the kernels).

A is inverted by the sweep operator (Beaton 1964), one channel after another, in float32: d steps of one outer product
each, whatever the ridge. A positive matrix needs no pivoting. With G the gradient of W:

    dC = A^-1 G      dA = -dC W^T      dr = trace(dA)      dphi(k)_j = (dC v'_j + S k'_j + dk_mean) / n
    S = dA + dA^T + (2 ridge / d) trace(dA) I

Where the largest variance of the keys is nothing but rounding, W is 0: such keys read the mean.
"""

import triton
import triton.language as tl

from softless.kernels.common.arithmetic import factor, precise
from softless.kernels.common.launch import SIZES
from softless.kernels.common.rows import read_square, read_state, sequence, write_spread, write_square, write_state
from softless.kernels.parallel.gradients import key_gradient_tokens, query_gradient_tokens, write_taps
from softless.kernels.parallel.observe import observe_tokens
from softless.kernels.parallel.read import ALIVE, factors_of, read_tokens

EPS = tl.constexpr(2.0**-23)
MOST = tl.constexpr(2.0**126)  # a ridge is never larger


@triton.jit
def ridges(spread, n, k_mean, ridge, D: tl.constexpr):
    """(K, r, size, tau, free, lost) of the comoment of keys with themselves, [BD, BD].

    size   the largest entry of A
    tau    trace(K) / d
    free   whether r is ridge tau, and not the least ridge with which A can be inverted
    lost   whether all keys are equal, but for rounding
    """
    lines = tl.arange(0, spread.shape[0])
    covariance = spread * (1.0 / tl.maximum(n, 1.0))
    diagonal = tl.sum(tl.where(lines[:, None] == lines[None, :], covariance, 0.0), 1)
    variance, tau = tl.max(diagonal, 0), tl.sum(diagonal, 0) * (1.0 / D)
    least = 16.0 * EPS * tl.max(tl.abs(k_mean), 0)
    lost = tl.where(variance <= tl.maximum(least * least, ALIVE), tau == tau, False)  # NaN is not lost
    wanted = tl.minimum(ridge * tau, MOST)
    size = tl.where(lost, 1.0, variance + wanted)
    floor = 4.0 * D * EPS * size
    return covariance, tl.maximum(wanted, floor), size, tau, tl.where(lost, False, wanted >= floor), lost


@triton.jit
def swept(covariance, right, r, size, lost, D: tl.constexpr, BOTH: tl.constexpr):
    """((K + r I)^-1, [BD, BD], and if BOTH, its product with `right`); 0 where it is lost, and beyond D.

    Step i replaces a_jk by a_jk - a_ji a_ik / p with p = a_ii, the rest of row and column i by itself / p, and p by
    -1 / p. One outer product does all of it, if p - 1 stands for p in its factors: only the diagonal is then too large
    by 2. No p is larger than 1, so nothing cancels. Rows are taken out by products with 0 and 1, which cost one
    instruction per number.
    """
    lines = tl.arange(0, covariance.shape[0])
    unit = lines[:, None] == lines[None, :]
    matrix = covariance * (1.0 / size) + tl.where(unit & (lines < D)[:, None], r / size, 0.0)
    matrix = tl.where(lost, tl.where(unit, 1.0, 0.0), matrix)
    for i in range(D):
        here = (lines == i).to(tl.float32)
        row = tl.sum(matrix * here[:, None], 0)
        inverse = 1.0 / tl.sum(row * here, 0)
        column = (row - here) * inverse
        matrix -= column[:, None] * (row - here)[None, :]
        if BOTH:
            right -= column[:, None] * tl.sum(right * here[:, None], 0)[None, :]
    matrix = tl.where(unit, 2.0, 0.0) - matrix
    within, factor = (lines < D)[:, None] & (lines < D)[None, :], tl.where(lost, 0.0, 1.0 / size)
    return tl.where(within, factor * matrix, 0.0), tl.where((lines < D)[:, None], factor * right, 0.0)


@triton.jit
def times(a, b, sums, DTYPE: tl.constexpr):
    """a @ b + sums for a solution: exact products for float32, and for half precision 22 bits of each factor."""
    return precise(a, b, sums, tl.float32 if DTYPE == tl.float32 else tl.float16)


@triton.jit
def stored_times(a, A_ROW: tl.constexpr, b, B_ROW: tl.constexpr, B_COLUMN: tl.constexpr, D: tl.constexpr,
                 K: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                 DTYPE: tl.constexpr):  # fmt: skip
    """`times` of a [D, K] and b [K, E] in memory, 32 of K at a time: wide matrices have no registers for it at once."""
    lines, channels = tl.arange(0, BD), tl.arange(0, BE)
    sums = tl.zeros((BD, BE), tl.float32)
    for first in range(0, K, 32):
        inner = first + tl.arange(0, 32)
        left = tl.load(a + lines[:, None] * A_ROW + inner[None, :],
                       mask=(lines < D)[:, None] & (inner < K)[None, :], other=0.0)  # fmt: skip
        right = tl.load(b + inner[:, None] * B_ROW + channels[None, :] * B_COLUMN,
                        mask=(inner < K)[:, None] & (channels < E)[None, :], other=0.0)  # fmt: skip
        sums = times(left, right, sums, DTYPE)
    return sums


@triton.jit
def moved(v_mean, k_mean, weights, gain, FOLDED: tl.constexpr, DTYPE: tl.constexpr):
    """What stands for v_mean."""
    if FOLDED:
        return v_mean - gain * tl.sum(k_mean[:, None] * factor(weights, DTYPE).to(tl.float32), 0)
    else:
        return v_mean


@triton.jit
def predict(n, k_mean, v_mean, comoment, spread, ridge, gain, D: tl.constexpr, FOLDED: tl.constexpr,
            DTYPE: tl.constexpr):  # fmt: skip
    """(W, A^-1, what stands for v_mean).

    In float32 W comes with the sweep: a product with the inverse would leave larger residuals.
    """
    covariance, r, size, _tau, _free, lost = ridges(spread, n, k_mean, ridge, D)
    right = comoment * (1.0 / tl.maximum(n, 1.0))
    inverse, weights = swept(covariance, right, r, size, lost, D, DTYPE == tl.float32)
    if DTYPE != tl.float32:
        weights = times(inverse, right, tl.zeros_like(right), DTYPE)
    return weights, inverse, moved(v_mean, k_mean, weights, gain, FOLDED, DTYPE)


@triton.jit
def spread_gradient(spread, n, k_mean, ridge, trace, d_matrix, D: tl.constexpr):
    """(S / n, d ridge) from dA, with its trace."""
    lines = tl.arange(0, spread.shape[0])
    _covariance, _r, _size, tau, free, _lost = ridges(spread, n, k_mean, ridge, D)
    d_spread = d_matrix + tl.trans(d_matrix)
    d_spread += tl.where(lines[:, None] == lines[None, :], tl.where(free, 2.0 * ridge * trace / D, 0.0), 0.0)
    return d_spread / tl.maximum(n, 1.0), tl.where(free, tau * trace, 0.0)


@triton.jit
def key_mean_gradient(weights, d_v_mean, n, gain, CENTERED: tl.constexpr):
    """d phi(k) of every key through k_mean."""
    if CENTERED:
        return -gain * tl.sum(weights * d_v_mean[None, :], 1) / tl.maximum(n, 1.0)
    else:
        return tl.sum(0.0 * weights, 1)


@triton.jit
def predict_gradient(n, k_mean, spread, weights, inverse, d_weights, d_v_mean, ridge, gain, D: tl.constexpr,
                     CENTERED: tl.constexpr, FOLDED: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """(d comoment, S / n, d phi(k) of every key through k_mean, d ridge, d gain).

    d_weights is sum_i f_i do_i^T over the queries, and d_v_mean sum_i do_i.
    """
    if FOLDED:
        d_weights -= k_mean[:, None] * d_v_mean[None, :]
    d_covariance = times(inverse, gain * d_weights, tl.zeros_like(d_weights), DTYPE)
    d_matrix = times(-d_covariance, tl.trans(weights), tl.zeros_like(spread), DTYPE)
    trace = -tl.sum(d_covariance * weights)
    d_spread, d_ridge = spread_gradient(spread, n, k_mean, ridge, trace, d_matrix, D)
    d_key = key_mean_gradient(weights, d_v_mean, n, gain, CENTERED)
    return d_covariance / tl.maximum(n, 1.0), d_spread, d_key, d_ridge, tl.sum(d_weights * weights)


@triton.jit(do_not_specialize=SIZES)
def solve_kernel(records, solved, inverses, factors, H, ridge, scale, GROUP: tl.constexpr, NUMBERS: tl.constexpr,
                 SOLVED: tl.constexpr, SQUARE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
                 BE: tl.constexpr, FOLDED: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """One program per head that has a W of its own: each key head, or each query head if its ridge or gain differ."""
    program = tl.program_id(0).to(tl.int64)
    record, inverse_at = records + program // GROUP * NUMBERS, inverses + program * SQUARE
    n, k_mean, v_mean, comoment, shift = read_state(record, D, E, BD, BE, D)
    spread = read_square(record + E, E + D, D, BD)
    ridge, gain = factors_of(factors, program % H, ridge, scale)
    covariance, r, size, _tau, _free, lost = ridges(spread, n, k_mean, ridge, D)
    right, count = comoment / tl.maximum(n, 1.0), tl.maximum(n, 1.0)
    inverse, weights = swept(covariance, right, r, size, lost, D, DTYPE == tl.float32)
    write_square(inverse_at, inverse, D)
    if DTYPE != tl.float32:
        tl.debug_barrier()
        weights = stored_times(inverse_at, D, record, E + D, 1, D, D, E, BD, BE, DTYPE) / count
    v_mean = moved(v_mean, k_mean, weights, gain, FOLDED, DTYPE)
    write_state(solved + program * SOLVED, n, k_mean, v_mean, weights, shift, D, E)


@triton.jit(do_not_specialize=SIZES)
def solve_gradient_kernel(records, solved, inverses, gradients, d_records, d_factors, factors, H, ridge, scale,
                          GROUP: tl.constexpr, NUMBERS: tl.constexpr, SOLVED: tl.constexpr, SQUARE: tl.constexpr,
                          D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                          CENTERED: tl.constexpr, FOLDED: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """The gradient of what was observed from that of W; programs as in `solve_kernel`.

    The factors of a product are written where the result will be, and read from there.
    """
    program = tl.program_id(0).to(tl.int64)
    record, d_record, state = (
        records + program // GROUP * NUMBERS,
        d_records + program * NUMBERS,
        solved + program * SOLVED,
    )
    n, k_mean, _v_mean, _comoment, shift = read_state(record, D, E, BD, BE, D)
    _n, _k_mean, _v_mean, weights, _shift = read_state(state, D, E, BD, BE)
    _n, _d_k, d_v_mean, d_weights, _shift = read_state(gradients + program * SOLVED, D, E, BD, BE)
    first, gain = factors_of(factors, program % H, ridge, scale)
    if FOLDED:
        d_weights -= k_mean[:, None] * d_v_mean[None, :]
    if factors is not None:
        tl.store(d_factors + 2 * program + 1, scale * tl.sum(d_weights * weights))
    d_key = key_mean_gradient(weights, d_v_mean, n, gain, CENTERED)
    write_state(d_record, n, d_key, d_v_mean, gain * d_weights, shift, D, E, D)
    tl.debug_barrier()
    d_covariance = stored_times(inverses + program * SQUARE, D, d_record, E + D, 1, D, D, E, BD, BE, DTYPE)
    trace = -tl.sum(d_covariance * weights)
    tl.debug_barrier()
    write_state(d_record, n, d_key, d_v_mean, d_covariance / tl.maximum(n, 1.0), shift, D, E, D)
    tl.debug_barrier()
    d_matrix = stored_times(d_record, E + D, state, 1, E, D, E, D, BD, BD, DTYPE) * -tl.maximum(n, 1.0)
    d_spread, d_ridge = spread_gradient(
        read_square(record + E, E + D, D, BD), n, k_mean, first, trace, d_matrix, D)  # fmt: skip
    write_spread(d_record, d_key, d_spread, D, E)
    if factors is not None:
        tl.store(d_factors + 2 * program, d_ridge)


@triton.jit(do_not_specialize=SIZES)
def whole_regress_kernel(q, k, v, out, taps, mask, q_offsets, k_offsets, factors, N, M, G, ridge, scale, t, picture,
                         GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                         T: tl.constexpr, PHI_Q: tl.constexpr, PHI_K: tl.constexpr, READER: tl.constexpr,
                         SIGNED: tl.constexpr, CONSTANT: tl.constexpr, DTYPE: tl.constexpr,
                         FOLDED: tl.constexpr):  # fmt: skip
    """Observe, solve, then read: `short.whole_kernel` for regression."""
    program = tl.program_id(0).to(tl.int64)
    b, g = program // G, program % G
    a, N = sequence(q_offsets, b, N)
    b, M = sequence(k_offsets, b, M)
    n, k_mean, v_mean, comoment, shift, spread = observe_tokens(
        k, v, mask, b, g, 0, M, t, D, E, BD, BE, T, PHI_K, True, DTYPE, False, True)  # fmt: skip
    if factors is None:
        weights, _inverse, mean = predict(n, k_mean, v_mean, comoment, spread, ridge, scale, D, FOLDED, DTYPE)
        weights = factor(weights, DTYPE)
        for member in range(GROUP):
            read_tokens(q, v, out, taps, mask, a, g * GROUP + member, 0, N, n, k_mean, mean, weights, shift, 1.0, scale,
                        t, picture, D, E, BD, BE, T, PHI_Q, PHI_K, READER, SIGNED, CONSTANT, DTYPE, False)  # fmt: skip
    else:
        for member in range(GROUP):
            first, gain = factors_of(factors, g * GROUP + member, ridge, scale)
            weights, _inverse, mean = predict(n, k_mean, v_mean, comoment, spread, first, gain, D, FOLDED, DTYPE)
            read_tokens(q, v, out, taps, mask, a, g * GROUP + member, 0, N, n, k_mean, mean, factor(weights, DTYPE),
                        shift, 1.0, gain, t, picture, D, E, BD, BE, T, PHI_Q, PHI_K, READER, SIGNED, CONSTANT, DTYPE,
                        False)  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def whole_regress_gradient_kernel(q, k, v, d_out, taps, mask, q_offsets, k_offsets, d_q, d_k, d_v, d_taps, d_factors,
                                  factors, N, M, G, ridge, scale, t, picture, GROUP: tl.constexpr, D: tl.constexpr,
                                  E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, T: tl.constexpr,
                                  PHI_Q: tl.constexpr, PHI_K: tl.constexpr, READER: tl.constexpr,
                                  SIGNED: tl.constexpr, CONSTANT: tl.constexpr, DTYPE: tl.constexpr,
                                  STAGES: tl.constexpr, CENTERED: tl.constexpr, FOLDED: tl.constexpr):  # fmt: skip
    """Observe and solve again, then run both passes of `gradients`, with the gradient of the solution between them.

    Query heads that share a key head, and have neither a ridge nor a gain of their own, share W and its gradient.
    """
    EACH: tl.constexpr = GROUP if factors is not None else 1  # gradients of solutions
    TOGETHER: tl.constexpr = GROUP // EACH
    program = tl.program_id(0).to(tl.int64)
    b, g = program // G, program % G
    a, N = sequence(q_offsets, b, N)
    b, M = sequence(k_offsets, b, M)
    n, k_mean, v_mean, comoment, shift, spread = observe_tokens(
        k, v, mask, b, g, 0, M, t, D, E, BD, BE, T, PHI_K, True, DTYPE, False, True)  # fmt: skip
    d_key, d_v_mean = tl.zeros((BD,), tl.float32), tl.zeros((BE,), tl.float32)
    d_comoment, d_spread = tl.zeros((BD, BE), tl.float32), tl.zeros((BD, BD), tl.float32)
    for each in range(EACH):
        first, gain = factors_of(factors, g * GROUP + each, ridge, scale)
        weights, inverse, _mean = predict(n, k_mean, v_mean, comoment, spread, first, gain, D, False, DTYPE)
        d_weights, d_sum = tl.zeros((BD, BE), tl.float32), tl.zeros((BE,), tl.float32)
        for member in range(TOGETHER):
            _of_k, of_v, of_weights, _d_share, _d_scale = query_gradient_tokens(
                q, d_out, d_q, None, 0, a, g * GROUP + each * TOGETHER + member, 0, N, n, k_mean,
                factor(weights, DTYPE), shift, 1.0, gain, t, D, E, BD, BE, T, PHI_Q, PHI_K, READER, SIGNED, CONSTANT,
                DTYPE, False, STAGES)  # fmt: skip
            d_weights, d_sum = d_weights + of_weights, d_sum + of_v
        of_comoment, of_spread, of_key, d_ridge, d_gain = predict_gradient(
            n, k_mean, spread, weights, inverse, d_weights, d_sum, first, gain, D, CENTERED, FOLDED, DTYPE)  # fmt: skip
        d_comoment, d_spread = d_comoment + of_comoment, d_spread + of_spread
        d_key, d_v_mean = d_key + of_key, d_v_mean + d_sum
        if factors is not None:
            tl.store(d_factors + 2 * (program * GROUP + each), d_ridge)
            tl.store(d_factors + 2 * (program * GROUP + each) + 1, scale * d_gain)
    sums = key_gradient_tokens(
        k, v, d_out, taps, mask, d_k, d_v, b, g, 0, M, n, k_mean, v_mean, shift, d_key, d_v_mean,
        factor(d_comoment, DTYPE), factor(d_spread, DTYPE), t, picture, D, E, BD, BE, T, PHI_K, DTYPE,
        False)  # fmt: skip
    if taps is not None:
        write_taps(d_taps + program * 9 * E, sums, E)
