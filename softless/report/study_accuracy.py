"""What each twin reaches and what it costs: accuracy against time, work or size, and how it got there."""

from collections.abc import Mapping
from typing import Any

from softless.report.study_figure import Figure, Panel, Pick, Section, has_numbers, means, plot, span, whiskers
from softless.report.study_labels import beside_marks
from softless.report.study_style import Look

COSTS = {
    "seconds_per_epoch": ("time", "seconds of one epoch of training", "~g"),
    "macs": ("multiply-adds", "multiply-adds of one image", "~s"),
    "parameters": ("parameters", "parameters", "~s"),
}


def section(document: dict[str, Any], looks: Mapping[str, Look]) -> Section:
    """Cost, then learning curves."""
    twins = document["twins"]
    made = [figure for figure in (cost(twins, looks), learning(twins, looks)) if figure]
    return Section(
        "accuracy",
        "What each twin reaches, and what it costs",
        "Accuracy and cost",
        "The twins share everything but attention: images, seeds, optimizer, depth and width.",
        tuple(made),
        "" if made else "No accuracies: this study trained no twins.",
    )


def cost(twins: list[dict[str, Any]], looks: Mapping[str, Look]) -> Figure | None:
    """One mark a twin; a switch chooses what goes to the right."""
    known = [key for key in COSTS if has_numbers(twin.get(key) for twin in twins)]
    if not known or not has_numbers(means(twin["accuracy"] for twin in twins)):
        return None
    traces = [trace for key in known for trace in _marks(twins, key, looks, shown=key == known[0])]
    picks = tuple(
        Pick(key, COSTS[key][0], {f"xaxis.{name}": value for name, value in _axis(twins, key).items()}) for key in known
    )
    y = {"title": "accuracy, %", "range": span((twin["accuracy"] for twin in twins), 100)}
    about = "; ".join(f"{twin['label']} {_percent(twin['accuracy'])}" for twin in twins)
    return Figure(
        "cost",
        "Accuracy against cost",
        "Up is better and left is cheaper; bars are 95% intervals, and where two overlap, read little into the order.",
        (Panel(plot(traces, x=_axis(twins, known[0]), y=y), f"Accuracy of each twin: {about}"),),
        "twins",
        height=420,
        picks=picks if len(picks) > 1 else (),
    )


def _axis(twins: list[dict[str, Any]], key: str) -> dict[str, Any]:
    """From zero, so that half the way is half the cost, with room for a name."""
    _, title, form = COSTS[key]
    return {"title": title, "range": [0, 1.12 * max(twin.get(key) or 0 for twin in twins)], "tickformat": form}


def _marks(twins: list[dict[str, Any]], key: str, looks: Mapping[str, Look], *, shown: bool) -> list[dict[str, Any]]:
    drawn = [twin for twin in twins if twin.get(key) is not None and means([twin["accuracy"]])[0] is not None]
    marks = [(twin[key], twin["accuracy"]["mean"], twin["label"]) for twin in drawn]
    top, span_y = _axis(twins, key)["range"][1], span(twin["accuracy"] for twin in twins)
    places = beside_marks(marks, top, span_y)
    return [
        looks[twin["id"]].trace(pick=key)
        | {
            "x": [twin[key]],
            "y": means([twin["accuracy"]], 100),
            "error_y": whiskers([twin["accuracy"]], 100) | {"color": looks[twin["id"]].color},
            "mode": "markers+text",
            "text": [f" {twin['label']} "],
            "textposition": place,
            "textfont": {"color": looks[twin["id"]].color, "size": 12},
            "visible": shown,
            "hovertemplate": f"<b>%{{text}}</b><br>%{{y:.1f}}% at %{{x:.3s}} ({COSTS[key][1]})<extra></extra>",
        }
        for twin, place in zip(drawn, places, strict=True)
    ]


def _percent(estimate: dict[str, Any] | None) -> str:
    (mean,) = means([estimate], 100)
    return "not measured" if mean is None else f"{mean:.1f}%"


def learning(twins: list[dict[str, Any]], looks: Mapping[str, Look]) -> Figure | None:
    """The mean over seeds, epoch by epoch."""
    traces = []
    for twin in twins:
        epochs: dict[float, list[float]] = {}
        for point in (point for seed in twin.get("seeds") or [] for point in seed.get("curve") or []):
            if point.get("accuracy") is not None:
                epochs.setdefault(point["epoch"], []).append(point["accuracy"])
        if epochs:
            mean = [100 * sum(values) / len(values) for values in epochs.values()]
            drawn = {"x": list(epochs), "y": mean, "mode": "lines" if len(epochs) > 1 else "markers"}
            hover = {"hovertemplate": f"<b>{twin['label']}</b><br>epoch %{{x}}: %{{y:.1f}}%<extra></extra>"}
            traces.append(looks[twin["id"]].trace() | drawn | hover)
    if not traces:
        return None
    axes: dict[str, Any] = {"x": {"title": "epoch"}, "y": {"title": "accuracy, %"}}
    return Figure(
        "learning",
        "How fast they learn",
        "Each line is a twin's accuracy on the test images, averaged over seeds; a steeper start needs fewer epochs.",
        (Panel(plot(traces, **axes), "Accuracy of each twin by epoch"),),
        "curves",
        height=320,
        within="twins",
    )
