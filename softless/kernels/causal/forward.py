"""Causal attention, forward: one program walks along a segment of one head, chunk by chunk, and carries the State.

    q, out  [B, H, N, D], [B, H, N, E]        k, v  [B, G, N, D], [B, G, N, E]          any strides
    before  State at the start of each segment, P = [B, G, segments]          after  State at the end, P = [B, G]

Factors are rounded as `arithmetic` says; sums and States are float32. Value columns are independent of each other, and
a program takes BE of them. SHARED query heads share a key head.

`forward_kernel` centers keys and values on the past. `states` defines w, g and the update:

    out_i = lift_i v_mean + g_i f_i comoment + sum_{j <= i} w_ij v'_j

`plain_kernel` works on plain sums. It is faster, and serves readers that do not subtract, in half precision:

    S = sum h v^T     z = sum h     y = sum v                          of all tokens before the chunk

    out_i = (f_i S + b_i y + sum_{j <= i} (f_i.h_j + b_i) v_j) / mass_i      mass_i = f_i.z + b_i n + the same weights
    b_i   = 1 for a query without mass, which reads the mean; 0 otherwise

Reader `none` multiplies by `scale` instead of dividing, and has b = 0. No step waits for the means of the past. The
centered form is needed for InLine's subtraction, for the last digits of float32, and where a mass may cancel, as in
Taylor attention. In `plain_kernel` no feature is negative and every weight is rounded once, so the error is at most one
ulp of the output, whatever offset keys and values share. Values go from memory to the tensor cores unchanged.

`decode_kernel` absorbs one token into the State and reads it, in float32 throughout:

    comoment += (n/(n+1)) (h - k_mean)(v - v_mean)^T         k_mean += (h - k_mean)/(n+1)       v_mean likewise
    out = lift v_mean + g f comoment

The State is read and written once, and moving its D x E numbers is all the time a step takes. The query of a hidden
token reads the State; the token itself is not absorbed.
"""

import triton
import triton.language as tl

