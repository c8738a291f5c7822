"""One token: absorb it into the State and read the State, in float32 throughout.

    comoment += (n/(n+1)) (h - k_mean)(v - v_mean)^T         k_mean += (h - k_mean)/(n+1)       v_mean likewise
    out = lift v_mean + g f comoment                         `causal_memory.weigh` has g

The State is read and written once: its D x E numbers are all the time it takes. A hidden token is read by its query,
not absorbed.
"""

import triton
import triton.language as tl

from softless.kernels.causal.memory import SIZES, begin, remember, weigh
from softless.kernels.common.features import feature
from softless.kernels.common.mask import visible
from softless.kernels.common.rows import load, store


@triton.jit(do_not_specialize=SIZES)
def decode_kernel(q, k, v, out, mask, before, after, groups, scale, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
                  BE: tl.constexpr, SHARED: tl.constexpr, PHI_Q: tl.constexpr, PHI_K: tl.constexpr,
                  READER: tl.constexpr, SIGNED: tl.constexpr, CONSTANT: tl.constexpr):  # fmt: skip
    """One program a key head and block of value columns."""
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
