"""Causal attention, backward: the gradient of the queries, and what the keys' gradient needs to know about each query.

Keys are taken relative to a typical key, h' = h - k_ref (`reference`), and values relative to their mean over the whole
call, v' = v - v_ref: a gradient may depend on the future. With S = sum h' v'^T, z = sum h', y = sum v' of all tokens
before the chunk, and for j over the tokens of the chunk,

    s_ij = f_i.h_j (subtract: f_i.h'_j)         t_ij = do_i.v'_j         total_i = do_i.y + sum_j t_ij
    w_ij = g_i s_ij + b_i                                           `states.weigh`, with 0 for k_mean
    delta_i = do_i.(r_i - v_ref)      r the output (divide), the mean (subtract) or 0 (none)

    divide    b total + g (f.S do + (f.k_ref)(do.y) + sum_j s_ij t_ij)      subtract  total / n      none  -do.v_ref

    df_i = g_i [ S do_i - delta_i z + sum_j (t_ij - delta_i) h'_j + (total_i - n_i delta_i) k_ref ]

so the rounded output is not read back: its product with do is computed again, in float32. A weight of a division may be
far smaller than its key's distance from the typical key. Weights are therefore made from keys as they are, and only df
from centered keys. Where keys are nearly equal, delta is then too coarse for the last term, total - n delta. With r for
the rest of df / g as delta gives it and a = f.k_ref, that term equals (total - n delta)(1 - n a g) - n g f.r, in which
an error of delta is multiplied by how much keys differ (`refined`). A weight of a subtraction is 1 minus a sum that may
be a thousand, so its queries enter as g f, rounded as the keys' gradient rounds them. For each query are written

    gain g      delta      even b             scalars [B, H, 3, N] float32
"""

import triton
import triton.language as tl

from softless.kernels.causal.states import counts, dot_rows, place, relative, sees, sums_before, weigh
from softless.kernels.common.arithmetic import column_sums, factor, held, product, summed
from softless.kernels.common.features import feature, slope
from softless.kernels.common.launch import SIZES
from softless.kernels.common.reference import typical
from softless.kernels.common.rows import keep, line, load, sequence, store, visible


@triton.jit
def refined(rest, gradient, phi, usual, gain, n):
    """rest = total - n delta of a division, recomputed from differences of keys where keys differ by little."""
    share = n * usual * gain  # 1 where every key is k_ref
    again = rest * (1.0 - share) - n * gain * tl.sum(phi * gradient, 1)
    return tl.where(tl.abs(share) <= 2.0, again, rest)


@triton.jit
def answer_gradient(phi, keys, plain, values, d_out, sight, known, past, turned, k_sums, v_sums, k_ref, v_ref, scale,
                    D: tl.constexpr, READER: tl.constexpr, SIGNED: tl.constexpr, CONSTANT: tl.constexpr,
                    DTYPE: tl.constexpr):  # fmt: skip
    """(g, delta, b, df / g) of a chunk's queries. keys h', plain h, values v' and d_out are factors; turned is S^T."""
    CHUNK: tl.constexpr = phi.shape[0]
    square, zero = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK,), tl.float32)
    z, share = summed(k_sums), 1.0 / tl.maximum(known, 1.0)
    through = tl.where(sight, product(d_out, tl.trans(values), square, DTYPE), 0.0)
    before = dot_rows(d_out, summed(v_sums))  # do.y
    total = before + tl.sum(through, 1)
    if READER == "divide":
        scores = tl.where(sight, product(factor(phi, DTYPE), tl.trans(plain), square, DTYPE), 0.0)
        inner = tl.sum(scores, 1) + dot_rows(phi, z + past * k_ref)
        terms = inner
        if SIGNED:
            terms = tl.sum(tl.abs(scores), 1) + dot_rows(tl.abs(phi), tl.abs(z + past * k_ref))
        gain, even = weigh(inner, zero, terms, known, scale, D, READER, SIGNED, CONSTANT)
        drawn = tl.sum(scores * through, 1)
        usual = dot_rows(phi, k_ref) + (1.0 if CONSTANT else 0.0)
    elif READER == "subtract":
        gain = share * scale
        queries = factor(gain[:, None] * phi, DTYPE)
        scores = tl.where(sight, product(queries, tl.trans(keys), square, DTYPE), 0.0)
        even, delta = share * (1.0 - tl.sum(scores, 1) - dot_rows(queries, z)), share * total
    else:
        gain, even = weigh(zero, zero, zero, known, scale, D, READER, SIGNED, CONSTANT)
        delta = -dot_rows(d_out, v_ref)
    gradient = product(d_out, factor(turned, DTYPE), tl.zeros((CHUNK, phi.shape[1]), tl.float32), DTYPE)
    if READER == "divide":
        drawn += tl.sum(phi * (gradient + before[:, None] * k_ref[None, :]), 1)
        delta = even * total + gain * drawn
    pulls = factor(tl.where(sight, through - delta[:, None], 0.0), DTYPE)
    gradient = product(pulls, keys, gradient, DTYPE) - delta[:, None] * z[None, :]
    if READER != "subtract":
        rest = total - known * delta
        if READER == "divide":
            rest = refined(rest, gradient, phi, usual, gain, known)
        gradient += rest[:, None] * k_ref[None, :]
    return gain, delta, even, gradient


