"""The gradient of near and far tokens: queries first, then the sums over later queries, then keys.

With M_i the mass, c_i the gain, and e_i = do_i / M_i:

    dw_ij = e_i.v_j - delta_i                delta_i = e_i.o_i              of the weight of each pair
    ds_ij = p_ij dw_ij + [j = j*_i] t_i      t_i = -sum_near p_ij dw_ij     of a score; j*_i has the largest
    dP_i  = c_i sum_far dw_ij P_j            dP_j = sum_i c_i dw_ij P_i     of features
    dv_j  = sum_i w_ij e_i                   dgain = sum_i t_i

m_i = s_ij* is subtracted from all scores of near tokens, so j*_i gets what all of them get, with the other sign. Of
several equal largest scores it is the first. All weights together get sum_j w_ij dw_ij = 0, so what near tokens lose is
what far ones get: t_i = P_i.dP_i. It is computed so, and is 0 where no token is far.

Keys before a chunk of queries are read from sums, and so these queries are, by the keys:

    dP_i = c_i (S e_i - (delta_i - e_i.r) z)        U = sum c_i P_i e_i^T        u = sum c_i (delta_i - e_i.r*) P_i
    dP_j = U (v_j - r*) - u                         dv_j = U^T P_j

r belongs to the sums that the query reads (`read`), and r* is that of the last chunk. So nothing that is rounded to a
factor contains an offset that all values share, and what contains one is subtracted in float32.

    lines    [B, H, 5, N] float32: m, 1 / M, delta, t and delta - e.r*
    largest  [B, H, N] int32: the place j* of k, or -1 - slot of one of the first tokens
"""

import triton
import triton.language as tl

from softless.kernels.causal.states import place
from softless.kernels.common.arithmetic import factor, product, summed, weighted_sums
from softless.kernels.common.launch import SIZES
from softless.kernels.common.rows import FLOOR, load, store
from softless.kernels.near.read import (
    are_real,
    around,
    compare,
    find,
    find_center,
    find_largest,
    halves,
    leave,
    load_firsts,
    load_map,
    raise_scores,
    read_around,
    read_far,
    score_firsts,
    score_window,
    weigh_far,
)


@triton.jit
def line(lines, head, tokens, number: tl.constexpr, here):
    """Where one of the five numbers of these queries is."""
    return lines + (head * 5 + number) * tokens + here


@triton.jit
def through_softmax(rising, falling, d_rising, d_falling):
    """The gradient of z = W x from those of softmax(z) and softmax(-z)."""
    rising, falling = rising.to(tl.float32), falling.to(tl.float32)
    up = rising * (d_rising - tl.sum(rising * d_rising, 1)[:, None])
    return up - falling * (d_falling - tl.sum(falling * d_falling, 1)[:, None])


@triton.jit
def through_map(dx, dz, turned, DTYPE: tl.constexpr):
    """dx + W^T dz; W^T is None for the identity."""
    if turned is None:
        return dx + dz
    else:
        return product(factor(dz, DTYPE), tl.trans(turned), dx, DTYPE)


@triton.jit
def store_factor(x, row, spots, features, here, dz, F: tl.constexpr):
    """Write dz, which the gradient of a learned map needs."""
    if x is not None:
        tl.store(x + (row + spots)[:, None] * F + features[None, :], dz.to(x.dtype.element_ty), mask=here)


