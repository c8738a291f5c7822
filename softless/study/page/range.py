"""How wide a twin's scores are: first-order error against range, the threshold rule over tau, three distributions.

With R the range of a row of scores, first order is off by at most R^2 / 2 of the row's norm; within a threshold tau of
the row's maximum no range exceeds tau.
"""

from collections.abc import Mapping
from math import ceil, floor, log10
from typing import Any

from softless.report.page import GRAYS
from softless.study.page.figure import Figure, Panel, Section, layer_names, means, measured_on, plot
from softless.study.page.style import Look, look_of, mechanism_color, mechanism_of

DRAWN = ("inline", "threshold", "uniform", "taylor")


def section(document: dict[str, Any], looks: Mapping[str, Look]) -> Section:
    """Error, the rule with its slider, distributions."""
    found, images = document.get("range") or {}, (document.get("examined") or {}).get("images")
    made = (
        error(found, looks, images),
        threshold(found.get("threshold") or [], looks, images),
        distributions(found.get("distributions") or []),
    )
    figures = tuple(figure for figure in made if figure)
    return Section(
        "range",
        "How wide its scores are",
        "Score range",
        "If the scores of a row hardly differ, softmax is nearly linear in them, and a linear kernel can replace it at "
        "a small error. The range of a row, its largest score minus its smallest, says how far a layer is from that.",
        figures,
        "" if figures else "No score ranges: this study ran no probes of them.",
    )


def error(found: dict[str, Any], looks: Mapping[str, Look], images: float | None = None) -> Figure | None:
    """Curves of mechanisms on random scores, the bound, and where the layers are that run a softmax."""
    curves, layers = found.get("curves") or [], found.get("layers") or []
    traces = [_curve(curve, looks) for curve in curves if mechanism_of(curve["label"]) in DRAWN]
    if curves and curves[0]["points"]:
        traces.append(_bound(curves[0]["points"]))
    numbers = layer_names([layer["layer"] for layer in layers])
    for id_, look in looks.items():
        own = [layer for layer in layers if layer["twin"] == id_]
        if own and look.mechanism == "softmax":
            traces.append(_layers(look, own, numbers))
    if not traces:
        return None
    x = {"title": "range of a row of scores", "type": "log", "tickvals": _ticks(traces), "tickformat": "~g"}
    y = {"title": "error against softmax, %", "type": "log", "dtick": 1, "tickformat": ",~g"}
    return Figure(
        "range-error",
        "Error of a linear kernel against range",
        "Marks are the layers that run a softmax, at the mean range of their scores and the error that a first-order "
        "kernel would make there; further left, softmax does less. Lines are mechanisms on random scores, and the "
        "dotted bound is never exceeded by first order. The dashed vertical line is the tau of the next figure."
        + measured_on(images, "test images per twin"),
        (Panel(plot(traces, x=x, y=y), "Error against score range"),),
        "range",
        height=420,
    )


def _ticks(traces: list[dict[str, Any]]) -> list[float]:
    """1, 2 and 5 of each power of ten; the powers alone where there are many."""
    ends = [x for trace in traces for x in trace["x"] if x and x > 0]
    low, high = floor(log10(min(ends, default=1))), ceil(log10(max(ends, default=1)))
    return [lead * 10.0**power for power in range(low, high + 1) for lead in ((1, 2, 5) if high - low <= 3 else (1,))]


def _curve(curve: dict[str, Any], looks: Mapping[str, Look]) -> dict[str, Any]:
    points = [p for p in curve["points"] if (p.get("range") or 0) > 0 and (p.get("error") or 0) > 0]
    label, look = curve["label"], look_of(curve["label"], looks)
    color = look.color if look else GRAYS[1] if label == "uniform" else mechanism_color(label)
    return {
        "x": [point["range"] for point in points],
        "y": [100 * point["error"] for point in points],
        "name": label,
        "mode": "lines",
        "meta": {"label": label} | ({} if look else {"ink": GRAYS[0] if label == "uniform" else color}),
        "line": {"color": color, "width": 1.6, "dash": look.dash if look else "solid"},
        "hovertemplate": f"{label}: %{{y:.2g}}% at range %{{x:.2g}}<extra></extra>",
    }


def _bound(points: list[dict[str, Any]]) -> dict[str, Any]:
    known = [p for p in points if (p.get("range") or 0) > 0 and (p.get("bound") or 0) > 0]
    return {
        "x": [point["range"] for point in known],
        "y": [100 * point["bound"] for point in known],
        "mode": "lines",
        "meta": {"label": "bound R²/2", "ink": GRAYS[0]},
        "line": {"color": GRAYS[2], "width": 1.4, "dash": "dot"},
        "hovertemplate": "bound R²/2: %{y:.2g}%<extra></extra>",
    }


