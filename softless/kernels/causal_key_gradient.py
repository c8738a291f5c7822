"""The gradients of keys and values: two programs walk back along a segment of one key head, one for each.

With v' = v - v_ref as in `causal_query_gradient`, h' = h - k_ref where CENTERED and h elsewhere, and the scalars that
`causal_query_gradient` left,

    dh_j = sum_{i >= j} g_i f_i (do_i.v'_j - delta_i)        = outer v'_j - of_queries    from later chunks
    dv_j = sum_{i >= j} (g_i f_i.h'_j + even_i) do_i         = outer^T h'_j + of_outputs  from later chunks

    outer = sum g f do^T [D, E]       of_queries = sum g delta f [D]       of_outputs = sum even do [E]

The references may know the future: the gradients of keys and values do anyway. Both programs keep `outer`: sharing it
would need twice the registers. `sums_kernel` makes the three sums over each segment's queries, and `later` holds what
follows each segment; they lie one after the other, D E + D + E numbers.
"""

import triton
import triton.language as tl

from softless.kernels.arithmetic import ONES, factor, held, product, summed, weighted_sums
from softless.kernels.causal_memory import SIZES, relative
from softless.kernels.features import feature, slope
from softless.kernels.mask import visible
from softless.kernels.query import contrast
from softless.kernels.reference import typical
from softless.kernels.rows import keep, load, store


@triton.jit
def gained_queries(q, scalars, b, h, here, dims, stop, D: tl.constexpr, PHI: tl.constexpr, PHI_K: tl.constexpr,
                   EVEN: tl.constexpr):  # fmt: skip
    """g f as a factor, less what `query.contrast` knows the keys do not see; 0 beyond `stop`."""
    some, full = here < stop, EVEN and D == dims.shape[0]
    queries = feature(load(q, b, h, here, dims, some[:, None] & (dims < D)[None, :], full), 0.0, D, PHI)
    queries = contrast(held(queries, q.at.dtype.element_ty), D, PHI_K, True)
    gain = tl.load(scalars + here, mask=some, other=0.0)
    return factor(keep(gain[:, None] * queries, some[:, None], 0.0, EVEN), q.at.dtype.element_ty)


@triton.jit
def backwards(mask, steps, seen):
    """Which queries of its chunk a key is seen by, [keys, queries]; what is beyond the end has no gain."""
    after = steps[:, None] <= steps[None, :]
    if mask is None:
        return after
    else:
        return after & seen[:, None]


@triton.jit
def value_walk(q, k, do, dv, mask, k_ref, scalars, later, b, g, start, stop, tokens, D: tl.constexpr, E: tl.constexpr,
               BD: tl.constexpr, BE: tl.constexpr, CHUNK: tl.constexpr, SHARED: tl.constexpr, PHI_Q: tl.constexpr,
               PHI_K: tl.constexpr, EVEN: tl.constexpr, CENTERED: tl.constexpr,
               STAGES: tl.constexpr):  # fmt: skip
    """dv of one segment; `scalars` and `later` point at this key head's."""
    DTYPE: tl.constexpr = q.at.dtype.element_ty
    FULL_K: tl.constexpr = EVEN and D == BD
    FULL_V: tl.constexpr = EVEN and E == BE
    dims, columns, steps = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, CHUNK)
    inside, valued = (dims < D)[None, :], (columns < E)[None, :]
    turned, of_outputs = tl.zeros((BE, BD), tl.float32), tl.zeros((BE,), tl.float32)  # outer^T: do is read as it lies
    pulls = tl.zeros((BE, ONES), tl.float32)
    if later is not None:
        turned += tl.load(later + dims[None, :] * E + columns[:, None], mask=(columns < E)[:, None] & inside, other=0.0)
        of_outputs += tl.load(later + D * E + D + columns, mask=columns < E, other=0.0)
        if CENTERED:
            of_outputs += tl.sum(turned * k_ref[None, :], 1)  # `later` is of keys as they are
    chunks = (stop - start + CHUNK - 1) // CHUNK
    for step in tl.range(0, chunks, num_stages=STAGES):
        here = start + (chunks - 1 - step) * CHUNK + steps
        some, seen = here < stop, visible(mask, b, here, stop)
        keys = feature(load(k, b, g, here, dims, seen[:, None] & inside, FULL_K), 0.0, D, PHI_K)
        keys = factor(keep(keys - k_ref[None, :] if CENTERED else keys, seen[:, None], 0.0, EVEN), DTYPE)
        gradient = product(keys, factor(tl.trans(turned), DTYPE), tl.zeros((CHUNK, BE), tl.float32), DTYPE)
        gradient += (of_outputs + summed(pulls))[None, :]
        sight = backwards(mask, steps, seen)
        for r in range(SHARED):
            of_head = scalars + r * 3 * tokens
            queries = gained_queries(q, of_head, b, g * SHARED + r, here, dims, stop, D, PHI_Q, "identity", EVEN)
            given = factor(load(do, b, g * SHARED + r, here, columns, some[:, None] & valued, FULL_V), DTYPE)
            even = tl.load(of_head + 2 * tokens + here, mask=some, other=0.0)
            pulls = weighted_sums(even[:, None], given, pulls, DTYPE)
            weights = product(keys, tl.trans(queries), tl.zeros((CHUNK, CHUNK), tl.float32), DTYPE)
            weights = factor(tl.where(sight, weights + even[None, :], 0.0), DTYPE)
            gradient = product(weights, given, gradient, DTYPE)
            turned = product(tl.trans(given), queries, turned, DTYPE)
        gradient = keep(gradient, seen[:, None], 0.0, EVEN)
        store(dv, b, g, here, columns, some[:, None] & valued, gradient, FULL_V)


