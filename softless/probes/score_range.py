"""What the scores of a layer allow: how far they spread, and what a first-order kernel in place of e^s would cost.

For a row s of scores over n keys, p = softmax(s) and R = max s - min s:

    deviation, entropy     of s; of p, in nats (log n if attention is flat)
    volume                 exp(mean_i log(n (s_(i+m) - s_(i-m)) / 2m)), s in ascending order, m = floor(sqrt n), places
                           beyond an end at that end (Vasicek 1976): e to the differential entropy of the scores
    first-order error      |w - p| / |p| with w_j = (1 + s_j - mean s)/n; never above the bound R^2/2 (approximation.py)
    uniform error          |1/n - p| / |p|: what ignoring the scores altogether costs
    kept, discarded        keys with s > max s - tau: their share, and the softmax mass on the others
    effective rank         (sum_i x_i^2)^2 / sum_i x_i^4 over the singular values x of S less its row means: how many
                           directions the scores use (r if r are equal); softmax ignores a row's mean, and so does this

Scores with this entropy fill volume^n of the space of all rows: `volume` is the side of a cube of that size, in units
of a score. It is never above R, and about R where scores spread evenly; about sqrt(2 pi e) = 4.13 deviations where they
are normal, which is the most there is; 0 where all are equal. So rows whose variance is held at 1 fill at most 4.13^n,
and rows that are cut to a range below tau less than tau^n, where a first-order kernel is at most tau^2/2 off.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

TAU = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
LITTLE, MUCH = 0.1, 0.5  # of the size of softmax's own weights


@dataclass(frozen=True)
class Spread:
    """One number a query, each [B, H, N]; a query that sees no key has zeros."""

    range: Tensor
    deviation: Tensor
    entropy: Tensor
    volume: Tensor
    first_order_error: Tensor
    uniform_error: Tensor
    bound: Tensor


@dataclass(frozen=True)
class Filtered:
    """One number a query and tau, each [B, H, N, T]."""

    tau: tuple[float, ...]
    kept: Tensor
    discarded: Tensor


@dataclass(frozen=True)
class Compared:
    """Scores of one kind, and the weights that three ways of reading them give, the largest first."""

    scores: str
    range: float
    deviation: float
    error: dict[str, float]  # by way; softmax's own is 0
    weights: dict[str, tuple[float, ...]]


class Rows(NamedTuple):
    """Rows of scores over the keys each sees, less their mean; a hidden key has 0 there."""

    centered: Float[Tensor, "*b n m"]
    seen: Bool[Tensor, "*b n m"]
    tokens: Shaped[Tensor, "*b n 1"]

    def softmax(self) -> Float[Tensor, "*b n m"]:
        """A row that sees nothing is zero."""
        seen = self.centered.masked_fill(~self.seen, -torch.inf)
        return seen.softmax(-1).masked_fill(~self.seen.any(-1, keepdim=True), 0.0)

    def weights(self) -> dict[str, Tensor]:
        """Under softmax, to first order about the mean, and ignoring the scores."""
        even = self.seen / self.tokens.to(self.centered.dtype)
        return {"softmax": self.softmax(), "first order": even * (1 + self.centered), "uniform": even}


def read(scores: Float[Tensor, "*b n m"]) -> Rows:
    """Scores are -inf where a query may not see a key."""
    seen = scores > -torch.inf
    count = seen.sum(-1, keepdim=True).clamp(min=1)
    finite = torch.where(seen, scores, 0.0)
    return Rows(torch.where(seen, finite - finite.sum(-1, keepdim=True) / count, 0.0), seen, count)


def spread(scores: Float[Tensor, "*b n m"]) -> Spread:
    """Of each row."""
    rows = read(scores)
    weights, x = rows.weights(), rows.centered
    p, top = weights["softmax"], x.amax(-1)  # the mean lies between the extremes: hidden zeros are neither
    largest = p.amax(-1)
    log_sum = top - torch.where(largest > 0, largest, 1.0).log()  # log sum e^x
    reach = top - x.amin(-1)
    return Spread(
        range=reach,
        deviation=(x.square().sum(-1) / rows.tokens[..., 0]).sqrt(),
        entropy=(log_sum - (p * x).sum(-1)).clamp(min=0),
        volume=volume(rows),
        first_order_error=_error(weights["first order"], p),
        uniform_error=_error(weights["uniform"], p),
        bound=reach.square() / 2,
    )


def volume(rows: Rows) -> Float[Tensor, "*b n"]:
    """The side of the cube that a row's scores fill; 0 for a row that sees one key or none."""
    keys, count = rows.seen.shape[-1], rows.tokens
    ordered = torch.where(rows.seen, rows.centered, torch.inf).sort(-1).values  # hidden keys last
    reach = count.sqrt().floor().long()
    place = torch.arange(keys, device=count.device)
    above, below = torch.minimum(place + reach, count - 1), (place - reach).clamp(min=0)
    gaps = ordered.gather(-1, above) - ordered.gather(-1, torch.minimum(below, count - 1))
    inside = (place < count) & rows.seen.any(-1, keepdim=True)
    logs = torch.where(inside, (gaps * (count / (2 * reach))).log(), 0.0)
    return torch.where(inside[..., 0], (logs.sum(-1) / count[..., 0]).exp(), 0.0)


