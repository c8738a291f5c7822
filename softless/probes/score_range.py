"""How far the scores of a layer spread, and what a first-order kernel instead of e^s would cost there.

For a row s of scores over n keys, p = softmax(s) and R = max s - min s:

    deviation, entropy     of s; of p, in nats (log n if attention is flat)
    volume                 exp(mean_i log(n (s_(i+m) - s_(i-m)) / 2m)), s in ascending order, m = floor(sqrt n), places
                           beyond an end at that end (Vasicek 1976): e to the differential entropy of the scores
    first-order error      |w - p| / |p| with w_j = (1 + s_j - mean s)/n; never above the bound R^2/2 (approximation.py)
    uniform error          |1/n - p| / |p|: the cost of ignoring the scores altogether
    kept, discarded        keys with s > max s - tau: their share, and the softmax mass on the others
    effective rank         (sum_i x_i^2)^2 / sum_i x_i^4 over the singular values x of S less its row means: how many
                           directions the scores use (r if r are equal); softmax ignores a row's mean, and so does this

Scores with this entropy fill volume^n of the space of all rows: `volume` is the side of a cube of that size, in units
of a score. It is never above R, and about R if scores spread evenly. Normal scores reach sqrt(2 pi e) = 4.13
deviations, the most that a deviation allows; equal scores have 0. So rows with variance 1 fill at most 4.13^n, and rows
that are cut to a range below tau fill less than tau^n; there, a first-order kernel is at most tau^2/2 off.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

TAU = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
LITTLE, MUCH = 0.1, 0.5  # of the size of softmax's own weights
COSTS = ("little", "something", "much", "too much")


class CenteredScores(NamedTuple):
    """Rows of scores less the mean over the keys that each row sees; 0 for a hidden key."""

    centered: Float[Tensor, "*b n m"]
    seen: Bool[Tensor, "*b n m"]
    tokens: Shaped[Tensor, "*b n 1"]

    def softmax(self) -> Float[Tensor, "*b n m"]:
        """Return softmax weights; a row that sees no key is zero."""
        seen = self.centered.masked_fill(~self.seen, -torch.inf)
        return seen.softmax(-1).masked_fill(~self.seen.any(-1, keepdim=True), 0.0)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights under softmax, to first order about the mean, and ignoring the scores."""
        even = self.seen / self.tokens.to(self.centered.dtype)
        return {"softmax": self.softmax(), "first order": even * (1 + self.centered), "uniform": even}


def center(scores: Float[Tensor, "*b n m"]) -> CenteredScores:
    """Subtract the mean of each row; scores are -inf where a query may not see a key."""
    seen = scores > -torch.inf
    count = seen.sum(-1, keepdim=True).clamp(min=1)
    finite = torch.where(seen, scores, 0.0)
    return CenteredScores(torch.where(seen, finite - finite.sum(-1, keepdim=True) / count, 0.0), seen, count)


def spread(scores: Float[Tensor, "*b n m"]) -> dict[str, Float[Tensor, "*b n"]]:
    """Return the measures above, one number per query and measure; a query that sees no key has zeros."""
    rows = center(scores)
    weights, x = rows.weights(), rows.centered
    p, top = weights["softmax"], x.amax(-1)  # the mean lies between the extremes: hidden zeros are neither
    largest = p.amax(-1)
    log_sum = top - torch.where(largest > 0, largest, 1.0).log()  # log sum e^x
    reach = top - x.amin(-1)
    return {
        "score_range": reach,
        "score_deviation": (x.square().sum(-1) / rows.tokens[..., 0]).sqrt(),
        "entropy": (log_sum - (p * x).sum(-1)).clamp(min=0),
        "score_volume": volume(rows),
        "first_order_error": relative_error(weights["first order"], p),
        "uniform_error": relative_error(weights["uniform"], p),
        "bound": reach.square() / 2,
    }


