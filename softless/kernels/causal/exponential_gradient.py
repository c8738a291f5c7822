"""Causal attention with exponential keys, backward (`exponential` has the forward pass and the symbols).

For keys and values it is the same walk, from the end: a_i = log f_i - log(mass_i) takes the place of the keys, do that
of the values, and every weight e^(a_i + log h_j) is at most 1.

    t_ij = do_i.v'_j                                delta_i = sum_j w_ij t_ij        channel: for each channel
    dq_ic = e^(a_ic) sum_{j <= i} h_jc (t_ij - delta_ic)       dlog h_jc = h_jc sum_{i >= j} e^(a_ic) (t_ij - delta_ic)
    dv_j  = sum_{i >= j} w_ij do_i

In dq terms cancel: of all tokens where keys are nearly equal, of the largest where one token holds all the mass. So

    G_ic  = sum_j h_jc (t_ij - delta_i) = sum_j h'_jc (t_ij - delta_i) + r_c sum_j (t_ij - delta_i)       h' = h - r
    dq_ic = e^(a_ic) (G_ic - Z_ic sum_c' f_ic' G_ic' / mass)

where h' is rounded and not h, r is the typical key (or less where no query sees one as large), and what an error of
delta adds to G in proportion to Z drops out. For each channel it is G / Z less its mean over the channels.

    scalars   [B, H, 2, N, W] float32: a | delta        divide: W = 1 and a is without t q        channel: W = D
"""

import triton
import triton.language as tl

from softless.kernels.causal.exponential import (
    VOID,
    anchor,
    first_value,
    in_centered_units,
    in_units,
    largest,
    log_keys,
    log_softmax,
    nothing,
    read_values,
    sums_at,
    together,
    write_sums,
)
from softless.kernels.causal.key_gradient import backwards
from softless.kernels.causal.states import counts, dot_rows, place, sees
from softless.kernels.common.arithmetic import column_sums, exponential, factor, product, summed
from softless.kernels.common.launch import SIZES
from softless.kernels.common.reference import typical
from softless.kernels.common.rows import line, load, real, sequence, store, visible


@triton.jit
def past_of_queries(d_out, keys, sight, known, base, z, turned, y, DTYPE: tl.constexpr):
    """(Z of each query, sum_j t_ij h'_j over the past, sum_j t_ij over the past); keys are factors h'.

    z, turned and y are the sums before the tile.
    """
    drawn = product(d_out, factor(turned, DTYPE), tl.zeros((keys.shape[0], keys.shape[1]), tl.float32), DTYPE)
    ones = factor(tl.where(sight, 1.0, 0.0), DTYPE)
    masses = product(ones, keys, known[:, None] * base[None, :] + summed(z)[None, :], DTYPE)
    return masses, drawn, dot_rows(d_out, summed(y))


@triton.jit
def differences(keys, through, sight, known, base, z, drawn, before, center, DTYPE: tl.constexpr):
    """sum_j h_jc (t_ij - center_i), made of h' and r."""
    center = center[:, None]
    pulls = factor(tl.where(sight, through - center, 0.0), DTYPE)
    rest = (tl.sum(through, 1) + before)[:, None] - known[:, None] * center
    return product(pulls, keys, drawn - center * summed(z)[None, :], DTYPE) + rest * base[None, :]


@triton.jit
def channel_pull(x, units, keys, through, sight, known, base, z, masses, drawn, before, dims, D: tl.constexpr,
                 DTYPE: tl.constexpr):  # fmt: skip
    """(dq, a, delta) with a normalizer for each channel."""
    logs, some = log_softmax(x, dims, D), tl.where(masses > 0, masses, 1.0)
    phi, total = exponential(logs), (tl.sum(through, 1) + before)[:, None]
    delta = product(factor(through, DTYPE), keys, drawn + total * base[None, :], DTYPE) / some
    center = tl.sum(phi * delta, 1)
    pull = differences(keys, through, sight, known, base, z, drawn, before, center, DTYPE) / some
    gain = tl.where(masses > 0, logs - units[None, :] - tl.log(some), VOID)
    return phi * (pull - tl.sum(phi * pull, 1)[:, None]), gain, delta


@triton.jit
def divided_pull(x, units, keys, through, sight, known, base, z, masses, drawn, before, t, DTYPE: tl.constexpr):
    """(dq, a - t q, delta) of a division."""
    logs = t * x + units[None, :]
    top = tl.max(logs, 1)
    phi = exponential(logs - top[:, None])
    mass = tl.sum(phi * masses, 1)
    some = tl.where(mass > 0, mass, 1.0)
    scores = product(factor(phi, DTYPE), tl.trans(keys), tl.zeros((keys.shape[0], keys.shape[0]), tl.float32), DTYPE)
    common = tl.sum(phi * base[None, :], 1) * (tl.sum(through, 1) + before)
    delta = (tl.sum(scores * through, 1) + tl.sum(phi * drawn, 1) + common) / some
    pull = differences(keys, through, sight, known, base, z, drawn, before, delta, DTYPE)
    pull -= (tl.sum(phi * pull, 1) / some)[:, None] * masses
    pull = t * phi * tl.where(mass[:, None] > 0, pull / some[:, None], 0.0)
    return pull, tl.where(mass > 0, -top - tl.log(some), VOID), delta