def filtered(scores: Float[Tensor, "*b n m"], tau: Sequence[float] = TAU) -> Filtered:
    """What the threshold filter keeps of each row, and what softmax would have given to the rest."""
    rows = read(scores)
    below, softmax = scores - scores.amax(-1, keepdim=True), rows.softmax()
    kept = [below > -each for each in tau]
    return Filtered(
        tuple(tau),
        torch.stack([each.sum(-1) / rows.tokens[..., 0] for each in kept], -1),
        torch.stack([softmax.masked_fill(each, 0.0).sum(-1) for each in kept], -1),
    )


def effective_rank(scores: Float[Tensor, "b h n m"], real: Bool[Tensor, "b n"] | None = None) -> Float[Tensor, "b h"]:
    """Of the score matrix of each head, without a decomposition; queries that are not `real` are left out."""
    centered = read(scores).centered
    if real is not None:
        centered = torch.where(real[:, None, :, None], centered, 0.0)
    if scores.shape[2] > scores.shape[3]:
        centered = centered.mT
    gram = centered @ centered.mT.contiguous()  # some CPUs take ten times as long for a transposed view
    energy, fourth = centered.double().square().sum((2, 3)), gram.double().square().sum((2, 3))
    return energy.square() / torch.where(fourth > 0, fourth, 1.0)


def three_distributions(tokens: int = 256, seed: int = 0) -> tuple[Compared, ...]:
    """Scores that are all equal, uniform with variance 1, and normal with variance 1, each read three ways.

    Unit variance does not bound the range: that of normal scores grows with the tokens, as 2 sqrt(2 ln n).
    """
    generator = torch.Generator().manual_seed(seed)
    even = (torch.rand(tokens, generator=generator, dtype=torch.float64) - 0.5) * 12**0.5
    normal = torch.randn(tokens, generator=generator, dtype=torch.float64)
    constant = torch.zeros(tokens, dtype=torch.float64)
    return tuple(compare(s, name) for name, s in (("constant", constant), ("uniform", even), ("normal", normal)))


def compare(scores: Float[Tensor, " m"], name: str = "scores") -> Compared:
    """One row of scores, read by softmax, to first order, and not at all."""
    row = scores.double().sort(descending=True).values[None]
    found, weights = spread(row), read(row).weights()
    return Compared(
        name,
        found.range.item(),
        found.deviation.item(),
        {way: _error(each, weights["softmax"]).item() for way, each in weights.items()},
        {way: tuple(each[0].tolist()) for way, each in weights.items()},
    )


def cost(error: float, uniform: float) -> str:
    """What a linear kernel would cost in a layer, in a word: little, something, much, or too much."""
    if error < LITTLE:
        return "little"
    if error < uniform:
        return "something" if error < MUCH else "much"
    return "too much"


def verdict(error: float, uniform: float, reach: float, runs: str = "softmax") -> str:
    """The same in a sentence, from means over a layer's queries; `runs` is the mechanism that it has now."""
    word = cost(error, uniform)
    more = ", more than looking at no score at all" if word == "too much" else ""
    whose = "its scores" if runs == "softmax" else f"the scores a softmax would see (it runs {runs})"
    return (
        f"A linear kernel would cost {word} here{more}: {whose} span {reach:.2g} a query, and to first order the "
        f"weights are {_percent(error)} away from softmax's, where uniform weights are {_percent(uniform)} away."
    )


def _percent(share: float) -> str:
    return "under 1 %" if share < 0.01 else f"{100 * share:.0f} %"


def _error(weights: Float[Tensor, "*b m"], exact: Float[Tensor, "*b m"]) -> Float[Tensor, "*b"]:
    size = exact.norm(dim=-1)
    return (weights - exact).norm(dim=-1) / torch.where(size > 0, size, 1.0)
