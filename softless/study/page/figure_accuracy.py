"""Accuracy and cost of each twin: accuracy against time, work or size, and learning curves."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from softless.report.page import Trace, plot
from softless.report.units import listed
from softless.study.page import figure as draw
from softless.study.page.figure import Figure, Look, Panel, Pick, Section, Table
from softless.study.page.text import MISSING, short
from softless.study.schema import StudyDocument, TwinResult

Cost = Literal["seconds_per_epoch", "macs", "parameters"]
COSTS: dict[Cost, tuple[str, str, str]] = {
    "seconds_per_epoch": ("training time", "seconds per epoch of training", "~g"),
    "macs": ("multiply-adds", "multiply-adds per image", "~s"),
    "parameters": ("parameters", "parameters", "~s"),
}
AXIS = f"The accuracy axis spans at least {draw.POINTS:g} points, so that small differences look small."


def section(document: StudyDocument, looks: Mapping[str, Look]) -> Section:
    """Return the section on accuracy and cost."""
    twins, test = document["twins"], document["data"].get("test")
    figures = tuple(figure for figure in (cost(twins, looks, test), learning(twins, looks, test)) if figure)
    return Section(
        "accuracy", "What each twin reaches, and what it costs", "Accuracy and cost", shared(twins), figures,
        "" if figures else "This study trained no twins.",
        tables=(numbers(twins, test),) if figures else (),
    )  # fmt: skip


def shared(twins: Sequence[TwinResult]) -> str:
    """Say what the twins have in common, and which of them differ in size."""
    says = "All twins were trained on the same images, from the same seeds, with the same recipe, depth and width. "
    sizes: dict[float, list[str]] = {}
    for twin in twins:
        if (count := twin.get("parameters")) is not None:
            sizes.setdefault(count, []).append(twin["label"])
    if len(sizes) < 2:
        return says + "They differ in attention alone."
    groups = "; ".join(f"{count:,.0f} parameters: {listed(labels)}" for count, labels in sorted(sizes.items()))
    local = any(twin.get("local") for twin in twins)
    why = " “+ local” adds the local residual, a 3 x 3 convolution beside attention." if local else ""
    return f"{says}They differ in attention, and not all have the same size ({groups}).{why}"


def cost(twins: Sequence[TwinResult], looks: Mapping[str, Look], test: float | None = None) -> Figure | None:
    """Draw one mark per twin; a switch chooses the cost."""
    known = [key for key in COSTS if draw.has_numbers(twin.get(key) for twin in twins)]
    if not known or not draw.has_numbers(draw.means(twin["accuracy"] for twin in twins)):
        return None
    traces = [trace for key in known for trace in _marks(twins, key, looks, shown=key == known[0])]
    picks = tuple(
        Pick(key, COSTS[key][0], {f"xaxis.{name}": value for name, value in _axis(twins, key).items()}) for key in known
    )
    about = "; ".join(f"{twin['label']} {_percent(twin)}" for twin in twins)
    y = draw.percent_axis(twin["accuracy"] for twin in twins)
    return Figure(
        "cost", "Accuracy against cost",
        f"Higher is more accurate; further left is cheaper. {_certainty(twins)} {AXIS}{draw.measured_on(test)}",
        (Panel(plot(traces, x=_axis(twins, known[0]), y=y), f"Accuracy of each twin: {about}"),), "twins",
        height=420, picks=picks if len(picks) > 1 else (),
    )  # fmt: skip


def _certainty(twins: Sequence[TwinResult]) -> str:
    if any(twin["accuracy"] and twin["accuracy"].get("low") is not None for twin in twins):
        return "Bars are 95% intervals over seeds: where two of them overlap, the order may be chance."
    return "Each twin was trained from one seed, so there are no intervals: small differences may be chance."


def _axis(twins: Sequence[TwinResult], key: Cost) -> dict[str, Any]:
    """Return an axis from zero, so that half the way is half the cost, with room for a name."""
    _, title, form = COSTS[key]
    return {"title": title, "range": [0, 1.12 * max(twin.get(key) or 0 for twin in twins)], "tickformat": form}


def _marks(twins: Sequence[TwinResult], key: Cost, looks: Mapping[str, Look], *, shown: bool) -> list[Trace]:
    measured = [twin for twin in twins if twin.get(key) is not None and draw.means([twin["accuracy"]])[0] is not None]
    return [
        looks[twin["id"]].trace(pick=key, label=twin["label"])
        | {
            "x": [twin[key]],
            "y": draw.means([twin["accuracy"]], 100),
            "error_y": draw.whiskers([twin["accuracy"]], 100) | {"color": looks[twin["id"]].color},
            "mode": "markers",
            "visible": shown,
            "hovertemplate": f"<b>{twin['label']}</b><br>%{{y:.1f}}% at %{{x:.3s}} {COSTS[key][1]}<extra></extra>",
        }
        for twin in measured
    ]


def _percent(twin: TwinResult) -> str:
    (mean,) = draw.means([twin["accuracy"]], 100)
    return "not measured" if mean is None else f"{mean:.1f}%"


def learning(twins: Sequence[TwinResult], looks: Mapping[str, Look], test: float | None = None) -> Figure | None:
    """Draw the mean accuracy over seeds, epoch by epoch."""
    traces: list[Trace] = []
    for twin in twins:
        epochs: dict[float, list[float]] = {}
        for point in (point for seed in twin.get("seeds") or [] for point in seed.get("curve") or []):
            if (accuracy := point.get("accuracy")) is not None:
                epochs.setdefault(point["epoch"], []).append(accuracy)
        if epochs:
            mean = [100 * sum(values) / len(values) for values in epochs.values()]
            curve = {"x": list(epochs), "y": mean, "mode": "lines" if len(epochs) > 1 else "markers"}
            hover = {"hovertemplate": f"<b>{twin['label']}</b><br>epoch %{{x}}: %{{y:.1f}}%<extra></extra>"}
            traces.append(looks[twin["id"]].trace() | curve | hover)
    if not traces:
        return None
    heights = [y for trace in traces for y in trace["y"]]
    y = {"title": "accuracy, %", "range": draw.span(heights, least=draw.POINTS, most=101)}
    return Figure(
        "learning", "How fast the twins learn",
        "Each line is a twin's accuracy after each epoch of training, averaged over its seeds. A line that still rises "
        f"at the right end was stopped early.{draw.measured_on(test)}",
        (Panel(plot(traces, x={"title": "epoch"}, y=y), "Accuracy of each twin by epoch"),), "curves", height=320,
        within="twins",
    )  # fmt: skip


def numbers(twins: Sequence[TwinResult], test: float | None) -> Table:
    """Return the table of the numbers in both figures."""
    rows = []
    for twin in twins:
        accuracy = twin["accuracy"]
        low, high = (accuracy.get("low"), accuracy.get("high")) if accuracy else (None, None)
        between = MISSING if low is None or high is None else f"{100 * low:.1f} to {100 * high:.1f}"
        (mean,) = draw.means([accuracy], 100)
        rows.append(
            (
                twin["label"], short(mean, ".1f"), between, str(len(twin.get("seeds") or [])),
                short(twin.get("parameters"), ",.0f"), short(twin.get("macs"), ",.0f"),
                short(twin.get("seconds_per_epoch"), ".2f"),
            )
        )  # fmt: skip
    columns = (
        "twin", "accuracy, %", "95% interval", "seeds", "parameters", "multiply-adds per image", "seconds per epoch",
    )  # fmt: skip
    alone = any(row[2] == MISSING and row[1] != MISSING for row in rows)
    notes = (f"{MISSING} in the interval: a single seed has none.",) if alone else ()
    return Table(
        "The twins in numbers", f"Accuracy after the last epoch.{draw.measured_on(test)}", columns, tuple(rows), notes,
        "twins",
    )  # fmt: skip