@triton.jit(do_not_specialize=SIZES)
def exponential_query_kernel(q, k, v, do, dq, mask, offsets, before, scalars, heads, tokens, segments, length, t,
                             D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, CHUNK: tl.constexpr,
                             SHARED: tl.constexpr, READER: tl.constexpr, DTYPE: tl.constexpr,
                             STAGES: tl.constexpr):  # fmt: skip
    """The gradient of the queries, and the scalars: one program per segment and head, which walks as the forward."""
    b, h, g, p, segment = place(tl.program_id(0).to(tl.int64), heads, segments, SHARED)
    b, end = sequence(offsets, b, tokens)
    start = (segment * length).to(tl.int32)
    stop = tl.minimum(start + length, end)
    dims, columns, steps = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, CHUNK)
    inside = (dims < D)[None, :]
    reference = first_value(v, mask, b, g, end, columns, E)
    k_ref = typical(k, mask, b, g, 0, end, t, dims, D, "exp")
    units, z, turned, y, n = sums_at(before, p * segments + segment, dims, columns, D, E)
    offset, low = anchor(v, mask, b, g, end, columns, E, DTYPE) - reference, tl.minimum(k_ref, units)
    base = exponential(low - units)
    turned += offset[:, None] * summed(z)[None, :]
    y += (n * offset)[:, None]
    turned -= summed(y)[:, None] * base[None, :]
    z -= (n * base)[:, None]
    scalars += line(offsets, b, h, heads, tokens, 2) * (D if READER == "channel" else 1)
    at, most = start, units
    while at < stop:
        here = at + steps
        seen = visible(mask, b, here, stop)
        logs = log_keys(k, b, g, here, dims, seen, t, D)
        count, new = together(logs, most, steps)
        taken, asked = seen & (steps < count), (here < stop) & (steps < count)
        lower = tl.minimum(k_ref, new)
        z, turned, keys, base = in_centered_units(units, new, low, lower, z, turned, y, n, logs, taken)
        units, low, most = new, lower, largest(most, logs, taken)
        keys, values = factor(keys, DTYPE), read_values(v, b, g, here, columns, taken, reference, E, DTYPE)
        known, more = counts(mask, n, taken, steps, tl.minimum(stop - at, count))
        sight = sees(mask, steps, taken) & (steps < count)[None, :]
        x = load(q, b, h, here, dims, asked[:, None] & inside)
        d_out = factor(load(do, b, h, here, columns, asked[:, None] & (columns < E)[None, :]), DTYPE)
        through = product(d_out, tl.trans(values), tl.zeros((CHUNK, CHUNK), tl.float32), DTYPE)
        through = tl.where(sight, through, 0.0)
        masses, drawn, earlier = past_of_queries(d_out, keys, sight, known, base, z, turned, y, DTYPE)
        if READER == "channel":
            pull, gain, delta = channel_pull(x, units, keys, through, sight, known, base, z, masses, drawn, earlier,
                                             dims, D, DTYPE)  # fmt: skip
            spots, there = scalars + here[:, None] * D + dims[None, :], asked[:, None] & inside
            tl.store(spots, gain, mask=there)
            tl.store(spots + tokens * D, delta, mask=there)
        else:
            pull, gain, delta = divided_pull(x, units, keys, through, sight, known, base, z, masses, drawn, earlier, t,
                                             DTYPE)  # fmt: skip
            tl.store(scalars + here, gain, mask=asked)
            tl.store(scalars + tokens + here, delta, mask=asked)
        store(dq, b, h, here, dims, asked[:, None] & inside, pull)
        turned, z = product(tl.trans(values), keys, turned, DTYPE), column_sums(keys, z, DTYPE)
        y, n = column_sums(values, y, DTYPE), n + more.to(tl.float32)
        at += count


@triton.jit
def log_gains(q, scalars, b, h, here, there, tokens, t, dims, D: tl.constexpr, READER: tl.constexpr):
    """(a, delta) of queries: VOID and 0 for those that see nothing or are not `there`; delta is [n, 1] or [n, BD]."""
    if READER == "channel":
        spots, inside = scalars + here[:, None] * D + dims[None, :], there[:, None] & (dims < D)[None, :]
        return tl.load(spots, mask=inside, other=VOID), tl.load(spots + tokens * D, mask=inside, other=0.0)
    else:
        gain = tl.load(scalars + here, mask=there, other=VOID)
        delta = tl.load(scalars + tokens + here, mask=there, other=0.0)[:, None]
        inside = (gain > VOID)[:, None] & (dims < D)[None, :]
        return tl.where(inside, t * load(q, b, h, here, dims, inside) + gain[:, None], VOID), delta


