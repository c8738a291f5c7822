"""A mean and its 95 % confidence interval, from samples that arrive in any portions.

    n, mean, squares = sum (x - mean)^2          merged by Chan et al. 1979: any split of the samples gives the same
    mean -+ t sqrt(squares / (n - 1) / n)        Student's t with n - 1 degrees of freedom

    (r + z^2/2 -+ z sqrt(r (n - r)/n + z^2/4)) / (n + z^2)          Wilson 1927: r of n, sure even where r = n

A sample is an image (or a text): its tokens are not independent, so they are averaged first.
"""

from dataclasses import dataclass, fields
from math import sqrt
from statistics import NormalDist
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

Z = NormalDist().inv_cdf(0.975)
FEW = (12.706205, 4.302653, 3.182446, 2.776445)  # Student's t for 1 to 4 degrees of freedom


@dataclass(frozen=True)
class Estimate:
    """The mean of n samples, and where the true one lies with 95 % confidence; None for a single sample."""

    mean: float
    low: float | None
    high: float | None
    n: int


class Running(NamedTuple):
    """Samples seen so far, each a tensor of the same shape; float64."""

    n: int
    mean: Float[Tensor, "*shape"]
    squares: Float[Tensor, "*shape"]

    def estimate(self) -> Estimate:
        """Of samples that are one number each."""
        return _interval(self.n, self.mean.item(), self.squares.item())

    def estimates(self) -> tuple[Estimate, ...]:
        """Of samples that are one number a head."""
        pairs = zip(self.mean.tolist(), self.squares.tolist(), strict=True)
        return tuple(_interval(self.n, mean, squares) for mean, squares in pairs)


def observe(samples: Float[Tensor, "n *shape"]) -> Running:
    """The first dimension counts samples."""
    samples = samples.double()
    mean = samples.mean(0)
    return Running(samples.shape[0], mean, (samples - mean).square().sum(0))


def merge(a: Running, b: Running) -> Running:
    """Of both lots of samples together."""
    n, apart = a.n + b.n, b.mean - a.mean
    return Running(n, a.mean + apart * (b.n / n), a.squares + b.squares + apart.square() * (a.n * b.n / n))


def proportion(successes: int, n: int) -> Estimate:
    """How often something happens that happened in `successes` of n samples."""
    middle = successes + Z**2 / 2
    half = Z * sqrt(successes * (n - successes) / n + Z**2 / 4)
    low, high = ((middle - half) / (n + Z**2), (middle + half) / (n + Z**2))
    return Estimate(successes / n, 0.0 if successes == 0 else low, 1.0 if successes == n else high, n)


def summarize(found: Any) -> dict[str, Estimate]:
    """Every tensor [B, ...] of a probe's dataclass as an estimate over its B samples."""
    named = {field.name: getattr(found, field.name) for field in fields(found)}
    return {
        name: observe(value.flatten(1).double().mean(1)).estimate()
        for name, value in named.items()
        if isinstance(value, Tensor)
    }


def student(degrees: int) -> float:
    """The 97.5 % point of Student's t: exact for few degrees, then Cornish and Fisher's series (error < 3e-4)."""
    if degrees <= len(FEW):
        return FEW[degrees - 1]
    z, series = Z, 1 / degrees
    return (
        z
        + series * (z**3 + z) / 4
        + series**2 * (5 * z**5 + 16 * z**3 + 3 * z) / 96
        + series**3 * (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
        + series**4 * (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    )


def _interval(n: int, mean: float, squares: float) -> Estimate:
    if n < 2:
        return Estimate(mean, None, None, n)
    half = student(n - 1) * sqrt(squares / (n - 1) / n)
    return Estimate(mean, mean - half, mean + half, n)
