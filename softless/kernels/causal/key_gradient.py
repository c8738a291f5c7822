"""Causal attention, backward: the gradients of keys and values. A program walks back along a segment of one key head.

With v' = v - v_ref as in `query_gradient`, h' = h - k_ref where CENTERED and h otherwise, and the scalars that
`query_gradient` wrote,

    dh_j = sum_{i >= j} g_i f_i (do_i.v'_j - delta_i)        = outer v'_j - of_queries    from later chunks
    dv_j = sum_{i >= j} (g_i f_i.h'_j + even_i) do_i         = outer^T h'_j + of_outputs  from later chunks

    outer = sum g f do^T [D, E]       of_queries = sum g delta f [D]       of_outputs = sum even do [E]

The references may depend on the future, as the gradients of keys and values do anyway. `sums_kernel` makes the three
sums over pieces of segments, and `later_kernel` the sums over all queries after each segment: D E + D + E numbers, the
three sums one after the other.

Loads beyond the last token repeat that token with a gain of zero: they add nothing, and their results are not stored.
"""

import triton
import triton.language as tl

from softless.kernels.common.arithmetic import ONES, factor, held, product, summed, weighted_sums
from softless.kernels.common.features import feature, slope
from softless.kernels.common.launch import SIZES
from softless.kernels.common.reference import typical
from softless.kernels.common.rows import line, load, sequence, store, visible
from softless.kernels.parallel.read import contrast


