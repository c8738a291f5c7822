"""Means and their 95 % confidence intervals from samples that arrive batch by batch, and histograms of counts.

    n, mean, squares = sum (x - mean)^2          merged by Chan et al. 1979: any split of the samples gives the same
    mean -+ t sqrt(squares / (n - 1) / n)        Student's t with n - 1 degrees of freedom

    (r + z^2/2 -+ z sqrt(r (n - r)/n + z^2/4)) / (n + z^2)          Wilson 1927: r of n; has a width even if r = n

A sample is an image (or a text): its tokens are not independent, so they are averaged first.
"""

from dataclasses import dataclass
from itertools import zip_longest
from math import cos, pi, sin, sqrt
from statistics import NormalDist
from typing import NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

Z = NormalDist().inv_cdf(0.975)
FEW = 30  # degrees of freedom, up to which Student's t is found from its distribution


@dataclass(frozen=True)
class Estimate:
    """The mean of n samples and its 95 % confidence interval; low and high are None for a single sample."""

    mean: float
    low: float | None
    high: float | None
    n: int


class Running(NamedTuple):
    """Mean and squared deviations of the samples so far, each a tensor of the same shape; float64."""

    n: int
    mean: Float[Tensor, "*shape"]
    squares: Float[Tensor, "*shape"]

    def estimates(self) -> tuple[Estimate, ...]:
        """Return one estimate per entry of a sample."""
        if self.n < 2:
            return tuple(Estimate(mean, None, None, self.n) for mean in self.mean.flatten().tolist())
        half = student(self.n - 1) * (self.squares / (self.n - 1) / self.n).sqrt()
        entries = (x.flatten().tolist() for x in (self.mean, self.mean - half, self.mean + half))
        return tuple(Estimate(mean, low, high, self.n) for mean, low, high in zip(*entries, strict=True))


def observe(samples: Float[Tensor, "n *shape"]) -> Running:
    """Return the mean and squared deviations over the first dimension."""
    samples = samples.double()
    mean = samples.mean(0)
    return Running(samples.shape[0], mean, (samples - mean).square().sum(0))


def merge(a: Running, b: Running) -> Running:
    """Return the mean and squared deviations of both sets of samples together."""
    n, apart = a.n + b.n, b.mean - a.mean
    return Running(n, a.mean + apart * (b.n / n), a.squares + b.squares + apart.square() * (a.n * b.n / n))


def proportion(successes: int, n: int) -> Estimate:
    """Estimate the probability of an event that happened in `successes` of n samples."""
    middle = successes + Z**2 / 2
    half = Z * sqrt(successes * (n - successes) / n + Z**2 / 4)
    low, high = ((middle - half) / (n + Z**2), (middle + half) / (n + Z**2))
    return Estimate(successes / n, 0.0 if successes == 0 else low, 1.0 if successes == n else high, n)


def student(degrees: int, family: int = 1) -> float:
    """Return the t of 95 % intervals, by Student's distribution; a `family` of intervals holds together (Bonferroni).

    Few degrees are exact, by bisection. Many take Cornish and Fisher's series.
    """
    if degrees <= FEW:
        low, high = 0.0, pi / 2
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if _inside(middle, degrees) < 1 - 0.05 / family else (low, middle)
        return sqrt(degrees) * sin(low) / cos(low)
    z, series = NormalDist().inv_cdf(1 - 0.025 / family), 1 / degrees
    return (
        z
        + series * (z**3 + z) / 4
        + series**2 * (5 * z**5 + 16 * z**3 + 3 * z) / 96
        + series**3 * (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
        + series**4 * (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    )


def _inside(angle: float, degrees: int) -> float:
    """Return the share of Student's t within sqrt(degrees) tan(angle) of 0 (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    odd = degrees % 2
    term = cos(angle) if odd else 1.0
    total = 0.0 if degrees == 1 else term
    for power in range(2 + odd, degrees - 1, 2):
        term *= cos(angle) ** 2 * (power - 1) / power
        total += term
    return (angle + sin(angle) * total) * 2 / pi if odd else sin(angle) * total


@dataclass(frozen=True)
class Histogram:
    """counts[i] samples lie in edges[i] <= x < edges[i + 1]. The bins double: 0, 1, 2 to 3, 4 to 7, ..."""

    edges: tuple[int, ...] = (0,)
    counts: tuple[int, ...] = ()

    def __add__(self, other: "Histogram") -> "Histogram":
        edges = max(self.edges, other.edges, key=len)
        return Histogram(edges, tuple(a + b for a, b in zip_longest(self.counts, other.counts, fillvalue=0)))


def histogram(counts: Shaped[Tensor, "*shape"]) -> Histogram:
    """Return the histogram of integers from 0, as InLine's Figure 2 has it.

    >>> histogram(torch.tensor([0, 0, 1, 3, 5]))
    Histogram(edges=(0, 1, 2, 4, 8), counts=(2, 1, 1, 1))
    """
    bins = torch.frexp(counts.double().flatten()).exponent  # 0 -> 0, 1 -> 1, 2 and 3 -> 2, 4 to 7 -> 3
    sizes = torch.bincount(bins.long()).tolist()
    return Histogram((0, *(2**power for power in range(len(sizes)))), tuple(sizes))
