"""The State before each segment: segments are walked at the same time.

`segment_kernel` makes the State of each segment but the last from its own tokens, as `observe` does; `prefix_kernel`
merges them one after another with the State before the call:

    n = n_1 + n_2      mean = mean_1 + (n_2/n) (mean_2 - mean_1)                                (Chan et al. 1979)
    comoment = comoment_1 + comoment_2 + (n_1 n_2/n) (k_mean_2 - k_mean_1) (v_mean_2 - v_mean_1)^T
"""

import triton
import triton.language as tl

from softless.kernels.causal.memory import SIZES, remember, remembered
from softless.kernels.parallel.observe import observe_tokens


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


@triton.jit
def merged(n, k_mean, v_mean, comoment, n_new, k_new, v_new, new):
    """The State of two, the second one `new`."""
    n_all = n + n_new
    share = n_new.to(tl.float32) / tl.maximum(n_all, 1).to(tl.float32)
    k_new, v_new = k_new - k_mean, v_new - v_mean
    comoment += new + (share * n.to(tl.float32) * k_new)[:, None] * v_new[None, :]
    return n_all, k_mean + share * k_new, v_mean + share * v_new, comoment


@triton.jit(do_not_specialize=SIZES)
def prefix_kernel(states, first, before, segments, D: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
                  ROWS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """One program a key head and ROWS channels of its keys; k_mean and comoment of `states` are those of `before`."""
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
