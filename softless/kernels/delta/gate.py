"""How much a token of the delta rule erases and writes, and the derivatives of both.

    delta   a = beta              gain = beta
    efla    a = 1 - e^-x          gain = a / |k| = beta |k| D(x)          x = beta |k|^2,  D(x) = (1 - e^-x)/x

Below x = 1/2, where the quotient would cancel, D is the sum of its series, sum_n (-x)^n / (n+1)!. The derivatives, with
flow = (a/gain) da + dgain:

    delta   dbeta = flow                    efla   dbeta = e^-x |k| flow          d|k| = 2 beta e^-x flow - beta D dgain
"""

import triton
import triton.language as tl

NEAR = tl.constexpr(0.5)
TERMS = tl.constexpr(11)  # x^11 / 12! is 1e-12
GONE = tl.constexpr(100.0)  # e^-100 is 0 in float32
TINY = tl.constexpr(1e-30)
FAR = tl.constexpr(2.0**60)  # keys beyond have no gradient through e^-x, and their squares are finite


@triton.jit
def series(x):
    """D for x < NEAR."""
    term = tl.zeros_like(x) + 1.0
    total = term
    for n in tl.static_range(1, TERMS):
        term = term * x * (-1.0 / (n + 1))
        total += term
    return total


@triton.jit
def gate(length, beta, RULE: tl.constexpr):
    """(a, gain) of keys of this length."""
    if RULE == "delta":
        return beta, beta
    else:
        tl.static_assert(RULE == "efla")
        x = beta * length * length
        near = series(tl.minimum(x, NEAR))
        erased = 1.0 - tl.exp(-tl.minimum(x, GONE))
        written = erased / tl.where(x < NEAR, 1.0, length)
        return tl.where(x < NEAR, x * near, erased), tl.where(x < NEAR, beta * length * near, written)


@triton.jit
def gate_gradient(d_erase, d_gain, d_write, gain, length, beta, RULE: tl.constexpr):
    """(dbeta, d|k|) of the gradients of a and gain; d_write is a da + gain dgain, which has no terms that cancel."""
    ratio = length
    if RULE == "delta":
        ratio = tl.zeros_like(length) + 1.0
    some = tl.abs(gain) > TINY
    flow = tl.where(some, d_write / tl.where(some, gain, 1.0), ratio * d_erase + d_gain)
    if RULE == "delta":
        return flow, tl.zeros_like(length)
    else:
        x = beta * length * length
        left = tl.exp(-tl.minimum(x, GONE))
        decline = tl.where(
            x < NEAR, beta * series(tl.minimum(x, NEAR)), (1.0 - left) / tl.where(x < NEAR, 1.0, length * length)
        )
        return left * tl.minimum(length, FAR) * flow, 2.0 * beta * left * flow - decline * d_gain
