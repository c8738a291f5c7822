"""What a query brings to a State: its features in the state's units, and its gain.

    o = v_mean + e^top gain (f @ comoment)        f e^top = phi(q) e^shift, up to a factor that division cancels

    divide    gain = 1 / (n f.k_mean)
    subtract  gain = scale / n
    channel   gain = 1                    f = rho(q) / (n k_mean), channel by channel
    none      gain = scale                (k_mean and v_mean are 0, and the comoment is the plain sum)

Taylor attention's features are [1, x^]: the 1 adds n to the mass and nothing to the comoment (CONSTANT). A query whose
mass is 0, or no more than TINY, reads the mean; so does one whose mass is lost in rounding, where features are signed.
"""

import triton
import triton.language as tl

from softless.kernels.common.arithmetic import ONES, dots, exponential, lost
from softless.kernels.common.features import feature, slope
from softless.kernels.common.record import FLOOR
from softless.kernels.common.rows import keep

TINY = tl.constexpr(2.0**-126)  # above this, 1 / x is finite
ALIVE = tl.constexpr(2.0**-100)  # above this, with room to spare for a gradient


@triton.jit
def occupied(k_mean, comoment):
    """Channels that some key uses, [BD]: those with neither mean nor covariance have no say in a maximum."""
    return (k_mean != 0) | (tl.sum((comoment.to(tl.float32) != 0).to(tl.int32), 1) > 0)


@triton.jit
def query_features(x, n, k_mean, comoment, shift, t, D: tl.constexpr, PHI: tl.constexpr, EXP_K: tl.constexpr,
                   READER: tl.constexpr):  # fmt: skip
    """(phi, units, top): f = phi units, [tokens, BD] each, units broadcastable, top [tokens, 1]."""
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
def contrast(f, D: tl.constexpr, PHI_K: tl.constexpr, CENTERED: tl.constexpr):
    """f as a factor of the comoment. Softmax keys add up to 1, so what f's channels share has no effect on a centered
    one: it is left out before rounding.
    """
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
    """0 for infinity: an output that overflows has no use for a gradient, and one that does not had 0 to grow."""
    return tl.where(tl.abs(x) == float("inf"), 0.0, x)


@triton.jit
def least_mass(f, total, n, floor, FEATURES: tl.constexpr, SIGNED: tl.constexpr, CONSTANT: tl.constexpr):
    """A mass f.total no larger counts as 0, [tokens, 1] or one number: `floor`, or what rounding may leave. The terms
    of Taylor attention are 1 and q^.k^ for each token: 2 n at most.
    """
    if CONSTANT:
        return tl.maximum(lost(2.0 * n, n, FEATURES + 1), floor)
    elif SIGNED:
        return tl.maximum(lost(tl.sum(tl.abs(f.to(tl.float32) * total[None, :]), 1)[:, None], n, FEATURES), floor)
    else:
        return floor


@triton.jit
def answer(correlation, f, n, k_mean, v_mean, top, scale, D: tl.constexpr, EXP: tl.constexpr, READER: tl.constexpr,
           SIGNED: tl.constexpr, CONSTANT: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """The readers themselves: `softless.algebra.readers.answer`; f is a factor."""
    if READER == "divide":
        sums = tl.zeros((1, ONES), tl.float32) + (n * k_mean)[:, None]
        weight = dots(f, sums, DTYPE)[:, None] + (n if CONSTANT else 0.0)
        alive = tl.abs(weight) > least_mass(f, n * k_mean, n, TINY, D, SIGNED, CONSTANT)
        return v_mean[None, :] + correlation * tl.where(alive, 1.0 / tl.where(alive, weight, 1.0), 0.0)
    elif READER == "channel":
        return v_mean[None, :] + correlation
    else:
        step = correlation * (scale / tl.maximum(n, 1.0) if READER == "subtract" else scale)
        return v_mean[None, :] + (grow(step, top) if EXP else step)


@triton.jit
def pull(u, f, n, k_mean, top, scale, D: tl.constexpr, EXP: tl.constexpr, READER: tl.constexpr,
         SIGNED: tl.constexpr, CONSTANT: tl.constexpr):  # fmt: skip
    """(df, g, weighted, along) from u = do @ comoment^T: the gradient of f, and what the query adds to the state's.

    d comoment = sum weighted^T do         d (n k_mean) = -sum along weighted

    divide    g = 1 / mass    along = g f.u = do.(o - v_mean)      weighted = g f    df = g (u - along n k_mean)
    channel   g = 1           along = u / (n k_mean)               weighted = f      df = u
    others    g = the gain    along is not used                    weighted = g f    df = g u

    The others' outputs grow with e^top where features are exponential; df is without that factor.
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
    else:
        gain = scale / tl.maximum(n, 1.0) if READER == "subtract" else scale
        return gain * u, gain, spent(grow(gain * f, top)) if EXP else gain * f, f


@triton.jit
def query_slope(x, phi, units, top, df, t, EXP: tl.constexpr, PHI: tl.constexpr, READER: tl.constexpr):
    """Gradient of q from that of f."""
    gradient = slope(x, phi, df * tl.where(units < 1.0 / ALIVE, units, 0.0), t, PHI)
    if READER == "divide" or READER == "channel" or not EXP:
        return gradient
    else:
        return grow(gradient, top)
