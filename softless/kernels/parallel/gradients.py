"""The backward pass: one pass over queries makes dq and the State's gradient, one over keys makes dk and dv of it.

    u = do @ comoment^T                     the pull of each output on its query's features
    dq = from u, see `read.pull`            d comoment = sum_i weighted_i do_i^T      d v_mean = sum_i do_i
    dv = (phi(k) - k_mean) @ d comoment + d v_mean / n
    dphi(k) = (v - v_mean) @ d comoment^T + d (n k_mean)      + (phi(k) - k_mean) @ d spread, of `regress`

The outputs are not needed: do.(o - v_mean) = gain (f.u), computed in float32. Reader `none` has zero means and no
gradient through them. DTYPE is that of the products: the input's, but float32 for exponential keys, which saturate and
then differ by far less than their size.
"""

import triton
import triton.language as tl

from softless.kernels.common.arithmetic import (
    ONES,
    column_sums,
    exponential,
    factor,
    held,
    product,
    summed,
    weighted_sums,
)
from softless.kernels.common.features import feature, slope
from softless.kernels.common.launch import SIZES
from softless.kernels.common.rows import (
    keep,
    line,
    load,
    read_square,
    read_state,
    sequence,
    store,
    visible,
    write_state,
)
from softless.kernels.parallel.read import (
    centered,
    contrast,
    factors_of,
    pull,
    pull_blend,
    query_features,
    query_slope,
    residual_gradient,
)


@triton.jit
def query_gradient_tokens(q, d_out, d_q, scalars, plane, b, h, begin, end, n, k_mean, comoment, shift, share, scale, t,
                          D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, T: tl.constexpr,
                          PHI_Q: tl.constexpr, PHI_K: tl.constexpr, READER: tl.constexpr, SIGNED: tl.constexpr,
                          CONSTANT: tl.constexpr, DTYPE: tl.constexpr, EVEN: tl.constexpr,
                          STAGES: tl.constexpr):  # fmt: skip
    """Write dq for queries begin..end; return (d (n k_mean), d v_mean, d comoment, d share, d scale).

    `comoment` is a factor. Only blend has the last two.

    If `scalars` [2, plane] is given, the gains and `along` are written there instead, for `query_sums_kernel`: a
    division of wide heads has no registers for dq and the sums at once.
    """
    DIVIDES: tl.constexpr = READER == "divide" or READER == "blend"
    EXP_K: tl.constexpr = PHI_K == "exp"
    EXP: tl.constexpr = EXP_K or PHI_Q == "exp"
    FULL_K: tl.constexpr = EVEN and D == BD
    columns, channels = tl.arange(0, BD), tl.arange(0, BE)
    turned = tl.zeros((BE, BD), tl.float32)  # d_comoment^T, as in `observe_tokens`
    drifts, pulls = tl.zeros((BD, ONES), tl.float32), tl.zeros((BE, ONES), tl.float32)
    d_share, d_scale = tl.zeros((T, 1), tl.float32), tl.zeros((T, 1), tl.float32)
    for start in tl.range(begin, end, T, num_stages=STAGES):
        tokens = start + tl.arange(0, T)
        here = (tokens < end)[:, None]
        x = load(q, b, h, tokens, columns, here & (columns < D)[None, :], FULL_K)
        cotangent = load(d_out, b, h, tokens, channels, here & (channels < E)[None, :], EVEN and E == BE)
        cotangent = factor(cotangent, DTYPE)
        phi, units, top = query_features(x, n, k_mean, comoment, shift, t, D, PHI_Q, EXP_K, READER)
        if DIVIDES:
            phi = held(phi, DTYPE)
        u = product(cotangent, tl.trans(comoment), tl.zeros((T, BD), tl.float32), DTYPE)
        if READER == "blend":
            gradient, gain, weighted, along, of_share, of_scale = pull_blend(
                x, u, phi, units, n, k_mean, top, share, scale, t, D, EXP, PHI_Q, SIGNED)  # fmt: skip
            d_share, d_scale = d_share + of_share, d_scale + of_scale
        else:
            f = centered(phi, units, k_mean, READER)
            df, gain, weighted, along = pull(u, f, n, k_mean, top, scale, D, EXP, READER, SIGNED, CONSTANT)
            gradient = query_slope(x, phi, units, top, df, t, EXP, PHI_Q, READER)
        store(d_q, b, h, tokens, columns, here & (columns < D)[None, :], gradient, FULL_K)
        if scalars is not None:
            tl.store(scalars + tokens[:, None], gain, mask=here)
            tl.store(scalars + plane + tokens[:, None], along, mask=here)
        else:
            if READER == "channel":
                drifts = column_sums(factor(keep(along * weighted, here, 0.0, EVEN), DTYPE), drifts, DTYPE)
            weighted = factor(keep(contrast(weighted, D, PHI_K, READER != "none"), here, 0.0, EVEN), DTYPE)
            turned = product(tl.trans(cotangent), weighted, turned, DTYPE)
            if READER == "divide":
                drifts = weighted_sums(along, weighted, drifts, DTYPE)
            elif READER == "blend":
                drifts = weighted_sums(along, factor(keep(phi * units, here, 0.0, EVEN), DTYPE), drifts, DTYPE)
            if READER != "none":
                pulls = column_sums(cotangent, pulls, DTYPE)
    return -summed(drifts), summed(pulls), tl.trans(turned), tl.sum(d_share), tl.sum(d_scale)


