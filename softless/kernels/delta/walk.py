"""The delta rule's walks: one program goes along the tokens of a key head, chunk by chunk, and carries its memory S.

Forward, from the first chunk to the last. `solve` makes T; keys here are k/|k|:

    R = diag(gain) V - diag(a) K S          U = T R
    o = scale (Q S + tril(Q K^T) U)         S <- S + K^T U

Keys enter products as they come, exact, and are scaled to length 1 afterwards. Where the keys of neighbors are alike,
what they write nearly cancels, so the products with T and U have twice the bits of a factor.

    out      [B, H, N, E]                 or None, where only the memory is needed, for the gradient
    before   [P, D, E] float32            S at the start, or None for zeros           after   the same at the end
    states   [P, chunks, D, E]            S before each chunk, or None                written [B, G, N, E]  U

Backward, from the last chunk to the first, with the gradient of the memory, dS:

    dU = scale tril(Q K^T)^T dO + K dS          dR = T^T dU          dV = diag(gain) dR
    dS <- dS + scale Q^T dO - K^T diag(a) dR

    later    [P, chunks, D, E]            dS after each chunk                         refused [B, G, N, E]  dR
    last     [P, D, E] float32            gradient of the memory at the end, or None  first   the same at the start
"""

import triton
import triton.language as tl

from softless.kernels.common.arithmetic import factor, precise, precise_left, precise_right, product, rounded
from softless.kernels.common.launch import SIZES
from softless.kernels.common.rows import load, store, visible


@triton.jit
def recall(memory, p, dims, columns, D: tl.constexpr, E: tl.constexpr):
    """Load memory p [BD, BE] as float32; zeros if there is none."""
    if memory is None:
        return tl.zeros((dims.shape[0], columns.shape[0]), tl.float32)
    else:
        here = (dims < D)[:, None] & (columns < E)[None, :]
        return tl.load(memory + (p * D + dims[:, None]) * E + columns[None, :], mask=here, other=0.0).to(tl.float32)


@triton.jit
def memorize(memory, p, dims, columns, values, D: tl.constexpr, E: tl.constexpr):
    """Write memory p, rounded as it will be multiplied."""
    here = (dims < D)[:, None] & (columns < E)[None, :]
    values = rounded(values, memory.dtype.element_ty)
    tl.store(memory + (p * D + dims[:, None]) * E + columns[None, :], values, mask=here)


@triton.jit
def strengths(scalars, p, here, tokens):
    """(1/|k|, a, gain) of the tokens `here`."""
    scalars += p * 3 * tokens + here
    within = here < tokens
    return (
        tl.load(scalars, mask=within, other=0.0),
        tl.load(scalars + tokens, mask=within, other=0.0),
        tl.load(scalars + 2 * tokens, mask=within, other=0.0),
    )


@triton.jit
def inverse_of(solved, chunk, CHUNK: tl.constexpr):
    """Load T of a chunk; `chunk` counts over all heads."""
    steps = tl.arange(0, CHUNK)
    return tl.load(solved + (chunk * CHUNK + steps[:, None]) * CHUNK + steps[None, :]).to(tl.float32)


@triton.jit(do_not_specialize=SIZES)
def walk_kernel(q, k, v, out, mask, scalars, solved, before, after, states, written, groups, tokens, chunks, scale,
                D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, CHUNK: tl.constexpr,
                SHARED: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """One program per key head and block of value columns."""
    DTYPE: tl.constexpr = k.at.dtype.element_ty
    BLOCKS: tl.constexpr = (E + BE - 1) // BE
    program = tl.program_id(0).to(tl.int64)
    columns = (program % BLOCKS).to(tl.int32) * BE + tl.arange(0, BE)
    p = program // BLOCKS
    b, g = p // groups, p % groups
    dims, steps = tl.arange(0, BD), tl.arange(0, CHUNK)
    inside, valued = (dims < D)[None, :], (columns < E)[None, :]
    zero = tl.zeros((CHUNK, BE), tl.float32)
    memory = recall(before, p, dims, columns, D, E)
    for at in tl.range(0, tokens, CHUNK, num_stages=STAGES):
        here = at + steps
        within, seen = (here < tokens)[:, None], visible(mask, b, here, tokens)[:, None]
        keys = factor(load(k, b, g, here, dims, seen & inside), DTYPE)
        values = load(v, b, g, here, columns, seen & valued)
        unit, erase, gain = strengths(scalars, p, here, tokens)
        inverse = inverse_of(solved, p * chunks + at // CHUNK, CHUNK)
        if states is not None:
            memorize(states, p * chunks + at // CHUNK, dims, columns, memory, D, E)

        past = factor(memory, DTYPE)
        held = product(keys, past, zero, DTYPE)
        writes = precise(inverse, gain[:, None] * values - (erase * unit)[:, None] * held, zero, DTYPE)
        if written is not None:
            store(written, b, g, here, columns, within & valued, writes)
        writes *= unit[:, None]
        if out is not None:
            for r in range(SHARED):
                queries = factor(load(q, b, g * SHARED + r, here, dims, within & inside), DTYPE)
                scores = product(queries, tl.trans(keys), tl.zeros((CHUNK, CHUNK), tl.float32), DTYPE)
                scores = tl.where(steps[:, None] >= steps[None, :], scores, 0.0)
                answer = precise(scores, writes, product(queries, past, zero, DTYPE), DTYPE)
                store(out, b, g * SHARED + r, here, columns, within & valued, scale * answer)
        memory = precise_right(tl.trans(keys), writes, memory, DTYPE)
    if after is not None:
        memorize(after, p, dims, columns, memory, D, E)


@triton.jit(do_not_specialize=SIZES)
def walk_back_kernel(q, k, do, dv, mask, scalars, solved, last, first, later, refused, groups, tokens, chunks, scale,
                     D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, CHUNK: tl.constexpr,
                     SHARED: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """One program per key head and block of value columns."""
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
        within, seen = (here < tokens)[:, None], visible(mask, b, here, tokens)[:, None]
        keys = factor(load(k, b, g, here, dims, seen & inside), DTYPE)
        unit, erase, gain = strengths(scalars, p, here, tokens)
        inverse = inverse_of(solved, p * chunks + chunk, CHUNK)
        memorize(later, p * chunks + chunk, dims, columns, gradient, D, E)

        through, outer = zero, tl.zeros((BD, BE), tl.float32)
        for r in range(SHARED):
            queries = factor(load(q, b, g * SHARED + r, here, dims, within & inside), DTYPE)
            d_out = factor(load(do, b, g * SHARED + r, here, columns, within & valued), DTYPE)
            scores = product(keys, tl.trans(queries), tl.zeros((CHUNK, CHUNK), tl.float32), DTYPE)
            scores = tl.where(steps[:, None] <= steps[None, :], scores, 0.0)
            through = precise_left(scores, d_out, through, DTYPE)
            outer = product(tl.trans(queries), d_out, outer, DTYPE)
        wanted = product(keys, factor(gradient, DTYPE), scale * through, DTYPE)
        refusal = precise(tl.trans(inverse), unit[:, None] * wanted, zero, DTYPE)
        store(dv, b, g, here, columns, within & valued, gain[:, None] * refusal)
        store(refused, b, g, here, columns, within & valued, refusal)
        taken = factor(-(erase * unit)[:, None] * refusal, DTYPE)
        gradient = product(tl.trans(keys), taken, gradient + scale * outer, DTYPE)
    if first is not None:
        memorize(first, p, dims, columns, gradient, D, E)