@triton.jit
def key_walk(q, k, v, do, dk, mask, v_ref, scalars, later, b, g, start, stop, tokens, D: tl.constexpr,
             E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, CHUNK: tl.constexpr, SHARED: tl.constexpr,
             PHI_Q: tl.constexpr, PHI_K: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """dk of one segment; `scalars` and `later` point at this key head's."""
    DTYPE: tl.constexpr = q.at.dtype.element_ty
    FULL_K: tl.constexpr = EVEN and D == BD
    FULL_V: tl.constexpr = EVEN and E == BE
    dims, columns, steps = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, CHUNK)
    inside, valued = (dims < D)[None, :], (columns < E)[None, :]
    turned, of_queries = tl.zeros((BE, BD), tl.float32), tl.zeros((BD,), tl.float32)
    drifts = tl.zeros((BD, ONES), tl.float32)
    if later is not None:
        turned += tl.load(later + dims[None, :] * E + columns[:, None], mask=(columns < E)[:, None] & inside, other=0.0)
        of_queries += tl.load(later + D * E + dims, mask=dims < D, other=0.0)
    chunks = (stop - start + CHUNK - 1) // CHUNK
    for step in tl.range(0, chunks, num_stages=STAGES):
        here = start + (chunks - 1 - step) * CHUNK + steps
        some, seen = here < stop, visible(mask, b, here, stop)
        values = relative(load(v, b, g, here, columns, seen[:, None] & valued, FULL_V), v_ref, seen, DTYPE, EVEN)
        gradient = product(values, factor(turned, DTYPE), tl.zeros((CHUNK, BD), tl.float32), DTYPE)
        gradient -= (of_queries + summed(drifts))[None, :]
        sight = backwards(mask, steps, seen)
        for r in range(SHARED):
            of_head = scalars + r * 3 * tokens
            queries = gained_queries(q, of_head, b, g * SHARED + r, here, dims, stop, D, PHI_Q, PHI_K, EVEN)
            given = factor(load(do, b, g * SHARED + r, here, columns, some[:, None] & valued, FULL_V), DTYPE)
            delta = tl.load(of_head + tokens + here, mask=some, other=0.0)
            drifts = weighted_sums(delta[:, None], queries, drifts, DTYPE)
            through = product(values, tl.trans(given), tl.zeros((CHUNK, CHUNK), tl.float32), DTYPE)
            through = factor(tl.where(sight, through - delta[None, :], 0.0), DTYPE)
            gradient = product(through, queries, gradient, DTYPE)
            turned = product(tl.trans(given), queries, turned, DTYPE)
        keys = load(k, b, g, here, dims, seen[:, None] & inside, FULL_K)
        gradient = slope(keys, feature(keys, 0.0, D, PHI_K), gradient, 0.0, PHI_K)
        gradient = keep(gradient, seen[:, None], 0.0, EVEN)
        store(dk, b, g, here, dims, some[:, None] & inside, gradient, FULL_K)


