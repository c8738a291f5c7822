"""Causal attention: one program walks along a segment of one head, chunk by chunk, and carries the State.

    out_i = lift_i v_mean + g_i f_i comoment + sum_{j <= i} w_ij v'_j          `causal_memory` has w, g and the update

    q, out  [B, H, N, D], [B, H, N, E]        k, v  [B, G, N, D], [B, G, N, E]          any strides
    before  State at the start of each segment, P = [B, G, segments]          after  State at the end, P = [B, G]

Factors are rounded as `arithmetic` says, sums and States are float32. Value columns are independent of each other: a
program takes BE of them. SHARED query heads share a key head.
"""

import triton
import triton.language as tl

from softless.kernels.causal.memory import (
    SIZES,
    absorb,
    begin,
    counts,
    dot_rows,
    place,
    relative,
    remember,
    sees,
    sum_rows,
    weigh,
)
from softless.kernels.common.arithmetic import factor, product
from softless.kernels.common.features import feature
from softless.kernels.common.mask import visible
from softless.kernels.common.rows import load, store


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(q, k, v, out, mask, before, after, heads, tokens, segments, length, scale, D: tl.constexpr,
                   E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, CHUNK: tl.constexpr, SHARED: tl.constexpr,
                   PHI_Q: tl.constexpr, PHI_K: tl.constexpr, READER: tl.constexpr, SIGNED: tl.constexpr,
                   CONSTANT: tl.constexpr, DTYPE: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """One program a segment and block of value columns."""
    BLOCKS: tl.constexpr = (E + BE - 1) // BE
    program = tl.program_id(0).to(tl.int64)
    columns = (program % BLOCKS).to(tl.int32) * BE + tl.arange(0, BE)
    b, h, g, p, segment = place(program // BLOCKS, heads, segments, SHARED)
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

    if (segment + 1 == segments) & (h % SHARED == 0):
        remember(after, p, dims, columns, n, k_mean, v_mean, comoment, D, E)
