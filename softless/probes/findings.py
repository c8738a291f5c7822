"""What an examination says of each layer of a model, and the tally it grows from, batch by batch.

Every measure is one number an image and head. Estimates are over images, of the mean of the heads and of each head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from softless.probes.histogram import Histogram, histogram
from softless.probes.running import Estimate, Running, merge, observe
from softless.probes.score_range import verdict

PLAIN: tuple[str, ...] = (
    "confusions",
    "collinear_collisions",
    "collinear_pairs",
    "score_range",
    "score_deviation",
    "entropy",
    "score_volume",
)
PLAIN += ("first_order_error", "uniform_error", "bound", "effective_rank", "smallest_singular_value")


@dataclass(frozen=True)
class LayerFindings:
    """One layer; None where it has no such thing.

    confusions                pairs of different queries of an image and head whose rows differ by less than 1e-3
    confusion_histogram       of those counts, over images and heads
    collinear_collisions      share of the queries q that get the row of 2q
    collinear_pairs           pairs of different queries of an image and head that point the same way
    local_mass                weight on a query's 3 x 3; local_baseline is that of uniform weights
    attention_distance        in patches; distance_baseline is that of uniform weights
    residual_share            of the local residual in the output
    score_range to bound      of the scores a softmax would see (score_range.py); entropy in nats
    score_volume              the side of the cube that a query's scores fill: e to their differential entropy
    kept, discarded           of the threshold filter, for each tau
    rank, full_rank           the smallest rank of [phi(K), 1] seen, and what Propositions 1 and 3 need
    by_head                   the estimates of each head
    verdict                   what a linear kernel would cost here, in one sentence
    """

    name: str
    mechanism: str
    heads: int
    tokens: int
    confusions: Estimate
    confusion_histogram: Histogram
    collinear_collisions: Estimate
    collinear_pairs: Estimate
    local_mass: Estimate | None
    local_baseline: float | None
    attention_distance: Estimate | None
    distance_baseline: float | None
    residual_share: Estimate | None
    score_range: Estimate
    score_deviation: Estimate
    entropy: Estimate
    score_volume: Estimate
    first_order_error: Estimate
    uniform_error: Estimate
    bound: Estimate
    effective_rank: Estimate
    tau: tuple[float, ...]
    kept: tuple[Estimate, ...]
    discarded: tuple[Estimate, ...]
    rank: int
    full_rank: int
    smallest_singular_value: Estimate
    by_head: dict[str, tuple[Estimate, ...]]
    verdict: str


@dataclass(frozen=True)
class Examination:
    """All layers. The histogram counts images by their confusions in all layers and heads together (Figure 2)."""

    layers: tuple[LayerFindings, ...]
    images: int
    confusion_histogram: Histogram


@dataclass(frozen=True)
class Measured:
    """One layer on one batch: `values` holds [images, heads] by measure."""

    name: str
    mechanism: str
    tokens: int
    values: Mapping[str, Float[Tensor, "images heads"]]
    rank: int
    full_rank: int


class Tally:
    """A layer's measurements so far."""

    def __init__(self, first: Measured):
        self.first, self.tokens, self.rank = first, 0, first.rank
        self.runs: dict[str, Running] = {}
        self.confusions = Histogram()
        self.add(first)

    def add(self, found: Measured) -> None:
        for name, values in found.values.items():
            now = observe(torch.cat([values, values.mean(1, keepdim=True)], 1))  # each head, then their mean
            self.runs[name] = merge(self.runs[name], now) if name in self.runs else now
        self.confusions += histogram(found.values["confusions"])
        self.tokens, self.rank = max(self.tokens, found.tokens), min(self.rank, found.rank)

    def findings(self, tau: Sequence[float]) -> LayerFindings:
        every = {name: running.estimates() for name, running in self.runs.items()}
        mean = {name: estimates[-1] for name, estimates in every.items()}
        first, near, far = self.first, mean.get("local_baseline"), mean.get("distance_baseline")
        return LayerFindings(
            name=first.name,
            mechanism=first.mechanism,
            heads=len(every["confusions"]) - 1,
            tokens=self.tokens,
            confusion_histogram=self.confusions,
            local_mass=mean.get("local_mass"),
            local_baseline=None if near is None else near.mean,
            attention_distance=mean.get("attention_distance"),
            distance_baseline=None if far is None else far.mean,
            residual_share=mean.get("residual_share"),
            tau=tuple(tau),
            kept=tuple(mean[f"kept {each:g}"] for each in tau),
            discarded=tuple(mean[f"discarded {each:g}"] for each in tau),
            rank=self.rank,
            full_rank=first.full_rank,
            by_head={name: estimates[:-1] for name, estimates in every.items()},
            verdict=verdict(
                mean["first_order_error"].mean, mean["uniform_error"].mean, mean["score_range"].mean, first.mechanism
            ),
            **{name: mean[name] for name in PLAIN},
        )
