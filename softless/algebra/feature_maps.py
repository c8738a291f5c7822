"""Feature maps phi, which linear attention uses instead of the exponential of a score.

    identity     x                          divide: fails (InLine Table 3: 0.2 % top-1)
    relu         max(x, 0)
    leaky_relu   max(x, 0.01 x)             divide: fails (InLine Table 3: 1.5 % top-1)
    elu          elu(x) + 1                 Katharopoulos et al. 2020
    exp          exp(t x)                   kept as its logarithm, see `Log`
    softmax      softmax over channels
    affine_relu  max(A x + b, 0)            A [H, d, d], b [H, d], shared by q and k

A map takes x [B, H, N, d] and returns features [B, H, N, D], or their logarithm.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from softless.algebra.modes import eager, recording
from softless.algebra.state import Log
from softless.errors import ArgumentError

FeatureMap = Callable[[Tensor], Tensor]


def elu(x: Tensor) -> Tensor:
    """elu(x) + 1, as e^min(x, 0) + max(x, 0): expm1(x) + 1 would round to 0 at x = -17.

    min(x, 0) is x - max(x, 0), whose slope at 0 is 1 in every torch; that of `clamp` is not.
    """
    positive = x.relu()
    below = (x - positive).exp_()
    return below + positive if recording(x) or not eager() else below.add_(positive)


def affine_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return ReLU(A x + b) with one A and b per head."""
    return (x @ weight.mT + bias[:, None, :]).relu()  # [B, H, N, d] @ [H, d, d]


def unit(x: Tensor, dims: tuple[int, ...] = (-1,)) -> Tensor:
    """Return x / |x|, and 0 for the zero vector. x is divided by its largest entry first, so |x|^2 cannot overflow."""
    if x.shape[-1] == 0:
        return x
    largest = x.detach().abs().amax(dims, keepdim=True)
    x = x / torch.where(largest > 0, largest, 1.0)
    square = x.square().sum(dims, keepdim=True)
    return x * torch.where(square > 0, square, 1.0).rsqrt()


ELEMENTWISE: dict[str, FeatureMap] = {
    "identity": lambda x: x,
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "elu": elu,
    "softmax": lambda x: x.softmax(-1),
}
SIGNED = ("identity", "leaky_relu")  # features that may be negative
NAMES = (*ELEMENTWISE, "exp", "affine_relu")


def apply(phi: str | FeatureMap, x: Tensor, *, t: float = 1.0, inputs: Mapping[str, Tensor]) -> Tensor | Log:
    """Return phi(x), for a name or for a callable that maps the last dimension."""
    if callable(phi):
        return _checked(phi(x), x)
    if phi == "exp":
        return Log(t * x)
    if phi == "affine_relu":
        return affine_relu(x, inputs["weight"].to(x.dtype), inputs["bias"].to(x.dtype))
    return ELEMENTWISE[phi](x)


def _checked(features: object, x: Tensor) -> Tensor:
    """Return the features of a user's map if it mapped the last dimension of each token, else raise."""
    if not isinstance(features, Tensor):
        raise ArgumentError(f"phi returned a {type(features).__name__} and must return a tensor")
    fits = features.ndim == x.ndim and features.shape[:-1] == x.shape[:-1] and features.shape[-1] > 0
    if not fits or features.dtype != x.dtype:
        raise ArgumentError(
            f"phi returned {features.dtype} {list(features.shape)} and must map {list(x.shape)} to a {x.dtype} tensor "
            f"of shape {[*x.shape[:-1], 'D']}, D at least 1"
        )
    return features