from softless.kernels.causal.states import (
    LEAST,
    absorb,
    begin,
    counts,
    dot_rows,
    place,
    relative,
    remember,
    sees,
    sum_rows,
    sums_before,
    weigh,
)
from softless.kernels.common.arithmetic import column_sums, dots, factor, held, product, summed
from softless.kernels.common.features import feature
from softless.kernels.common.launch import SIZES
from softless.kernels.common.rows import load, sequence, store, visible


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(q, k, v, out, mask, offsets, before, after, heads, tokens, segments, length, scale, D: tl.constexpr,
                   E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, CHUNK: tl.constexpr, SHARED: tl.constexpr,
                   PHI_Q: tl.constexpr, PHI_K: tl.constexpr, READER: tl.constexpr, SIGNED: tl.constexpr,
                   CONSTANT: tl.constexpr, DTYPE: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """One program per segment and block of value columns."""
    BLOCKS: tl.constexpr = (E + BE - 1) // BE
    program = tl.program_id(0).to(tl.int64)
    columns = (program % BLOCKS).to(tl.int32) * BE + tl.arange(0, BE)
    b, h, g, p, segment = place(program // BLOCKS, heads, segments, SHARED)
    b, tokens = sequence(offsets, b, tokens)
    dims, steps = tl.arange(0, BD), tl.arange(0, CHUNK)
    inside, valued = (dims < D)[None, :], (columns < E)[None, :]
    start = (segment * length).to(tl.int32)
    stop = tl.minimum(start + length, tokens)
    n, k_mean, v_mean, comoment = begin(k, v, mask, before, b, g, p * segments + segment, start, stop, dims, columns, D,
                                        E, PHI_K)  # fmt: skip
    for at in tl.range(start, stop, CHUNK, num_stages=STAGES):
        here = at + steps
        seen = visible(mask, b, here, stop)
        keys = feature(load(k, b, g, here, dims, seen[:, None] & inside), 0.0, D, PHI_K)
        keys = relative(keys, k_mean, seen, DTYPE)
        values = relative(load(v, b, g, here, columns, seen[:, None] & valued), v_mean, seen, DTYPE)
        z, y = sum_rows(keys), sum_rows(values)
        queries = load(q, b, h, here, dims, (here < stop)[:, None] & inside)
        queries = factor(feature(queries, 0.0, D, PHI_Q), DTYPE)
        central = dot_rows(queries, k_mean)

        sight = sees(mask, steps, seen)
        scores = product(queries, tl.trans(keys), tl.zeros((CHUNK, CHUNK), tl.float32), DTYPE)
        scores = tl.where(sight, scores, 0.0)
        known, new = counts(mask, n, seen, steps, stop - at)
        inner = tl.sum(scores, 1)
        terms = inner
        if SIGNED:
            terms = tl.sum(tl.abs(scores), 1) + known * dot_rows(tl.abs(queries), tl.abs(k_mean))
        gain, even = weigh(inner, central, terms, known, scale, D, READER, SIGNED, CONSTANT)
        weights = factor(tl.where(sight, gain[:, None] * scores + even[:, None], 0.0), DTYPE)

        answer = product(queries, factor(comoment, DTYPE), tl.zeros((CHUNK, BE), tl.float32), DTYPE)
        answer = product(weights, values, gain[:, None] * answer, DTYPE)
        if READER == "none":
            answer += (gain * (inner + known * central))[:, None] * v_mean[None, :]
        else:
            answer += v_mean[None, :]
        if mask is not None:
            answer = tl.where(known[:, None] > 0, answer, 0.0)
        store(out, b, h, here, columns, (here < stop)[:, None] & valued, answer)
        n, k_mean, v_mean, comoment = absorb(n, k_mean, v_mean, comoment, keys, values, z, y, new, DTYPE)

    if after is not None and (segment + 1 == segments) & (h % SHARED == 0):
        remember(after, p, dims, columns, n, k_mean, v_mean, comoment, D, E)


@triton.jit
def read_chunk(queries, keys, values, sight, known, turned, k_sums, v_sums, scale, READER: tl.constexpr,
               DTYPE: tl.constexpr):  # fmt: skip
    """The outputs of a chunk of queries. queries, keys and values are factors; turned is S^T."""
    CHUNK: tl.constexpr = queries.shape[0]
    scores = product(queries, tl.trans(keys), tl.zeros((CHUNK, CHUNK), tl.float32), DTYPE)
    scores = tl.where(sight, scores, 0.0)
    answer = tl.zeros((CHUNK, values.shape[1]), tl.float32)
    answer = product(queries, factor(tl.trans(turned), DTYPE), answer, DTYPE)
    if READER == "divide":
        mass = (tl.sum(scores, 1) + dots(queries, k_sums, DTYPE))[:, None]
        even = tl.where(tl.abs(mass) <= LEAST, 1.0, 0.0)
        mass += even * known[:, None]
        answer += even * summed(v_sums)[None, :]
        answer = product(factor(tl.where(sight, scores + even, 0.0), DTYPE), values, answer, DTYPE)
        return answer * (1.0 / tl.where(mass != 0, mass, 1.0))
    else:
        tl.static_assert(READER == "none")
        return scale * product(factor(scores, DTYPE), values, answer, DTYPE)


@triton.jit
def leave(memory, p, dims, columns, n, turned, k_sums, v_sums, D: tl.constexpr, E: tl.constexpr):
    """Write State p, made from these sums."""
    share = 1.0 / tl.maximum(n, 1).to(tl.float32)
    z, v_mean = summed(k_sums), share * summed(v_sums)
    comoment = tl.trans(turned) - z[:, None] * v_mean[None, :]
    remember(memory, p, dims, columns, n, share * z, v_mean, comoment, D, E)


@triton.jit(do_not_specialize=SIZES)
def plain_kernel(q, k, v, out, mask, offsets, before, after, heads, tokens, segments, length, scale, D: tl.constexpr,
                 E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, CHUNK: tl.constexpr, SHARED: tl.constexpr,
                 PHI_Q: tl.constexpr, PHI_K: tl.constexpr, READER: tl.constexpr, SIGNED: tl.constexpr,
                 CONSTANT: tl.constexpr, DTYPE: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """The same arguments as `forward_kernel`, on plain sums."""
    tl.static_assert(not SIGNED and not CONSTANT)
    BLOCKS: tl.constexpr = (E + BE - 1) // BE
    program = tl.program_id(0).to(tl.int64)
    columns = (program % BLOCKS).to(tl.int32) * BE + tl.arange(0, BE)
    b, h, g, p, segment = place(program // BLOCKS, heads, segments, SHARED)
    b, tokens = sequence(offsets, b, tokens)
    dims, steps = tl.arange(0, BD), tl.arange(0, CHUNK)
    inside, valued = (dims < D)[None, :], (columns < E)[None, :]

    n, turned, k_sums, v_sums = sums_before(before, p * segments + segment, dims, columns, 0.0, 0.0, D, E)
    start = (segment * length).to(tl.int32)
    stop = tl.minimum(start + length, tokens)
    for at in tl.range(start, stop, CHUNK, num_stages=STAGES):
        here = at + steps
        seen = visible(mask, b, here, stop)
        keys = feature(load(k, b, g, here, dims, seen[:, None] & inside), 0.0, D, PHI_K)
        keys = factor(held(tl.where(seen[:, None], keys, 0.0), DTYPE), DTYPE)
        values = factor(load(v, b, g, here, columns, seen[:, None] & valued), DTYPE)
        queries = load(q, b, h, here, dims, (here < stop)[:, None] & inside)
        queries = factor(feature(queries, 0.0, D, PHI_Q), DTYPE)

        known, new = counts(mask, n, seen, steps, stop - at)
        answer = read_chunk(queries, keys, values, sees(mask, steps, seen), known, turned, k_sums, v_sums, scale,
                            READER, DTYPE)  # fmt: skip
        if mask is not None:
            answer = tl.where(known[:, None] > 0, answer, 0.0)
        store(out, b, h, here, columns, (here < stop)[:, None] & valued, answer)
        turned = product(tl.trans(values), keys, turned, DTYPE)
        k_sums, v_sums = column_sums(keys, k_sums, DTYPE), column_sums(values, v_sums, DTYPE)
        n += new

    if after is not None and (segment + 1 == segments) & (h % SHARED == 0):
        leave(after, p, dims, columns, n, turned, k_sums, v_sums, D, E)


@triton.jit(do_not_specialize=SIZES)
def decode_kernel(q, k, v, out, mask, before, after, groups, scale, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
                  BE: tl.constexpr, SHARED: tl.constexpr, PHI_Q: tl.constexpr, PHI_K: tl.constexpr,
                  READER: tl.constexpr, SIGNED: tl.constexpr, CONSTANT: tl.constexpr):  # fmt: skip
    """One program per key head and block of value columns."""
    BLOCKS: tl.constexpr = (E + BE - 1) // BE
    program = tl.program_id(0).to(tl.int64)
    columns = (program % BLOCKS).to(tl.int32) * BE + tl.arange(0, BE)
    p = program // BLOCKS
    b, g = p // groups, p % groups
    dims, token = tl.arange(0, BD), tl.arange(0, 1)
    inside, valued = (dims < D)[None, :], (columns < E)[None, :]
    n, k_mean, v_mean, comoment = begin(k, v, mask, before, b, g, p, 0, 1, dims, columns, D, E, PHI_K)
    seen = visible(mask, b, token, 1)
    count = tl.sum(seen.to(tl.int32), 0)
    keys = feature(load(k, b, g, token, dims, seen[:, None] & inside), 0.0, D, PHI_K)
    k_step = tl.sum(tl.where(seen[:, None], keys - k_mean[None, :], 0.0), 0)
    v_step = load(v, b, g, token, columns, seen[:, None] & valued)
    v_step = tl.sum(tl.where(seen[:, None], v_step - v_mean[None, :], 0.0), 0)
    past = n.to(tl.float32)
    n += count
    share = 1.0 / tl.maximum(n, 1).to(tl.float32)
    comoment += (past * share * k_step)[:, None] * v_step[None, :]
    k_mean += share * k_step
    v_mean += share * v_step
    for r in range(SHARED):
        h = g * SHARED + r
        queries = feature(load(q, b, h, token, dims, (token < 1)[:, None] & inside), 0.0, D, PHI_Q)
        central = tl.sum(queries * k_mean[None, :], 1)
        terms = n.to(tl.float32) * tl.sum(tl.abs(queries * k_mean[None, :]), 1)
        gain, _ = weigh(tl.zeros_like(central), central, terms, n.to(tl.float32), scale, D, READER, SIGNED, CONSTANT)
        answer = gain[:, None] * tl.sum(tl.sum(queries, 0)[:, None] * comoment, 0)[None, :]
        if READER == "none":
            answer += (gain * n.to(tl.float32) * central)[:, None] * v_mean[None, :]
        else:
            answer += v_mean[None, :]
        store(out, b, h, token, columns, (token < 1)[:, None] & valued, tl.where(n > 0, answer, 0.0))
    remember(after, p, dims, columns, n, k_mean, v_mean, comoment, D, E)
