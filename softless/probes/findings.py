"""The results of an examination: every measure of every layer, and the report that `softless probe` writes.

Every measure is one number per image and head. An estimate averages it over images: for each head, and for their mean.
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from softless.probes.running import Estimate, Histogram, Running, histogram, merge, observe
from softless.probes.score_range import COSTS, cost, verdict


@dataclass(frozen=True)
class LayerFindings:
    """The measures of one layer; None for a measure that the layer does not have.

    confusions                pairs of different queries of an image and head whose rows differ by less than 1e-3
    confusion_histogram       histogram of these counts, over images and heads
    collinear_collisions      share of queries q that get the same row as 2q
    collinear_pairs           pairs of different queries of an image and head that point the same way
    local_mass                weight on the 3 x 3 around a query; local_baseline is the same for uniform weights
    attention_distance        mean distance in patches; distance_baseline is the same for uniform weights
    residual_share            share of the local residual in the output
    score_range to bound      measures of the scores that a softmax would see (score_range.py); entropy in nats
    score_volume              the side of the cube that a query's scores fill: e to their differential entropy
    kept, discarded           share of keys, and lost softmax mass, under the threshold filter for each tau
    rank, full_rank           the smallest rank of [phi(K), 1] over all images, and the rank that the propositions need
    by_head                   the estimates of each head
    verdict                   the cost of a linear kernel here, in one sentence; None for random weights
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
    verdict: str | None


ESTIMATES = tuple(field.name for field in fields(LayerFindings) if field.type in (Estimate, Estimate | None))
FACTS = tuple(field.name for field in fields(LayerFindings) if field.type in (str, int, float | None))


@dataclass(frozen=True)
class Examination:
    """All layers. The histogram counts images by their confusions in all layers and heads together (Figure 2)."""

    layers: tuple[LayerFindings, ...]
    images: int
    confusion_histogram: Histogram


@dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """The document of `softless probe`, field by field."""

    schema: str
    model: str
    weights: str
    data: str
    samples: str
    images: int
    device: str
    seed: int
    seconds: float
    missed: tuple[str, ...]  # modules whose attention could not be captured
    verdict: str | None  # None for random weights
    layers: tuple[LayerFindings, ...]
    confusion_histogram: Histogram

    def document(self) -> dict[str, Any]:
        """Return the report for a JSON file; a number that is not finite is null."""
        return {name: _json(value) for name, value in asdict(self).items()}

    def table(self) -> str:
        """Return one CSV row per layer: its facts, then each estimate with its interval, then the verdict."""
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow([*FACTS, *(f"{name}{end}" for name in ESTIMATES for end in ("", "_low", "_high")), "verdict"])
        for layer in self.document()["layers"]:
            estimates = [layer[name] or {} for name in ESTIMATES]
            numbers = [estimate.get(end) for estimate in estimates for end in ("mean", "low", "high")]
            rows.writerow([*(layer[name] for name in FACTS), *numbers, layer["verdict"]])
        return text.getvalue()


def overall_verdict(layers: Sequence[LayerFindings]) -> str:
    """Say what a linear kernel would cost softmax layers to first order, and how many queries the others confuse."""
    costs = [cost(x.first_order_error.mean, x.uniform_error.mean) for x in layers if x.mechanism == "softmax"]
    sentences = []
    if costs:
        words = {"too much": "lose more than looking at no score at all"}
        parts = [f"{words.get(word, f'cost {word}')} in {costs.count(word)}" for word in COSTS if word in costs]
        of = f" of {len(costs)} layers" if len(costs) > 1 else " layer"
        sentences.append(
            f"To first order, a linear kernel in place of the softmax would {' and '.join(parts)}{of}. What fitted "
            "layers cost the model, softless convert measures."
        )
    for name in dict.fromkeys(layer.mechanism for layer in layers if layer.mechanism != "softmax"):
        confused = [layer.confusions.mean for layer in layers if layer.mechanism == name]
        mean = sum(confused) / len(confused)
        runs, confuse = ("layers run", "confuse") if len(confused) > 1 else ("layer runs", "confuses")
        pairs = f"{mean:,.0f}" if mean >= 100 else f"{mean:.3g}"
        sentences.append(f"{len(confused)} {runs} {name}, and {confuse} {pairs} pairs of queries per image and head.")
    return " ".join(sentences)


def _json(value: Any) -> Any:
    """Replace numbers that JSON cannot hold by None."""
    if isinstance(value, dict):
        return {key: _json(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_json(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Measured:
    """One layer on one batch: `values` holds [images, heads] by measure."""

    name: str
    mechanism: str
    tokens: int
    values: Mapping[str, Float[Tensor, "images heads"]]
    rank: int
    full_rank: int


class LayerTally:
    """The measurements of one layer so far, batch by batch."""

    def __init__(self, first: Measured):
        self.first, self.tokens, self.rank = first, 0, first.rank
        self.runs: dict[str, Running] = {}
        self.confusions = Histogram()
        self.add(first)

    def add(self, measured: Measured) -> None:
        for name, values in measured.values.items():
            now = observe(torch.cat([values, values.mean(1, keepdim=True)], 1))  # each head, then their mean
            self.runs[name] = merge(self.runs[name], now) if name in self.runs else now
        self.confusions += histogram(measured.values["confusions"])
        self.tokens, self.rank = max(self.tokens, measured.tokens), min(self.rank, measured.rank)

    def findings(self, tau: Sequence[float]) -> LayerFindings:
        by_measure = {name: running.estimates() for name, running in self.runs.items()}
        mean = {name: estimates[-1] for name, estimates in by_measure.items()}
        near, far = mean.get("local_baseline"), mean.get("distance_baseline")
        error, uniform, reach = (mean[name].mean for name in ("first_order_error", "uniform_error", "score_range"))
        estimates: dict[str, Any] = {name: mean.get(name) for name in ESTIMATES}
        return LayerFindings(
            name=self.first.name,
            mechanism=self.first.mechanism,
            heads=len(by_measure["confusions"]) - 1,
            tokens=self.tokens,
            confusion_histogram=self.confusions,
            local_baseline=None if near is None else near.mean,
            distance_baseline=None if far is None else far.mean,
            tau=tuple(tau),
            kept=tuple(mean[f"kept {threshold:g}"] for threshold in tau),
            discarded=tuple(mean[f"discarded {threshold:g}"] for threshold in tau),
            rank=self.rank,
            full_rank=self.first.full_rank,
            by_head={name: heads[:-1] for name, heads in by_measure.items()},
            verdict=verdict(error, uniform, reach, self.first.mechanism),
            **estimates,
        )
