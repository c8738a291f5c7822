"""Observe: one pass over keys and values makes the State (`softless.algebra.state.observe`).

    k' = phi(k) - k_ref       v' = v - v_ref           rounded to the input's dtype
    comoment = sum k' v'^T - (sum k')(sum v')^T / n    k_mean = k_ref + (sum k')/n      v_mean = v_ref + (sum v')/n

k_ref is what keys have in common (`reference`), so rounding costs in proportion to how much keys differ. The same
rounded numbers enter both terms, so their covariance is exact. Values in half precision are factors already: they have
v_ref = 0 and go to the tensor cores unchanged. Their mean costs no more than the rounding of a float32 sum, because it
multiplies keys that add up to little. Without a normalizer (reader `none`) nothing is centered, and the comoment is
sum phi(k) v^T.

Regression also needs the comoment of the keys with themselves, sum k' k'^T - (sum k')(sum k')^T / n (SPREAD). The same
pass makes it from the same factors.

Exponential keys are kept in units of e^shift, the running maximum of each channel. When it grows, all sums so far are
rescaled.
"""

import triton
import triton.language as tl

from softless.kernels.common.arithmetic import ONES, column_sums, exponential, factor, product, summed
from softless.kernels.common.features import feature
from softless.kernels.common.launch import SIZES
from softless.kernels.common.reference import typical
from softless.kernels.common.rows import FLOOR, fill, keep, load, sequence, visible, write_spread, write_state


@triton.jit
def observe_tokens(k, v, mask, b, g, begin, end, t, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
                   BE: tl.constexpr, T: tl.constexpr, PHI: tl.constexpr, CENTERED: tl.constexpr, DTYPE: tl.constexpr,
                   EVEN: tl.constexpr, SPREAD: tl.constexpr = False):  # fmt: skip
    """The State of tokens begin..end of one key head: (n, k_mean, v_mean, comoment, shift). EVEN: tiles are full.

    With SPREAD, also the comoment of the keys with themselves.
    """
    FULL_K: tl.constexpr = EVEN and D == BD
    FULL_V: tl.constexpr = EVEN and E == BE
    columns, channels = tl.arange(0, BD), tl.arange(0, BE)
    k_ref, v_ref = tl.zeros((BD,), tl.float32), tl.zeros((BE,), tl.float32)
    shift = tl.full((BD,), FLOOR if PHI == "exp" else 0.0, tl.float32)
    if CENTERED:
        k_ref = typical(k, mask, b, g, begin, end, t, columns, D, PHI)
        if PHI == "exp":
            k_ref, shift = (columns < D).to(tl.float32), k_ref
        if DTYPE == tl.float32:
            v_ref = typical(v, mask, b, g, begin, end, t, channels, E, "identity")
    n = begin * 0.0
    turned = tl.zeros((BE, BD), tl.float32)  # comoment^T: values are read where they are, keys are stored once
    spread = tl.zeros((BD, BD), tl.float32)
    k_sums, v_sums = tl.zeros((BD, ONES), tl.float32), tl.zeros((BE, ONES), tl.float32)
    for start in range(begin, end, T):
        tokens = start + tl.arange(0, T)
        seen = visible(mask, b, tokens, end)
        of_keys, of_values = seen[:, None] & (columns < D)[None, :], seen[:, None] & (channels < E)[None, :]
        phi = feature(load(k, b, g, tokens, columns, of_keys, FULL_K), t, D, PHI)
        values = load(v, b, g, tokens, channels, of_values, FULL_V)
        if PHI == "exp":
            phi = keep(phi, seen[:, None], FLOOR, EVEN)
            top = tl.maximum(shift, tl.max(phi, 0))
            decay = exponential(shift - top)
            turned, k_sums, k_ref, shift = turned * decay[None, :], k_sums * decay[:, None], k_ref * decay, top
            phi = exponential(phi - top[None, :])
        keys = factor(keep(phi - k_ref[None, :], of_keys, 0.0, FULL_K), DTYPE)
        if DTYPE == tl.float32:
            values = keep(values - v_ref[None, :], of_values, 0.0, FULL_V)
        values = factor(values, DTYPE)
        turned = product(tl.trans(values), keys, turned, DTYPE)
        if SPREAD:
            spread = product(tl.trans(keys), keys, spread, DTYPE)
        if CENTERED:
            k_sums, v_sums = column_sums(keys, k_sums, DTYPE), column_sums(values, v_sums, DTYPE)
        n += 1.0 * T if EVEN else tl.sum(seen.to(tl.float32))
    k_step, v_step = summed(k_sums) / tl.maximum(n, 1.0), summed(v_sums) / tl.maximum(n, 1.0)
    comoment = tl.trans(turned)
    if CENTERED:
        comoment -= (n * k_step)[:, None] * v_step[None, :]
    if SPREAD:
        spread -= (n * k_step)[:, None] * k_step[None, :]
        return n, k_ref + k_step, v_ref + v_step, comoment, shift, spread
    else:
        return n, k_ref + k_step, v_ref + v_step, comoment, shift


