"""Read: one pass over queries answers them from the State (`softless.algebra.readers`), the local residual included.

    o = v_mean + e^top gain (f @ comoment)        f e^top = phi(q) e^shift, up to a factor that division cancels

    divide    gain = 1 / (n f.k_mean)
    subtract  gain = scale / n
    blend     gain = a / (n f.k_mean) + scale b / n, with a and b of the head (`factors`)
    channel   gain = 1                    f = rho(q) / (n k_mean), channel by channel
    regress   gain = scale                (f may be centered on k_mean, and the comoment is W: see `regress`)
    none      gain = scale                (k_mean and v_mean are 0, and the comoment is the plain sum)

Taylor attention's features are [1, x^]: the 1 adds n to the mass and nothing to the comoment (CONSTANT). A query reads
the mean where its mass is TINY or less, and where features are signed and rounding has lost the mass.

InLine's local residual (Han et al. 2024, eq. 6) has a 3x3 kernel for every sample and channel:

    residual_i = sum_o taps_o v_{i+o}      o over the 3x3 neighbors, zero beyond the border
    dv_j = sum_o taps_o do_{j-o}           dtaps_o = sum_j do_{j-o} v_j

Tokens from `prefix` on are a picture, row by row, `width` wide. The tokens before it neither get nor give a residual.
The nine shifted tiles come from the cache: only the first read of a row costs memory bandwidth.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from softless.kernels.common.arithmetic import ONES, dots, exponential, factor, lost, product
from softless.kernels.common.features import feature, slope
from softless.kernels.common.launch import SIZES
from softless.kernels.common.rows import FLOOR, keep, load, read_state, real, sequence, store


class Taps(NamedTuple):
    """The 3x3 kernels [batch, heads, 9, dim] with their strides, as a kernel argument."""

    at: Any
    batch: int
    head: int
    tap: int
    channel: int


TINY = tl.constexpr(2.0**-126)  # above this, 1 / x is finite
ALIVE = tl.constexpr(2.0**-100)  # above this, with room to spare for a gradient


@triton.jit
def factors_of(factors, h, first, second):
    """(first, second) of a head: the same for all heads, or the head's own number and its factor of `second`."""
    if factors is None:
        return first, second
    else:
        return tl.load(factors + 2 * h), second * tl.load(factors + 2 * h + 1)


@triton.jit
def occupied(k_mean, comoment):
    """Channels that some key uses, [BD]: channels with neither mean nor covariance do not enter a maximum."""
    return (k_mean != 0) | (tl.sum((comoment.to(tl.float32) != 0).to(tl.int32), 1) > 0)


@triton.jit
def query_features(x, n, k_mean, comoment, shift, t, D: tl.constexpr, PHI: tl.constexpr, EXP_K: tl.constexpr,
                   READER: tl.constexpr):  # fmt: skip
    """(phi, units, top): f = phi units, both [tokens, BD] or broadcastable to it; top [tokens, 1]."""
    phi = feature(x, t, D, PHI)
    zero = tl.zeros((x.shape[0], 1), tl.float32)
    if READER == "channel":
        total = (n * k_mean)[None, :]
        return phi, tl.where(total != 0, 1.0 / tl.where(total != 0, total, 1.0), 0.0), zero
    elif PHI == "exp":
        logs = tl.where(occupied(k_mean, comoment)[None, :], phi + shift[None, :], FLOOR)
        top = tl.max(logs, 1)[:, None]
        return exponential(logs - top), zero + 1.0, top
    elif EXP_K:
        logs = tl.where(phi != 0, shift[None, :], FLOOR)
        top = tl.max(logs, 1)[:, None]
        return phi, exponential(logs - top), top
    else:
        return phi, zero + 1.0, zero


@triton.jit
def centered(phi, units, k_mean, READER: tl.constexpr):
    """f of `query_features`; relative to the mean key where regression has features that are rounded."""
    if READER == "regress centered":
        return phi - k_mean[None, :]
    else:
        return phi * units


