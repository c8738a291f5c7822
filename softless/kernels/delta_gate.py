"""How much a token of the delta rule erases and writes, and the derivatives of both.

    delta   a = beta              gain = beta
    efla    a = 1 - e^-x          gain = a / |k| = beta |k| D(x)          x = beta |k|^2,  D(x) = (1 - e^-x)/x

Below x = 1/2, D and what its derivative needs, D + 2x D', are sums of their series, where the quotients would cancel:

    D = sum_n (-x)^n / (n+1)!          D + 2x D' = sum_n (2n+1) (-x)^n / (n+1)!
"""

import triton
import triton.language as tl

NEAR = tl.constexpr(0.5)
TERMS = tl.constexpr(11)  # x^11 / 12! is 1e-12
GONE = tl.constexpr(100.0)  # e^-100 is 0 in float32
FAR = tl.constexpr(2.0**60)  # keys beyond have no gradient through e^-x, and their squares are finite


@triton.jit
def series(x):
    """(D, D + 2x D') for x < NEAR."""
    term = tl.zeros_like(x) + 1.0
    plain, weighted = term, term
    for n in tl.static_range(1, TERMS):
        term = term * x * (-1.0 / (n + 1))
        plain += term
        weighted += (2 * n + 1) * term
    return plain, weighted


@triton.jit
def gate(length, beta, RULE: tl.constexpr):
    """(a, gain) of keys of this length."""
    if RULE == "delta":
        return beta, beta
    else:
        tl.static_assert(RULE == "efla")
        x = beta * length * length
        near, _ = series(tl.minimum(x, NEAR))
        erased = 1.0 - tl.exp(-tl.minimum(x, GONE))
        written = erased / tl.where(x < NEAR, 1.0, length)
        return tl.where(x < NEAR, x * near, erased), tl.where(x < NEAR, beta * length * near, written)


@triton.jit
def gate_gradient(d_erase, d_gain, length, beta, RULE: tl.constexpr):
    """(dbeta, d|k|) of the gradients of (a, gain)."""
    if RULE == "delta":
        return d_erase + d_gain, tl.zeros_like(length)
    else:
        x = beta * length * length
        left = tl.exp(-tl.minimum(x, GONE))
        _, near = series(tl.minimum(x, NEAR))
        square = tl.where(x < NEAR, 1.0, length * length)
        length = tl.minimum(length, FAR)
        slope = (2.0 * tl.minimum(x, GONE) * left - (1.0 - left)) / square
        slope = tl.where(x < NEAR, beta * near, slope)
        d_beta = left * length * (length * d_erase + d_gain)
        return d_beta, 2.0 * beta * length * left * d_erase + slope * d_gain
