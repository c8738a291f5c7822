"""The State before each segment: where heads are few, segments are walked at the same time.

    segment_kernel   the State of each segment but the last, from its own tokens
    prefix_kernel    the State before segment s, from that before the call (t = 0) and those of the segments t <= s:

        n = sum_t n_t       mean = m_0 + sum_t n_t (m_t - m_0) / n       m_0 the mean of the first State with a token
        comoment = sum_t comoment_t + sum_t n_t k'_t v'_t^T - n k'_mean v'_mean^T               ' relative to m_0

Running sums over t, all segments at once; nothing in them comes from a later segment.
"""

import triton
import triton.language as tl

from softless.kernels.causal_memory import SIZES, absorb, begin, relative, remember, sum_rows, visible
from softless.kernels.features import feature
from softless.kernels.rows import load


@triton.jit(do_not_specialize=SIZES)
def segment_kernel(k, v, mask, states, groups, tokens, segments, length, D: tl.constexpr, E: tl.constexpr,
                   BD: tl.constexpr, BE: tl.constexpr, CHUNK: tl.constexpr, PHI: tl.constexpr,
                   STAGES: tl.constexpr):  # fmt: skip
    """One program a segment, key head and block of value columns: the State of segment t is written at t + 1."""
    DTYPE: tl.constexpr = k.at.dtype.element_ty
    BLOCKS: tl.constexpr = (E + BE - 1) // BE
    program = tl.program_id(0).to(tl.int64)
    columns = (program % BLOCKS).to(tl.int32) * BE + tl.arange(0, BE)
    segment = program // BLOCKS % (segments - 1)
    p = program // BLOCKS // (segments - 1)
    b, g = p // groups, p % groups
    start = (segment * length).to(tl.int32)
    stop = tl.minimum(start + length, tokens)
    dims = tl.arange(0, BD)
    n, k_mean, v_mean, comoment = begin(k, v, mask, None, b, g, p, start, stop, dims, columns, D, E, PHI, CHUNK)
    for at in tl.range(start, stop, CHUNK, num_stages=STAGES):
        here = at + tl.arange(0, CHUNK)
        seen = visible(mask, b, here, stop)
        keys = feature(load(k, b, g, here, dims, seen[:, None] & (dims < D)[None, :]), 0.0, D, PHI)
        keys = relative(keys, k_mean, seen, DTYPE)
        values = load(v, b, g, here, columns, seen[:, None] & (columns < E)[None, :])
        values = relative(values, v_mean, seen, DTYPE)
        z, y = sum_rows(keys), sum_rows(values)
        count = tl.sum(seen.to(tl.int32), 0)
        n, k_mean, v_mean, comoment = absorb(n, k_mean, v_mean, comoment, keys, values, z, y, count, DTYPE)
    remember(states, p * segments + segment + 1, dims, columns, n, k_mean, v_mean, comoment, D, E)


@triton.jit(do_not_specialize=SIZES)
def prefix_kernel(states, first, n_out, v_out, segments, D: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
                  SEGMENTS: tl.constexpr):  # fmt: skip
    """One program a key head and channel a of the keys: row a of every comoment and k_mean, in place."""
    program = tl.program_id(0).to(tl.int64)
    p, a = program // D, program % D
    at, columns = tl.arange(0, SEGMENTS), tl.arange(0, BE)
    s = p * segments + at
    some, later = at < segments, (at > 0) & (at < segments)
    tile = some[:, None] & (columns < E)[None, :]
    spots = states.comoment + (s[:, None] * D + a) * E + columns[None, :]
    n = tl.load(states.n + s, mask=later, other=0)
    k = tl.load(states.k_mean + s * D + a, mask=later, other=0.0)
    v = tl.load(states.v_mean + s[:, None] * E + columns[None, :], mask=later[:, None] & tile, other=0.0)
    comoment = tl.load(spots, mask=later[:, None] & tile, other=0.0)
    if first is not None:
        n = tl.where(at == 0, tl.load(first.n + p), n)
        k = tl.where(at == 0, tl.load(first.k_mean + p * D + a), k)
        mean = tl.load(first.v_mean + p * E + columns, mask=columns < E, other=0.0)
        v = tl.where((at == 0)[:, None], mean[None, :], v)
        line = tl.load(first.comoment + (p * D + a) * E + columns, mask=columns < E, other=0.0)
        comoment = tl.where((at == 0)[:, None], line[None, :], comoment)

    pivot = at == tl.min(tl.where(n > 0, at, SEGMENTS), 0)
    k_pivot, v_pivot = tl.sum(tl.where(pivot, k, 0.0), 0), tl.sum(tl.where(pivot[:, None], v, 0.0), 0)
    tokens = n.to(tl.float32)
    k, v = tl.where(n > 0, k - k_pivot, 0.0), tl.where((n > 0)[:, None], v - v_pivot[None, :], 0.0)
    comoment = tl.cumsum(comoment + (tokens * k)[:, None] * v, 0)
    n = tl.cumsum(n, 0)
    known = tl.maximum(n, 1).to(tl.float32)
    k, v = tl.cumsum(tokens * k, 0), tl.cumsum(tokens[:, None] * v, 0)
    tl.store(spots, comoment - k[:, None] * (v / known[:, None]), mask=tile)
    tl.store(states.k_mean + s * D + a, tl.where(n > 0, k_pivot + k / known, 0.0), mask=some)
    if a == 0:
        v = tl.where((n > 0)[:, None], v_pivot[None, :] + v / known[:, None], 0.0)
        tl.store(n_out + s, n, mask=some)
        tl.store(v_out + s[:, None] * E + columns[None, :], v, mask=tile)
