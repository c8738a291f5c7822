"""The formulas of the papers in plain PyTorch: unfused, in the dtype of the input.

    linear     o = phi(q) (phi(k)^T v) / phi(q).sum_j phi(k_j)                    normalize="none": no division
    inline     o = (s/N) phi(q) (phi(k)^T v) - s (phi(q).mean phi(k)) mean v + mean v       as its authors compute it
    efficient  o = softmax_channels(q) (softmax_tokens(k)^T v)
    taylor     o = (sum_j v_j + q^ (k^^T v)) / (N + q^.sum_j k^_j)                             q^ = q/|q|, order 1

The causal form has two versions, both for N = M:

    weights    the N x N scores, masked: tril(phi(q) phi(k)^T) v
    sums       running sums of phi(k) v^T, N x d x e numbers: for lengths whose N x N weights do not fit

InLine's local residual is one convolution with B C groups, and its MLP is two convolutions with one group per head, as
its authors run them.

These formulas are a yardstick of speed, not of precision: they use raw sums and do not handle zeros. softless.algebra
has the careful form.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from softless.errors import UnsupportedError
from softless.mechanisms import Mechanism
from softless.mechanisms.base import repeat_heads
from softless.mechanisms.efficient import Efficient
from softless.mechanisms.linear import FeatureMapped, InLine, Linear
from softless.mechanisms.taylor import Taylor
from softless.nn.local_residual import LocalResidual

Features = Float[Tensor, "b h n d"]
Values = Float[Tensor, "b h n e"]
Queries = Float[Tensor, "b h m d"]
Output = Float[Tensor, "b h m e"]
Map = Callable[[Tensor], Tensor]
Formula = Callable[[Tensor, Tensor, Tensor], Tensor]

WEIGHTS, SUMS = "weights", "sums"

MAPS: dict[str, Map] = {
    "identity": lambda x: x,
    "relu": F.relu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.01),
    "elu": lambda x: F.elu(x) + 1,
    "softmax": lambda x: x.softmax(-1),
}


def plain(mechanism: Mechanism, *, causal_by: str | None = None) -> Formula:
    """Return the formula as a function of q, k and v; `causal_by` is None, 'weights' or 'sums'."""
    if isinstance(mechanism, Linear | InLine):
        on_q, on_k = maps(mechanism)
        forms = SUBTRACT if isinstance(mechanism, InLine) else DIVIDE if mechanism.normalize == "divide" else KEEP
        form = forms[causal_by]
        return lambda q, k, v: form(on_q(q), *_like(q, on_k(k), v))
    if isinstance(mechanism, Efficient):
        return lambda q, k, v: CHANNEL[causal_by](q.softmax(-1), *_like(q, k, v))
    if isinstance(mechanism, Taylor) and mechanism.order == 1:
        if causal_by is None:
            return lambda q, k, v: _taylor(_unit(q), *_like(q, _unit(k), v))
        return lambda q, k, v: DIVIDE[causal_by](_one_and(q), *_like(q, _one_and(k), v))
    name = mechanism.name
    raise UnsupportedError(f"{name} has no plain formula here: linear, inline, efficient and taylor of order 1 do")


def plain_padded(mechanism: Mechanism, key_mask: Bool[Tensor, "b n"]) -> Formula:
    """Return the formula of linear or inline for sequences with padding; `key_mask` is True at real tokens."""
    if not isinstance(mechanism, Linear | InLine):
        raise UnsupportedError(f"{mechanism.name} has no plain formula with padding here: linear and inline do")
    on_q, on_k = maps(mechanism)
    real = key_mask[:, None, :, None]

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        a, (b, v) = on_q(q), _like(q, on_k(k) * real, v * real)
        if isinstance(mechanism, Linear):
            return (_divide if mechanism.normalize == "divide" else _keep)(a, b, v)
        n, s = real.sum(-2, keepdim=True).to(q.dtype), q.shape[-1] ** -0.5
        k_mean, v_mean = b.sum(-2, keepdim=True) / n, v.sum(-2, keepdim=True) / n
        return (s / n) * (a @ (b.mT @ v)) - s * (a @ k_mean.mT) * v_mean + v_mean

    return formula


def plain_taps(residual: LocalResidual, context: Float[Tensor, "b c"]) -> Float[Tensor, "b h 9 d"]:
    """Compute the kernels of the local residual by two convolutions in groups."""
    taps = nn.Sequential.forward(residual, context[..., None])
    return taps.squeeze(-1).unflatten(1, (residual.heads, -1, 9)).transpose(2, 3)


def plain_residual(
    v: Float[Tensor, "b h n d"], taps: Float[Tensor, "b h 9 d"], grid: tuple[int, int], prefix: int = 0
) -> Float[Tensor, "b h n d"]:
    """Apply the 3x3 kernel of every sample and channel to its picture; the first `prefix` tokens get zero."""
    batch, heads, _, dim = v.shape
    picture = v[:, :, prefix:].transpose(2, 3).reshape(1, batch * heads * dim, *grid)
    kernels = taps.transpose(2, 3).reshape(batch * heads * dim, 1, 3, 3)
    local = F.conv2d(picture, kernels, padding=1, groups=kernels.shape[0])  # [1, B C, height, width]
    return F.pad(local.reshape(batch, heads, dim, -1).transpose(2, 3), (0, 0, prefix, 0))


def maps(mechanism: FeatureMapped) -> tuple[Map, Map]:
    """Return phi and phi_k of a mechanism in plain PyTorch."""
    phi, phi_k, t = mechanism.phi, mechanism.phi_k, mechanism.t
    return _map(phi, t), _map(phi if phi_k is None else phi_k, t)


def _map(phi: str | Map, t: float) -> Map:
    if callable(phi):
        return phi
    if phi == "exp":
        return lambda x: (t * x).exp()
    if phi not in MAPS:
        raise UnsupportedError(f"phi {phi!r} has no plain formula here: {', '.join(MAPS)} and exp do")
    return MAPS[phi]


def _like(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat the heads of k and v to as many as q has."""
    return repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])