@triton.jit
def contrast(f, D: tl.constexpr, PHI_K: tl.constexpr, CENTERED: tl.constexpr):
    """f as a factor of the comoment. Centered softmax keys cancel what all channels of f share, so it is removed."""
    if PHI_K == "softmax" and CENTERED:
        columns = tl.arange(0, f.shape[1])[None, :]
        return keep(f - tl.sum(f, 1)[:, None] * (1.0 / D), columns < D, 0.0, D == f.shape[1])
    else:
        return f


@triton.jit
def grow(x, top):
    """x e^top in two steps, so that only the result can overflow; 0 stays 0."""
    half = tl.exp(0.5 * top)
    return tl.where(x == 0, x, x * half * half)


@triton.jit
def spent(x):
    """x, but 0 for infinity: an output that overflows needs no gradient, and one that does not had nothing to grow."""
    return tl.where(tl.abs(x) == float("inf"), 0.0, x)


@triton.jit
def least_mass(f, total, n, floor, FEATURES: tl.constexpr, SIGNED: tl.constexpr, CONSTANT: tl.constexpr):
    """The bound below which a mass f.total counts as 0, [tokens, 1] or one number: `floor`, or what rounding may leave.

    The terms of Taylor attention are 1 and q^.k^ for each token: at most 2 n.
    """
    if CONSTANT:
        return tl.maximum(lost(2.0 * n, n, FEATURES + 1), floor)
    elif SIGNED:
        return tl.maximum(lost(tl.sum(tl.abs(f.to(tl.float32) * total[None, :]), 1)[:, None], n, FEATURES), floor)
    else:
        return floor