@triton.jit(do_not_specialize=SIZES)
def query_gradient_kernel(q, k, v, do, dq, mask, offsets, before, v_ref, width, scalars, heads, tokens, segments,
                          length, scale, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                          CHUNK: tl.constexpr, SHARED: tl.constexpr, PHI_Q: tl.constexpr, PHI_K: tl.constexpr,
                          READER: tl.constexpr, SIGNED: tl.constexpr, CONSTANT: tl.constexpr,
                          DTYPE: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """One program per segment and head; it walks as the forward does. No query sees a token beyond the end."""
    SEEN: tl.constexpr = mask is None
    b, h, g, p, segment = place(tl.program_id(0).to(tl.int64), heads, segments, SHARED)
    b, end = sequence(offsets, b, tokens)
    start = (segment * length).to(tl.int32)
    stop = tl.minimum(start + length, end)
    dims, columns, steps = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, CHUNK)
    inside, valued = (dims < D)[None, :], (columns < E)[None, :]
    k_ref = typical(k, mask, b, g, 0, end, 0.0, dims, D, PHI_K)
    v_ref = tl.load(v_ref + p * width + columns, mask=columns < E, other=0.0)
    scalars += line(offsets, b, h, heads, tokens, 3)
    n, turned, k_sums, v_sums = sums_before(before, p * segments + segment, dims, columns, k_ref, v_ref, D, E)
    for at in tl.range(start, stop, CHUNK, num_stages=STAGES):
        here = at + steps
        within, seen = here < stop, visible(mask, b, here, stop)
        keys = held(feature(load(k, b, g, here, dims, seen[:, None] & inside), 0.0, D, PHI_K), DTYPE)
        plain = factor(keep(keys, seen[:, None], 0.0, SEEN), DTYPE)
        keys = relative(keys, k_ref, seen, DTYPE, SEEN)
        values = relative(load(v, b, g, here, columns, seen[:, None] & valued), v_ref, seen, DTYPE, SEEN)
        x = load(q, b, h, here, dims, within[:, None] & inside)
        phi = held(feature(x, 0.0, D, PHI_Q), DTYPE)
        d_out = factor(load(do, b, h, here, columns, within[:, None] & valued), DTYPE)

        known, new = counts(mask, n, seen, steps, stop - at)
        gain, delta, even, gradient = answer_gradient(
            phi, keys, plain, values, d_out, sees(mask, steps, seen), known, n.to(tl.float32), turned, k_sums, v_sums,
            k_ref, v_ref, scale, D, READER, SIGNED, CONSTANT, DTYPE)  # fmt: skip
        if mask is not None:
            gain, even = tl.where(known > 0, gain, 0.0), tl.where(known > 0, even, 0.0)
        tl.store(scalars + here, gain, mask=within)
        tl.store(scalars + tokens + here, delta, mask=within)
        tl.store(scalars + 2 * tokens + here, even, mask=within)
        gradient = slope(x, phi, gain[:, None] * gradient, 0.0, PHI_Q)
        store(dq, b, h, here, dims, within[:, None] & inside, gradient)
        turned = product(tl.trans(values), keys, turned, DTYPE)
        k_sums, v_sums = column_sums(keys, k_sums, DTYPE), column_sums(values, v_sums, DTYPE)
        n += new
