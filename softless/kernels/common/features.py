"""Feature maps inside a kernel, and the slopes that take a gradient back through them.

    identity  x        relu  max(x, 0)        leaky_relu  max(x, 0.01 x)        elu  elu(x) + 1
    softmax   over channels                   unit  x / |x|, 0 for the zero vector
    exp       e^(t x): kept as its logarithm t x, which the caller takes relative to a shift

`softless.algebra.feature_maps` defines the same maps and gives the reasons. x is [tokens, BD] in float32, and 0 beyond
column D. NaN stays NaN.
"""

from typing import Any

import triton
import triton.language as tl

from softless.algebra.kernel_spec import KernelSpec
from softless.kernels.common.arithmetic import exponential
from softless.kernels.common.rows import keep

SIGNED = ("identity", "leaky_relu", "unit")  # features that may be negative


def may_cancel(spec: KernelSpec) -> bool:
    """Whether the mass of a division has terms of either sign: its products are then finer than the inputs."""
    return spec.reader in ("divide", "blend") and (spec.phi_q in SIGNED or spec.phi_k in SIGNED)


def folded(spec: KernelSpec) -> bool:
    """Whether regression centers its queries by what it adds to the output: they are factors as they come."""
    return spec.reader == "regress" and spec.centered and spec.phi_q == "identity"


def named(spec: KernelSpec) -> dict[str, Any]:
    """Return a spec as constants of a kernel. Exponential features do not count as signed."""
    signed = may_cancel(spec) and "exp" not in (spec.phi_q, spec.phi_k)
    reader = "regress centered" if spec.reader == "regress" and spec.centered and not folded(spec) else spec.reader
    names = {"PHI_Q": spec.phi_q, "PHI_K": spec.phi_k, "READER": reader}
    return names | {"SIGNED": signed, "CONSTANT": spec.constant}


@triton.jit
def feature(x, t, D: tl.constexpr, PHI: tl.constexpr):
    """phi(x), or its logarithm for exp; 0 beyond column D."""
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
    """1 / |x| as [tokens, 1]; 1 for the zero vector. x is divided by its largest entry, lest |x|^2 overflow."""
    largest = tl.max(tl.abs(x), 1)[:, None]
    scale = tl.where(largest > 0, 1.0 / tl.where(largest > 0, largest, 1.0), 1.0)
    square = tl.sum(x * scale * (x * scale), 1)[:, None]
    return tl.where(largest > 0, scale / tl.sqrt(tl.where(square > 0, square, 1.0)), 1.0)


@triton.jit
def slope(x, phi, gradient, t, PHI: tl.constexpr):
    """The gradient of x from that of phi(x). For exp, `phi` is the features themselves, not their logarithm."""
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
