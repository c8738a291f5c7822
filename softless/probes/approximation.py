"""The distance of a mechanism's weights from softmax's, against the range of the scores.

With s a row of scores q.k/sqrt(d), p = softmax(s), w the mechanism's weights and R = max s - min s:

    error = |w - p| / |p|          Euclidean, row by row
    bound = R^2 / 2                first order about the mean, w_j = (1 + s_j - mean s)/n, which is `inline`

The bound is a theorem. Along p(t) = softmax(t s) inline is p(0) + p'(0), so w - p = -int (1 - t) p''(t) dt;
p''_j = p_j ((s_j - m)^2 - var) is at most R^2 p_j in size, and |p(t)| grows with t: |w - p| <= R^2/2 |p|.

Uniform weights 1/n are the baseline: their error also goes to zero with R, but only as R does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log

import torch
from jaxtyping import Float
from torch import Tensor

from softless.functional import attention_weights
from softless.mechanisms import Mechanism
from softless.mechanisms.base import repeat_heads
from softless.probes.score_range import relative_error


@dataclass(frozen=True)
class Approximation:
    """Means over rows, except `worst`. `within_bound` is the share of rows with error <= R^2 / 2."""

    deviation: float  # standard deviation of the scores
    range: float
    error: float
    worst: float
    bound: float
    within_bound: float


def approximation(
    q: Float[Tensor, "b h n d"], k: Float[Tensor, "b g m d"], mechanism: str | Mechanism | None
) -> Approximation:
    """Compare a mechanism's explicit weights with softmax's on the same q and k; None means uniform weights."""
    softmax = attention_weights(q, k, "softmax")
    weights = torch.full_like(softmax, 1 / k.shape[2]) if mechanism is None else attention_weights(q, k, mechanism)
    scores = _scores(q, k)
    reach = scores.amax(-1) - scores.amin(-1)
    matrices = weights.shape[1] // softmax.shape[1]  # per head: one, or several (hydra)
    error = relative_error(weights, softmax.repeat_interleave(matrices, 1))
    bound = (reach.square() / 2).repeat_interleave(matrices, 1)
    return Approximation(
        scores.std(correction=0).item(),
        reach.mean().item(),
        error.mean().item(),
        error.max().item(),
        bound.mean().item(),
        (error <= bound * (1 + 1e-6)).double().mean().item(),
    )


def sweep(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g m d"],
    mechanism: str | Mechanism | None,
    deviations: Sequence[float],
) -> tuple[Approximation, ...]:
    """Return `approximation` with q and k rescaled so that the scores have each of these standard deviations."""
    now = _scores(q, k).std(correction=0)
    factors = [(deviation / now).sqrt() for deviation in deviations]
    return tuple(approximation(q * factor, k * factor, mechanism) for factor in factors)


def approximates(curve: Sequence[Approximation], uniform: Sequence[Approximation]) -> bool:
    """Return whether the error is below half of that of uniform weights where scores barely differ."""
    return curve[0].error < uniform[0].error / 2


def safe_range(curve: Sequence[Approximation], tolerance: float = 0.1) -> float | None:
    """Return the score range where the mean error reaches `tolerance`, log-log interpolated; None if it never does."""
    if curve[0].error >= tolerance:
        return 0.0
    for a, b in pairwise(curve):
        if a.error < tolerance <= b.error:
            share = log(tolerance / a.error) / log(b.error / a.error) if a.error > 0 else 1.0
            return exp(log(a.range) + share * log(b.range / a.range))
    return None


def _scores(q: Float[Tensor, "b h n d"], k: Float[Tensor, "b g m d"]) -> Float[Tensor, "b h n m"]:
    return q @ repeat_heads(k, q.shape[1]).mT * q.shape[-1] ** -0.5