@triton.jit
def key_gradient_tokens(k, v, d_out, taps, local, mask, d_k, d_v, b, g, begin, end, n, k_mean, v_mean, shift, d_k_total,
                        d_v_mean, d_comoment, d_spread, t, picture, D: tl.constexpr, E: tl.constexpr,
                        BD: tl.constexpr, BE: tl.constexpr, T: tl.constexpr, PHI: tl.constexpr,
                        DTYPE: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """Write dk and dv of tokens begin..end; return dtaps [ONES, BE].

    `d_comoment` is a factor; so is `d_spread`, S / n of `regress`, or it is None. `local` is what the residual adds to
    dv, if `residual_gradient_kernel` computed it before.
    """
    columns, channels = tl.arange(0, BD), tl.arange(0, BE)
    FULL_K: tl.constexpr = EVEN and D == BD
    FULL_V: tl.constexpr = EVEN and E == BE
    ROOM: tl.constexpr = 2.0**-24 if PHI == "exp" else 1.0  # dphi(k) may overflow where phi(k) dphi(k) does not
    d_taps = tl.zeros((ONES, BE), tl.float32)
    for start in range(begin, end, T):
        tokens = start + tl.arange(0, T)
        within, seen = (tokens < end)[:, None], visible(mask, b, tokens, end)
        of_keys, of_values = seen[:, None] & (columns < D)[None, :], seen[:, None] & (channels < E)[None, :]
        x = load(k, b, g, tokens, columns, of_keys, FULL_K)
        values = load(v, b, g, tokens, channels, of_values, FULL_V)
        phi = feature(x, t, D, PHI)
        if PHI == "exp":
            phi = exponential(keep(phi - shift[None, :], of_keys, 0.0, FULL_K))
        keys = factor(keep(phi - k_mean[None, :], of_keys, 0.0, FULL_K), DTYPE)
        gradient = product(keys, d_comoment, tl.zeros((T, BE), tl.float32), DTYPE)
        gradient += (d_v_mean / tl.maximum(n, 1.0))[None, :]
        if taps is not None:
            residual, d_taps = residual_gradient(d_out, taps, values, d_taps, b, g, tokens, seen, picture[0],
                                                 picture[1], picture[2], E, BE, DTYPE)  # fmt: skip
            gradient += residual
        if local is not None:
            gradient += load(local, b, g, tokens, channels, of_values, FULL_V)
        gradient = keep(gradient, seen[:, None], 0.0, EVEN)
        store(d_v, b, g, tokens, channels, within & (channels < E)[None, :], gradient, FULL_V)
        values = factor(keep((values - v_mean[None, :]) * ROOM, of_values, 0.0, FULL_V), DTYPE)
        gradient = product(values, tl.trans(d_comoment), tl.zeros((T, BD), tl.float32), DTYPE)
        if d_spread is not None:
            gradient = product(keys, d_spread, gradient, DTYPE)
        gradient = slope(x, phi, gradient + (d_k_total * ROOM)[None, :], t, PHI) * (1 / ROOM)
        gradient = keep(gradient, seen[:, None], 0.0, EVEN)
        store(d_k, b, g, tokens, columns, within & (columns < D)[None, :], gradient, FULL_K)
    return d_taps


@triton.jit(do_not_specialize=SIZES)
def query_gradient_kernel(q, d_out, d_q, d_factors, q_offsets, scalars, records, gradients, factors, N, H, span, splits,
                          scale, t, GROUP: tl.constexpr, NUMBERS: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
                          BD: tl.constexpr, BE: tl.constexpr, T: tl.constexpr, PHI_Q: tl.constexpr,
                          PHI_K: tl.constexpr, READER: tl.constexpr, SIGNED: tl.constexpr, CONSTANT: tl.constexpr,
                          DTYPE: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """One program per query head and span of tokens; each writes its share of the state's gradient."""
    program = tl.program_id(0).to(tl.int64)
    head, begin = program // splits, (program % splits).to(tl.int32) * span
    b, h = head // H, head % H
    record = records + (b * (H // GROUP) + h // GROUP) * NUMBERS
    n, k_mean, _v_mean, comoment, shift = read_state(record, D, E, BD, BE)
    comoment = factor(comoment, DTYPE)
    b, end = sequence(q_offsets, b, N)
    if scalars is not None:
        scalars += line(q_offsets, b, h, H, N, 2)
    share, gain = factors_of(factors, h, 1.0, scale)
    d_k_total, d_v_mean, d_comoment, d_share, d_scale = query_gradient_tokens(
        q, d_out, d_q, scalars, N, b, h, begin, tl.minimum(begin + span, end), n, k_mean, comoment, shift, share, gain,
        t, D, E, BD, BE, T, PHI_Q, PHI_K, READER, SIGNED, CONSTANT, DTYPE, EVEN, STAGES)  # fmt: skip
    if READER == "blend":
        tl.store(d_factors + 2 * program, d_share)
        tl.store(d_factors + 2 * program + 1, scale * d_scale)
    if scalars is None:
        write_state(gradients + program * NUMBERS, n, d_k_total, d_v_mean, d_comoment, shift, D, E)


@triton.jit(do_not_specialize=SIZES)
def query_sums_kernel(q, d_out, q_offsets, scalars, gradients, N, H, span, splits, t, NUMBERS: tl.constexpr,
                      D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, T: tl.constexpr,
                      PHI_Q: tl.constexpr, PHI_K: tl.constexpr, READER: tl.constexpr, DTYPE: tl.constexpr,
                      EVEN: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Make the State's gradient of a division from the gains and `along` that `query_gradient_kernel` wrote.

    The `along` of blend multiplies features that are not weighted: their gain has a part that is no division.
    """
    program = tl.program_id(0).to(tl.int64)
    head, begin = program // splits, (program % splits).to(tl.int32) * span
    b, end = sequence(q_offsets, head // H, N)
    h, end, scalars = head % H, tl.minimum(begin + span, end), scalars + line(q_offsets, b, head % H, H, N, 2)
    columns, channels = tl.arange(0, BD), tl.arange(0, BE)
    turned = tl.zeros((BE, BD), tl.float32)
    drifts, pulls = tl.zeros((BD, ONES), tl.float32), tl.zeros((BE, ONES), tl.float32)
    for start in tl.range(begin, end, T, num_stages=STAGES):
        tokens = start + tl.arange(0, T)
        here = (tokens < end)[:, None]
        x = load(q, b, h, tokens, columns, here & (columns < D)[None, :], EVEN and D == BD)
        cotangent = load(d_out, b, h, tokens, channels, here & (channels < E)[None, :], EVEN and E == BE)
        cotangent = factor(cotangent, DTYPE)
        gain = tl.load(scalars + tokens[:, None], mask=here, other=0.0)
        along = tl.load(scalars + N + tokens[:, None], mask=here, other=0.0)
        phi = held(feature(x, t, D, PHI_Q), DTYPE)
        weighted = factor(keep(contrast(gain * phi, D, PHI_K, True), here, 0.0, EVEN), DTYPE)
        turned = product(tl.trans(cotangent), weighted, turned, DTYPE)
        if READER == "blend":
            weighted = factor(keep(phi, here, 0.0, EVEN), DTYPE)
        drifts = weighted_sums(along, weighted, drifts, DTYPE)
        pulls = column_sums(cotangent, pulls, DTYPE)
    nothing = tl.zeros((BD,), tl.float32)
    write_state(gradients + program * NUMBERS, 0.0, -summed(drifts), summed(pulls), tl.trans(turned), nothing, D, E)


@triton.jit(do_not_specialize=SIZES)
def key_gradient_kernel(k, v, d_out, taps, mask, k_offsets, d_k, d_v, d_taps, records, gradients, M, G, span, splits,
                        t, picture, NUMBERS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
                        BE: tl.constexpr, T: tl.constexpr, PHI_K: tl.constexpr, DTYPE: tl.constexpr,
                        EVEN: tl.constexpr, MORE: tl.constexpr = 0):  # fmt: skip
    """One program per key head and span of tokens. MORE: the gradient has a spread of as many columns."""
    program = tl.program_id(0).to(tl.int64)
    head, begin = program // splits, (program % splits).to(tl.int32) * span
    b, M = sequence(k_offsets, head // G, M)
    g = head % G
    n, k_mean, v_mean, _comoment, shift = read_state(records + head * NUMBERS, D, E, BD, BE, MORE)
    _n, d_k_total, d_v_mean, d_comoment, _shift = read_state(gradients + head * NUMBERS, D, E, BD, BE, MORE)
    d_comoment, d_spread = factor(d_comoment, DTYPE), None
    if MORE > 0:
        d_spread = factor(read_square(gradients + head * NUMBERS + E, E + MORE, D, BD), DTYPE)
    sums = key_gradient_tokens(
        k, v, d_out, taps, None, mask, d_k, d_v, b, g, begin, tl.minimum(begin + span, M), n, k_mean, v_mean, shift,
        d_k_total, d_v_mean, d_comoment, d_spread, t, picture, D, E, BD, BE, T, PHI_K, DTYPE, EVEN)  # fmt: skip
    if taps is not None:
        write_taps(d_taps + program * 9 * E, sums, E)


@triton.jit(do_not_specialize=SIZES)
def residual_gradient_kernel(v, d_out, taps, mask, local, d_taps, M, G, picture, E: tl.constexpr, BE: tl.constexpr,
                             T: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """What the residual adds to dv, in float32, and dtaps; one program per head.

    Kernels that do a whole head hold its State and the gradient of it, and have no registers left for this.
    """
    program = tl.program_id(0).to(tl.int64)
    b, g = program // G, program % G
    channels, sums = tl.arange(0, BE), tl.zeros((ONES, BE), tl.float32)
    for start in range(0, M, T):
        tokens = start + tl.arange(0, T)
        seen, real = visible(mask, b, tokens, M), (channels < E)[None, :]
        values = load(v, b, g, tokens, channels, seen[:, None] & real)
        gradient, sums = residual_gradient(
            d_out, taps, values, sums, b, g, tokens, seen, picture[0], picture[1], picture[2], E, BE, DTYPE
        )
        store(local, b, g, tokens, channels, (tokens < M)[:, None] & real, gradient)
    write_taps(d_taps + program * 9 * E, sums, E)


@triton.jit
def write_taps(at, sums, E: tl.constexpr):
    """Store the nine rows of dtaps, [9, E]."""
    lines, channels = tl.arange(0, ONES), tl.arange(0, sums.shape[1])
    tl.store(at + lines[:, None] * E + channels[None, :], sums, mask=(lines < 9)[:, None] & (channels < E)[None, :])
