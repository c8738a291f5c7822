"""Whole heads: where tokens are few, one program does a key head from end to end and nothing is written in between.

Windows of 49 tokens and pictures of 197 are bound by launches and latency: one kernel forward, one backward, the state
and its gradient never leave the registers. The queries that share the key head follow one another.
"""

import triton
import triton.language as tl

from softless.kernels.common.arithmetic import factor
from softless.kernels.common.launch import SIZES
from softless.kernels.parallel.gradients import key_gradient_tokens, query_gradient_tokens, write_taps
from softless.kernels.parallel.observe import observe_tokens
from softless.kernels.parallel.read import read_tokens


@triton.jit(do_not_specialize=SIZES)
def whole_kernel(q, k, v, out, taps, mask, N, M, G, scale, t, picture, GROUP: tl.constexpr, D: tl.constexpr,
                 E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, T: tl.constexpr, PHI_Q: tl.constexpr,
                 PHI_K: tl.constexpr, READER: tl.constexpr, SIGNED: tl.constexpr,
                 CONSTANT: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """Observe, then read."""
    program = tl.program_id(0).to(tl.int64)
    b, g = program // G, program % G
    n, k_mean, v_mean, comoment, shift = observe_tokens(
        k, v, mask, b, g, 0, M, t, D, E, BD, BE, T, PHI_K, READER != "none", DTYPE, False)  # fmt: skip
    comoment = factor(comoment, DTYPE)
    for member in range(GROUP):
        read_tokens(q, v, out, taps, mask, b, g * GROUP + member, 0, N, n, k_mean, v_mean, comoment, shift, scale, t,
                    picture, D, E, BD, BE, T, PHI_Q, PHI_K, READER, SIGNED, CONSTANT, DTYPE,
                    False)  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def whole_gradient_kernel(q, k, v, d_out, taps, mask, d_q, d_k, d_v, d_taps, N, M, G, scale, t, picture,
                          GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                          T: tl.constexpr, PHI_Q: tl.constexpr, PHI_K: tl.constexpr, READER: tl.constexpr,
                          SIGNED: tl.constexpr, CONSTANT: tl.constexpr, DTYPE: tl.constexpr,
                          STAGES: tl.constexpr):  # fmt: skip
    """Observe again, then both passes of `gradients`."""
    program = tl.program_id(0).to(tl.int64)
    b, g = program // G, program % G
    n, k_mean, v_mean, comoment, shift = observe_tokens(
        k, v, mask, b, g, 0, M, t, D, E, BD, BE, T, PHI_K, READER != "none", DTYPE, False)  # fmt: skip
    comoment = factor(comoment, DTYPE)
    d_k_total, d_v_mean = tl.zeros((BD,), tl.float32), tl.zeros((BE,), tl.float32)
    d_comoment = tl.zeros((BD, BE), tl.float32)
    for member in range(GROUP):
        of_k, of_v, of_comoment = query_gradient_tokens(
            q, d_out, d_q, None, b, g * GROUP + member, 0, N, N, n, k_mean, comoment, shift, scale, t, D, E, BD, BE, T,
            PHI_Q, PHI_K, READER, SIGNED, CONSTANT, DTYPE, False, STAGES)  # fmt: skip
        d_k_total, d_v_mean, d_comoment = d_k_total + of_k, d_v_mean + of_v, d_comoment + of_comoment
    sums = key_gradient_tokens(
        k, v, d_out, taps, mask, d_k, d_v, b, g, 0, M, n, k_mean, v_mean, shift, d_k_total, d_v_mean,
        factor(d_comoment, DTYPE), t, picture, D, E, BD, BE, T, PHI_K, DTYPE, False)  # fmt: skip
    if taps is not None:
        write_taps(d_taps + program * 9 * E, sums, E)
