"""Regression: the step between observe and read (`softless.algebra.regression`), and its gradient.

    K = spread / n      C = comoment / n      A = K + r I, r = ridge trace(K) / d      W = A^-1 C
    o = v_mean + g (phi(q) - k_mean)^T W

The read pass takes W for a comoment, and g for a gain. Queries that are factors as they come (phi identity) stay so:
v_mean - g k_mean^T W stands for v_mean, with W as it enters products. Other features are centered on k_mean before they
are rounded (reader `regress centered` of the kernels).

A is inverted by the sweep operator (Beaton 1964), four channels at a time, in float32: d / 4 steps of one product each,
whatever the ridge. A positive matrix needs no pivoting. With G the gradient of W:

    dC = A^-1 G      dA = -dC W^T      dr = trace(dA)      dphi(k)_j = (dC v'_j + S k'_j + dk_mean) / n
    S = dA + dA^T + (2 ridge / d) trace(dA) I

Where keys hardly vary in some direction, A^-1 is as large as 1 / r, and so are terms of dphi(k) and dv that nearly
cancel. They only cancel as far as K, C and the gradients are made of the same rounded keys. So where keys are few for
their channels, their products have more bits than the inputs (KEYS). In float32 the terms also need A W = C, and a
product with the inverse does not keep it well enough: `predict` corrects W once, by W + A^-1 (C - A W).

Where the largest variance of the keys is nothing but rounding, W is 0: such keys read the mean.
"""

import triton
import triton.language as tl

from softless.kernels.common.arithmetic import factor, precise
from softless.kernels.common.launch import SIZES
from softless.kernels.common.rows import read_square, read_state, sequence, write_spread, write_square, write_state
from softless.kernels.parallel.gradients import key_gradient_tokens, query_gradient_tokens
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
def rows_of_four(x):
    """The four rows of x [4, n], [n] each."""
    even, odd = tl.split(tl.permute(tl.reshape(x, (2, 2, x.shape[1])), (0, 2, 1)))
    first, third = tl.split(tl.permute(even, (1, 0)))
    second, fourth = tl.split(tl.permute(odd, (1, 0)))
    return first, second, third, fourth