@triton.jit
def back_around(d_queries, d_rising, d_falling, queries, upstream, share, delta, base, k, v, map_k, b, g, at,
                dims, columns, features, before, arrived, scale, D: tl.constexpr, E: tl.constexpr, F: tl.constexpr,
                BLOCKS: tl.constexpr, FARS: tl.constexpr, WINDOW: tl.constexpr, FIRST: tl.constexpr,
                LATE: tl.constexpr, DTYPE: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Add what queries get from the chunks of keys around them: dq, and dP of both halves without c."""
    CHUNK: tl.constexpr = queries.shape[0]
    for block in tl.range(0, BLOCKS, num_stages=STAGES):
        spots, real, apart = around(at, block, before, arrived, WINDOW, FIRST, LATE, CHUNK)
        keys = load(k, b, g, spots, dims, real[:, None] & (dims < D)[None, :])
        values = factor(load(v, b, g, spots, columns, real[:, None] & (columns < E)[None, :]), DTYPE)
        d_weights = product(upstream, tl.trans(values), tl.zeros((CHUNK, CHUNK), tl.float32), DTYPE)
        d_weights = share * d_weights - delta
        if block < FARS:
            up, down = halves(keys, map_k, (features < F)[None, :], DTYPE)
            d_far = tl.where((apart >= WINDOW) & (apart >= 0) & real[None, :], d_weights, 0.0)
            d_far = factor(d_far, DTYPE)
            d_rising, d_falling = product(d_far, up, d_rising, DTYPE), product(d_far, down, d_falling, DTYPE)
        keys = factor(keys, DTYPE)
        d_scores = raise_scores(score_window(queries, keys, apart, real, scale, WINDOW, DTYPE), base) * d_weights
        d_queries = product(factor(d_scores, DTYPE), keys, d_queries, DTYPE)
    return d_queries, d_rising, d_falling


@triton.jit
def divide(answer, mass, upstream, center):
    """(1 / M, delta, delta - e.r) of queries, [CHUNK, 1]; 0 where there is no mass."""
    share = tl.where(mass > 0, 1.0 / tl.where(mass > 0, mass, 1.0), 0.0)
    delta = share * share * tl.sum(upstream.to(tl.float32) * answer, 1)[:, None]
    return share, delta, less_center(delta, share, upstream, center)


@triton.jit
def less_center(delta, share, upstream, center):
    """delta - e.r of queries, [CHUNK, 1]."""
    return delta - share * tl.sum(upstream.to(tl.float32) * center, 1)[:, None]


@triton.jit
def back_far(upstream, sums, z, share, delta, DTYPE: tl.constexpr):
    """dP without c, of one half of the features, from the keys before all chunks around; `delta` is less e.r."""
    d = product(upstream, tl.trans(sums), tl.zeros((upstream.shape[0], sums.shape[0]), tl.float32), DTYPE)
    return share * d - delta * summed(z)[None, :]


@triton.jit
def store_part(x, row, slots, columns, scale, weights, tile, FIRST: tl.constexpr, WIDTH: tl.constexpr,
               DTYPE: tl.constexpr):  # fmt: skip
    """Write what a chunk of queries adds to the gradient of the first tokens: scale weights^T tile."""
    part = product(tl.trans(weights), tile, tl.zeros((weights.shape[1], tile.shape[1]), tl.float32), DTYPE)
    within = (slots < FIRST)[:, None] & (columns < WIDTH)[None, :]
    tl.store(x + (row * FIRST + slots)[:, None] * WIDTH + columns[None, :], scale * part, mask=within)


@triton.jit(do_not_specialize=SIZES)
def near_query_kernel(q, k, v, first_k, first_v, d_out, dq, dz_q, d_first_k, d_first_v, lines, largest, map_q, map_k,
                      gain, n, count, sums, masses, centers, heads, tokens, chunks, scale, D: tl.constexpr,
                      E: tl.constexpr, F: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr,
                      WINDOW: tl.constexpr, FIRST: tl.constexpr, FIRSTS: tl.constexpr, LATE: tl.constexpr,
                      BLOCKS: tl.constexpr, FARS: tl.constexpr, CHUNK: tl.constexpr, SHARED: tl.constexpr,
                      DTYPE: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """One program per chunk of queries: dq, the numbers of its lines, and its part of the first tokens' gradients."""
    b, h, g, _, chunk = place(tl.program_id(0).to(tl.int64), heads, chunks, SHARED)
    row, at = (b * heads + h) * chunks + chunk, (chunk * CHUNK).to(tl.int32)
    dims, columns, features, slots = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, BF), tl.arange(0, FIRSTS)
    before, arrived = tl.load(n + b), tl.load(count + b).to(tl.int32)
    here = at + tl.arange(0, CHUNK)
    asked = (here < tokens)[:, None]
    queries = load(q, b, h, here, dims, asked & (dims < D)[None, :])
    turned_q = load_map(map_q, h, features, dims, D, F, DTYPE)
    turned_k = load_map(map_k, h, features, dims, D, F, DTYPE)
    rising, falling = halves(queries, turned_q, (features < F)[None, :], DTYPE)
    queries = factor(queries, DTYPE)
    upstream = factor(load(d_out, b, h, here, columns, asked & (columns < E)[None, :]), DTYPE)
    to_firsts = None
    if FIRST > 0:
        firsts = load_firsts(first_k, b, g, slots, dims, FIRST, D, DTYPE)
        of_firsts = load_firsts(first_v, b, g, slots, columns, FIRST, E, DTYPE)
        to_firsts = score_firsts(queries, firsts, slots, before + here, scale, FIRST, DTYPE)
    top, where = find_largest(queries, k, to_firsts, b, g, at, dims, before, arrived, scale, D, BLOCKS, WINDOW, FIRST,
                              LATE, DTYPE, STAGES)  # fmt: skip
    weight, base = weigh_far(top, gain, h, F)
    upper, lower, upper_z, lower_z = find(sums, masses, row, features, columns, E, F)
    upper, lower, center = factor(upper, DTYPE), factor(lower, DTYPE), find_center(centers, row, columns, E)
    answer, mass = read_far(rising, falling, upper, lower, upper_z, lower_z, center, weight, DTYPE)
    if FIRST > 0:
        close = raise_scores(to_firsts, base)
        answer = product(factor(close, DTYPE), of_firsts, answer, DTYPE)
        mass += tl.sum(factor(close, DTYPE).to(tl.float32), 1)[:, None]
    answer, mass = read_around(answer, mass, queries, rising, falling, weight, base, k, v, turned_k, b, g, at, dims,
                               columns, features, before, arrived, scale, D, E, F, BLOCKS, FARS, WINDOW, FIRST, LATE,
                               DTYPE, STAGES)  # fmt: skip
    share, delta, far_delta = divide(answer, mass, upstream, center)

    if FIRST > 0:
        d_firsts = product(upstream, tl.trans(of_firsts), tl.zeros((CHUNK, FIRSTS), tl.float32), DTYPE)
        d_firsts = close * (share * d_firsts - delta)
    d_queries, d_rising, d_falling = back_around(
        tl.zeros((CHUNK, BD), tl.float32), back_far(upstream, upper, upper_z, share, far_delta, DTYPE),
        back_far(upstream, lower, lower_z, share, far_delta, DTYPE), queries, upstream, share, delta, base, k, v,
        turned_k, b, g, at, dims, columns, features, before, arrived, scale, D, E, F, BLOCKS, FARS, WINDOW, FIRST, LATE,
        DTYPE, STAGES)  # fmt: skip
    d_rising, d_falling = weight * d_rising, weight * d_falling
    d_top = tl.where(top > FLOOR, tl.sum(rising.to(tl.float32) * d_rising + falling.to(tl.float32) * d_falling, 1), 0.0)
    in_window = (asked & ((top > FLOOR) & (where >= 0))[:, None]) & (dims < D)[None, :]
    d_queries += d_top[:, None] * load(k, b, g, tl.maximum(where, 0), dims, in_window)
    if FIRST > 0:
        d_firsts += tl.where(where[:, None] == -1 - slots[None, :], d_top[:, None], 0.0)
        d_firsts = factor(tl.where(asked & (slots < FIRST)[None, :], d_firsts, 0.0), DTYPE)
        d_queries = product(d_firsts, firsts, d_queries, DTYPE)
        store_part(d_first_k, row, slots, dims, scale, d_firsts, queries, FIRST, D, DTYPE)
        shares = factor(tl.where(asked, share * close, 0.0), DTYPE)
        store_part(d_first_v, row, slots, columns, 1.0, shares, upstream, FIRST, E, DTYPE)
    dz = through_softmax(rising, falling, d_rising, d_falling)
    store_factor(dz_q, (b * heads + h) * tokens, here, features, asked & (features < F)[None, :], dz, F)
    d_queries = through_map(scale * d_queries, dz, turned_q, DTYPE)
    store(dq, b, h, here, dims, asked & (dims < D)[None, :], d_queries)
    center = find_center(centers, (b * heads + h + 1) * chunks - 1, columns, E)
    leave_line(lines, largest, b * heads + h, tokens, here, top, share, delta, d_top,
               less_center(delta, share, upstream, center), where)  # fmt: skip


