"""The delta rule, backward: the walk from the last chunk to the first, with the gradient of the memory, dS.

dU = scale tril(Q K^T)^T dO + K dS          dR = T^T dU          dV = diag(gain) dR
dS <- dS + scale Q^T dO - K^T diag(a) dR                         keys here are k/|k|

later    [P, chunks, D, E]      dS after each chunk                        refused [B, G, N, E]   dR
last     [P, D, E] float32      gradient of the memory at the end, or none
first    the same at the start
"""

import triton
import triton.language as tl

from softless.kernels.common.arithmetic import factor, precise, precise_left, product
from softless.kernels.common.mask import visible
from softless.kernels.common.rows import load, store
from softless.kernels.delta.solve import SIZES
from softless.kernels.delta.walk import inverse_of, keep, recall, strengths


@triton.jit(do_not_specialize=SIZES)
def walk_back_kernel(q, k, do, dv, mask, scalars, solved, last, first, later, refused, groups, tokens, chunks, scale,
                     D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, CHUNK: tl.constexpr,
                     SHARED: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """One program a key head and block of value columns."""
    DTYPE: tl.constexpr = k.at.dtype.element_ty
    BLOCKS: tl.constexpr = (E + BE - 1) // BE
    program = tl.program_id(0).to(tl.int64)
    columns = (program % BLOCKS).to(tl.int32) * BE + tl.arange(0, BE)
    p = program // BLOCKS
    b, g = p // groups, p % groups
    dims, steps = tl.arange(0, BD), tl.arange(0, CHUNK)
    inside, valued = (dims < D)[None, :], (columns < E)[None, :]
    zero = tl.zeros((CHUNK, BE), tl.float32)
    gradient = recall(last, p, dims, columns, D, E)  # dS
    for done in tl.range(0, chunks, num_stages=STAGES):
        chunk = chunks - 1 - done
        here = chunk * CHUNK + steps
        some, seen = (here < tokens)[:, None], visible(mask, b, here, tokens)[:, None]
        keys = factor(load(k, b, g, here, dims, seen & inside), DTYPE)
        unit, erase, gain = strengths(scalars, p, here, tokens)
        inverse = inverse_of(solved, p * chunks + chunk, CHUNK)
        keep(later, p * chunks + chunk, dims, columns, gradient, D, E)

        through, outer = zero, tl.zeros((BD, BE), tl.float32)
        for r in range(SHARED):
            queries = factor(load(q, b, g * SHARED + r, here, dims, some & inside), DTYPE)
            given = factor(load(do, b, g * SHARED + r, here, columns, some & valued), DTYPE)
            scores = product(keys, tl.trans(queries), tl.zeros((CHUNK, CHUNK), tl.float32), DTYPE)
            scores = tl.where(steps[:, None] <= steps[None, :], scores, 0.0)
            through = precise_left(scores, given, through, DTYPE)
            outer = product(tl.trans(queries), given, outer, DTYPE)
        wanted = product(keys, factor(gradient, DTYPE), scale * through, DTYPE)
        refusal = precise(tl.trans(inverse), unit[:, None] * wanted, zero, DTYPE)
        store(dv, b, g, here, columns, some & valued, gain[:, None] * refusal)
        store(refused, b, g, here, columns, some & valued, refusal)
        taken = factor(-(erase * unit)[:, None] * refusal, DTYPE)
        gradient = product(tl.trans(keys), taken, gradient + scale * outer, DTYPE)
    if first is not None:
        keep(first, p, dims, columns, gradient, D, E)
