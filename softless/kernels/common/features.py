"""Feature maps inside a kernel, and the slopes that take a gradient back through them.

    identity  x        relu  max(x, 0)        leaky_relu  max(x, 0.01 x)        elu  elu(x) + 1
    softmax   over channels                   unit  x / |x|, 0 for the zero vector
    exp       e^(t x): kept as its logarithm t x, which the caller takes relative to a shift

They are `softless.algebra.feature_maps`, where the reasons are. x is [tokens, BD] in float32; columns beyond D hold 0.
NaN stays NaN.
"""

import triton
import triton.language as tl

from softless.kernels.common.arithmetic import exponential
from softless.kernels.common.rows import keep

NAMES = ("identity", "relu", "leaky_relu", "elu", "softmax", "unit", "exp")
SIGNED = ("identity", "leaky_relu", "unit")  # those that may be negative


def may_cancel(phi_q: str, phi_k: str, reader: str) -> bool:
    """Whether a division's mass is a sum of either sign: its products are finer than those of the inputs."""
    return reader == "divide" and (phi_q in SIGNED or phi_k in SIGNED)


@triton.jit
def feature(x, t, D: tl.constexpr, PHI: tl.constexpr):
    """phi(x), its logarithm for exp; 0 beyond column D."""
    columns = tl.arange(0, x.shape[1])[None, :]
    if PHI == "identity":
        return x
    elif PHI == "relu":
        return tl.where(x < 0, 0.0, x)
    elif PHI == "leaky_relu":
        return tl.where(x < 0, 0.01 * x, x)
    elif PHI == "elu":
        return keep(tl.where(x > 0, x + 1.0, exponential(x)), columns < D, 0.0, D == x.shape[1])
    elif PHI == "softmax":
        logs = keep(x, columns < D, float("-inf"), D == x.shape[1])
        powers = exponential(logs - tl.max(logs, 1)[:, None])
        return powers / tl.sum(powers, 1)[:, None]
    elif PHI == "unit":
        return x * inverse_norm(x)
    else:
        tl.static_assert(PHI == "exp")
        return t * x


@triton.jit
def inverse_norm(x):
    """1 / |x| as [tokens, 1], by way of the largest entry: |x|^2 cannot overflow. 1 for the zero vector."""
    largest = tl.max(tl.abs(x), 1)[:, None]
    scale = tl.where(largest > 0, 1.0 / tl.where(largest > 0, largest, 1.0), 1.0)
    square = tl.sum(x * scale * (x * scale), 1)[:, None]
    return tl.where(largest > 0, scale / tl.sqrt(tl.where(square > 0, square, 1.0)), 1.0)


@triton.jit
def slope(x, phi, gradient, t, PHI: tl.constexpr):
    """Gradient of x from that of phi(x); for exp, `gradient` is that of the features and `phi` the features."""
    if PHI == "identity":
        return gradient
    elif PHI == "relu":
        return tl.where(phi > 0, gradient, 0.0)
    elif PHI == "leaky_relu":
        return tl.where(phi > 0, gradient, 0.01 * gradient)
    elif PHI == "elu":
        return gradient * tl.minimum(phi, 1.0)
    elif PHI == "softmax":
        return phi * (gradient - tl.sum(phi * gradient, 1)[:, None])
    elif PHI == "unit":
        length = inverse_norm(x)
        return length * (gradient - phi * tl.sum(phi * gradient, 1)[:, None])
    else:
        tl.static_assert(PHI == "exp")
        return t * (phi * gradient)
