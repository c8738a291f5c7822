"""Regression: the best linear predictor of v from k, read at a query.

    K = sum_j k'_j k'_j^T / n        C = sum_j k'_j v'_j^T / n        k' = phi(k) - k_mean, v' = v - v_mean
    A = K + r I                      W = A^-1 C
    o = v_mean + g (phi(q) - k_mean)^T W
    w_ij = 1/n + (g/n) (phi(q_i) - k_mean)^T A^-1 k'_j

    relative ridge   r = lam trace(K) / d      the same for keys of any size
    absolute ridge   r = lam / n               one more token changes n A by a product of one vector with itself

Rows sum to one. A query equal to the mean key reads the mean value. With lam = 0 and g = 1 this is least squares, which
no invertible affine map of q and k together changes. As lam grows with g = s r, it becomes InLine for q - k_mean. Keys
may have shares p_j that sum to one, instead of 1/n everywhere.

No state is new: observe [v, phi(k)] instead of v (`with_keys`), and its comoment is [n C | n K]. `conjugate` has the
causal form.

r is never less than the rounding of K, 4 d eps of its largest entry. So A can always be solved with, also where keys
are fewer than channels and lam is 0.

Garnelo and Czarnecki 2023 (arXiv 2305.10203) read keys in this way; von Oswald et al. 2025 (arXiv 2506.05233) do so
causally.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from softless.algebra.readers import alive
from softless.algebra.state import State, keep


def with_keys(phi_k: Float[Tensor, "*#b n d"], v: Float[Tensor, "*#b n m"]) -> Float[Tensor, "*b n m+d"]:
    """Return [v, phi(k)], the values of a state that regression reads."""
    batch = torch.broadcast_shapes(phi_k.shape[:-1], v.shape[:-1])
    return torch.cat([v.expand(*batch, -1), phi_k.expand(*batch, -1)], -1)


def observe_shares(
    phi_k: Float[Tensor, "*#b m d"],
    v: Float[Tensor, "*#b m e"],
    shares: Float[Tensor, "*b m"],
    n: Int[Tensor, "*#b"],
) -> State:
    """Summarize n tokens that have shares of one, instead of 1/n each. Such a state is read, and never merged."""
    p = shares[..., None]  # [*b, m, 1]
    k_mean, v_mean = (p * phi_k).sum(-2), (p * v).sum(-2)
    comoment = (p * (phi_k - k_mean[..., None, :])).mT @ (v - v_mean[..., None, :])
    return State(n, k_mean, v_mean, n[..., None, None] * comoment, torch.zeros_like(k_mean))


def read(
    phi_q: Float[Tensor, "*#b n d"],
    state: State,
    ridge: float | Float[Tensor, "*#b"],
    gain: float | Float[Tensor, "*#b"] = 1.0,
    *,
    relative: bool = True,
    centered: bool = True,
) -> Float[Tensor, "*b n m"]:
    """Answer queries from a state of `with_keys`.

    >>> import torch
    >>> from softless.algebra import observe, regression
    >>> k, v = torch.randn(2, 4, 100, 16), torch.randn(2, 4, 100, 8)            # [B, H, M, d], [B, H, M, e]
    >>> state = observe(k, regression.with_keys(k, v))
    >>> regression.read(torch.randn(2, 4, 5, 16), state, ridge=0.1).shape       # [B, H, N, e]
    torch.Size([2, 4, 5, 8])
    """
    return reader(state, ridge, gain, relative=relative, centered=centered)(phi_q)


def reader(
    state: State,
    ridge: float | Float[Tensor, "*#b"],
    gain: float | Float[Tensor, "*#b"] = 1.0,
    *,
    relative: bool = True,
    centered: bool = True,
) -> Callable[[Tensor], Tensor]:
    """Solve for W, and return the function that answers queries phi(q), as `read` does."""
    width = state.comoment.shape[-1] - state.comoment.shape[-2]
    tokens = state.n.clamp(min=1)[..., None, None]
    covariance, spread = (state.comoment / tokens).split([width, state.comoment.shape[-2]], -1)
    least = rounding(state.k_mean[..., None, :])
    predictor = solve(spread, covariance, ridge_of(spread, per_matrix(ridge), tokens, relative=relative), least)
    k_mean, v_mean, factor = state.k_mean[..., None, :], state.v_mean[..., None, :width], per_matrix(gain)
    return lambda phi_q: v_mean + factor * ((phi_q - k_mean if centered else phi_q) @ predictor)


def weights(
    phi_q: Float[Tensor, "*#b n d"],
    phi_k: Float[Tensor, "*#b m d"],
    ridge: float | Float[Tensor, "*#b"],
    gain: float | Float[Tensor, "*#b"],
    visible: Bool[Tensor, "*#b #n m"],
    shares: Float[Tensor, "*#b #n m"] | None = None,
    *,
    relative: bool = True,
    centered: bool = True,
) -> Float[Tensor, "*b n m"]:
    """Return the explicit weights. Each query has a regression of its own, over the keys that it sees."""
    some = visible.sum(-1)[..., None, None].clamp(min=1)  # [*b, n, 1, 1]
    p = (visible / some[..., 0].to(phi_k.dtype) if shares is None else shares)[..., None]  # [*b, n, m, 1]
    k = keep(phi_k[..., None, :, :], visible)  # [*b, n, m, d]
    mean = (p * k).sum(-2, keepdim=True)
    k = keep(k - mean, visible)
    k = keep(k - (p * k).sum(-2, keepdim=True), visible)  # else rows sum to one only as well as the mean is rounded
    spread = (p * k).mT @ k
    r = ridge_of(spread, per_matrix(ridge, 1), some, relative=relative)
    inverse = solve(spread, (p * k).mT, r, rounding(mean))  # [*b, n, d, m]
    q = phi_q[..., None, :] - mean if centered else phi_q[..., None, :]
    return (p.mT + per_matrix(gain, 1) * (q @ inverse))[..., 0, :]


def ridge_of(
    spread: Float[Tensor, "*#b d d"], ridge: float | Tensor, tokens: Tensor, *, relative: bool
) -> Float[Tensor, "*#b 1 1"]:
    """Return r [*b, 1, 1]: how much is added to the diagonal of K."""
    size = spread.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] if relative else 1 / tokens.to(spread.dtype)
    return (ridge * size).clamp(max=torch.finfo(spread.dtype).max / 4)


def rounding(k_mean: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n 1"]:
    """Return the largest variance that rounding alone gives to equal keys."""
    return (16 * torch.finfo(k_mean.dtype).eps * k_mean.detach().abs().amax(-1, keepdim=True)).square()


def lost(variance: Float[Tensor, "*#b"], least: Float[Tensor, "*#b"]) -> Bool[Tensor, "*b"]:
    """Return whether the largest variance of keys is nothing but rounding."""
    return (variance <= least) | (~alive(variance) & ~variance.isnan())


def solve(
    spread: Float[Tensor, "*#b d d"],
    right: Float[Tensor, "*#b d m"],
    ridge: Float[Tensor, "*#b 1 1"],
    least: Float[Tensor, "*#b 1 1"],
) -> Float[Tensor, "*b d m"]:
    """Return (K + r I)^-1 right, and 0 where no variance is above `least`: keys that are all equal predict the mean.

    The matrix is divided by its largest entry first, so keys may be of any size.
    """
    unit = torch.eye(spread.shape[-1], dtype=spread.dtype, device=spread.device)
    variance = spread.detach().diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
    nothing = lost(variance, least)
    size = torch.where(nothing, 1.0, variance + ridge.detach())
    matrix = spread / size + (ridge / size).clamp(min=floor(spread)) * unit
    right = torch.where(nothing, 0.0, right) / size
    return torch.where(nothing, 0.0, torch.linalg.solve_ex(torch.where(nothing, unit, matrix), right).result)


def floor(x: Float[Tensor, "*b d"]) -> float:
    """Return the least ridge of a matrix whose largest entry is 1, for d channels."""
    return 4 * x.shape[-1] * torch.finfo(x.dtype).eps


def per_matrix(x: float | Tensor, more: int = 0) -> float | Tensor:
    """Return a number, or one number per matrix with dimensions to multiply matrices by."""
    return x[(..., *[None] * (2 + more))] if isinstance(x, Tensor) else x
