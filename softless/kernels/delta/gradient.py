"""The delta rule, backward: dq, dk and dbeta of each chunk by itself, after both walks.

With S before the chunk, dS after it, U and dR of its tokens, and keys k^ = k/|k|:

    dP = scale tril(dO U^T)         dA = -stril(dR U^T)             M = diag(a) dA
    dQ = scale dO S^T + dP k^       dk^ = dP^T Q + U dS^T - diag(a) dR S^T + (M + M^T) k^
    da = rows of dA * k^ k^^T - dR * k^ S                           dgain = rows of dR * V
    a da + gain dgain = rows of dR * U

    dk = (dk^ - k^ (k^.dk^)) / |k| + d|k| k^                        `solve` has dbeta and d|k|

The gradient of a key head is summed over the query heads that share it. A key of length 0 has no gradient.
"""

import triton
import triton.language as tl

from softless.kernels.common.arithmetic import factor, product
from softless.kernels.common.launch import SIZES
from softless.kernels.common.rows import load, store, visible
from softless.kernels.delta.solve import gate_gradient, inverted, scaled
from softless.kernels.delta.walk import recall, strengths


@triton.jit
def score_gradient(do, written, states, b, h, g, chunk, here, within, D: tl.constexpr, E: tl.constexpr,
                   BD: tl.constexpr, BE: tl.constexpr, CHUNK: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """(tril(dO U^T), dO S^T) of one head's queries."""
    dims, steps = tl.arange(0, BD), tl.arange(0, CHUNK)
    pulls, gradient = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, BD), tl.float32)
    for at in range(0, E, BE):
        columns = at + tl.arange(0, BE)
        valued = within & (columns < E)[None, :]
        d_out = factor(load(do, b, h, here, columns, valued), DTYPE)
        writes = factor(load(written, b, g, here, columns, valued), DTYPE)
        memory = factor(recall(states, chunk, dims, columns, D, E), DTYPE)
        pulls = product(d_out, tl.trans(writes), pulls, DTYPE)
        gradient = product(d_out, tl.trans(memory), gradient, DTYPE)
    return tl.where(steps[:, None] >= steps[None, :], pulls, 0.0), gradient


@triton.jit
def write_gradient(v, written, refused, states, later, b, g, chunk, here, within, seen, keys, erase, gradient,
                   D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, CHUNK: tl.constexpr,
                   DTYPE: tl.constexpr):  # fmt: skip
    """(dk^ so far, stril(dR U^T), rows of dR * K S, dgain, rows of dR * U) of a chunk's writes."""
    dims, steps = tl.arange(0, BD), tl.arange(0, CHUNK)
    mixed = tl.zeros((CHUNK, CHUNK), tl.float32)
    of_held = tl.zeros((CHUNK,), tl.float32)
    of_gain, of_write = of_held, of_held
    for at in range(0, E, BE):
        columns = at + tl.arange(0, BE)
        valued = (columns < E)[None, :]
        writes = load(written, b, g, here, columns, within & valued)
        refusal = load(refused, b, g, here, columns, within & valued)
        memory = factor(recall(states, chunk, dims, columns, D, E), DTYPE)
        follows = factor(recall(later, chunk, dims, columns, D, E), DTYPE)
        of_write += tl.sum(refusal * writes, 1)
        writes = factor(writes, DTYPE)
        gradient = product(writes, tl.trans(follows), gradient, DTYPE)
        gradient = product(factor(-erase[:, None] * refusal, DTYPE), tl.trans(memory), gradient, DTYPE)
        mixed = product(factor(refusal, DTYPE), tl.trans(writes), mixed, DTYPE)
        held = product(keys, memory, tl.zeros((CHUNK, BE), tl.float32), DTYPE)
        of_held += tl.sum(refusal * held, 1)
        of_gain += tl.sum(refusal * load(v, b, g, here, columns, seen & valued), 1)
    return gradient, tl.where(steps[:, None] > steps[None, :], mixed, 0.0), of_held, of_gain, of_write


@triton.jit(do_not_specialize=SIZES)
def gradient_kernel(q, k, v, beta, do, dq, dk, dbeta, mask, scalars, states, written, later, refused, groups, tokens,
                    chunks, scale, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                    CHUNK: tl.constexpr, SHARED: tl.constexpr, RULE: tl.constexpr):  # fmt: skip
    """One program per chunk and key head."""
    DTYPE: tl.constexpr = k.at.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    p = program // chunks
    b, g = p // groups, p % groups
    dims, steps = tl.arange(0, BD), tl.arange(0, CHUNK)
    here = (program % chunks * CHUNK).to(tl.int32) + steps
    inside, within, seen = (dims < D)[None, :], (here < tokens)[:, None], visible(mask, b, here, tokens)[:, None]
    keys, _, power = scaled(load(k, b, g, here, dims, seen & inside))
    keys = factor(keys, DTYPE)
    inverse, erase, gain = strengths(scalars, p, here, tokens)
    unit = inverse * power
    gradient = tl.zeros((CHUNK, BD), tl.float32)
    for r in range(SHARED):
        h = g * SHARED + r
        pulls, of_queries = score_gradient(
            do, written, states, b, h, g, program, here, within, D, E, BD, BE, CHUNK, DTYPE
        )
        of_queries = product(factor(pulls * unit[None, :], DTYPE), keys, of_queries, DTYPE)
        store(dq, b, h, here, dims, within & inside, scale * of_queries)
        queries = factor(load(q, b, h, here, dims, within & inside), DTYPE)
        gradient = product(factor(tl.trans(scale * pulls), DTYPE), queries, gradient, DTYPE)
    gradient, mixed, of_held, of_gain, of_write = write_gradient(
        v, written, refused, states, later, b, g, program, here, within, seen, keys, erase, gradient, D, E, BD, BE,
        CHUNK, DTYPE)  # fmt: skip
    alike = product(keys, tl.trans(keys), tl.zeros((CHUNK, CHUNK), tl.float32), DTYPE) * unit[None, :]
    of_erase = -unit * (of_held + tl.sum(mixed * alike, 1))
    mixed = erase[:, None] * mixed
    mixed = factor((mixed + tl.trans(mixed)) * -unit[None, :], DTYPE)
    gradient = product(mixed, keys, gradient, DTYPE)

    strength = tl.sum(load(beta, b, g, here, tl.arange(0, 1), seen), 1)
    of_beta, of_length = gate_gradient(of_erase, of_gain, of_write, gain, inverted(inverse), strength, RULE)
    store(dbeta, b, g, here, tl.arange(0, 1), within, tl.where(seen, of_beta[:, None], 0.0))
    direction = unit[:, None] * keys.to(tl.float32)
    along = of_length - inverse * tl.sum(gradient * direction, 1)
    store(dk, b, g, here, dims, within & inside, inverse[:, None] * gradient + along[:, None] * direction)
