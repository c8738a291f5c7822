"""The gradient of the queries, and what the keys' gradient needs to know of each query.

With p_ij = do_i.(v_j - r_i), where r is the output (divide), the mean (subtract) or 0 (none),

    df_i = g_i sum_{j <= i} h_j p_ij
         = g_i [ comoment do_i + sum_{j in the chunk} h'_j p_ij + k_mean sum_j p_ij ]

    do.(r - v_mean) = delta      divide    sum_j w_ij do.v'_j + g f.comoment do
                                 subtract  sum_j do.v'_j / n
                                 none      -do.v_mean

so the rounded output is not read back: it is made again, in float32, as far as do sees it. The last sum is kept in
float32 too, and what is rounded is relative to the past. Written for each query, relative to the keys' and values'
means over the whole call (k_ref, v_ref), where the keys' gradient uses them:

    gain g      delta do.(r - v_ref)      even b + g f.(k_ref - k_mean)             scalars [B, H, 3, N] float32
"""

import triton
import triton.language as tl

from softless.kernels.arithmetic import factor, product
from softless.kernels.causal_memory import (
    SIZES,
    absorb,
    begin,
    counts,
    dot_rows,
    relative,
    sees,
    sum_rows,
    visible,
    weigh,
)
from softless.kernels.features import feature, slope
from softless.kernels.rows import load, store


@triton.jit
def answer_gradient(queries, keys, values, given, known, sight, k_mean, v_mean, comoment, scale, READER: tl.constexpr,
                    CONSTANT: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """(g, delta, b, df / g) of a chunk's queries; queries, keys, values and given are factors."""
    CHUNK: tl.constexpr = queries.shape[0]
    square = tl.zeros((CHUNK, CHUNK), tl.float32)
    central = dot_rows(queries, k_mean)
    inner = central
    if READER != "none":
        scores = tl.where(sight, product(queries, tl.trans(keys), square, DTYPE), 0.0)
        inner = tl.sum(scores, 1)
    gain, even = weigh(inner, central, known, scale, READER, CONSTANT)
    through = tl.where(sight, product(given, tl.trans(values), square, DTYPE), 0.0)
    total = tl.sum(through, 1)
    gradient = tl.zeros((CHUNK, queries.shape[1]), tl.float32)
    gradient = product(given, tl.trans(factor(comoment, DTYPE)), gradient, DTYPE)
    if READER == "divide":
        delta = even * total + gain * tl.sum(scores * through, 1)
        delta += gain * tl.sum(queries.to(tl.float32) * gradient, 1)
    elif READER == "subtract":
        delta = total / tl.maximum(known, 1.0)
    else:
        delta = -dot_rows(given, v_mean)
    gradient = product(factor(tl.where(sight, through - delta[:, None], 0.0), DTYPE), keys, gradient, DTYPE)
    if READER != "subtract":
        gradient += (total - known * delta)[:, None] * k_mean[None, :]
    return gain, delta, even, gradient


@triton.jit(do_not_specialize=SIZES)
def query_gradient_kernel(q, k, v, do, dq, mask, before, k_ref, v_ref, width, scalars, heads, tokens, segments,
                          length, scale, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                          CHUNK: tl.constexpr, SHARED: tl.constexpr, PHI_Q: tl.constexpr, PHI_K: tl.constexpr,
                          READER: tl.constexpr, CONSTANT: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """One program a segment and head; it walks as the forward does."""
    DTYPE: tl.constexpr = q.at.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    segment = program % segments
    h = program // segments % heads
    b = program // segments // heads
    g = h // SHARED
    p = b * (heads // SHARED) + g
    start = (segment * length).to(tl.int32)
    stop = tl.minimum(start + length, tokens)
    dims, columns, steps = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, CHUNK)
    inside, valued = (dims < D)[None, :], (columns < E)[None, :]
    k_ref += p * D + dims
    v_ref += p * width + columns
    scalars += (b * heads + h) * 3 * tokens
    n, k_mean, v_mean, comoment = begin(
        k, v, mask, before, b, g, p * segments + segment, start, stop, dims, columns, D, E, PHI_K, CHUNK
    )
    for at in tl.range(start, stop, CHUNK, num_stages=STAGES):
        here = at + steps
        some = here < stop
        seen = visible(mask, b, here, stop)
        keys = feature(load(k, b, g, here, dims, seen[:, None] & inside), 0.0, D, PHI_K)
        keys = relative(keys, k_mean, seen, DTYPE)
        values = relative(load(v, b, g, here, columns, seen[:, None] & valued), v_mean, seen, DTYPE)
        z, y = sum_rows(keys), sum_rows(values)
        queries = load(q, b, h, here, dims, some[:, None] & inside)
        queries = factor(feature(queries, 0.0, D, PHI_Q), DTYPE)
        given = factor(load(do, b, h, here, columns, some[:, None] & valued), DTYPE)

        sight = sees(mask, steps, seen)
        known, new = counts(mask, n, seen, steps, stop - at)
        k_shift = dot_rows(queries, tl.load(k_ref, mask=dims < D, other=0.0) - k_mean)
        v_shift = dot_rows(given, v_mean - tl.load(v_ref, mask=columns < E, other=0.0))
        gain, delta, even, gradient = answer_gradient(
            queries, keys, values, given, known, sight, k_mean, v_mean, comoment, scale, READER, CONSTANT, DTYPE
        )
        if mask is not None:
            gain, even = tl.where(known > 0, gain, 0.0), tl.where(known > 0, even, 0.0)
        delta += v_shift
        even += gain * k_shift
        tl.store(scalars + here, gain, mask=some)
        tl.store(scalars + tokens + here, delta, mask=some)
        tl.store(scalars + 2 * tokens + here, even, mask=some)
        raw = load(q, b, h, here, dims, some[:, None] & inside)  # again: held since above, it would cost registers
        gradient = slope(raw, feature(raw, 0.0, D, PHI_Q), gain[:, None] * gradient, 0.0, PHI_Q)
        store(dq, b, h, here, dims, some[:, None] & inside, gradient)
        n, k_mean, v_mean, comoment = absorb(n, k_mean, v_mean, comoment, keys, values, z, y, new, DTYPE)