def _unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def _one_and(x: Tensor) -> Tensor:
    """Return [1, x^]: features whose product is 1 + q^.k^."""
    return F.pad(_unit(x), (1, 0), value=1.0)


def _keep(a: Queries, b: Features, v: Values) -> Output:
    return a @ (b.mT @ v)


def _keep_weights(a: Features, b: Features, v: Values) -> Values:
    return (a @ b.mT).tril() @ v


def _keep_sums(a: Features, b: Features, v: Values) -> Values:
    running = (b[..., :, None] * v[..., None, :]).cumsum(-3)  # sum_{j <= i} b_j v_j^T: [B, H, N, d, e]
    return (a[..., None, :] @ running).squeeze(-2)


def _divide(a: Queries, b: Features, v: Values) -> Output:
    return (a @ (b.mT @ v)) / (a @ b.sum(-2)[..., None])


def _divide_weights(a: Features, b: Features, v: Values) -> Values:
    weights = (a @ b.mT).tril()
    return (weights @ v) / weights.sum(-1, keepdim=True)


def _divide_sums(a: Features, b: Features, v: Values) -> Values:
    return _keep_sums(a, b, v) / (a * b.cumsum(-2)).sum(-1, keepdim=True)


def _subtract(a: Queries, b: Features, v: Values) -> Output:
    s, v_mean = a.shape[-1] ** -0.5, v.mean(-2, keepdim=True)
    share = (s / b.shape[-2]) ** 0.5  # half on each side, so that half precision does not overflow
    return a @ ((b * share).mT @ (v * share)) - s * (a @ b.mean(-2)[..., None]) * v_mean + v_mean


def _subtract_weights(a: Features, b: Features, v: Values) -> Values:
    n = _counts(a)
    scores = (a @ b.mT).tril()
    centered = a.shape[-1] ** -0.5 * (scores - scores.sum(-1, keepdim=True) / n)
    return ((centered + 1) / n).tril() @ v


def _subtract_sums(a: Features, b: Features, v: Values) -> Values:
    n = _counts(a)
    s, k_mean, v_mean = a.shape[-1] ** -0.5, b.cumsum(-2) / n, v.cumsum(-2) / n
    return s * (_keep_sums(a, b, v) / n - (a * k_mean).sum(-1, keepdim=True) * v_mean) + v_mean


def _so_far(a: Features, k: Features) -> tuple[Features, Features]:
    """Return the factors of a softmax over the tokens so far: exp(k), and a over its running sum."""
    mass = k.exp()
    return a / mass.cumsum(-2), mass


def _taylor(a: Queries, b: Features, v: Values) -> Output:
    return (v.sum(-2, keepdim=True) + a @ (b.mT @ v)) / (b.shape[-2] + a @ b.sum(-2)[..., None])


def _counts(x: Features) -> Float[Tensor, "n 1"]:
    """Return how many tokens each token sees: 1 to N."""
    return torch.arange(1, x.shape[-2] + 1, device=x.device, dtype=x.dtype)[:, None]


KEEP = {None: _keep, WEIGHTS: _keep_weights, SUMS: _keep_sums}
DIVIDE = {None: _divide, WEIGHTS: _divide_weights, SUMS: _divide_sums}
SUBTRACT = {None: _subtract, WEIGHTS: _subtract_weights, SUMS: _subtract_sums}
CHANNEL: dict[str | None, Formula] = {
    None: lambda a, k, v: a @ (k.softmax(-2).mT @ v),
    WEIGHTS: lambda a, k, v: _keep_weights(*_so_far(a, k), v),
    SUMS: lambda a, k, v: _keep_sums(*_so_far(a, k), v),
}
