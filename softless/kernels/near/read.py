"""Near and far tokens in causal order. First the sums of far tokens before each chunk, then all chunks at once.

    q, out  [B, H, N, D], [B, H, N, E]        k, v  [B, G, W + N, D], [B, G, W + N, E], the window before the call first
    first_k, first_v  [B, G, FIRST, .]        n, count  [B], the tokens before the call, and how many of N are real
    sums, masses      [B, H, chunks, 2 F, E], [B, H, chunks, 2 F]        centers  [B, H, chunks, E]

`algebra.near` has the formula. Features are P = [softmax(W x), softmax(-W x)] here, and the gain c takes their factor.
A chunk of queries sees the last BLOCKS chunks of keys token by token. FARS of them hold keys that are
far from some of its queries. Of all keys before, it reads the sums

    S = sum P_j (v_j - r)^T        z = sum P_j        r = the mean of their values

A first pass over the scores finds m_i, the largest of a near token. Then each pair has one weight:

    w_ij = e^{s_ij - m_i} where j is near, c P_i.P_j where it is far
    o_i  = (c P_i S + c P_i.z r + sum_j w_ij v_j) / (c P_i.z + sum_j w_ij)

The sums have factors of their own, rounded once, as the weights are. An offset that all values share is no part of
them, because S is centered first: r follows from sum P_j v_j^T, as each half of P_j adds up to one. The mass adds up
rounded weights, so such an offset costs at most one ulp.
"""

import triton
import triton.language as tl

from softless.kernels.causal.states import place
from softless.kernels.common.arithmetic import (
    ONES,
    column_sums,
    dots,
    exponential,
    factor,
    product,
    rounded,
    summed,
)
from softless.kernels.common.launch import SIZES
from softless.kernels.common.rows import FLOOR, load, store


@triton.jit
def load_map(matrix, h, features, dims, D: tl.constexpr, F: tl.constexpr, DTYPE: tl.constexpr):
    """W^T of a head as a factor [BD, BF]; None for the identity."""
    if matrix is None:
        return None
    else:
        inside = (dims < D)[:, None] & (features < F)[None, :]
        spot = matrix + h * F * D + features[None, :] * D + dims[:, None]
        return factor(tl.load(spot, mask=inside, other=0.0).to(tl.float32), DTYPE)


@triton.jit
def halves(x, turned, mapped, DTYPE: tl.constexpr):
    """softmax(W x) and softmax(-W x) of a tile [tokens, BD], as factors [tokens, BF]."""
    if turned is not None:
        x = product(factor(x, DTYPE), turned, tl.zeros((x.shape[0], turned.shape[1]), tl.float32), DTYPE)
    return factor(softmax_of(x, mapped), DTYPE), factor(softmax_of(-x, mapped), DTYPE)


@triton.jit
def softmax_of(x, mapped):
    x = tl.where(mapped, x, FLOOR)
    raised = exponential(x - tl.max(x, 1)[:, None])
    return raised * (1.0 / tl.sum(raised, 1))[:, None]


@triton.jit
def are_real(spots, before, arrived, WINDOW: tl.constexpr, FIRST: tl.constexpr):
    """Which of the tokens at these places of k are real, and none of the first of the sequence."""
    return (spots >= 0) & (spots < WINDOW + arrived) & (before + spots - WINDOW >= FIRST)


@triton.jit
def corner(row, features, columns, E: tl.constexpr, F: tl.constexpr):
    """Offsets of the upper half of a chunk's sums; the lower half is F E numbers further."""
    return row * 2 * F * E + features[:, None] * E + columns[None, :]


@triton.jit
def leave(sums, masses, row, features, columns, upper, lower, upper_z, lower_z, E: tl.constexpr, F: tl.constexpr):
    """Write S and z of both halves."""
    spot, within = sums + corner(row, features, columns, E, F), (features < F)[:, None] & (columns < E)[None, :]
    tl.store(spot, rounded(upper, sums.dtype.element_ty), mask=within)
    tl.store(spot + F * E, rounded(lower, sums.dtype.element_ty), mask=within)
    tl.store(masses + row * 2 * F + features, summed(upper_z), mask=features < F)
    tl.store(masses + row * 2 * F + F + features, summed(lower_z), mask=features < F)