@triton.jit
def leave_line(lines, largest, head, tokens, here, top, share, delta, d_top, last_delta, where):
    asked = here < tokens
    tl.store(line(lines, head, tokens, 0, here), top, mask=asked)
    tl.store(line(lines, head, tokens, 1, here), tl.sum(share, 1), mask=asked)
    tl.store(line(lines, head, tokens, 2, here), tl.sum(delta, 1), mask=asked)
    tl.store(line(lines, head, tokens, 3, here), d_top, mask=asked)
    tl.store(line(lines, head, tokens, 4, here), tl.sum(last_delta, 1), mask=asked)
    tl.store(largest + head * tokens + here, where, mask=asked)


@triton.jit
def find_line(lines, gain, head, h, tokens, here, F: tl.constexpr):
    """(1 / M, delta, delta - e.r*, c, m, t) of queries, [CHUNK, 1]; 1 / M is 0 where there is none."""
    asked = here < tokens
    share = tl.load(line(lines, head, tokens, 1, here), mask=asked, other=0.0)[:, None]
    delta = tl.load(line(lines, head, tokens, 2, here), mask=asked, other=0.0)[:, None]
    d_top = tl.load(line(lines, head, tokens, 3, here), mask=asked, other=0.0)[:, None]
    last_delta = tl.load(line(lines, head, tokens, 4, here), mask=asked, other=0.0)[:, None]
    weight, base = weigh_far(tl.load(line(lines, head, tokens, 0, here), mask=asked, other=FLOOR), gain, h, F)
    return share, delta, last_delta, weight, base, d_top