@triton.jit(do_not_specialize=SIZES)
def key_gradient_kernel(q, k, v, do, dk, dv, mask, v_ref, width, scalars, later, groups, tokens, segments,
                        length, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                        CHUNK: tl.constexpr, SHARED: tl.constexpr, PHI_Q: tl.constexpr, PHI_K: tl.constexpr,
                        EVEN: tl.constexpr, CENTERED: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Two programs a segment and key head; they serve all query heads that share the key head."""
    program = tl.program_id(0).to(tl.int64)
    segment, p = program // 2 % segments, program // 2 // segments
    b, g = p // groups, p % groups
    start = (segment * length).to(tl.int32)
    stop = tl.minimum(start + length, tokens)
    dims, columns = tl.arange(0, BD), tl.arange(0, BE)
    scalars += p * SHARED * 3 * tokens
    if later is not None:
        later += program // 2 * (D * E + D + E)
    if program % 2 == 0:
        mean = tl.zeros((BD,), tl.float32)
        if CENTERED:
            mean = typical(k, mask, b, g, 0, tokens, 0.0, dims, D, PHI_K)
        value_walk(q, k, do, dv, mask, mean, scalars, later, b, g, start, stop, tokens, D, E, BD, BE, CHUNK, SHARED,
                   PHI_Q, PHI_K, EVEN, CENTERED, STAGES)  # fmt: skip
    else:
        center = tl.load(v_ref + p * width + columns, mask=columns < E, other=0.0)
        key_walk(q, k, v, do, dk, mask, center, scalars, later, b, g, start, stop, tokens, D, E, BD, BE, CHUNK, SHARED,
                 PHI_Q, PHI_K, EVEN, STAGES)  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def sums_kernel(q, k, do, mask, scalars, sums, heads, tokens, segments, length, D: tl.constexpr, E: tl.constexpr,
                BD: tl.constexpr, BE: tl.constexpr, CHUNK: tl.constexpr, SHARED: tl.constexpr, PHI_Q: tl.constexpr,
                PHI_K: tl.constexpr, EVEN: tl.constexpr, CENTERED: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """One program a segment and query head: sum g f do^T, sum g delta f, sum even do."""
    DTYPE: tl.constexpr = q.at.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    segment, p = program % segments, program // segments
    b, h = p // heads, p % heads
    start = (segment * length).to(tl.int32)
    stop = tl.minimum(start + length, tokens)
    dims, columns = tl.arange(0, BD), tl.arange(0, BE)
    valued = (columns < E)[None, :]
    scalars += p * 3 * tokens
    turned = tl.zeros((BE, BD), tl.float32)
    drifts, pulls = tl.zeros((BD, ONES), tl.float32), tl.zeros((BE, ONES), tl.float32)
    for at in tl.range(start, stop, CHUNK, num_stages=STAGES):
        here = at + tl.arange(0, CHUNK)
        some = here < stop
        queries = gained_queries(q, scalars, b, h, here, dims, stop, D, PHI_Q, "identity", EVEN)
        given = factor(load(do, b, h, here, columns, some[:, None] & valued, EVEN and E == BE), DTYPE)
        delta = tl.load(scalars + tokens + here, mask=some, other=0.0)
        even = tl.load(scalars + 2 * tokens + here, mask=some, other=0.0)
        drifts = weighted_sums(delta[:, None], queries, drifts, DTYPE)
        pulls = weighted_sums(even[:, None], given, pulls, DTYPE)
        turned = product(tl.trans(given), queries, turned, DTYPE)
    of_queries, of_outputs = summed(drifts), summed(pulls)
    if CENTERED:
        of_outputs -= tl.sum(turned * typical(k, mask, b, h // SHARED, 0, tokens, 0.0, dims, D, PHI_K)[None, :], 1)
    sums += program * (D * E + D + E)
    tl.store(sums + dims[None, :] * E + columns[:, None], turned, mask=(columns < E)[:, None] & (dims < D)[None, :])
    tl.store(sums + D * E + dims, of_queries, mask=dims < D)
    tl.store(sums + D * E + D + columns, of_outputs, mask=columns < E)
