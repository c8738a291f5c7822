"""Causal attention with exponential keys: one program walks along a segment of one head and carries sums in units.

    Z = sum_j h_j e^-u [D]        S = sum_j h_j e^-u v_j^T [D, E]        u [D] the largest log h_j so far, or near it

    divide    out_i = sum_c f_ic S_c / sum_c f_ic Z_c       f = e^(t q - top), where top is the largest t q + u
    channel   out_i = sum_c f_ic S_c / Z_c                  f = softmax(q)

The tokens of a tile share one u: the largest keys that the first of them sees. A maximum over the tile would lose the
past of a query to a key that it does not see, and its last bits would depend on later tokens. So a tile ends before the
first key that is more than e^RISE above u. Within it no feature is larger than that, and every mass is at least 1.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from softless.kernels.causal.states import place, sees
from softless.kernels.common.arithmetic import ONES, column_sums, dots, exponential, factor, product, summed
from softless.kernels.common.launch import SIZES
from softless.kernels.common.reference import typical
from softless.kernels.common.rows import first_visible, load, sequence, store, visible

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
    """The first visible value. Others are taken relative to it: in many heads the first token holds the mass."""
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