@triton.jit
def find(sums, masses, row, features, columns, E: tl.constexpr, F: tl.constexpr):
    """Read S of both halves [BF, BE], and z with ONES equal columns; zeros without sums."""
    if sums is None:
        zeros = tl.zeros((features.shape[0], columns.shape[0]), tl.float32)
        none = tl.zeros((features.shape[0], ONES), tl.float32)
        return zeros, zeros, none, none
    else:
        spot, within = sums + corner(row, features, columns, E, F), (features < F)[:, None] & (columns < E)[None, :]
        upper, lower = tl.load(spot, mask=within, other=0.0), tl.load(spot + F * E, mask=within, other=0.0)
        upper_z = tl.load(masses + row * 2 * F + features, mask=features < F, other=0.0)
        lower_z = tl.load(masses + row * 2 * F + F + features, mask=features < F, other=0.0)
        spread = tl.zeros((features.shape[0], ONES), tl.float32)
        return upper.to(tl.float32), lower.to(tl.float32), spread + upper_z[:, None], spread + lower_z[:, None]


@triton.jit
def leave_centered(sums, masses, centers, row, features, columns, upper, lower, upper_z, lower_z, E: tl.constexpr,
                   F: tl.constexpr):  # fmt: skip
    """Write S, z and r, from the sums of P_j v_j^T; r is 0 where there are no tokens."""
    tokens = tl.sum(summed(upper_z), 0)
    center = tl.sum(upper, 0) * tl.where(tokens > 0, 1.0 / tl.where(tokens > 0, tokens, 1.0), 0.0)
    tl.store(centers + row * E + columns, center, mask=columns < E)
    upper -= summed(upper_z)[:, None] * center[None, :]
    lower -= summed(lower_z)[:, None] * center[None, :]
    leave(sums, masses, row, features, columns, upper, lower, upper_z, lower_z, E, F)


@triton.jit
def find_center(centers, row, columns, E: tl.constexpr):
    """Read r, [1, BE]."""
    return tl.load(centers + row * E + columns, mask=columns < E, other=0.0)[None, :]


