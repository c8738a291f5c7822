"""The State while a causal kernel walks along the tokens, and how a query weighs the tokens it sees.

With h'_j = h_j - k_mean and v'_j = v_j - v_mean, where the means are those of all tokens before the chunk,

    w_ij = g_i f_i.h'_j + b_i                weight of value j for query i
    o_i  = v_mean + g_i f_i comoment + sum_{j in the chunk, j <= i} w_ij v'_j

    divide    g = 1 / mass                   b = g f.k_mean              mass = sum_j f.h_j; b = 1/n where it is lost
    subtract  g = scale / n                  b = (1 - g sum_j f.h'_j) / n
    none      g = scale                      b = g f.k_mean              o has g mass v_mean instead of v_mean

The chunk's own sums z = sum h' and y = sum v' update the State (Chan et al. 1979, with one rank less):

    comoment += sum h' v'^T - z y^T / n      k_mean += z / n             v_mean += y / n

Keys and values are centered on the past before they are rounded to a factor. A common offset of keys or values
therefore costs no bits, and no query learns of the future. Before the first token there is no mean. The first visible
token stands in for it, with n = 0, and the same update replaces it by the true mean after one chunk.

Segments of a head are walked at the same time. `segment_kernel` makes the State of each segment but the last from its
own tokens, as `observe` does. `prefix_kernel` merges these one after another, starting from the State before the call:

    n = n_1 + n_2      mean = mean_1 + (n_2/n) (mean_2 - mean_1)                                (Chan et al. 1979)
    comoment = comoment_1 + comoment_2 + (n_1 n_2/n) (k_mean_2 - k_mean_1) (v_mean_2 - v_mean_1)^T
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from softless.kernels.common.arithmetic import ONES, factor, lost, product
from softless.kernels.common.features import feature
from softless.kernels.common.launch import SIZES
from softless.kernels.common.rows import first_visible, keep, load, sequence, visible
from softless.kernels.parallel.observe import observe_tokens

LEAST = tl.constexpr(2.0**-100)  # a mass no larger counts as 0: its inverse would leave no room for a gradient


class Memory(NamedTuple):
    """States as kernels see them: n int64 [P], k_mean [P, D], v_mean [P, width], comoment [P, D, width], float32."""

    n: Any
    k_mean: Any
    v_mean: Any
    comoment: Any
    width: int


@triton.jit
def place(program, heads, segments, SHARED: tl.constexpr):
    """(b, h, g, p, segment) of a walk; p counts key heads. Programs of a head follow one another."""
    segment, head = program % segments, program // segments
    b, h = head // heads, head % heads
    return b, h, h // SHARED, b * (heads // SHARED) + h // SHARED, segment


@triton.jit
def counts(mask, n, seen, steps, left):
    """How many tokens each query of a chunk sees, float32 [CHUNK], and how many of the `left` tokens the chunk adds."""
    if mask is None:
        return n.to(tl.float32) + (steps + 1).to(tl.float32), tl.minimum(left, steps.shape[0])
    else:
        return n.to(tl.float32) + tl.cumsum(seen.to(tl.float32), 0), tl.sum(seen.to(tl.int32), 0)


@triton.jit
def sees(mask, steps, seen):
    """Which tokens of its chunk a query sees, [CHUNK, CHUNK]; queries beyond the end may see anything."""
    before = steps[:, None] >= steps[None, :]
    if mask is None:
        return before
    else:
        return before & seen[None, :]


@triton.jit
def remembered(memory, p, dims, columns, D: tl.constexpr, E: tl.constexpr):
    """Load State p, of some value columns."""
    n = tl.load(memory.n + p)
    k_mean = tl.load(memory.k_mean + p * D + dims, mask=dims < D, other=0.0)
    v_mean = tl.load(memory.v_mean + p * memory.width + columns, mask=columns < E, other=0.0)
    spots = memory.comoment + (p * D + dims[:, None]) * memory.width + columns[None, :]
    here = (dims < D)[:, None] & (columns < E)[None, :]
    comoment = tl.load(spots, mask=here, other=0.0, eviction_policy="evict_first")  # read once
    return n, k_mean, v_mean, comoment


@triton.jit
def remember(memory, p, dims, columns, n, k_mean, v_mean, comoment, D: tl.constexpr, E: tl.constexpr):
    """Write State p; every block of columns writes the same n and k_mean."""
    tl.store(memory.n + p, n)
    tl.store(memory.k_mean + p * D + dims, k_mean, mask=dims < D)
    tl.store(memory.v_mean + p * memory.width + columns, v_mean, mask=columns < E)
    spots = memory.comoment + (p * D + dims[:, None]) * memory.width + columns[None, :]
    tl.store(spots, comoment, mask=(dims < D)[:, None] & (columns < E)[None, :])


@triton.jit
def begin(k, v, mask, memory, b, g, p, start, stop, dims, columns, D: tl.constexpr, E: tl.constexpr,
          PHI: tl.constexpr):  # fmt: skip
    """The State before `start`: the stored one. If it is empty, its means are the first visible token."""
    token = first_visible(mask, b, start, stop) + tl.arange(0, 1)
    seen = visible(mask, b, token, stop)[:, None]
    key = feature(load(k, b, g, token, dims, seen & (dims < D)[None, :]), 0.0, D, PHI)
    key = tl.sum(tl.where(seen, key, 0.0), 0)
    value = tl.sum(load(v, b, g, token, columns, seen & (columns < E)[None, :]), 0)
    if memory is None:
        n = tl.sum(tl.zeros((1,), tl.int64), 0)
        return n, key, value, tl.zeros((dims.shape[0], columns.shape[0]), tl.float32)
    else:
        n, k_mean, v_mean, comoment = remembered(memory, p, dims, columns, D, E)
        return n, tl.where(n == 0, key, k_mean), tl.where(n == 0, value, v_mean), comoment


@triton.jit
def sums_before(memory, p, dims, columns, k_ref, v_ref, D: tl.constexpr, E: tl.constexpr):
    """(n, S^T, z, y) of State p, or zeros if there is none.

    S = sum h' v'^T, z = sum h', y = sum v' with h' = h - k_ref and v' = v - v_ref; z and y are as in `column_sums`.
    """
    BD: tl.constexpr = dims.shape[0]
    BE: tl.constexpr = columns.shape[0]
    turned = tl.zeros((BE, BD), tl.float32)
    k_sums, v_sums = tl.zeros((BD, ONES), tl.float32), tl.zeros((BE, ONES), tl.float32)
    if memory is None:
        return tl.sum(tl.zeros((1,), tl.int64), 0), turned, k_sums, v_sums
    else:
        n, k_mean, v_mean, comoment = remembered(memory, p, dims, columns, D, E)
        z, y = n.to(tl.float32) * (k_mean - k_ref), n.to(tl.float32) * (v_mean - v_ref)
        turned += tl.trans(comoment + z[:, None] * (v_mean - v_ref)[None, :])
        return n, turned, k_sums + z[:, None], v_sums + y[:, None]


@triton.jit
def absorb(n, k_mean, v_mean, comoment, keys, values, z, y, count, DTYPE: tl.constexpr):
    """The State after `count` more tokens: keys and values are factors relative to its means, with sums z and y."""
    n += count
    share = 1.0 / tl.maximum(n, 1).to(tl.float32)
    comoment = product(tl.trans(keys), values, comoment, DTYPE) - (share * z)[:, None] * y[None, :]
    return n, k_mean + share * z, v_mean + share * y, comoment


@triton.jit
def relative(x, mean, seen, DTYPE: tl.constexpr, SEEN: tl.constexpr = False):
    """x - mean as a factor, 0 for hidden tokens. SEEN: no hidden token matters."""
    return factor(keep(x - mean[None, :], seen[:, None], 0.0, SEEN), DTYPE)


@triton.jit
def sum_rows(x):
    """sum_j x_j in float32. Call it as soon as x is made: holding x to the end of a step would cost registers."""
    return tl.sum(x.to(tl.float32), 0)


@triton.jit
def dot_rows(x, vector):
    """x_i . vector in float32."""
    return tl.sum(x.to(tl.float32) * vector[None, :], 1)


@triton.jit
def weigh(inner, central, terms, n, scale, D: tl.constexpr, READER: tl.constexpr, SIGNED: tl.constexpr,
          CONSTANT: tl.constexpr):  # fmt: skip
    """(g, b) of each query, from sum_j f.h'_j, f.k_mean, and how many tokens it sees. CONSTANT adds a feature 1.

    terms  the sum of the absolute values of the mass's terms; only read if SIGNED, since CONSTANT's is 2 per token
    """
    tokens = tl.maximum(n, 1.0)
    if READER == "divide":
        least = LEAST
        if CONSTANT:
            least = tl.maximum(lost(2.0 * tokens, tokens, D + 1), LEAST)
        elif SIGNED:
            least = tl.maximum(lost(terms, tokens, D), LEAST)
        if CONSTANT:
            central += 1.0
        mass = inner + tokens * central
        empty = tl.abs(mass) <= least
        gain = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, mass))
        return gain, tl.where(empty, 1.0 / tokens, gain * central)
    elif READER == "subtract":
        gain = tl.zeros_like(central) + scale / tokens
        return gain, (1.0 - gain * inner) / tokens
    else:
        tl.static_assert(READER == "none")
        gain = tl.zeros_like(central) + scale
        return gain, gain * central


@triton.jit(do_not_specialize=SIZES)
def segment_kernel(k, v, mask, offsets, states, groups, tokens, segments, length, D: tl.constexpr, E: tl.constexpr,
                   BD: tl.constexpr, BE: tl.constexpr, T: tl.constexpr, PHI: tl.constexpr, DTYPE: tl.constexpr,
                   EVEN: tl.constexpr):  # fmt: skip
    """One program per segment and key head: the State of segment t is written at t + 1."""
    program = tl.program_id(0).to(tl.int64)
    segment, p = program % (segments - 1), program // (segments - 1)
    b, tokens = sequence(offsets, p // groups, tokens)
    start = (segment * length).to(tl.int32)
    stop = tl.minimum(start + length, tokens)
    n, k_mean, v_mean, comoment, _shift = observe_tokens(
        k, v, mask, b, p % groups, start, stop, 0.0, D, E, BD, BE, T, PHI, True, DTYPE,
        EVEN)  # fmt: skip
    dims, columns = tl.arange(0, BD), tl.arange(0, BE)
    remember(states, p * segments + segment + 1, dims, columns, n.to(tl.int64), k_mean, v_mean, comoment, D, E)


@triton.jit
def merged(n, k_mean, v_mean, comoment, n_new, k_new, v_new, new):
    """Merge two States; the second one is `new`."""
    n_all = n + n_new
    share = n_new.to(tl.float32) / tl.maximum(n_all, 1).to(tl.float32)
    k_new, v_new = k_new - k_mean, v_new - v_mean
    comoment += new + (share * n.to(tl.float32) * k_new)[:, None] * v_new[None, :]
    return n_all, k_mean + share * k_new, v_mean + share * v_new, comoment


@triton.jit(do_not_specialize=SIZES)
def prefix_kernel(states, first, before, segments, D: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
                  ROWS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """One program per key head and ROWS channels of its keys; k_mean and comoment of `states` are those of `before`."""
    program = tl.program_id(0).to(tl.int64)
    BLOCKS: tl.constexpr = (D + ROWS - 1) // ROWS
    p, dims, columns = program // BLOCKS, program % BLOCKS * ROWS + tl.arange(0, ROWS), tl.arange(0, BE)
    if first is None:
        n = tl.sum(tl.zeros((1,), tl.int64), 0)
        k_mean, v_mean = tl.zeros((ROWS,), tl.float32), tl.zeros((BE,), tl.float32)
        comoment = tl.zeros((ROWS, BE), tl.float32)
    else:
        n, k_mean, v_mean, comoment = remembered(first, p, dims, columns, D, E)
    remember(before, p * segments, dims, columns, n, k_mean, v_mean, comoment, D, E)
    for segment in tl.range(1, segments, num_stages=STAGES):
        n_new, k_new, v_new, new = remembered(states, p * segments + segment, dims, columns, D, E)
        n, k_mean, v_mean, comoment = merged(n, k_mean, v_mean, comoment, n_new, k_new, v_new, new)
        remember(before, p * segments + segment, dims, columns, n, k_mean, v_mean, comoment, D, E)
