"""Causal regression for all queries at once, by conjugate gradients.

    B_i = sum_{j<=i} k'_j k'_j^T + lam I        B_i x_i = n_i g (phi(q_i) - k_mean_i)        k'_j = phi(k_j) - k_mean_i
    o_i = v_mean_i + (1/n_i) sum_{j<=i} (x_i.k'_j) (v_j - v_mean_i)

B_i differs for every query, and is never formed. A step of conjugate gradients multiplies it with a vector, which is
one causal linear attention whose values are the keys. Tokens come in chunks. With y and w the keys and the values
[v, k] relative to the means at the start of their chunk, S the comoment there [d, m + d], and s and t the sums of y and
w from there,

    sum_{j<=i} (x.k'_j) (w_j - w_mean_i) = x S + sum_{start<j<=i} (x.y_j) w_j - (x.s_i) t_i / n_i

is both the output and the product with B_i. Only the past is subtracted, so nothing large cancels.

If the ridge is the same for all queries of a chunk, the inverse is known. With A the matrix at the start of the chunk,
each token adds the product of one vector with itself, and takes one from the inverse (Sherman and Morrison), here for
all tokens at once:

    B_i = A + sum_{j<=i} z_j z_j^T                  z_j = (1 - 1/n_j)^1/2 (k_j - k_mean_{j-1})
    B_i^-1 = A^-1 - sum_{j<=i} u_j u_j^T            U = L^-1 Z A^-1, L L^T = I + Z A^-1 Z^T

So this inverse is one causal linear attention as well. It preconditions the steps, and one step is enough, except where
the ridge follows what the queries see. Steps are float64. A query is done when its residual is eps of its right side;
then the steps start once more from the true residual.

The gradient comes from the equation, not from the steps: with u_i = B_i^-1 dx_i, that of the right side is u_i and that
of B_i is -u_i x_i^T. It can be differentiated again. MesaNet (von Oswald et al. 2025, arXiv 2506.05233) solves in
steps as well.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from softless.algebra.chunks import first_kept, fold, unfold
from softless.algebra.modes import PLAIN, eager
from softless.algebra.regression import floor, lost, rounding, solve
from softless.algebra.state import State, keep, merge, observe

SPAN = 256  # tokens that take their steps together; later ones need fewer
POWERS = (1.0, 1.5)  # of eps: what each round of steps leaves of the right side


class Spans(NamedTuple):
    """What the queries of each chunk see. The mean of the past is the origin of y and w."""

    start: State  # before the chunk: n [*b, c], comoment [*b, c, d, m + d]
    y: Float[Tensor, "*b c l d"]
    w: Float[Tensor, "*b c l e"]
    n: Float[Tensor, "*#b c l 1"]  # tokens that each query sees

    def correlate(self, x: Float[Tensor, "*#b c l d"], columns: slice) -> Float[Tensor, "*b c l e"]:
        """Return sum_{j<=i} (x_i.k'_j) (w_j - w_mean_i) for some columns of w."""
        w = self.w[..., columns]
        own = (x @ self.y.mT).tril() @ w + x @ self.start.comoment[..., columns]
        return own - (x * self.y.cumsum(-2)).sum(-1, keepdim=True) * (w.cumsum(-2) / self.n.clamp(min=1))


def chunked(
    phi_q: Float[Tensor, "*#b n d"],
    phi_k: Float[Tensor, "*#b n d"],
    values: Float[Tensor, "*#b n e"],
    ridge: float | Float[Tensor, "*#b 1 1 1"],
    gain: float | Float[Tensor, "*#b 1 1 1"],
    mask: Bool[Tensor, "*#b n"] | None,
    state: State | None,
    chunk: int,
    *,
    centered: bool,
) -> Float[Tensor, "*b n m"]:
    """Return the causal output for values [v, phi(k)] and the absolute ridge.

    >>> import torch
    >>> from softless.algebra import conjugate, observe, regression
    >>> q, k, v = torch.randn(3, 2, 4, 100, 16).unbind()                        # [B, H, N, d]
    >>> values = regression.with_keys(k, v)
    >>> out = conjugate.chunked(q, k, values, 0.1, 1.0, None, None, 16, centered=True)
    >>> last = regression.read(q[:, :, -1:], observe(k, values), 0.1, relative=False)
    >>> torch.allclose(out[:, :, -1:], last, atol=1e-5)                         # the last query sees every token
    True
    """
    tokens, width = phi_q.shape[-2], values.shape[-1] - phi_k.shape[-1]
    phi_k, values = keep(phi_k, mask), keep(values, mask)
    bad = ~phi_k.isfinite().all(-1, keepdim=True)  # keys are values here, and 0 nan is nan: it would reach the past
    spans = _spans(torch.where(bad, 0.0, phi_k), torch.where(bad, 0.0, values), mask, state, chunk)
    some, of_keys = spans.n.clamp(min=1), slice(width, None)
    drift = spans.y.cumsum(-2) / some
    mean = spans.start.k_mean[..., None, :] + drift
    right = fold(phi_q, chunk) - mean if centered else fold(phi_q, chunk)

    diagonal = spans.start.comoment[..., of_keys].diagonal(dim1=-2, dim2=-1)[..., None, :]
    variance = diagonal + spans.y.square().cumsum(-2) - some * drift.square()
    variance = variance.detach().amax(-1, keepdim=True)  # [*b, c, l, 1], of n K
    nothing = lost(variance / some, rounding(mean))
    ridge = variance.new_zeros(()) + ridge
    equal = torch.where(ridge > torch.finfo(ridge.dtype).eps, ridge, 1.0)  # no matter which: the right side is 0
    ridge = torch.where(nothing, equal, torch.maximum(ridge, floor(phi_k) * (variance + ridge)))
    right = torch.where(nothing, 0.0, gain * some * right)
    if tokens > chunk and eager() and type(phi_q) in PLAIN and not phi_q.is_meta:
        x = _Solve.apply(right, ridge, spans.start.comoment[..., of_keys], spans.y, spans.n)
        sums = spans.correlate(x, slice(width))
    else:
        sums = _dense(right, ridge, spans, width)
    v_mean = spans.start.v_mean[..., None, :width] + spans.w[..., :width].cumsum(-2) / some
    out = torch.where(spans.n > 0, v_mean + sums / some, 0.0)
    return torch.where(bad.cumsum(-2) > 0, torch.nan, unfold(out, tokens))


def _spans(k: Tensor, values: Tensor, mask: Tensor | None, state: State | None, chunk: int) -> Spans:
    """Cut tokens into chunks, and merge the states before each."""
    mask = torch.ones_like(k[..., 0], dtype=torch.bool) if mask is None else mask
    real = fold(mask[..., None].to(k.dtype), chunk)  # [*b, c, l, 1]
    k, values, seen = fold(k, chunk), fold(values, chunk), real[..., 0] > 0
    blocks = observe(k, values, seen)
    empty = State(*(torch.zeros_like(part) for part in _at(blocks, 0)))
    states = [empty if state is None else state._replace(n=state.n.expand(empty.k_mean.shape[:-1]))]
    for at in range(k.shape[-3] - 1):
        states.append(merge(states[-1], _at(blocks, at)))
    parts = zip(*states, strict=True)
    n, *rest = (torch.stack(part, -1 - of) for part, of in zip(parts, (0, 1, 1, 2, 1), strict=True))
    n = n.expand(rest[0].shape[:-1])
    none = (n == 0)[..., None]  # the first chunk has no past: its first token is as good an origin as any
    k_mean, v_mean, comoment, shift = rest
    k_mean, v_mean = (
        torch.where(none, first_kept(x, seen).squeeze(-2), mean) for x, mean in ((k, k_mean), (values, v_mean))
    )
    y, w = (keep(x - mean[..., None, :], seen) for x, mean in ((k, k_mean), (values, v_mean)))
    start = State(n, k_mean, v_mean, comoment, shift)
    return Spans(start, y, w, n[..., None, None] + real.cumsum(-2))


def _at(state: State, chunk: int) -> State:
    """Return the state of one chunk."""
    k_mean, v_mean, shift = (x[..., chunk, :] for x in (state.k_mean, state.v_mean, state.shift))
    return State(state.n[..., chunk], k_mean, v_mean, state.comoment[..., chunk, :, :], shift)


def _dense(right: Tensor, ridge: Tensor, spans: Spans, width: int) -> Tensor:
    """Return the sum with every B_i formed: for a few tokens, and where no step may depend on numbers."""
    s, t = spans.y.cumsum(-2), spans.w.cumsum(-2) / spans.n.clamp(min=1)
    own = (spans.y[..., :, None] * spans.w[..., None, :]).cumsum(-3) - s[..., :, None] * t[..., None, :]
    comoment = spans.start.comoment[..., None, :, :] + own  # [*b, c, l, d, m + d]
    of_values, of_keys = comoment[..., :width], comoment[..., width:]
    predictor = solve(of_keys, of_values, ridge[..., None], torch.zeros_like(ridge[..., None]))
    return (right[..., None, :] @ predictor).squeeze(-2)


class _Solve(torch.autograd.Function):
    """x_i = B_i^-1 right_i, with B_i = S + sum y_j y_j^T - s_i s_i^T / n_i + ridge_i."""

    @staticmethod
    def forward(ctx: Any, right: Tensor, ridge: Tensor, start: Tensor, y: Tensor, n: Tensor) -> Tensor:
        together = max(1, SPAN // y.shape[-2])
        parts = (part.split(together, -3) for part in (right, ridge, start, y, n))
        x = torch.cat([_steps(*each) for each in zip(*parts, strict=True)], -3)
        ctx.save_for_backward(x, ridge, start, y, n)
        return x

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        x, ridge, start, y, n = ctx.saved_tensors
        u = _Solve.apply(dx, ridge, start, y, n)
        s = y.cumsum(-2)
        of_s = (x * (u * s).sum(-1, keepdim=True) + u * (x * s).sum(-1, keepdim=True)) / n.clamp(min=1)
        of_y = of_s.flip(-2).cumsum(-2).flip(-2) - (x @ y.mT).tril().mT @ u - (u @ y.mT).tril().mT @ x
        of_ridge = -(u * x).sum(-1, keepdim=True)
        return (
            u,
            of_ridge.sum_to_size(ridge.shape),
            -(x.mT @ u).sum_to_size(start.shape),
            of_y.sum_to_size(y.shape),
            None,
        )


def _steps(right: Tensor, ridge: Tensor, start: Tensor, y: Tensor, n: Tensor) -> Tensor:
    """Return x by conjugate gradients, in float64. A second round solves for the residual of the first."""
    size = right.abs().amax(-1, keepdim=True)
    size = torch.where(size == 0, 1.0, size)
    parts = [part.double() for part in (ridge, start, y, n)]
    inverse, wide = Inverse.of(*parts), (right / size).double()
    most = (wide * (inverse @ wide)).sum(-1, keepdim=True)
    first, second = (most * torch.finfo(right.dtype).eps ** (2 * power) for power in POWERS)
    x = 0 * wide + _round(wide, parts, inverse, first)  # nan stays nan
    x = x + _round(wide - _product(x, *parts), parts, inverse, second)
    return x.to(right.dtype) * size


def _product(x: Tensor, ridge: Tensor, start: Tensor, y: Tensor, n: Tensor) -> Tensor:
    """Return B_i x_i."""
    s = y.cumsum(-2)
    return (x @ y.mT).tril() @ y + x @ start - (x * s).sum(-1, keepdim=True) * (s / n.clamp(min=1)) + ridge * x


class Inverse(NamedTuple):
    """B_i^-1, with the ridge of the first query of the chunk for all: that of a later one depends on keys to come.

    Rows of Z are divided by the roots of the diagonal of L L^T, so huge keys to come leave the bits of earlier rows
    alone. A key whose square is not finite is left out: the steps count it.
    """

    before: Float[Tensor, "*b c d d"]  # A^-1
    u: Float[Tensor, "*b c l d"]

    @classmethod
    def of(cls, ridge: Tensor, start: Tensor, y: Tensor, n: Tensor) -> "Inverse":
        d, tokens = start.shape[-1], y.shape[-2]
        unit = _unit(d, y)
        half = torch.linalg.solve_triangular(_factor(start + ridge[..., :1, :] * unit), unit, upper=False)
        before = half.mT @ half
        earlier = torch.cat([(n[..., :1, :] - 1).clamp(min=0), n[..., :-1, :]], -2)  # tokens that came before each
        mean = torch.cat([torch.zeros_like(y[..., :1, :]), y.cumsum(-2)[..., :-1, :]], -2) / earlier.clamp(min=1)
        z = (n > earlier) * (earlier / n.clamp(min=1)).sqrt() * (y - mean)
        size = 1 + (z @ before * z).sum(-1, keepdim=True)
        size, z = torch.where(size.isfinite(), size, 1.0), torch.where(size.isfinite(), z, 0.0)
        z = z * size.rsqrt()
        least = 4 * tokens * torch.finfo(y.dtype).eps
        root = _factor(z @ before @ z.mT + (1 / size + least) * _unit(tokens, y))
        return cls(before, torch.linalg.solve_triangular(root, z @ before, upper=False))

    def __matmul__(self, r: Float[Tensor, "*b c l d"]) -> Float[Tensor, "*b c l d"]:
        """Return B_i^-1 r_i."""
        return r @ self.before - (r @ self.u.mT).tril() @ self.u


def _unit(size: int, like: Tensor) -> Tensor:
    return torch.eye(size, dtype=like.dtype, device=like.device)


def _factor(matrix: Tensor) -> Tensor:
    """Return L with L L^T = matrix; the identity where there is none."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    return torch.where((failed == 0)[..., None, None], factor, _unit(matrix.shape[-1], matrix))


def _round(residual: Tensor, parts: Any, inverse: Inverse, enough: Tensor) -> Tensor:
    """Return the solution for a residual. A row that is done keeps its bits, whatever the others need."""
    x, r, z = torch.zeros_like(residual), residual, inverse @ residual
    p, square = z, (residual * z).sum(-1, keepdim=True)
    active = square > enough
    for _ in range(4 * min(residual.shape[-2:]) + 4):
        if not active.any():
            break
        along = _product(p, *parts)
        curvature = (p * along).sum(-1, keepdim=True)
        active = active & (curvature > 0)
        step = torch.where(active, square / curvature, 0.0)
        x, r = x + step * p, r - step * along
        z = inverse @ r
        new = (r * z).sum(-1, keepdim=True)
        p = z + torch.where(active, new / square, 0.0) * p
        square = torch.where(active, new, square)
        active = active & (square > enough)
    return x
