"""How wide a twin's scores are: first-order error against range, the threshold rule over tau, three distributions.

Let R be the range of a row of scores. The first-order approximation of softmax is off by at most R^2 / 2 of the row's
norm. Scores within a threshold tau of the row's maximum have a range of at most tau.
"""

from collections.abc import Mapping, Sequence
from math import ceil, floor, log10
from typing import Literal

from softless.report.page import GRAYS, Trace, plot
from softless.study.page import figure as draw
from softless.study.page.figure import Figure, Look, Panel, Section
from softless.study.schema import Distribution, LayerRange, RangeCurve, RangePart, StudyDocument, ThresholdCurve

DRAWN = ("inline", "threshold", "uniform", "taylor")


def section(document: StudyDocument, looks: Mapping[str, Look]) -> Section:
    """Return the section on score ranges."""
    ranges, examined = document.get("range"), document.get("examined")
    images = examined and examined.get("images")
    drawn = (
        error(ranges, looks, images),
        threshold(ranges.get("threshold") or [], looks, images),
        distributions(ranges.get("distributions") or []),
    ) if ranges else ()  # fmt: skip
    figures = tuple(figure for figure in drawn if figure)
    return Section(
        "range", "How wide its scores are", "Score range",
        "If the scores of a row hardly differ, softmax is nearly linear in them, and a linear kernel can replace it at "
        "a small error. The range of a row, its largest score minus its smallest, says how far a layer is from that.",
        figures, "" if figures else "This study did not measure score ranges.",
    )  # fmt: skip


def error(ranges: RangePart, looks: Mapping[str, Look], images: float | None = None) -> Figure | None:
    """Draw the error of mechanisms on random scores, the bound, and the layers that run a softmax."""
    curves, layers = ranges.get("curves") or [], ranges.get("layers") or []
    traces = [_curve(curve, looks) for curve in curves if draw.mechanism_of(curve["label"]) in DRAWN]
    if curves and curves[0]["points"]:
        traces.append(_bound(curves[0]))
    numbers = draw.layer_names([layer["layer"] for layer in layers])
    for id_, look in looks.items():
        own = [layer for layer in layers if layer["twin"] == id_]
        if own and look.mechanism == "softmax":
            traces.append(_layers(look, own, numbers))
    if not traces:
        return None
    x = {"title": "range of a row of scores", "type": "log", "tickvals": _ticks(traces), "tickformat": "~g"}
    y = {"title": "error against softmax, %", "type": "log", "dtick": 1, "tickformat": ",~g"}
    return Figure(
        "range-error", "Error of a linear kernel against range",
        "Marks are the layers that run a softmax, at the mean range of their scores and the error that a linear kernel "
        "would make there; further left, softmax does less. Lines are mechanisms on random scores. A linear kernel "
        "never exceeds the dotted bound. The dashed vertical line is the tau of the next figure."
        + draw.measured_on(images, "test images per twin"),
        (Panel(plot(traces, x=x, y=y), "Error against score range"),), "range", height=420,
    )  # fmt: skip


def _ticks(traces: Sequence[Trace]) -> list[float]:
    """Return 1, 2 and 5 times each power of ten; the powers alone if there are many."""
    ends = [x for trace in traces for x in trace["x"] if x and x > 0]
    low, high = floor(log10(min(ends, default=1))), ceil(log10(max(ends, default=1)))
    return [lead * 10.0**power for power in range(low, high + 1) for lead in ((1, 2, 5) if high - low <= 3 else (1,))]


def _curve(curve: RangeCurve, looks: Mapping[str, Look]) -> Trace:
    x, y = _positive(curve, "error")
    label, look = curve["label"], draw.look_of(curve["label"], looks)
    color = look.color if look else GRAYS[1] if label == "uniform" else draw.mechanism_color(label)
    return {
        "x": x, "y": y, "name": label, "mode": "lines",
        "meta": {"label": label} | ({} if look else {"ink": GRAYS[0] if label == "uniform" else color}),
        "line": {"color": color, "width": 1.6, "dash": look.dash if look else "solid"},
        "hovertemplate": f"{label}: %{{y:.2g}}% at range %{{x:.2g}}<extra></extra>",
    }  # fmt: skip


def _positive(curve: RangeCurve, key: Literal["error", "bound"]) -> tuple[list[float], list[float]]:
    """Return range and percentage of the points that a logarithmic plot can show."""
    points = [(point.get("range") or 0.0, 100 * (point.get(key) or 0.0)) for point in curve["points"]]
    points = [(x, y) for x, y in points if x > 0 and y > 0]
    return [x for x, _ in points], [y for _, y in points]