@triton.jit
def query_chunk(q, do, scalars, b, h, here, stop, tokens, dims, columns, D: tl.constexpr, E: tl.constexpr,
          PHI: tl.constexpr, PHI_K: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """(g f, the same after `read.contrast`, do, delta, even) of a chunk's queries; the first three are factors."""
    within, near = here < stop, tl.minimum(here, stop - 1)
    gain = tl.load(scalars + here, mask=within, other=0.0)
    delta = tl.load(scalars + tokens + here, mask=within, other=0.0)
    even = tl.load(scalars + 2 * tokens + here, mask=within, other=0.0)
    queries = feature(load(q, b, h, near, dims, (dims < D)[None, :], D == dims.shape[0]), 0.0, D, PHI)
    queries = gain[:, None] * held(queries, DTYPE)
    d_out = factor(load(do, b, h, near, columns, (columns < E)[None, :], E == columns.shape[0]), DTYPE)
    return factor(queries, DTYPE), factor(contrast(queries, D, PHI_K, True), DTYPE), d_out, delta, even


@triton.jit
def backwards(mask, steps, seen):
    """Which queries of its chunk see a key, [keys, queries]; queries beyond the end have no gain."""
    after = steps[:, None] <= steps[None, :]
    if mask is None:
        return after
    else:
        return after & seen[:, None]


@triton.jit
def following(later, row, dims, columns, k_ref, D: tl.constexpr, E: tl.constexpr):
    """(outer^T, of_queries, of_outputs) of all queries after a segment; outer^T, because do is read untransposed."""
    turned = tl.zeros((columns.shape[0], dims.shape[0]), tl.float32)
    of_queries, of_outputs = tl.zeros((dims.shape[0],), tl.float32), tl.zeros((columns.shape[0],), tl.float32)
    if later is None:
        return turned, of_queries, of_outputs
    else:
        later += row * (D * E + D + E)
        inside = (columns < E)[:, None] & (dims < D)[None, :]
        turned += tl.load(later + dims[None, :] * E + columns[:, None], mask=inside, other=0.0)
        of_queries += tl.load(later + D * E + dims, mask=dims < D, other=0.0)
        of_outputs += tl.load(later + D * E + D + columns, mask=columns < E, other=0.0)
        return turned, of_queries, of_outputs + tl.sum(turned * k_ref[None, :], 1)  # `later` has uncentered keys


@triton.jit
def written(x, b, g, here, columns, seen, mask, stop, width, gradient):
    """Store a chunk's gradient: 0 for hidden tokens."""
    if mask is not None:
        gradient = tl.where(seen[:, None], gradient, 0.0)
    store(x, b, g, here, columns, (here < stop)[:, None] & (columns < width)[None, :], gradient)


@triton.jit(do_not_specialize=SIZES)
def key_gradient_kernel(q, k, v, do, dk, dv, mask, offsets, v_ref, width, scalars, later, groups, tokens, segments,
                        length, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                        CHUNK: tl.constexpr, SHARED: tl.constexpr, PHI_Q: tl.constexpr, PHI_K: tl.constexpr,
                        CENTERED: tl.constexpr, DTYPE: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """One program per segment and key head; it serves all query heads that share the key head."""
    BARE: tl.constexpr = PHI_K == "softmax"
    program = tl.program_id(0).to(tl.int64)
    segment, p = program % segments, program // segments
    b, end = sequence(offsets, p // groups, tokens)
    g, start = p % groups, (segment * length).to(tl.int32)
    stop = tl.minimum(start + length, end)
    dims, columns, steps = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, CHUNK)
    inside, valued = (dims < D)[None, :], (columns < E)[None, :]
    scalars += line(offsets, b, g * SHARED, groups * SHARED, tokens, 3)
    center = tl.load(v_ref + p * width + columns, mask=columns < E, other=0.0)
    k_ref = typical(k, mask, b, g, 0, end, 0.0, dims, D, PHI_K) if CENTERED else tl.zeros((BD,), tl.float32)
    turned, of_queries, of_outputs = following(later, p * (segments + 1) + segment + 1, dims, columns, k_ref, D, E)
    drifts, pulls = tl.zeros((BD, ONES), tl.float32), tl.zeros((BE, ONES), tl.float32)
    bared = contrast(turned, D, PHI_K, True)  # outer^T of bare queries, where that differs
    chunks = (stop - start + CHUNK - 1) // CHUNK
    for step in tl.range(0, chunks, num_stages=STAGES):
        here = start + (chunks - 1 - step) * CHUNK + steps
        near, seen = tl.minimum(here, stop - 1), visible(mask, b, here, stop)
        x = load(k, b, g, near, dims, seen[:, None] & inside, mask is None and D == BD)
        phi = feature(x, 0.0, D, PHI_K)
        keys = factor(phi - k_ref[None, :] if CENTERED else phi, DTYPE)
        past, sight = factor(turned, DTYPE), backwards(mask, steps, seen)
        if SHARED == 1:
            queries, bare, d_out, delta, even = query_chunk(
                q, do, scalars, b, g, here, stop, tokens, dims, columns, D, E, PHI_Q, PHI_K, DTYPE)  # fmt: skip
        gradient = product(keys, tl.trans(past), tl.zeros((CHUNK, BE), tl.float32), DTYPE)
        of_chunk = of_outputs + summed(pulls)
        for r in range(SHARED):
            if SHARED > 1:
                queries, _, d_out, _, even = query_chunk(
                    q, do, scalars + r * 3 * tokens, b, g * SHARED + r, here, stop, tokens, dims, columns, D, E, PHI_Q,
                    PHI_K, DTYPE)  # fmt: skip
            weights = product(keys, tl.trans(queries), tl.zeros((CHUNK, CHUNK), tl.float32), DTYPE)
            weights = factor(tl.where(sight, weights + even[None, :], 0.0), DTYPE)
            gradient = product(weights, d_out, gradient, DTYPE)
            pulls = weighted_sums(even[:, None], d_out, pulls, DTYPE)
        written(dv, b, g, here, columns, seen, mask, stop, E, gradient + of_chunk[None, :])

        values = load(v, b, g, near, columns, seen[:, None] & valued, mask is None and E == BE)
        values = factor(values - center[None, :], DTYPE)
        past = factor(bared if BARE else turned, DTYPE)
        gradient = product(values, past, tl.zeros((CHUNK, BD), tl.float32), DTYPE)
        of_chunk = of_queries + summed(drifts)
        for r in range(SHARED):
            if SHARED > 1:
                queries, bare, d_out, delta, _ = query_chunk(
                    q, do, scalars + r * 3 * tokens, b, g * SHARED + r, here, stop, tokens, dims, columns, D, E, PHI_Q,
                    PHI_K, DTYPE)  # fmt: skip
            through = product(values, tl.trans(d_out), tl.zeros((CHUNK, CHUNK), tl.float32), DTYPE)
            through = factor(tl.where(sight, through - delta[None, :], 0.0), DTYPE)
            gradient = product(through, bare, gradient, DTYPE)
            drifts = weighted_sums(delta[:, None], bare, drifts, DTYPE)
            turned = product(tl.trans(d_out), queries, turned, DTYPE)
            if BARE:
                bared = product(tl.trans(d_out), bare, bared, DTYPE)
        gradient = slope(x, phi, gradient - of_chunk[None, :], 0.0, PHI_K)
        written(dk, b, g, here, dims, seen, mask, stop, D, gradient)


@triton.jit(do_not_specialize=SIZES)
def sums_kernel(q, k, do, mask, offsets, scalars, sums, heads, tokens, segments, skipped, length, D: tl.constexpr,
                E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, CHUNK: tl.constexpr, SHARED: tl.constexpr,
                PHI_Q: tl.constexpr, PHI_K: tl.constexpr, CENTERED: tl.constexpr, DTYPE: tl.constexpr,
                STAGES: tl.constexpr):  # fmt: skip
    """Sum g f do^T, g delta f and even do: one program per query head and segment, except the `skipped` first ones."""
    program = tl.program_id(0).to(tl.int64)
    segment, p = program % (segments - skipped) + skipped, program // (segments - skipped)
    b, end = sequence(offsets, p // heads, tokens)
    h, start = p % heads, (segment * length).to(tl.int32)
    stop = tl.minimum(start + length, end)
    dims, columns = tl.arange(0, BD), tl.arange(0, BE)
    scalars += line(offsets, b, h, heads, tokens, 3)
    turned = tl.zeros((BE, BD), tl.float32)
    drifts, pulls = tl.zeros((BD, ONES), tl.float32), tl.zeros((BE, ONES), tl.float32)
    for at in tl.range(start, stop, CHUNK, num_stages=STAGES):
        here = at + tl.arange(0, CHUNK)
        queries, _, d_out, delta, even = query_chunk(
            q, do, scalars, b, h, here, stop, tokens, dims, columns, D, E, PHI_Q, "identity", DTYPE)  # fmt: skip
        drifts = weighted_sums(delta[:, None], queries, drifts, DTYPE)
        pulls = weighted_sums(even[:, None], d_out, pulls, DTYPE)
        turned = product(tl.trans(d_out), queries, turned, DTYPE)
    of_queries, of_outputs = summed(drifts), summed(pulls)
    if CENTERED:
        of_outputs -= tl.sum(turned * typical(k, mask, b, h // SHARED, 0, end, 0.0, dims, D, PHI_K)[None, :], 1)
    sums += program * (D * E + D + E)
    tl.store(sums + dims[None, :] * E + columns[:, None], turned, mask=(columns < E)[:, None] & (dims < D)[None, :])
    tl.store(sums + D * E + dims, of_queries, mask=dims < D)
    tl.store(sums + D * E + D + columns, of_outputs, mask=columns < E)


@triton.jit(do_not_specialize=SIZES)
def later_kernel(sums, last, later, segments, skipped, size, PIECES: tl.constexpr, SHARED: tl.constexpr,
                 BLOCK: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Row s of `later` [P, segments + 1, size]: the sums of `last` [P, size] and of every segment from s on.

    sums  [P, SHARED, (segments - skipped) PIECES, size]; rows before `skipped` stay as they are.
    """
    BLOCKS = (size + BLOCK - 1) // BLOCK
    program = tl.program_id(0).to(tl.int64)
    p, columns = program // BLOCKS, program % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside, summed_segments = columns < size, segments - skipped
    total = tl.zeros((BLOCK,), tl.float32)
    if last is not None:
        total += tl.load(last + p * size + columns, mask=inside, other=0.0)
    tl.store(later + (p * (segments + 1) + segments) * size + columns, total, mask=inside)
    for back in tl.range(1, summed_segments + 1, num_stages=STAGES):
        for r in range(SHARED):
            for piece in range(PIECES):
                row = ((p * SHARED + r) * summed_segments + summed_segments - back) * PIECES + piece
                total += tl.load(sums + row * size + columns, mask=inside, other=0.0)
        tl.store(later + (p * (segments + 1) + segments - back) * size + columns, total, mask=inside)