def volume(rows: CenteredScores) -> Float[Tensor, "*b n"]:
    """Return the side of the cube that a row's scores fill; 0 for a row that sees one key or none."""
    keys, count = rows.seen.shape[-1], rows.tokens
    ordered = torch.where(rows.seen, rows.centered, torch.inf).sort(-1).values  # hidden keys last
    reach = count.sqrt().floor().long()
    place = torch.arange(keys, device=count.device)
    above, below = torch.minimum(place + reach, count - 1), (place - reach).clamp(min=0)
    gaps = ordered.gather(-1, above) - ordered.gather(-1, torch.minimum(below, count - 1))
    inside = (place < count) & rows.seen.any(-1, keepdim=True)
    logs = torch.where(inside, (gaps * (count / (2 * reach))).log(), 0.0)
    return torch.where(inside[..., 0], (logs.sum(-1) / count[..., 0]).exp(), 0.0)


def filtered(
    scores: Float[Tensor, "*b n m"], tau: Sequence[float] = TAU
) -> tuple[Float[Tensor, "*b n t"], Float[Tensor, "*b n t"]]:
    """Return the share of keys that the threshold filter keeps for each tau, and the softmax mass on the others."""
    rows = center(scores)
    below, softmax = scores - scores.amax(-1, keepdim=True), rows.softmax()
    kept = [below > -threshold for threshold in tau]
    share = torch.stack([keys.sum(-1) / rows.tokens[..., 0] for keys in kept], -1)
    return share, torch.stack([softmax.masked_fill(keys, 0.0).sum(-1) for keys in kept], -1)


def effective_rank(scores: Float[Tensor, "b h n m"], real: Bool[Tensor, "b n"] | None = None) -> Float[Tensor, "b h"]:
    """Return the effective rank of each head's scores, without a decomposition; only `real` queries count."""
    centered = center(scores).centered
    if real is not None:
        centered = torch.where(real[:, None, :, None], centered, 0.0)
    if scores.shape[2] > scores.shape[3]:
        centered = centered.mT
    gram = centered @ centered.mT.contiguous()  # some CPUs take ten times as long for a transposed view
    energy, fourth = centered.double().square().sum((2, 3)), gram.double().square().sum((2, 3))
    return energy.square() / torch.where(fourth > 0, fourth, 1.0)


def compare(scores: Float[Tensor, " m"]) -> dict[str, list[float]]:
    """Return the weights of one row under softmax, to first order, and uniform, the largest first."""
    row = scores.double().sort(descending=True).values[None]
    return {kind: weights[0].tolist() for kind, weights in center(row).weights().items()}


def cost(error: float, uniform: float) -> str:
    """Return the cost of a linear kernel in a layer, one of `COSTS`."""
    if error < LITTLE:
        return "little"
    if error < uniform:
        return "something" if error < MUCH else "much"
    return "too much"


def verdict(error: float, uniform: float, reach: float, runs: str = "softmax") -> str:
    """Return the cost as a sentence, from means over a layer's queries; `runs` is the layer's own mechanism.

    It is about these weights, and says little about what a fitted layer would cost the model (docs/probes.md).
    """
    word = cost(error, uniform)
    more = ", more than looking at no score at all" if word == "too much" else ""
    whose = "its scores" if runs == "softmax" else f"the scores a softmax would see (it runs {runs})"
    return (
        f"To first order, a linear kernel would cost {word} here{more}: {whose} span {reach:.2g} per query, and the "
        f"weights are {_percent(error)} away from softmax's, where uniform weights are {_percent(uniform)} away."
    )


def _percent(share: float) -> str:
    return "under 1 %" if share < 0.01 else f"{100 * share:.0f} %"


def relative_error(weights: Float[Tensor, "*b m"], exact: Float[Tensor, "*b m"]) -> Float[Tensor, "*b"]:
    """Return |w - p| / |p| of each row; |w| where p is zero."""
    size = exact.norm(dim=-1)
    return (weights - exact).norm(dim=-1) / torch.where(size > 0, size, 1.0)