@triton.jit(do_not_specialize=SIZES)
def exponential_later_kernel(q, do, offsets, scalars, sums, heads, tokens, segments, length, t, D: tl.constexpr,
                             E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, CHUNK: tl.constexpr,
                             READER: tl.constexpr, DTYPE: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """The sums over the queries of each segment but the first: e^a do^T, delta e^a."""
    program = tl.program_id(0).to(tl.int64)
    segment, p = program % (segments - 1) + 1, program // (segments - 1)
    b, end = sequence(offsets, p // heads, tokens)
    start, h = (segment * length).to(tl.int32), p % heads
    stop = tl.minimum(start + length, end)
    dims, columns = tl.arange(0, BD), tl.arange(0, BE)
    scalars += line(offsets, b, h, heads, tokens, 2) * (D if READER == "channel" else 1)
    units, z, turned, y, n = nothing(dims, columns)
    for at in tl.range(start, stop, CHUNK, num_stages=STAGES):
        here = at + tl.arange(0, CHUNK)
        logs, delta = log_gains(q, scalars, b, h, here, here < stop, tokens, t, dims, D, READER)
        new = largest(units, logs, here < stop)
        z, turned, gains = in_units(units, new, z, turned, logs, here < stop)
        units = new
        d_out = factor(load(do, b, h, here, columns, (here < stop)[:, None] & (columns < E)[None, :]), DTYPE)
        turned = product(tl.trans(d_out), factor(gains, DTYPE), turned, DTYPE)
        z += tl.sum(gains * delta, 0)[:, None]
    write_sums(sums, p * segments + segment, dims, columns, units, summed(z), turned, summed(y), n, D, E)


@triton.jit(do_not_specialize=SIZES)
def exponential_key_kernel(q, k, v, do, dk, dv, mask, offsets, scalars, later, heads, tokens, segments, length, t,
                           D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, CHUNK: tl.constexpr,
                           SHARED: tl.constexpr, READER: tl.constexpr, DTYPE: tl.constexpr,
                           STAGES: tl.constexpr):  # fmt: skip
    """The gradients of keys and values as query head h sees them: one program per segment and query head, from the end.

    `later` are the sums over the queries of later segments. dk and dv have as many heads as q.
    """
    program = tl.program_id(0).to(tl.int64)
    segment, p = program % segments, program // segments
    b, end = sequence(offsets, p // heads, tokens)
    start, h = (segment * length).to(tl.int32), p % heads
    g, stop = h // SHARED, tl.minimum(start + length, end)
    dims, columns, steps = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, CHUNK)
    inside, valued, square = (dims < D)[None, :], (columns < E)[None, :], tl.zeros((CHUNK, CHUNK), tl.float32)
    reference = first_value(v, mask, b, g, end, columns, E)
    scalars += line(offsets, b, h, heads, tokens, 2) * (D if READER == "channel" else 1)
    units, z, turned, _y, _n = sums_at(later, p * segments + segment, dims, columns, D, E)
    at, most = stop, units
    while at > start:
        here = at - CHUNK + steps
        logs, delta = log_gains(q, scalars, b, h, here, here >= start, tokens, t, dims, D, READER)
        order = CHUNK - 1 - steps
        count, new = together(logs, most, order)
        taken = (here >= start) & (order < count)
        seen = real(mask, b, here, taken)
        z, turned, gains = in_units(units, new, z, turned, logs, taken)
        units, most = new, largest(most, logs, taken)
        sight = backwards(mask, steps, seen) & taken[None, :]
        lift = exponential(log_keys(k, b, g, here, dims, seen, t, D) + units[None, :])
        lift = tl.where(seen[:, None] & inside, lift, 0.0)
        keys, bare = factor(lift, DTYPE), factor(gains, DTYPE)
        d_out = factor(load(do, b, h, here, columns, taken[:, None] & valued), DTYPE)
        weights = tl.where(sight, product(keys, tl.trans(bare), square, DTYPE), 0.0)
        gradient = product(keys, factor(tl.trans(turned), DTYPE), tl.zeros((CHUNK, BE), tl.float32), DTYPE)
        gradient = product(factor(weights, DTYPE), d_out, gradient, DTYPE)
        store(dv, b, h, here, columns, taken[:, None] & valued, gradient)

        values = read_values(v, b, g, here, columns, seen, reference, E, DTYPE)
        through = product(values, tl.trans(d_out), square, DTYPE)
        gradient = product(values, factor(turned, DTYPE), tl.zeros((CHUNK, BD), tl.float32), DTYPE)
        if READER == "channel":
            gradient = product(factor(tl.where(sight, through, 0.0), DTYPE), bare, gradient, DTYPE)
            ones = factor(tl.where(sight, 1.0, 0.0), DTYPE)
            gradient -= product(ones, factor(gains * delta, DTYPE), tl.zeros((CHUNK, BD), tl.float32), DTYPE)
        else:
            through -= tl.trans(delta)
            gradient = product(factor(tl.where(sight, through, 0.0), DTYPE), bare, gradient, DTYPE)
        gradient = t * lift * (gradient - summed(z)[None, :])
        store(dk, b, h, here, dims, taken[:, None] & inside, gradient)
        turned = product(tl.trans(d_out), bare, turned, DTYPE)
        z += tl.sum(gains * delta, 0)[:, None]
        at -= count