def _layers(look: Look, layers: list[dict[str, Any]], numbers: Mapping[str, str]) -> dict[str, Any]:
    return look.trace() | {
        "x": means(layer.get("range") for layer in layers),
        "y": means((layer.get("error") for layer in layers), 100),
        "customdata": [numbers[layer["layer"]] for layer in layers],
        "mode": "markers",
        "hovertemplate": f"<b>{look.label}</b>, layer %{{customdata}}<br>"
        "range %{x:.2f}, error %{y:.1f}%<extra></extra>",
    }


def threshold(found: list[dict[str, Any]], looks: Mapping[str, Look], images: float | None = None) -> Figure | None:
    """One path per twin, the mean of its layers; the slider moves a mark along each."""
    traces: list[dict[str, Any]] = []
    for id_, look in looks.items():
        path = _path([layer for layer in found if layer["twin"] == id_])
        if path:
            drawn = look.trace(path=True)
            shown = {"x": path["kept"], "y": path["discarded"], "customdata": path["tau"], "mode": "lines"}
            hover = f"<b>{look.label}</b>, tau %{{customdata}}<br>keeps %{{x:.0f}}%, loses %{{y:.1f}}%<extra></extra>"
            traces.append(drawn | shown | {"line": drawn["line"] | {"width": 1.4}, "hovertemplate": hover})
            start = {"x": path["kept"][:1], "y": path["discarded"][:1], "mode": "markers"}
            big = {"marker": drawn["marker"] | {"size": 13}, "hoverinfo": "skip"}
            traces.append(look.trace(follows=True) | start | big)
    if not traces:
        return None
    axes: dict[str, Any] = {
        "x": {"title": "keys kept, %", "range": [-2, 104]},
        "y": {"title": "softmax's weight lost, %", "rangemode": "tozero"},
    }
    return Figure(
        "threshold",
        "What a threshold keeps",
        "The threshold rule keeps only the keys whose score is within tau of the row's largest score. Each line is a "
        "twin as tau grows from left to right, and the slider sets tau. Best is bottom left: few keys kept, and little "
        "of softmax's weight lost. Where a twin runs no softmax, it is the weight that a softmax would give to its "
        f"scores.{measured_on(images, 'test images per twin')}",
        (Panel(plot(traces, **axes), "Keys kept and weight lost, by tau"),),
        "range.threshold",
    )


def _path(layers: list[dict[str, Any]]) -> dict[str, list[float]] | None:
    if not layers:
        return None
    count = min(len(layer[key]) for layer in layers for key in ("tau", "kept", "discarded"))

    def mean(key: str) -> list[float]:
        return [round(100 * sum(layer[key][i] for layer in layers) / len(layers), 3) for i in range(count)]

    return {"tau": layers[0]["tau"][:count], "kept": mean("kept"), "discarded": mean("discarded")} if count else None


def distributions(found: list[dict[str, Any]]) -> Figure | None:
    """Sorted by softmax's weight; the dashes are none of a twin's, because these are no twins."""
    if not found:
        return None
    colors = {"softmax": "softmax", "first order": "inline", "uniform": "", "threshold": "threshold"}
    dashes = {"uniform": "dot", "first order": "longdash"}
    traces = [
        {
            "x": list(range(1, len(each["weights"]) + 1)),
            "y": each["weights"],
            "mode": "lines",
            "name": each["name"],
            "line": {
                "color": mechanism_color(colors.get(each["name"], each["name"])),
                "width": 2,
                "dash": dashes.get(each["name"], "solid"),
            },
            "meta": {"label": each["name"]},
            "hovertemplate": f"{each['name']}: %{{y:.4f}}<extra></extra>",
        }
        for each in found
    ]
    axes: dict[str, Any] = {
        "x": {"title": "keys, sorted by softmax's weight", "tickformat": "d"},
        "y": {"title": "weight"},
    }
    return Figure(
        "distributions",
        "The same scores, three ways",
        "The lines are the weights that softmax, its first order and equal weights give to one row of scores, a row of "
        "median range from the first softmax twin, for one test image. If first order is closer to softmax than the "
        "dotted uniform line is, a linear kernel is a fair substitute for this row.",
        (Panel(plot(traces, **axes), "Weights of one row under each distribution"),),
        "range.distributions",
        height=300,
    )