def _bound(curve: RangeCurve) -> Trace:
    x, y = _positive(curve, "bound")
    return {
        "x": x, "y": y, "mode": "lines", "meta": {"label": "bound R²/2", "ink": GRAYS[0]},
        "line": {"color": GRAYS[2], "width": 1.4, "dash": "dot"},
        "hovertemplate": "bound R²/2: %{y:.2g}%<extra></extra>",
    }  # fmt: skip


def _layers(look: Look, layers: Sequence[LayerRange], numbers: Mapping[str, str]) -> Trace:
    return look.trace() | {
        "x": draw.means(layer.get("range") for layer in layers),
        "y": draw.means((layer.get("error") for layer in layers), 100),
        "customdata": [numbers[layer["layer"]] for layer in layers],
        "mode": "markers",
        "hovertemplate": f"<b>{look.label}</b>, layer %{{customdata}}<br>"
        "range %{x:.2f}, error %{y:.1f}%<extra></extra>",
    }


def threshold(
    curves: Sequence[ThresholdCurve], looks: Mapping[str, Look], images: float | None = None
) -> Figure | None:
    """Draw one path per twin, the mean over its layers; the slider moves a mark along each path."""
    traces: list[Trace] = []
    for id_, look in looks.items():
        path = _path([curve for curve in curves if curve["twin"] == id_])
        if path:
            path_trace = look.trace(path=True)
            points = {"x": path["kept"], "y": path["discarded"], "customdata": path["tau"], "mode": "lines"}
            hover = f"<b>{look.label}</b>, tau %{{customdata}}<br>keeps %{{x:.0f}}%, loses %{{y:.1f}}%<extra></extra>"
            traces.append(path_trace | points | {"line": path_trace["line"] | {"width": 1.4}, "hovertemplate": hover})
            start = {"x": path["kept"][:1], "y": path["discarded"][:1], "mode": "markers"}
            big = {"marker": path_trace["marker"] | {"size": 13}, "hoverinfo": "skip"}
            traces.append(look.trace(follows=True) | start | big)
    if not traces:
        return None
    x = {"title": "keys kept, %", "range": [-2, 104]}
    y = {"title": "softmax's weight lost, %", "rangemode": "tozero"}
    return Figure(
        "threshold",
        "What a threshold keeps",
        "The threshold rule keeps only the keys whose score is within tau of the row's largest score. Each line is a "
        "twin as tau grows from left to right, and the slider sets tau. Best is bottom left: few keys kept, and little "
        "of softmax's weight lost. For a twin without a softmax, it is the weight that a softmax would give to its "
        f"scores.{draw.measured_on(images, 'test images per twin')}",
        (Panel(plot(traces, x=x, y=y), "Keys kept and weight lost, by tau"),),
        "range.threshold",
    )


def _path(layers: Sequence[ThresholdCurve]) -> dict[str, list[float]] | None:
    count = min((min(map(len, (each["tau"], each["kept"], each["discarded"]))) for each in layers), default=0)

    def mean(key: Literal["kept", "discarded"]) -> list[float]:
        return [round(100 * sum(layer[key][i] for layer in layers) / len(layers), 3) for i in range(count)]

    return {"tau": layers[0]["tau"][:count], "kept": mean("kept"), "discarded": mean("discarded")} if count else None


def distributions(rows: Sequence[Distribution]) -> Figure | None:
    """Draw the weights of one row of scores under three rules; they are no twins, so their dashes differ."""
    if not rows:
        return None
    colors = {"softmax": "softmax", "first order": "inline", "uniform": "", "threshold": "threshold"}
    dashes = {"uniform": "dot", "first order": "longdash"}
    traces = [
        {
            "x": list(range(1, len(each["weights"]) + 1)), "y": each["weights"], "mode": "lines", "name": each["name"],
            "line": {
                "color": draw.mechanism_color(colors.get(each["name"], each["name"])), "width": 2,
                "dash": dashes.get(each["name"], "solid"),
            },
            "meta": {"label": each["name"]}, "hovertemplate": f"{each['name']}: %{{y:.4f}}<extra></extra>",
        }
        for each in rows
    ]  # fmt: skip
    x = {"title": "keys, sorted by softmax's weight", "tickformat": "d"}
    return Figure(
        "distributions",
        "The same scores, three ways",
        "The lines are three ways to turn one row of scores into weights: softmax, its first-order approximation, and "
        "equal weights. The row is one of median range from the first softmax twin, for one test image. If first order "
        "is closer to softmax than the dotted uniform line is, a linear kernel can replace softmax for this row.",
        (Panel(plot(traces, x=x, y={"title": "weight"}), "Weights of one row under each distribution"),),
        "range.distributions",
        height=300,
    )
