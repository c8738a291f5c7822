"""Causal attention with exponential keys: one program walks along a segment of one head and carries sums in units.

    Z = sum_j h_j e^-u [D]        S = sum_j h_j e^-u v_j^T [D, E]        u [D] at least as large as every log h_j so far

    divide    out_i = sum_c f_ic S_c / sum_c f_ic Z_c       f = e^(t q - top), where top is the largest t q + u
    channel   out_i = sum_c f_ic S_c / Z_c                  f = softmax(q)

The tokens of a tile share one u: the largest keys that the first of them sees. A maximum over the tile would lose the
past of a query to a key that it does not see, and its last bits would depend on later tokens. So a tile ends before the
first key that is more than e^RISE above u. Within it no feature is larger than that, and every mass is at least 1.

The backward pass is the same walk, from the end: a_i = log f_i - log(mass_i) takes the place of the keys, do that of
the values, and every weight e^(a_i + log h_j) is at most 1.

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

from typing import Any, NamedTuple

import triton
import triton.language as tl

from softless.kernels.causal.key_gradient import backwards
from softless.kernels.causal.states import counts, dot_rows, place, sees
from softless.kernels.common.arithmetic import ONES, column_sums, dots, exponential, factor, product, summed
from softless.kernels.common.launch import SIZES
from softless.kernels.common.reference import typical
from softless.kernels.common.rows import first_visible, line, load, real, sequence, store, visible

VOID = tl.constexpr(-1e38)  # the logarithm of nothing: below all others, and the sum of two is finite
RISE = tl.constexpr(40.0)  # e^40 is 2e17, so products with it are far from overflow


class Gathered(NamedTuple):
    """Sums over segments: S [P, D, width], y = sum v [P, width], Z | u | n [P, 2 D + 1], float32."""

    outer: Any
    of_values: Any
    rest: Any
    width: int


@triton.jit
def log_keys(k, b, g, here, dims, seen, t, D: tl.constexpr):
    """t k, and VOID where a key is hidden, or a channel is beyond D."""
    there = seen[:, None] & (dims < D)[None, :]
    logs = tl.where(there, t * load(k, b, g, here, dims, there), VOID)
    return tl.where(logs < VOID, VOID, logs)


@triton.jit
def row_of(x, steps, row):
    """One row of a tile."""
    return tl.sum(tl.where(steps[:, None] == row, x, 0.0), 0)


@triton.jit
def together(logs, most, order):
    """(count, u): how many tokens share a u, and that u, [BD]. `most` are the largest keys before them.

    `order` counts the tokens, and may run backward. Where nothing is known yet, the first visible token counts as seen:
    queries before it read nothing.
    """
    SIZE: tl.constexpr = logs.shape[0]
    logs = tl.where(logs == logs, logs, VOID)
    first = tl.min(tl.where(tl.max(logs, 1) > VOID, order, SIZE - 1), 0)
    units = tl.where(most > VOID, tl.maximum(most, row_of(logs, order, 0)), row_of(logs, order, first))
    rise = tl.max(tl.where(logs > VOID, logs - units[None, :], VOID), 1)
    return tl.min(tl.where((rise > RISE) & (order > 0), order, SIZE), 0), units


@triton.jit
def largest(most, logs, taken):
    """The largest keys so far and among the tokens taken, [BD]."""
    return tl.maximum(most, tl.max(tl.where(taken[:, None] & (logs == logs), logs, VOID), 0))


@triton.jit
def in_units(units, new, z, turned, logs, taken):
    """(Z, S^T, e^(logs - u)) in new units u."""
    decay = exponential(units - new)
    features = tl.where(taken[:, None], exponential(logs - new[None, :]), 0.0)
    return z * decay[:, None], turned * decay[None, :], features


@triton.jit
def in_centered_units(units, new, low, lower, z, turned, y, n, logs, taken):
    """(Z', S'^T, h', r): `in_units` of h' = h - r, where log r was `low` and is `lower` from now on."""
    z, turned, features = in_units(units, new, z, turned, logs, taken)
    base = exponential(lower - new)
    step = exponential(low - new) - base
    keys = tl.where(taken[:, None], features - base[None, :], 0.0)
    return z + (n * step)[:, None], turned + summed(y)[:, None] * step[None, :], keys, base


@triton.jit
def nothing(dims, columns):
    """(u, Z, S^T, y, n) of no tokens; Z and y are as in `column_sums`."""
    z, y = tl.zeros((dims.shape[0], ONES), tl.float32), tl.zeros((columns.shape[0], ONES), tl.float32)
    turned = tl.zeros((columns.shape[0], dims.shape[0]), tl.float32)
    return tl.full((dims.shape[0],), VOID, tl.float32), z, turned, y, tl.sum(tl.zeros((1,), tl.float32), 0)


@triton.jit
def sums_at(sums, row, dims, columns, D: tl.constexpr, E: tl.constexpr):
    """(u, Z, S^T, y, n) of a row; nothing if there are no sums."""
    units, z, turned, y, n = nothing(dims, columns)
    if sums is None:
        return units, z, turned, y, n
    else:
        spots = sums.outer + (row * D + dims[None, :]) * sums.width + columns[:, None]
        turned += tl.load(spots, mask=(columns < E)[:, None] & (dims < D)[None, :], other=0.0)
        y += tl.load(sums.of_values + row * sums.width + columns, mask=columns < E, other=0.0)[:, None]
        rest = sums.rest + row * (2 * D + 1)
        z += tl.load(rest + dims, mask=dims < D, other=0.0)[:, None]
        return tl.load(rest + D + dims, mask=dims < D, other=VOID), z, turned, y, tl.load(rest + 2 * D)


@triton.jit
def write_sums(sums, row, dims, columns, units, z, turned, y, n, D: tl.constexpr, E: tl.constexpr):
    """Write a row; z [D] and y [E]."""
    spots = sums.outer + (row * D + dims[None, :]) * sums.width + columns[:, None]
    tl.store(spots, turned, mask=(columns < E)[:, None] & (dims < D)[None, :])
    tl.store(sums.of_values + row * sums.width + columns, y, mask=columns < E)
    rest = sums.rest + row * (2 * D + 1)
    tl.store(rest + dims, z, mask=dims < D)
    tl.store(rest + D + dims, units, mask=dims < D)
    tl.store(rest + 2 * D, n)


@triton.jit
def first_value(v, mask, b, g, end, columns, E: tl.constexpr):
    """The first visible value. Others are taken relative to it, because the first token is the sink of many a head."""
    token = first_visible(mask, b, 0, end) + tl.arange(0, 1)
    return tl.sum(load(v, b, g, token, columns, visible(mask, b, token, end)[:, None] & (columns < E)[None, :]), 0)


@triton.jit
def anchor(v, mask, b, g, end, columns, E: tl.constexpr, DTYPE: tl.constexpr):
    """What the forward pass takes values relative to. In half precision it reads them as they are."""
    if DTYPE == tl.float32:
        return first_value(v, mask, b, g, end, columns, E)
    else:
        return tl.zeros((columns.shape[0],), tl.float32)


@triton.jit
def read_values(v, b, g, here, columns, taken, reference, E: tl.constexpr, DTYPE: tl.constexpr):
    """Values relative to a reference, as factors; 0 for tokens that are not taken."""
    there = taken[:, None] & (columns < E)[None, :]
    return factor(tl.where(there, load(v, b, g, here, columns, there) - reference[None, :], 0.0), DTYPE)


@triton.jit
def running_masses(keys, sight, z, DTYPE: tl.constexpr):
    """Z of each channel up to each query, [CHUNK, BD]. A query that sees NaN has NaN, and no other one."""
    wrong = tl.max(tl.where(keys.to(tl.float32) == keys.to(tl.float32), 0.0, 1.0), 1)
    before = summed(z)[None, :] + tl.zeros((keys.shape[0], keys.shape[1]), tl.float32)
    keys = factor(tl.where(wrong[:, None] > 0, 0.0, keys.to(tl.float32)), DTYPE)
    masses = product(factor(tl.where(sight, 1.0, 0.0), DTYPE), keys, before, DTYPE)
    return tl.where(tl.sum(tl.where(sight, wrong[None, :], 0.0), 1)[:, None] > 0, float("nan"), masses)


@triton.jit
def log_softmax(x, dims, D: tl.constexpr):
    """log softmax over the channels, VOID beyond D."""
    x = tl.where((dims < D)[None, :], x, VOID)
    x -= tl.max(x, 1)[:, None]
    return tl.where((dims < D)[None, :], x - tl.log(tl.sum(exponential(x), 1))[:, None], VOID)


@triton.jit(do_not_specialize=SIZES)
def exponential_sums_kernel(k, v, mask, offsets, sums, groups, tokens, segments, length, t, D: tl.constexpr,
                            E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, CHUNK: tl.constexpr,
                            DTYPE: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """The sums over each segment of keys but the last; one program per block of value columns."""
    BLOCKS: tl.constexpr = (E + BE - 1) // BE
    program = tl.program_id(0).to(tl.int64)
    dims, columns = tl.arange(0, BD), (program % BLOCKS).to(tl.int32) * BE + tl.arange(0, BE)
    segment, p = program // BLOCKS % (segments - 1), program // BLOCKS // (segments - 1)
    b, end = sequence(offsets, p // groups, tokens)
    start, g = (segment * length).to(tl.int32), p % groups
    stop = tl.minimum(start + length, end)
    reference = anchor(v, mask, b, g, end, columns, E, DTYPE)
    k_ref = typical(k, mask, b, g, start, stop, t, dims, D, "exp")
    units, z, turned, y, n = nothing(dims, columns)
    low = units
    for at in tl.range(start, stop, CHUNK, num_stages=STAGES):
        here = at + tl.arange(0, CHUNK)
        seen = visible(mask, b, here, stop)
        logs = log_keys(k, b, g, here, dims, seen, t, D)
        new = largest(units, logs, seen)
        lower = tl.minimum(k_ref, new)
        z, turned, keys, _base = in_centered_units(units, new, low, lower, z, turned, y, n, logs, seen)
        keys, units, low = factor(keys, DTYPE), new, lower
        values = read_values(v, b, g, here, columns, seen, reference, E, DTYPE)
        turned, z = product(tl.trans(values), keys, turned, DTYPE), column_sums(keys, z, DTYPE)
        y, n = column_sums(values, y, DTYPE), n + tl.sum(seen.to(tl.float32), 0)
    base, y = exponential(low - units), summed(y)
    write_sums(sums, p * segments + segment, dims, columns, units, summed(z) + n * base,
               turned + y[:, None] * base[None, :], y, n, D, E)  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def exponential_scan_kernel(sums, before, segments, D: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
                            ROWS: tl.constexpr, REVERSE: tl.constexpr):  # fmt: skip
    """Row s of `before`: the sums of all segments before s, or after s if REVERSE. One program per ROWS channels."""
    BLOCKS: tl.constexpr = (D + ROWS - 1) // ROWS
    program = tl.program_id(0).to(tl.int64)
    p, columns = program // BLOCKS, tl.arange(0, BE)
    dims = (program % BLOCKS).to(tl.int32) * ROWS + tl.arange(0, ROWS)
    units, z, turned, y, n = nothing(dims, columns)
    for step in range(segments):
        row = p * segments + (segments - 1 - step if REVERSE else step)
        write_sums(before, row, dims, columns, units, summed(z), turned, summed(y), n, D, E)
        if step + 1 < segments:
            new_units, new_z, new, new_y, new_n = sums_at(sums, row, dims, columns, D, E)
            top = tl.maximum(units, new_units)
            decay, fresh = exponential(units - top), exponential(new_units - top)
            z, turned = z * decay[:, None] + new_z * fresh[:, None], turned * decay[None, :] + new * fresh[None, :]
            units, y, n = top, y + new_y, n + new_n


@triton.jit(do_not_specialize=SIZES)
def exponential_kernel(q, k, v, out, mask, offsets, before, heads, tokens, segments, length, t, D: tl.constexpr,
                       E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, CHUNK: tl.constexpr, SHARED: tl.constexpr,
                       READER: tl.constexpr, DTYPE: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Forward: one program per segment, head and block of value columns."""
    BLOCKS: tl.constexpr = (E + BE - 1) // BE
    program = tl.program_id(0).to(tl.int64)
    columns = (program % BLOCKS).to(tl.int32) * BE + tl.arange(0, BE)
    b, h, g, p, segment = place(program // BLOCKS, heads, segments, SHARED)
    b, end = sequence(offsets, b, tokens)
    start = (segment * length).to(tl.int32)
    stop = tl.minimum(start + length, end)
    dims, steps = tl.arange(0, BD), tl.arange(0, CHUNK)
    reference = anchor(v, mask, b, g, end, columns, E, DTYPE)
    units, z, turned, _y, _n = sums_at(before, p * segments + segment, dims, columns, D, E)
    at, most = start, units
    while at < stop:
        here = at + steps
        seen = visible(mask, b, here, stop)
        logs = log_keys(k, b, g, here, dims, seen, t, D)
        count, new = together(logs, most, steps)
        taken, asked = seen & (steps < count), (here < stop) & (steps < count)
        z, turned, keys = in_units(units, new, z, turned, logs, taken)
        units, most = new, largest(most, logs, taken)
        keys, values = factor(keys, DTYPE), read_values(v, b, g, here, columns, taken, reference, E, DTYPE)
        sight = sees(mask, steps, taken) & (steps < count)[None, :]
        x = load(q, b, h, here, dims, asked[:, None] & (dims < D)[None, :])
        if READER == "channel":
            masses = running_masses(keys, sight, z, DTYPE)
            queries = exponential(log_softmax(x, dims, D)) / tl.where(masses != 0, masses, 1.0)
            alive = tl.sum(masses, 1) != 0
        else:
            queries = t * x + units[None, :]
            queries = exponential(queries - tl.max(queries, 1)[:, None])
        queries = factor(queries, DTYPE)
        scores = product(queries, tl.trans(keys), tl.zeros((CHUNK, CHUNK), tl.float32), DTYPE)
        scores = tl.where(sight, scores, 0.0)
        answer = product(queries, factor(tl.trans(turned), DTYPE), tl.zeros((CHUNK, BE), tl.float32), DTYPE)
        answer = product(factor(scores, DTYPE), values, answer, DTYPE)
        if READER == "divide":
            mass = tl.sum(scores, 1) + dots(queries, z, DTYPE)
            alive = mass != 0
            answer = answer / tl.where(alive, mass, 1.0)[:, None]
        answer += reference[None, :]
        if mask is not None:
            answer = tl.where(alive[:, None], answer, 0.0)
        store(out, b, h, here, columns, asked[:, None] & (columns < E)[None, :], answer)
        turned, z = product(tl.trans(values), keys, turned, DTYPE), column_sums(keys, z, DTYPE)
        at += count


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
