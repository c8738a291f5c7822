"""The document of a conversion: every number, and the verdict in one sentence."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor

from softless.conversion.choosing import MEASURED
from softless.conversion.cost import CostRow
from softless.conversion.fitting import Fitted
from softless.conversion.layers import Layers
from softless.conversion.metrics import Metric, Rows
from softless.conversion.proving import Proof
from softless.conversion.samples import ThreeParts
from softless.conversion.stand_ins import Candidate
from softless.machine import circumstances, timestamp
from softless.probes.running import Estimate
from softless.report.units import counted, short

SCHEMA = "softless.convert/1"
LEAST_RECALL = 0.05  # below it, there is nothing to lose


@dataclass(frozen=True, kw_only=True)
class ConversionSettings:
    """What a conversion was asked, as the document tells it."""

    layers: Layers
    parts: ThreeParts
    metric: Metric
    candidates: Mapping[str, Candidate]
    budget: float
    steps: int
    seed: int
    tokens: int  # of a sample


@dataclass(frozen=True)
class LayerReport:
    """One layer of softmax attention.

    name                path of its module
    converted           whether it is linear now
    mechanism           its best candidate; None if no candidate has finite outputs
    rank                its place in the order of damage, from 0
    damage              harm of the model with only this layer converted; None if that is not finite
    errors              relative error of the output of each candidate; None if that is not finite
    first_order_error   what the range probe measures
    """

    name: str
    converted: bool
    mechanism: str | None
    rank: int
    damage: Estimate | None
    errors: dict[str, float | None]
    first_order_error: float

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "LayerReport":
        """Read a row of the document."""
        values = {each.name: row[each.name] for each in fields(cls)}
        return cls(**values | {"damage": row["damage"] and Estimate(**row["damage"])})


def assemble(
    plan: ConversionSettings, *, fitted: Sequence[Fitted], alone: Sequence[Rows | None], order: Sequence[int],
    chosen: Sequence[int], frontier: Mapping[int, Estimate | None], counts: Sequence[int],
    compared: Mapping[str, Sequence[Estimate | None]], proof: Proof, before: Tensor, cost: Sequence[CostRow],
    seconds: float, looks: Mapping[str, Any] | None,
) -> dict[str, Any]:  # fmt: skip
    """Put the document together."""
    metric = plan.metric
    layers = [
        LayerReport(
            name=name, converted=at in chosen, mechanism=fit.name or None, rank=list(order).index(at),
            damage=metric.harm(rows) if rows else None, errors=fit.errors, first_order_error=fit.first_order_error,
        )
        for at, (name, fit, rows) in enumerate(zip(plan.layers.names, fitted, alone, strict=True))
    ]  # fmt: skip
    lines = {MEASURED: [*frontier.items()]}
    for name, harms in compared.items():
        points = dict(lines.get(name, [])) | dict(zip(counts, harms, strict=True))
        lines[name] = sorted(points.items())
    predicted, delivered = proof.predicted, proof.delivered
    promise_kept = delivered is None if not chosen else delivered is not None and delivered.mean <= plan.budget
    document: dict[str, Any] = {
        "schema": SCHEMA, "date": timestamp(), "seconds": round(seconds, 3),
        **circumstances(plan.layers.device.type, *{plan.layers.package} - {"softless"}),
        "model": {"type": type(plan.layers.model).__name__, "architecture": plan.layers.kind},
        "metric": metric.name, "noun": metric.noun, "budget": plan.budget, "seed": plan.seed, "steps": plan.steps,
        "candidates": list(plan.candidates), "samples": plan.parts.sizes, "tokens": plan.tokens,
        "layers": [asdict(layer) for layer in layers],
        "frontier": {name: [_point(*point) for point in points] for name, points in lines.items()},
        "before": metric.value(before, None),
        "after": None if chosen and proof.rows is None else metric.value(before, proof.rows),
        "predicted": predicted and asdict(predicted), "delivered": delivered and asdict(delivered),
        "promise_kept": promise_kept, "healing": proof.healing, "recall": proof.recall, "texts": list(proof.texts),
        "looks": looks, "cost": list(cost), "verdict": "",
    }  # fmt: skip
    return document | {"verdict": verdict(document, metric)}


def _point(number: int, harm: Estimate | None) -> dict[str, Any]:
    return {"layers": number, "harm": harm and asdict(harm)}


def verdict(document: Mapping[str, Any], metric: Metric) -> str:
    """Say in one sentence what was converted, what it costs and what it buys."""
    layers = document["layers"]
    total, linear = len(layers), sum(layer["converted"] for layer in layers)
    if not linear and any(layer["damage"] and layer["damage"]["mean"] <= document["budget"] for layer in layers):
        samples = counted(document["samples"]["choose"], "sample")
        return (
            f"No layer of {total} is proven to fit a budget of {_budget(document)}: {samples} to choose cannot tell; "
            "give more data. The model is unchanged."
        )
    if not linear:
        return f"No layer of {total} can be made linear within a budget of {_budget(document)}; the model is unchanged."
    if document["delivered"] is None:
        return f"{_are(linear, total)} linear, and the {metric.noun} on unseen data is not a finite number."
    harm = Estimate(**document["delivered"])
    healed = document["healing"] and document["healing"]["kept"]
    parts = [_are(linear, total) + " linear", metric.says(harm) + (" after healing" if healed else "")]
    if not document["promise_kept"]:
        parts[1] += f", which breaks the budget of {_budget(document)}"
    return "; ".join([*parts, *_recalled(document["recall"]), *_gain(document["cost"])]) + "."


def _recalled(recall: Mapping[str, Any] | None) -> list[str]:
    """Say how much the model still finds far back, if the original found anything."""
    if recall is None or recall["before"]["mean"] < LEAST_RECALL:
        return []
    return [f"recall {recall['before']['mean']:.0%} before and {recall['after']['mean']:.0%} after"]


def _are(linear: int, total: int) -> str:
    return f"{linear} of {counted(total, 'layer')} {'is' if linear == 1 else 'are'}"


def _budget(document: Mapping[str, Any]) -> str:
    return f"{100 * document['budget']:g} %"


def _gain(cost: Sequence[CostRow]) -> list[str]:
    """Say how the models compare at the longest input that was timed, and at the longest one what they carry."""
    phrases = []
    if timed := [row for row in cost if row["seconds"] is not None]:
        before, after = timed[-1]["seconds"] or [1, 1]
        at = f"at {counted(timed[-1]['tokens'], 'token')} " if timed[-1]["tokens"] else ""
        phrases.append(f"{at}{_times(before / after, 'faster', 'slower')}")
    if (sized := [row for row in cost if row["bytes"] is not None]) and sized[-1]["bytes"]:
        before, after = sized[-1]["bytes"]
        phrases.append(
            f"at {counted(sized[-1]['tokens'], 'token')} its cache is {_times(before / after, 'smaller', 'larger')}"
        )
    return phrases


def _times(ratio: float, more: str, less: str) -> str:
    return f"{short(max(ratio, 1 / ratio))}x {more if ratio >= 1 else less}"
