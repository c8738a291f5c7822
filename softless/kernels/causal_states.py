"""The State before each segment: where heads are few, segments are walked at the same time.

    segment_kernel   the State of each segment but the last, from its own tokens, as `observe` makes it
    prefix_kernel    the State before segment s, from that before the call (t = 0) and those of the segments t <= s:

        n = sum_t n_t       mean = m_0 + sum_t n_t (m_t - m_0) / n       m_0 the mean of the first State with a token
        comoment = sum_t comoment_t + sum_t n_t k'_t v'_t^T - n k'_mean v'_mean^T               ' relative to m_0

Running sums over t, all segments at once; nothing in them comes from a later segment.
"""

import triton
import triton.language as tl

from softless.kernels.causal_memory import SIZES, remember
from softless.kernels.observe import observe_tokens


@triton.jit(do_not_specialize=SIZES)
def segment_kernel(k, v, mask, states, groups, tokens, segments, length, D: tl.constexpr, E: tl.constexpr,
                   BD: tl.constexpr, BE: tl.constexpr, T: tl.constexpr, PHI: tl.constexpr, DTYPE: tl.constexpr,
                   EVEN: tl.constexpr):  # fmt: skip
    """One program a segment and key head: the State of segment t is written at t + 1."""
    program = tl.program_id(0).to(tl.int64)
    segment, p = program % (segments - 1), program // (segments - 1)
    start = (segment * length).to(tl.int32)
    stop = tl.minimum(start + length, tokens)
    n, k_mean, v_mean, comoment, _shift = observe_tokens(
        k, v, mask, p // groups, p % groups, start, stop, 0.0, D, E, BD, BE, T, PHI, True, DTYPE,
        EVEN)  # fmt: skip
    dims, columns = tl.arange(0, BD), tl.arange(0, BE)
    remember(states, p * segments + segment + 1, dims, columns, n.to(tl.int64), k_mean, v_mean, comoment, D, E)


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
