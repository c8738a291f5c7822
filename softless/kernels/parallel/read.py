"""Read: one pass over queries answers them from the State (`softless.algebra.readers`), the local residual included."""

import triton
import triton.language as tl

from softless.kernels.common.arithmetic import factor, product
from softless.kernels.common.launch import SIZES
from softless.kernels.common.record import read_state
from softless.kernels.common.rows import load, store
from softless.kernels.parallel.local import residual
from softless.kernels.parallel.query import answer, contrast, query_features


@triton.jit
def read_tokens(q, v, out, taps, mask, b, h, begin, end, n, k_mean, v_mean, comoment, shift, scale, t, picture,
                D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, T: tl.constexpr,
                PHI_Q: tl.constexpr, PHI_K: tl.constexpr, READER: tl.constexpr, SIGNED: tl.constexpr,
                CONSTANT: tl.constexpr, DTYPE: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """Answer queries begin..end of one head; `comoment` is a factor."""
    EXP_K: tl.constexpr = PHI_K == "exp"
    columns, channels = tl.arange(0, BD), tl.arange(0, BE)
    for start in range(begin, end, T):
        tokens = start + tl.arange(0, T)
        here = tokens < end
        x = load(q, b, h, tokens, columns, here[:, None] & (columns < D)[None, :], EVEN and D == BD)
        phi, units, top = query_features(x, n, k_mean, comoment, shift, t, D, PHI_Q, EXP_K, READER)
        f = phi * units
        correlation = product(
            factor(contrast(f, D, PHI_K, READER != "none"), DTYPE), comoment, tl.zeros((T, BE), tl.float32), DTYPE
        )
        o = answer(correlation, factor(f, DTYPE), n, k_mean, v_mean, top, scale, D, EXP_K or PHI_Q == "exp", READER,
                   SIGNED, CONSTANT, DTYPE)  # fmt: skip
        if taps is not None:
            o += residual(v, taps, mask, b, h, tokens, here, picture[0], picture[1], picture[2], E, BE)
        store(out, b, h, tokens, channels, here[:, None] & (channels < E)[None, :], o, EVEN and E == BE)


@triton.jit(do_not_specialize=SIZES)
def read_kernel(q, v, out, taps, mask, records, N, H, span, splits, scale, t, picture, GROUP: tl.constexpr,
                NUMBERS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                T: tl.constexpr, PHI_Q: tl.constexpr, PHI_K: tl.constexpr, READER: tl.constexpr,
                SIGNED: tl.constexpr, CONSTANT: tl.constexpr, DTYPE: tl.constexpr,
                EVEN: tl.constexpr):  # fmt: skip
    """One program a query head and span of tokens."""
    program = tl.program_id(0).to(tl.int64)
    head, begin = program // splits, (program % splits).to(tl.int32) * span
    b, h = head // H, head % H
    record = records + (b * (H // GROUP) + h // GROUP) * NUMBERS
    n, k_mean, v_mean, comoment, shift = read_state(record, D, E, BD, BE)
    comoment = factor(comoment, DTYPE)
    read_tokens(q, v, out, taps, mask, b, h, begin, tl.minimum(begin + span, N), n, k_mean, v_mean, comoment, shift,
                scale, t, picture, D, E, BD, BE, T, PHI_Q, PHI_K, READER, SIGNED, CONSTANT, DTYPE, EVEN)  # fmt: skip