@triton.jit(do_not_specialize=SIZES)
def far_kernel(k, v, map_k, n, count, start_sums, start_masses, sums, masses, centers, heads, chunks, segments, length,
               D: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr,
               WINDOW: tl.constexpr, FIRST: tl.constexpr, LATE: tl.constexpr, CHUNK: tl.constexpr,
               SHARED: tl.constexpr, EACH: tl.constexpr, DTYPE: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """One program walks along a segment, a number of chunks, for a block of value columns.

    EACH: write S, z and r before each chunk, from the sums before the segment. Otherwise write sum P_j v_j^T and z of
    the segment alone.
    """
    COLUMNS: tl.constexpr = (E + BE - 1) // BE
    program = tl.program_id(0).to(tl.int64)
    columns = (program % COLUMNS).to(tl.int32) * BE + tl.arange(0, BE)
    b, h, g, _, segment = place(program // COLUMNS, heads, segments, SHARED)
    dims, features, steps = tl.arange(0, BD), tl.arange(0, BF), tl.arange(0, CHUNK)
    inside, valued, mapped = (dims < D)[None, :], (columns < E)[None, :], (features < F)[None, :]
    before, arrived = tl.load(n + b), tl.load(count + b).to(tl.int32)
    turned = load_map(map_k, h, features, dims, D, F, DTYPE)
    head = b * heads + h
    upper, lower, upper_z, lower_z = find(start_sums, start_masses, head * segments + segment, features, columns, E, F)
    first = (segment * length).to(tl.int32)
    for chunk in tl.range(first, tl.minimum(first + length, chunks), num_stages=STAGES):
        if EACH:
            row = head * chunks + chunk
            leave_centered(sums, masses, centers, row, features, columns, upper, lower, upper_z, lower_z, E, F)
        spots = chunk * CHUNK - LATE + steps
        real = are_real(spots, before, arrived, WINDOW, FIRST)[:, None]
        rising, falling = halves(load(k, b, g, spots, dims, real & inside), turned, mapped, DTYPE)
        rising, falling = tl.where(real, rising, 0.0), tl.where(real, falling, 0.0)
        rising, falling = factor(rising, DTYPE), factor(falling, DTYPE)
        values = factor(load(v, b, g, spots, columns, real & valued), DTYPE)
        upper = product(tl.trans(rising), values, upper, DTYPE)
        lower = product(tl.trans(falling), values, lower, DTYPE)
        upper_z, lower_z = column_sums(rising, upper_z, DTYPE), column_sums(falling, lower_z, DTYPE)
    if not EACH:
        leave(sums, masses, head * segments + segment, features, columns, upper, lower, upper_z, lower_z, E, F)


@triton.jit
def around(at, block, before, arrived, WINDOW: tl.constexpr, FIRST: tl.constexpr, LATE: tl.constexpr,
           CHUNK: tl.constexpr):  # fmt: skip
    """(places of k, which are real, how far queries are after keys) of a chunk of keys around one of queries."""
    steps = tl.arange(0, CHUNK)
    spots = at + block * CHUNK - LATE + steps
    return spots, are_real(spots, before, arrived, WINDOW, FIRST), (at + steps)[:, None] - (spots - WINDOW)[None, :]


@triton.jit
def load_firsts(x, b, g, slots, columns, FIRST: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr):
    """The first keys or values of the sequence as factors, [FIRSTS, columns]."""
    return factor(load(x, b, g, slots, columns, (slots < FIRST)[:, None] & (columns < WIDTH)[None, :]), DTYPE)


@triton.jit
def score_firsts(queries, firsts, slots, place, scale, FIRST: tl.constexpr, DTYPE: tl.constexpr):
    """The scores of the first tokens, FLOOR where a query does not see them; `place` counts queries from 0."""
    zeros = tl.zeros((queries.shape[0], slots.shape[0]), tl.float32)
    known = (slots[None, :] <= place[:, None]) & (slots < FIRST)[None, :]
    return tl.where(known, scale * product(queries, tl.trans(firsts), zeros, DTYPE), FLOOR)


@triton.jit
def raise_scores(scores, base):
    """e^{s - m}, 0 where the score is FLOOR."""
    return tl.where(scores > FLOOR, exponential(scores - base), 0.0)


@triton.jit
def score_window(queries, keys, apart, real, scale, WINDOW: tl.constexpr, DTYPE: tl.constexpr):
    """The scores of near keys, FLOOR for others."""
    scores = scale * product(queries, tl.trans(keys), tl.zeros((apart.shape[0], apart.shape[1]), tl.float32), DTYPE)
    return tl.where((apart >= 0) & (apart < WINDOW) & real[None, :], scores, FLOOR)


@triton.jit
def compare(rising, falling, up, down, apart, real, WINDOW: tl.constexpr, DTYPE: tl.constexpr):
    """P_i.P_j of far keys, 0 for others."""
    alike = product(rising, tl.trans(up), tl.zeros((apart.shape[0], apart.shape[1]), tl.float32), DTYPE)
    alike = product(falling, tl.trans(down), alike, DTYPE)
    return tl.where((apart >= WINDOW) & (apart >= 0) & real[None, :], alike, 0.0)


@triton.jit
def find_largest(queries, k, to_firsts, b, g, at, dims, before, arrived, scale, D: tl.constexpr, BLOCKS: tl.constexpr,
                 WINDOW: tl.constexpr, FIRST: tl.constexpr, LATE: tl.constexpr, DTYPE: tl.constexpr,
                 STAGES: tl.constexpr):  # fmt: skip
    """The largest score of a near key, and its place in k; -1 - slot of one of the first. FLOOR where none is near."""
    CHUNK: tl.constexpr = queries.shape[0]
    largest, where = tl.full((CHUNK,), FLOOR, tl.float32), tl.full((CHUNK,), 0, tl.int32)
    if FIRST > 0:
        largest = tl.max(to_firsts, 1)
        where = -1 - tl.argmax(to_firsts, 1, tie_break_left=True).to(tl.int32)
    for block in tl.range(0, BLOCKS, num_stages=STAGES):
        spots, real, apart = around(at, block, before, arrived, WINDOW, FIRST, LATE, CHUNK)
        keys = factor(load(k, b, g, spots, dims, real[:, None] & (dims < D)[None, :]), DTYPE)
        scores = score_window(queries, keys, apart, real, scale, WINDOW, DTYPE)
        best = at + block * CHUNK - LATE + tl.argmax(scores, 1, tie_break_left=True).to(tl.int32)
        where = tl.where(tl.max(scores, 1) > largest, best, where)
        largest = tl.maximum(largest, tl.max(scores, 1))
    return largest, where


@triton.jit
def read_far(rising, falling, upper, lower, upper_z, lower_z, center, weight, DTYPE: tl.constexpr):
    """c P_i S + c P_i.z r and c P_i.z; S of both halves as factors."""
    answer = product(rising, upper, tl.zeros((rising.shape[0], upper.shape[1]), tl.float32), DTYPE)
    answer = product(falling, lower, answer, DTYPE)
    mass = (dots(rising, upper_z, DTYPE) + dots(falling, lower_z, DTYPE))[:, None]
    return weight * (answer + mass * center), weight * mass


@triton.jit
def read_around(answer, mass, queries, rising, falling, weight, base, k, v, map_k, b, g, at, dims, columns, features,
                before, arrived, scale, D: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BLOCKS: tl.constexpr,
                FARS: tl.constexpr, WINDOW: tl.constexpr, FIRST: tl.constexpr, LATE: tl.constexpr,
                DTYPE: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Add what queries read from the chunks of keys around them."""
    CHUNK: tl.constexpr = queries.shape[0]
    for block in tl.range(0, BLOCKS, num_stages=STAGES):
        spots, real, apart = around(at, block, before, arrived, WINDOW, FIRST, LATE, CHUNK)
        keys = load(k, b, g, spots, dims, real[:, None] & (dims < D)[None, :])
        weights = raise_scores(score_window(queries, factor(keys, DTYPE), apart, real, scale, WINDOW, DTYPE), base)
        if block < FARS:
            up, down = halves(keys, map_k, (features < F)[None, :], DTYPE)
            weights += weight * compare(rising, falling, up, down, apart, real, WINDOW, DTYPE)
        values = factor(load(v, b, g, spots, columns, real[:, None] & (columns < E)[None, :]), DTYPE)
        weights = factor(weights, DTYPE)
        answer = product(weights, values, answer, DTYPE)
        mass += tl.sum(weights.to(tl.float32), 1)[:, None]
    return answer, mass


@triton.jit
def weigh_far(largest, gain, h, F: tl.constexpr):
    """(c, m) of queries, [CHUNK, 1]; 1 and 0 where no token is near, as c cancels there."""
    some = (largest > FLOOR)[:, None]
    gained = exponential(tl.load(gain + h).to(tl.float32)) * (F / 2)
    return tl.where(some, gained, 1.0), tl.where(some, largest[:, None], 0.0)


@triton.jit(do_not_specialize=SIZES)
def near_kernel(q, k, v, first_k, first_v, out, map_q, map_k, gain, n, count, sums, masses, centers, heads, tokens,
                chunks, scale, D: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                BF: tl.constexpr, WINDOW: tl.constexpr, FIRST: tl.constexpr, FIRSTS: tl.constexpr, LATE: tl.constexpr,
                BLOCKS: tl.constexpr, FARS: tl.constexpr, CHUNK: tl.constexpr, SHARED: tl.constexpr,
                DTYPE: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """One program per chunk of queries and block of value columns; FIRSTS slots hold the first tokens."""
    COLUMNS: tl.constexpr = (E + BE - 1) // BE
    program = tl.program_id(0).to(tl.int64)
    columns = (program % COLUMNS).to(tl.int32) * BE + tl.arange(0, BE)
    b, h, g, _, chunk = place(program // COLUMNS, heads, chunks, SHARED)
    dims, features, slots = tl.arange(0, BD), tl.arange(0, BF), tl.arange(0, FIRSTS)
    before, arrived = tl.load(n + b), tl.load(count + b).to(tl.int32)
    at = (chunk * CHUNK).to(tl.int32)
    here = at + tl.arange(0, CHUNK)
    queries = load(q, b, h, here, dims, (here < tokens)[:, None] & (dims < D)[None, :])
    turned = load_map(map_q, h, features, dims, D, F, DTYPE)
    rising, falling = halves(queries, turned, (features < F)[None, :], DTYPE)
    queries = factor(queries, DTYPE)
    to_firsts = None
    if FIRST > 0:
        firsts = load_firsts(first_k, b, g, slots, dims, FIRST, D, DTYPE)
        to_firsts = score_firsts(queries, firsts, slots, before + here, scale, FIRST, DTYPE)
    largest, _ = find_largest(queries, k, to_firsts, b, g, at, dims, before, arrived, scale, D, BLOCKS, WINDOW, FIRST,
                              LATE, DTYPE, STAGES)  # fmt: skip
    weight, base = weigh_far(largest, gain, h, F)
    row = (b * heads + h) * chunks + chunk
    upper, lower, upper_z, lower_z = find(sums, masses, row, features, columns, E, F)
    upper, lower, center = factor(upper, DTYPE), factor(lower, DTYPE), find_center(centers, row, columns, E)
    answer, mass = read_far(rising, falling, upper, lower, upper_z, lower_z, center, weight, DTYPE)
    if FIRST > 0:
        close = factor(raise_scores(to_firsts, base), DTYPE)
        answer = product(close, load_firsts(first_v, b, g, slots, columns, FIRST, E, DTYPE), answer, DTYPE)
        mass += tl.sum(close.to(tl.float32), 1)[:, None]
    turned = load_map(map_k, h, features, dims, D, F, DTYPE)
    answer, mass = read_around(answer, mass, queries, rising, falling, weight, base, k, v, turned, b, g, at, dims,
                               columns, features, before, arrived, scale, D, E, F, BLOCKS, FARS, WINDOW, FIRST, LATE,
                               DTYPE, STAGES)  # fmt: skip
    mass = tl.where(mass > 0, mass, 1.0)  # the answer is zero there
    store(out, b, h, here, columns, (here < tokens)[:, None] & (columns < E)[None, :], answer * (1.0 / mass))