@triton.jit
def panel(x, block, parity):
    """Rows 8 i + t + (0, 2, 4, 6) of x as [4, n]; `block` [rows / 8] is 1 at i and `parity` [2] at t, else 0.

    In the layout that Triton gives to 64 x 64 numbers and four warps, no part of this sum goes from warp to warp.
    """
    eight = tl.sum(tl.reshape(x, (x.shape[0] // 8, 8, x.shape[1])) * block[:, None, None], 0)
    return tl.sum(tl.reshape(eight, (4, 2, x.shape[1])) * parity[None, :, None], 1)


@triton.jit
def entry(row, at):
    """Number `at` of a row [4]."""
    return tl.sum(tl.where(tl.arange(0, 4) == at, row, 0.0), 0)


@triton.jit
def divided(b, p):
    """P^-1 b for the four vectors in b, by elimination; p has the rows of P [4, 4], positive definite."""
    p11, p12, p13 = entry(p[1], 1), entry(p[1], 2), entry(p[1], 3)
    p22, p23, p33 = entry(p[2], 2), entry(p[2], 3), entry(p[3], 3)
    by0 = 1.0 / entry(p[0], 0)
    p01, p02, p03 = entry(p[0], 1), entry(p[0], 2), entry(p[0], 3)
    l1, l2, l3 = p01 * by0, p02 * by0, p03 * by0
    p11, p12, p13 = p11 - l1 * p01, p12 - l1 * p02, p13 - l1 * p03
    p22, p23, p33 = p22 - l2 * p02, p23 - l2 * p03, p33 - l3 * p03
    by1 = 1.0 / p11
    m2, m3 = p12 * by1, p13 * by1
    p22, p23, p33 = p22 - m2 * p12, p23 - m2 * p13, p33 - m3 * p13
    by2 = 1.0 / p22
    n3 = p23 * by2
    b1 = b[1] - l1 * b[0]
    b2 = b[2] - l2 * b[0] - m2 * b1
    x3 = (b[3] - l3 * b[0] - m3 * b1 - n3 * b2) * (1.0 / (p33 - n3 * p23))
    x2 = b2 * by2 - n3 * x3
    x1 = b1 * by1 - m2 * x2 - m3 * x3
    return b[0] * by0 - l1 * x1 - l2 * x2 - l3 * x3, x1, x2, x3


@triton.jit
def swept(covariance, r, size, lost, D: tl.constexpr):
    """(K + r I)^-1, [BD, BD]; 0 where it is lost, and beyond D.

    A step takes the rows S of four channels. With R = a_S and P = a_SS, it replaces a by a - R^T P^-1 R, the rows S and
    the columns S by P^-1 R, and P by -P^-1. One product does all of it, if P - I stands for P in its factors: only the
    diagonal is then too large by 2. No entry of a positive matrix becomes larger on the way, so nothing cancels.
    """
    SIZE: tl.constexpr = covariance.shape[0]
    lines, blocks, parities = tl.arange(0, SIZE), tl.arange(0, SIZE // 8), tl.arange(0, 2)
    unit = lines[:, None] == lines[None, :]
    matrix = covariance * (1.0 / size) + tl.where(unit, tl.where(lines < D, r / size, 1.0)[:, None], 0.0)
    matrix = tl.where(lost, tl.where(unit, 1.0, 0.0), matrix)
    for step in range((D + 7) // 8 * 2):
        block, parity = (blocks == step // 2).to(tl.float32), (parities == step % 2).to(tl.float32)
        pivots = step // 2 * 8 + step % 2 + 2 * tl.arange(0, 4)
        rows = panel(matrix, block, parity)
        corner = rows_of_four(tl.trans(panel(tl.trans(rows), block, parity)))
        rows = rows_of_four(rows - (pivots[:, None] == lines[None, :]).to(tl.float32))
        columns = divided(rows, corner)
        for at in tl.static_range(4):
            matrix -= columns[at][:, None] * rows[at][None, :]
    matrix = tl.where(unit, 2.0, 0.0) - matrix
    within = (lines < D)[:, None] & (lines < D)[None, :]
    return tl.where(within, tl.where(lost, 0.0, 1.0 / size) * matrix, 0.0)


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
    """(W, A^-1, what stands for v_mean)."""
    covariance, r, size, _tau, _free, lost = ridges(spread, n, k_mean, ridge, D)
    right = comoment * (1.0 / tl.maximum(n, 1.0))
    inverse = swept(covariance, r, size, lost, D)
    weights = times(inverse, right, tl.zeros_like(right), DTYPE)
    if DTYPE == tl.float32:
        residual = right - r * weights - times(covariance, weights, tl.zeros_like(right), DTYPE)
        weights = times(inverse, residual, weights, DTYPE)
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


@triton.jit
def read_parts(parts, splits, NUMBERS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
               BE: tl.constexpr):  # fmt: skip
    """(n, k_mean, v_mean, comoment, spread) of all splits of a head: `observe.merge_kernel` by one program."""
    ROW: tl.constexpr = E + D
    columns, channels = tl.arange(0, BD), tl.arange(0, BE)
    k_first = tl.load(parts + D * ROW + columns, mask=columns < D, other=0.0)
    v_first = tl.load(parts + D * ROW + D + channels, mask=channels < E, other=0.0)
    comoment, spread = tl.zeros((BD, BE), tl.float32), tl.zeros((BD, BD), tl.float32)
    total, k_sum, v_sum = 0.0, tl.zeros((BD,), tl.float32), tl.zeros((BE,), tl.float32)
    for s in tl.range(splits, num_stages=3):
        n, k_mean, v_mean, of_values, _shift = read_state(parts + s * NUMBERS, D, E, BD, BE, D)
        of_keys = read_square(parts + s * NUMBERS + E, ROW, D, BD)
        k_step, v_step = k_mean - k_first, v_mean - v_first
        comoment += of_values + (n * k_step)[:, None] * v_step[None, :]
        spread += of_keys + (n * k_step)[:, None] * k_step[None, :]
        total, k_sum, v_sum = total + n, k_sum + n * k_step, v_sum + n * v_step
    k_step, v_step = k_sum / tl.maximum(total, 1.0), v_sum / tl.maximum(total, 1.0)
    comoment, spread = comoment - k_sum[:, None] * v_step[None, :], spread - k_sum[:, None] * k_step[None, :]
    return total, k_first + k_step, v_first + v_step, comoment, spread


@triton.jit(do_not_specialize=SIZES)
def solve_kernel(parts, records, solved, inverses, factors, H, splits, ridge, scale, GROUP: tl.constexpr,
                 NUMBERS: tl.constexpr, SOLVED: tl.constexpr, SQUARE: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
                 BD: tl.constexpr, BE: tl.constexpr, FOLDED: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """One program per head that has a W of its own: each key head, or each query head if its ridge or gain differ.

    Given the parts of a few splits, it merges them into the record first.
    """
    program = tl.program_id(0).to(tl.int64)
    record, inverse_at = records + program // GROUP * NUMBERS, inverses + program * SQUARE
    if parts is not None:
        n, k_mean, v_mean, comoment, spread = read_parts(parts + program * splits * NUMBERS, splits, NUMBERS, D, E,
                                                         BD, BE)  # fmt: skip
        shift = tl.zeros_like(k_mean)
        write_state(record, n, k_mean, v_mean, comoment, shift, D, E, D)
        write_spread(record, k_mean, spread, D, E)
    else:
        n, k_mean, v_mean, comoment, shift = read_state(record, D, E, BD, BE, D)
        spread = read_square(record + E, E + D, D, BD)
    ridge, gain = factors_of(factors, program % H, ridge, scale)
    covariance, r, size, _tau, _free, lost = ridges(spread, n, k_mean, ridge, D)
    count, state = tl.maximum(n, 1.0), solved + program * SOLVED
    inverse = swept(covariance, r, size, lost, D)
    write_square(inverse_at, inverse, D)
    if DTYPE != tl.float32 and BD * BE <= 64 * 64:
        weights = times(inverse, comoment / count, tl.zeros_like(comoment), DTYPE)
    else:
        tl.debug_barrier()
        weights = stored_times(inverse_at, D, record, E + D, 1, D, D, E, BD, BE, DTYPE) / count
    if DTYPE == tl.float32:
        write_state(state, n, k_mean, v_mean, weights, shift, D, E)
        tl.debug_barrier()
        residual = comoment / count - r * weights
        residual -= stored_times(record + E, E + D, state, E, 1, D, D, E, BD, BE, DTYPE) / count
        tl.debug_barrier()
        write_state(state, n, k_mean, v_mean, residual, shift, D, E)
        tl.debug_barrier()
        weights += stored_times(inverse_at, D, state, E, 1, D, D, E, BD, BE, DTYPE)
        tl.debug_barrier()
    v_mean = moved(v_mean, k_mean, weights, gain, FOLDED, DTYPE)
    write_state(state, n, k_mean, v_mean, weights, shift, D, E)


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
def whole_regress_gradient_kernel(q, k, v, d_out, mask, q_offsets, k_offsets, d_q, d_k, d_v, d_factors, local,
                                  factors, N, M, G, ridge, scale, t, GROUP: tl.constexpr, D: tl.constexpr,
                                  E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, T: tl.constexpr,
                                  PHI_Q: tl.constexpr, PHI_K: tl.constexpr, READER: tl.constexpr,
                                  SIGNED: tl.constexpr, CONSTANT: tl.constexpr, DTYPE: tl.constexpr,
                                  STAGES: tl.constexpr, CENTERED: tl.constexpr, FOLDED: tl.constexpr,
                                  KEYS: tl.constexpr):  # fmt: skip
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
        k, v, mask, b, g, 0, M, t, D, E, BD, BE, T, PHI_K, True, KEYS, False, True)  # fmt: skip
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
    key_gradient_tokens(
        k, v, d_out, None, local, mask, d_k, d_v, b, g, 0, M, n, k_mean, v_mean, shift, d_key, d_v_mean,
        factor(d_comoment, KEYS), factor(d_spread, KEYS), t, None, D, E, BD, BE, T, PHI_K, KEYS,
        False)  # fmt: skip