@triton.jit(do_not_specialize=SIZES)
def later_kernel(q, d_out, map_q, gain, lines, start_sums, start_masses, sums, masses, heads, tokens, chunks, segments,
                 length, D: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                 BF: tl.constexpr, CHUNK: tl.constexpr, SHARED: tl.constexpr, EACH: tl.constexpr, DTYPE: tl.constexpr,
                 STAGES: tl.constexpr):  # fmt: skip
    """One program walks back along a segment, for a block of value columns: U and u of the queries from each chunk on.

    EACH: write them for each chunk, with those after the segment. Otherwise those of the segment alone.
    """
    COLUMNS: tl.constexpr = (E + BE - 1) // BE
    program = tl.program_id(0).to(tl.int64)
    columns = (program % COLUMNS).to(tl.int32) * BE + tl.arange(0, BE)
    b, h, _g, _p, segment = place(program // COLUMNS, heads, segments, SHARED)
    dims, features, steps = tl.arange(0, BD), tl.arange(0, BF), tl.arange(0, CHUNK)
    mapped, head = (features < F)[None, :], b * heads + h
    turned = load_map(map_q, h, features, dims, D, F, DTYPE)
    upper, lower, upper_z, lower_z = find(start_sums, start_masses, head * segments + segment, features, columns, E, F)
    first = (segment * length).to(tl.int32)
    last = tl.minimum(first + length, chunks) - 1
    for back in tl.range(0, last + 1 - first, num_stages=STAGES):
        chunk = last - back
        here = chunk * CHUNK + steps
        asked = (here < tokens)[:, None]
        rising, falling = halves(load(q, b, h, here, dims, asked & (dims < D)[None, :]), turned, mapped, DTYPE)
        share, _delta, delta, weight, _base, _d_top = find_line(lines, gain, head, h, tokens, here, F)
        upstream = load(d_out, b, h, here, columns, asked & (columns < E)[None, :])
        upstream = factor(weight * share * upstream, DTYPE)
        upper = product(tl.trans(rising), upstream, upper, DTYPE)
        lower = product(tl.trans(falling), upstream, lower, DTYPE)
        upper_z = weighted_sums(weight * delta, rising, upper_z, DTYPE)
        lower_z = weighted_sums(weight * delta, falling, lower_z, DTYPE)
        if EACH:
            leave(sums, masses, head * chunks + chunk, features, columns, upper, lower, upper_z, lower_z, E, F)
    if not EACH:
        leave(sums, masses, head * segments + segment, features, columns, upper, lower, upper_z, lower_z, E, F)


@triton.jit(do_not_specialize=SIZES)
def near_key_kernel(q, k, v, d_out, dk, dv, dz_k, lines, largest, map_q, map_k, gain, n, count, sums, masses, centers,
                    heads, tokens, held, chunks, blocks, scale, D: tl.constexpr, E: tl.constexpr, F: tl.constexpr,
                    BD: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr, WINDOW: tl.constexpr, FIRST: tl.constexpr,
                    LATE: tl.constexpr, BLOCKS: tl.constexpr, CHUNK: tl.constexpr, SHARED: tl.constexpr,
                    DTYPE: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """One program per chunk of the `held` keys and query head: dk and dv."""
    b, h, g, _, block = place(tl.program_id(0).to(tl.int64), heads, blocks, SHARED)
    head, mine = b * heads + h, block.to(tl.int32)
    dims, columns, features, steps = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, BF), tl.arange(0, CHUNK)
    inside, valued, mapped = (dims < D)[None, :], (columns < E)[None, :], (features < F)[None, :]
    before, arrived = tl.load(n + b), tl.load(count + b).to(tl.int32)
    spots = mine * CHUNK - LATE + steps
    real = are_real(spots, before, arrived, WINDOW, FIRST)
    map_q = load_map(map_q, h, features, dims, D, F, DTYPE)
    map_k = load_map(map_k, h, features, dims, D, F, DTYPE)
    keys = load(k, b, g, spots, dims, real[:, None] & inside)
    up, down = halves(keys, map_k, mapped, DTYPE)
    keys = factor(keys, DTYPE)
    values = factor(load(v, b, g, spots, columns, real[:, None] & valued), DTYPE)
    d_keys, d_values = tl.zeros((CHUNK, BD), tl.float32), tl.zeros((CHUNK, BE), tl.float32)
    d_up, d_down = tl.zeros((CHUNK, BF), tl.float32), tl.zeros((CHUNK, BF), tl.float32)
    for chunk in tl.range(tl.maximum(mine - BLOCKS + 1, 0), tl.minimum(mine + 1, chunks), num_stages=STAGES):
        here = chunk * CHUNK + steps
        asked = (here < tokens)[:, None]
        apart = here[:, None] - (spots - WINDOW)[None, :]
        queries = load(q, b, h, here, dims, asked & inside)
        rising, falling = halves(queries, map_q, mapped, DTYPE)
        queries = factor(queries, DTYPE)
        upstream = factor(load(d_out, b, h, here, columns, asked & valued), DTYPE)
        share, delta, _last_delta, weight, base, d_top = find_line(lines, gain, head, h, tokens, here, F)
        where = tl.load(largest + head * tokens + here, mask=here < tokens, other=-1)[:, None]
        close = raise_scores(score_window(queries, keys, apart, real, scale, WINDOW, DTYPE), base)
        alike = weight * compare(rising, falling, up, down, apart, real, WINDOW, DTYPE)
        d_weights = product(upstream, tl.trans(values), tl.zeros((CHUNK, CHUNK), tl.float32), DTYPE)
        d_weights = share * d_weights - delta
        d_values = product(tl.trans(factor(share * (close + alike), DTYPE)), upstream, d_values, DTYPE)
        d_scores = close * d_weights + tl.where(where == spots[None, :], d_top, 0.0)
        d_keys = product(tl.trans(factor(d_scores, DTYPE)), queries, d_keys, DTYPE)
        d_far = tl.where((apart >= WINDOW) & (apart >= 0) & real[None, :], weight * d_weights, 0.0)
        d_far = tl.trans(factor(d_far, DTYPE))
        d_up, d_down = product(d_far, rising, d_up, DTYPE), product(d_far, falling, d_down, DTYPE)
    if mine + 1 < chunks:
        upper, lower, upper_z, lower_z = find(sums, masses, head * chunks + mine + 1, features, columns, E, F)
        upper, lower = factor(upper, DTYPE), factor(lower, DTYPE)
        d_values = product(down, lower, product(up, upper, d_values, DTYPE), DTYPE)
        center = find_center(centers, (head + 1) * chunks - 1, columns, E)
        values = factor(values.to(tl.float32) - center, DTYPE)
        d_up = product(values, tl.trans(upper), d_up, DTYPE) - summed(upper_z)[None, :]
        d_down = product(values, tl.trans(lower), d_down, DTYPE) - summed(lower_z)[None, :]
    dz = tl.where(real[:, None], through_softmax(up, down, d_up, d_down), 0.0)
    d_keys = through_map(scale * d_keys, dz, map_k, DTYPE)
    written = ((spots >= 0) & (spots < held))[:, None]
    store_factor(dz_k, head * held, spots, features, written & mapped, dz, F)
    store(dk, b, h, spots, dims, written & inside, tl.where(real[:, None], d_keys, 0.0))
    store(dv, b, h, spots, columns, written & valued, tl.where(real[:, None], d_values, 0.0))
