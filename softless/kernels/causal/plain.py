"""Causal attention on plain sums, for readers that do not subtract, in half precision: the forward walk at full speed.

    S = sum h v^T     z = sum h     y = sum v                          of all tokens before the chunk

    out_i = (f_i S + b_i y + sum_{j <= i} (f_i.h_j + b_i) v_j) / mass_i      mass_i = f_i.z + b_i n + the same weights
    b_i   = 1 for a query of no mass: it reads the mean; else 0

Reader `none` has the factor `scale` in place of the division, and b = 0. Nothing waits for the means of the past, as in
`causal_forward`, which centers: InLine's subtraction needs that, float32's last digits do, and so does a mass that may
cancel, as Taylor attention's. Here features are not negative, and every weight is
rounded once, so the error is an ulp of the output at most, whatever keys and values have in common. Values go from
memory to the tensor cores as they are.
"""

import triton
import triton.language as tl

from softless.kernels.causal.memory import LEAST, SIZES, counts, place, remember, sees, sums_before
from softless.kernels.common.arithmetic import column_sums, dots, factor, held, product, summed
from softless.kernels.common.features import feature
from softless.kernels.common.mask import visible
from softless.kernels.common.rows import load, store


@triton.jit
def read_chunk(queries, keys, values, sight, known, turned, k_sums, v_sums, scale, READER: tl.constexpr,
               DTYPE: tl.constexpr):  # fmt: skip
    """The outputs of a chunk of queries; they, keys and values are factors, and `turned` is S^T."""
    CHUNK: tl.constexpr = queries.shape[0]
    scores = product(queries, tl.trans(keys), tl.zeros((CHUNK, CHUNK), tl.float32), DTYPE)
    scores = tl.where(sight, scores, 0.0)
    answer = tl.zeros((CHUNK, values.shape[1]), tl.float32)
    answer = product(queries, factor(tl.trans(turned), DTYPE), answer, DTYPE)
    if READER == "divide":
        mass = (tl.sum(scores, 1) + dots(queries, k_sums, DTYPE))[:, None]
        even = tl.where(tl.abs(mass) <= LEAST, 1.0, 0.0)
        mass += even * known[:, None]
        answer += even * summed(v_sums)[None, :]
        answer = product(factor(tl.where(sight, scores + even, 0.0), DTYPE), values, answer, DTYPE)
        return answer * (1.0 / tl.where(mass != 0, mass, 1.0))
    else:
        tl.static_assert(READER == "none")
        return scale * product(factor(scores, DTYPE), values, answer, DTYPE)


@triton.jit
def leave(memory, p, dims, columns, n, turned, k_sums, v_sums, D: tl.constexpr, E: tl.constexpr):
    """Write State p of these sums."""
    share = 1.0 / tl.maximum(n, 1).to(tl.float32)
    z, v_mean = summed(k_sums), share * summed(v_sums)
    comoment = tl.trans(turned) - z[:, None] * v_mean[None, :]
    remember(memory, p, dims, columns, n, share * z, v_mean, comoment, D, E)


@triton.jit(do_not_specialize=SIZES)
def plain_kernel(q, k, v, out, mask, before, after, heads, tokens, segments, length, scale, D: tl.constexpr,
                 E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, CHUNK: tl.constexpr, SHARED: tl.constexpr,
                 PHI_Q: tl.constexpr, PHI_K: tl.constexpr, READER: tl.constexpr, SIGNED: tl.constexpr,
                 CONSTANT: tl.constexpr, DTYPE: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """One program a segment and block of value columns; `causal_forward` has the arguments."""
    tl.static_assert(not SIGNED and not CONSTANT)
    BLOCKS: tl.constexpr = (E + BE - 1) // BE
    program = tl.program_id(0).to(tl.int64)
    columns = (program % BLOCKS).to(tl.int32) * BE + tl.arange(0, BE)
    b, h, g, p, segment = place(program // BLOCKS, heads, segments, SHARED)
    dims, steps = tl.arange(0, BD), tl.arange(0, CHUNK)
    inside, valued = (dims < D)[None, :], (columns < E)[None, :]

    n, turned, k_sums, v_sums = sums_before(before, p * segments + segment, dims, columns, 0.0, 0.0, D, E)
    start = (segment * length).to(tl.int32)
    stop = tl.minimum(start + length, tokens)
    for at in tl.range(start, stop, CHUNK, num_stages=STAGES):
        here = at + steps
        seen = visible(mask, b, here, stop)
        keys = feature(load(k, b, g, here, dims, seen[:, None] & inside), 0.0, D, PHI_K)
        keys = factor(held(tl.where(seen[:, None], keys, 0.0), DTYPE), DTYPE)
        values = factor(load(v, b, g, here, columns, seen[:, None] & valued), DTYPE)
        queries = load(q, b, h, here, dims, (here < stop)[:, None] & inside)
        queries = factor(feature(queries, 0.0, D, PHI_Q), DTYPE)

        known, new = counts(mask, n, seen, steps, stop - at)
        answer = read_chunk(queries, keys, values, sees(mask, steps, seen), known, turned, k_sums, v_sums, scale,
                            READER, DTYPE)  # fmt: skip
        if mask is not None:
            answer = tl.where(known[:, None] > 0, answer, 0.0)
        store(out, b, h, here, columns, (here < stop)[:, None] & valued, answer)
        turned = product(tl.trans(values), keys, turned, DTYPE)
        k_sums, v_sums = column_sums(keys, k_sums, DTYPE), column_sums(values, v_sums, DTYPE)
        n += new

    if (segment + 1 == segments) & (h % SHARED == 0):
        leave(after, p, dims, columns, n, turned, k_sums, v_sums, D, E)