@triton.jit
def answer(correlation, f, n, k_mean, v_mean, top, share, scale, D: tl.constexpr, EXP: tl.constexpr,
           READER: tl.constexpr, SIGNED: tl.constexpr, CONSTANT: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """The output of the readers (`softless.algebra.readers.answer`); f is a factor, `share` is a of blend."""
    if READER == "divide" or READER == "blend":
        sums = tl.zeros((1, ONES), tl.float32) + (n * k_mean)[:, None]
        weight = dots(f, sums, DTYPE)[:, None] + (n if CONSTANT else 0.0)
        alive = tl.abs(weight) > least_mass(f, n * k_mean, n, TINY, D, SIGNED, CONSTANT)
        gain = tl.where(alive, 1.0 / tl.where(alive, weight, 1.0), 0.0)
        if READER == "divide":
            return v_mean[None, :] + correlation * gain
        elif EXP:
            return (
                v_mean[None, :] + correlation * (share * gain) + grow(correlation * (scale / tl.maximum(n, 1.0)), top)
            )
        else:
            return v_mean[None, :] + correlation * (share * gain + scale / tl.maximum(n, 1.0))
    elif READER == "channel":
        return v_mean[None, :] + correlation
    else:
        step = correlation * (scale / tl.maximum(n, 1.0) if READER == "subtract" else scale)
        return v_mean[None, :] + (grow(step, top) if EXP else step)


@triton.jit
def pull(u, f, n, k_mean, top, scale, D: tl.constexpr, EXP: tl.constexpr, READER: tl.constexpr,
         SIGNED: tl.constexpr, CONSTANT: tl.constexpr):  # fmt: skip
    """(df, g, weighted, along) from u = do @ comoment^T: the gradient of f, and what the query adds to the State's.

    d comoment = sum weighted^T do         d (n k_mean) = -sum along weighted

    divide    g = 1 / mass    along = g f.u = do.(o - v_mean)      weighted = g f    df = g (u - along n k_mean)
    channel   g = 1           along = u / (n k_mean)               weighted = f      df = u
    regress   g = the gain    along is not used                    weighted = f      df = g u
    others    g = the gain    along is not used                    weighted = g f    df = g u

    With exponential features the outputs of the others grow with e^top; df is without that factor.
    """
    if READER == "divide":
        weight, along = tl.split(tl.sum(tl.join(f * (n * k_mean)[None, :], f * u), 1))  # both in the layout of u
        weight, along = weight[:, None] + (n if CONSTANT else 0.0), along[:, None]
        alive = tl.abs(weight) > least_mass(f, n * k_mean, n, ALIVE, D, SIGNED, CONSTANT)
        gain = tl.where(alive, 1.0 / tl.where(alive, weight, 1.0), 0.0)
        along *= gain
        return gain * (u - along * (n * k_mean)[None, :]), gain, gain * f, along
    elif READER == "channel":
        total = (n * k_mean)[None, :]
        return u, 1.0, f, u * tl.where(total != 0, 1.0 / tl.where(total != 0, total, 1.0), 0.0)
    elif READER == "regress" or READER == "regress centered":
        return scale * u, scale, f, f
    else:
        gain = scale / tl.maximum(n, 1.0) if READER == "subtract" else scale
        return gain * u, gain, spent(grow(gain * f, top)) if EXP else gain * f, f


@triton.jit
def query_slope(x, phi, units, top, df, t, EXP: tl.constexpr, PHI: tl.constexpr, READER: tl.constexpr):
    """The gradient of q from that of f."""
    gradient = slope(x, phi, df * tl.where(units < 1.0 / ALIVE, units, 0.0), t, PHI)
    if READER == "divide" or READER == "channel" or not EXP:
        return gradient
    else:
        return grow(gradient, top)


@triton.jit
def pull_blend(x, u, phi, units, n, k_mean, top, share, scale, t, D: tl.constexpr, EXP: tl.constexpr,
               PHI: tl.constexpr, SIGNED: tl.constexpr):  # fmt: skip
    """(dq, g, weighted, along, d share, d scale) of blend, as in `pull`, except that

    d (n k_mean) = -sum along f         d share and d scale are [tokens, 1], before their sum over queries
    """
    f = phi * units
    mass, pulled = tl.split(tl.sum(tl.join(f * (n * k_mean)[None, :], f * u), 1))
    mass, pulled = mass[:, None], pulled[:, None]
    alive = tl.abs(mass) > least_mass(f, n * k_mean, n, ALIVE, D, SIGNED, False)
    inverse = tl.where(alive, 1.0 / tl.where(alive, mass, 1.0), 0.0)
    along, divided, step = inverse * pulled, share * inverse, scale / tl.maximum(n, 1.0)
    df = divided * (u - along * (n * k_mean)[None, :])
    if EXP:
        gradient = query_slope(x, phi, units, top, df, t, EXP, PHI, "divide")
        gradient += query_slope(x, phi, units, top, step * u, t, EXP, PHI, "subtract")
        weighted = divided * f + spent(grow(step * f, top))
        of_scale = spent(grow(pulled / tl.maximum(n, 1.0), top))
    else:
        gradient = query_slope(x, phi, units, top, df + step * u, t, EXP, PHI, "divide")
        weighted = (divided + step) * f
        of_scale = pulled / tl.maximum(n, 1.0)
    return gradient, divided + step, weighted, along * divided, along, of_scale


@triton.jit
def neighbor(tokens, down, right, prefix, height, width):
    """(token, whether it is inside the picture) `down` rows and `right` columns from each token."""
    place = tokens - prefix
    line, column = place // width + down, place % width + right
    inside = (place >= 0) & (line >= 0) & (line < height) & (column >= 0) & (column < width)
    return tokens + down * width + right, inside


@triton.jit
def residual(v, taps, mask, b, h, tokens, here, prefix, height, width, E: tl.constexpr, BE: tl.constexpr):
    """The residual of a tile of tokens, [tokens, BE]."""
    channels = tl.arange(0, BE)
    total = tl.zeros((tokens.shape[0], BE), tl.float32)
    for tap in tl.static_range(9):
        near, inside = neighbor(tokens, tap // 3 - 1, tap % 3 - 1, prefix, height, width)
        inside = inside & here
        if mask is not None:
            inside = real(mask, b, near, inside)
        values = load(v, b, h, near, channels, inside[:, None] & (channels < E)[None, :])
        total += values * weights_of(taps, b, h, tap, channels, E)
    return total


@triton.jit
def residual_gradient(d_out, taps, values, sums, b, h, tokens, seen, prefix, height, width, E: tl.constexpr,
                      BE: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """(dv of a tile, sums [ONES, BE] with dtaps_o added to row o); values are the tile's v."""
    channels = tl.arange(0, BE)
    d_values = tl.zeros((tokens.shape[0], BE), tl.float32)
    lines = tl.arange(0, ONES)[:, None]
    for tap in tl.static_range(9):
        near, inside = neighbor(tokens, 1 - tap // 3, 1 - tap % 3, prefix, height, width)
        cotangent = load(d_out, b, h, near, channels, (inside & seen)[:, None] & (channels < E)[None, :])
        d_values += cotangent * weights_of(taps, b, h, tap, channels, E)
        only = factor(tl.where(lines == tap, 1.0, tl.zeros((ONES, tokens.shape[0]), tl.float32)), DTYPE)
        sums = product(only, factor(cotangent * values, DTYPE), sums, DTYPE)
    return d_values, sums


@triton.jit
def weights_of(taps, b, h, tap, channels, E: tl.constexpr):
    """One tap for every channel, [1, BE]."""
    at = taps.at + b * taps.batch + h * taps.head + tap * taps.tap + channels * taps.channel
    return tl.load(at, mask=channels < E, other=0.0).to(tl.float32)[None, :]


@triton.jit
def read_tokens(q, v, out, taps, mask, b, h, begin, end, n, k_mean, v_mean, comoment, shift, share, scale, t, picture,
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
        f = centered(phi, units, k_mean, READER)
        correlation = product(
            factor(contrast(f, D, PHI_K, READER != "none"), DTYPE), comoment, tl.zeros((T, BE), tl.float32), DTYPE
        )
        o = answer(correlation, factor(f, DTYPE), n, k_mean, v_mean, top, share, scale, D, EXP_K or PHI_Q == "exp",
                   READER, SIGNED, CONSTANT, DTYPE)  # fmt: skip
        if taps is not None:
            o += residual(v, taps, mask, b, h, tokens, here, picture[0], picture[1], picture[2], E, BE)
        store(out, b, h, tokens, channels, here[:, None] & (channels < E)[None, :], o, EVEN and E == BE)


@triton.jit(do_not_specialize=SIZES)
def read_kernel(q, v, out, taps, mask, q_offsets, records, factors, N, H, span, splits, scale, t, picture,
                GROUP: tl.constexpr, NUMBERS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
                BE: tl.constexpr, T: tl.constexpr, PHI_Q: tl.constexpr, PHI_K: tl.constexpr, READER: tl.constexpr,
                SIGNED: tl.constexpr, CONSTANT: tl.constexpr, DTYPE: tl.constexpr,
                EVEN: tl.constexpr):  # fmt: skip
    """One program per query head and span of tokens."""
    program = tl.program_id(0).to(tl.int64)
    head, begin = program // splits, (program % splits).to(tl.int32) * span
    b, h = head // H, head % H
    record = records + (b * (H // GROUP) + h // GROUP) * NUMBERS
    b, N = sequence(q_offsets, b, N)
    n, k_mean, v_mean, comoment, shift = read_state(record, D, E, BD, BE)
    comoment = factor(comoment, DTYPE)
    share, scale = factors_of(factors, h, 1.0, scale)
    read_tokens(q, v, out, taps, mask, b, h, begin, tl.minimum(begin + span, N), n, k_mean, v_mean, comoment, shift,
                share, scale, t, picture, D, E, BD, BE, T, PHI_Q, PHI_K, READER, SIGNED, CONSTANT, DTYPE,
                EVEN)  # fmt: skip