@triton.jit(do_not_specialize=SIZES)
def observe_kernel(k, v, mask, k_offsets, records, M, G, span, splits, t, NUMBERS: tl.constexpr, D: tl.constexpr,
                   E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, T: tl.constexpr, PHI: tl.constexpr,
                   CENTERED: tl.constexpr, DTYPE: tl.constexpr, EVEN: tl.constexpr,
                   SPREAD: tl.constexpr = False):  # fmt: skip
    """One program per key head and span of tokens."""
    program = tl.program_id(0).to(tl.int64)
    head, split = program // splits, (program % splits).to(tl.int32)
    begin = split * span
    b, M = sequence(k_offsets, head // G, M)
    if SPREAD:
        n, k_mean, v_mean, comoment, shift, spread = observe_tokens(
            k, v, mask, b, head % G, begin, tl.minimum(begin + span, M), t, D, E, BD, BE, T, PHI, CENTERED,
            DTYPE, EVEN, True)  # fmt: skip
        write_state(records + program * NUMBERS, n, k_mean, v_mean, comoment, shift, D, E, D)
        write_spread(records + program * NUMBERS, k_mean, spread, D, E)
    else:
        n, k_mean, v_mean, comoment, shift = observe_tokens(
            k, v, mask, b, head % G, begin, tl.minimum(begin + span, M), t, D, E, BD, BE, T, PHI, CENTERED,
            DTYPE, EVEN)  # fmt: skip
        write_state(records + program * NUMBERS, n, k_mean, v_mean, comoment, shift, D, E)


@triton.jit(do_not_specialize=SIZES)
def merge_kernel(parts, records, splits, NUMBERS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, CELLS: tl.constexpr,
                 SHIFTED: tl.constexpr, TOGETHER: tl.constexpr = 8):  # fmt: skip
    """Merge the States of all splits of a head, CELLS numbers of the comoment per program, TOGETHER splits at a time.

    comoment = sum_s (comoment_s + n_s k_s v_s^T) - (sum_s n_s k_s)(sum_s n_s v_s)^T / n   relative to the first's means
    """
    program = tl.program_id(0).to(tl.int64)
    GROUPS: tl.constexpr = (D * E + CELLS - 1) // CELLS
    head, cells = program // GROUPS, (program % GROUPS).to(tl.int32) * CELLS + tl.arange(0, CELLS)
    feature, channel, real = cells // E, cells % E, cells < D * E
    parts += head * splits * NUMBERS
    zero = tl.zeros((CELLS,), tl.float32)
    shift, total, comoment, k_sum, v_sum = zero, zero, zero, zero, zero
    if SHIFTED:
        shift += FLOOR
        for s in range(splits):
            seen = tl.load(parts + s * NUMBERS + D * E + 2 * D + E + 0 * cells) > 0
            here = tl.load(parts + s * NUMBERS + D * E + D + E + feature, mask=real, other=FLOOR)
            shift = tl.maximum(shift, tl.where(seen, here, FLOOR))
    k_first = tl.load(parts + D * E + feature, mask=real, other=0.0)
    v_first = tl.load(parts + D * E + D + channel, mask=real, other=0.0)
    for first in range(0, splits, TOGETHER):
        for one in tl.static_range(TOGETHER):
            part = parts + (first + one) * NUMBERS
            here = real & (first + one + 0 * cells < splits)
            n = tl.load(part + D * E + 2 * D + E + 0 * cells, mask=here, other=0.0)
            k_mean = tl.load(part + D * E + feature, mask=here, other=0.0)
            covariance = tl.load(part + cells, mask=here, other=0.0)
            if SHIFTED:
                units = tl.load(part + D * E + D + E + feature, mask=here & (n > 0), other=FLOOR)
                units = tl.exp(tl.minimum(units - shift, 0.0))
                k_mean, covariance = k_mean * units, covariance * units
            else:
                k_mean -= k_first
            v_mean = tl.load(part + D * E + D + channel, mask=here, other=0.0) - v_first
            comoment += covariance + n * k_mean * v_mean
            k_sum, v_sum, total = k_sum + n * k_mean, v_sum + n * v_mean, total + n
    count = tl.maximum(total, 1.0)
    k_mean = k_sum / count if SHIFTED else k_first + k_sum / count
    at = records + head * NUMBERS
    tl.store(at + cells, comoment - k_sum * (v_sum / count), mask=real)
    tl.store(at + D * E + feature, k_mean, mask=real & (channel == 0))
    tl.store(at + D * E + D + channel, v_first + v_sum / count, mask=real & (feature == 0))
    tl.store(at + D * E + D + E + feature, shift, mask=real & (channel == 0))
    tl.store(at + D * E + 2 * D + E + 0 * cells, total, mask=cells == 0)
    if program % GROUPS == 0:
        fill(at, D, E)
