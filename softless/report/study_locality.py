"""How local a twin looks: the mass of the 3 x 3 around a query, and what masking it costs (Fig. 3, Tables 1 and 2)."""

from collections.abc import Mapping
from typing import Any

from softless.report.page import GRAYS
from softless.report.study_figure import Figure, Panel, Section, has_numbers, layer_names, means, plot, span, whiskers
from softless.report.study_style import Look

PERCENT = {"title": "accuracy, %"}


def section(document: dict[str, Any], looks: Mapping[str, Look]) -> Section:
    """Mass, masks, then confusion brought about on purpose."""
    made = (
        local_mass(document.get("layers") or [], looks),
        mask_out(document.get("mask_out") or [], looks),
        induced(document.get("induced") or [], looks),
    )
    figures = tuple(figure for figure in made if figure)
    return Section(
        "locality",
        "How local it looks",
        "Locality",
        "Softmax learns to look around itself; linear attention has to be given that, for instance as InLine's "
        "local residual. These figures show how much of it each twin does, and how much depends on it.",
        figures,
        "" if figures else "No locality: this study ran no probes of it.",
    )


def local_mass(layers: list[dict[str, Any]], looks: Mapping[str, Look]) -> Figure | None:
    """Layer by layer, over what uniform weights would give."""
    numbers, traces = layer_names([layer["name"] for layer in layers]), []
    for id_, look in looks.items():
        own = [layer for layer in layers if layer["twin"] == id_]
        masses = [layer.get("local_mass") for layer in own]
        if has_numbers(means(masses)):
            traces.append(
                look.trace()
                | {
                    "x": [int(numbers[layer["name"]]) for layer in own],
                    "y": means(masses, 100),
                    "error_y": whiskers(masses, 100) | {"color": look.color},
                    "mode": "lines+markers",
                    "hovertemplate": f"<b>{look.label}</b><br>layer %{{x}}: %{{y:.1f}}%<extra></extra>",
                }
            )
    if not traces:
        return None
    baseline = {int(numbers[layer["name"]]): layer.get("local_baseline") for layer in layers}
    baseline = {number: 100 * value for number, value in baseline.items() if value is not None}
    traces.append(
        {
            "x": list(baseline),
            "y": list(baseline.values()),
            "mode": "lines",
            "line": {"color": GRAYS[1], "width": 1.5, "dash": "dot"},
            "hovertemplate": "any nine keys: %{y:.1f}%<extra></extra>",
        }
    )
    named = {"text": "any nine keys", "font": {"color": GRAYS[0], "size": 12}, "yshift": -11, "xanchor": "left"}
    notes = [named | {"x": x, "y": y, "showarrow": False} for x, y in list(baseline.items())[:1]]
    x = {"title": "layer", "tickvals": [int(number) for number in numbers.values()]}
    y = {"title": "weight on the 3 x 3, %", "rangemode": "tozero"}
    return Figure(
        "local-mass",
        "Weight on the neighbors",
        "Each mark is the share of a layer's weight that falls on the 3 x 3 patches around a query; the dotted line is "
        "what weights that ignore place would put there.",
        (Panel(plot(traces, x=x, y=y, annotations=notes), "Local mass by layer"),),
        "layers",
    )


def mask_out(rows: list[dict[str, Any]], looks: Mapping[str, Look]) -> Figure | None:
    """Two panels with the same axes: masked around the query, and masked anywhere."""
    points: dict[tuple[str, str], dict[int, Any]] = {}
    for row in rows:
        kind, _, size = row["mask"].partition(" ")
        if kind == "none":
            for each in ("local", "random"):
                points.setdefault((each, row["twin"]), {})[0] = row["accuracy"]
        elif kind in ("local", "random") and size.isdecimal():
            keys = int(size) ** 2 if kind == "local" else int(size)
            points.setdefault((kind, row["twin"]), {})[keys] = row["accuracy"]
    shown = [estimate for line in points.values() for estimate in line.values()]
    if not has_numbers(means(shown)):
        return None
    titles = {"local": "masked around the query", "random": "as many masked at random"}
    panels = [_masked(kind, titles[kind], points, looks, span(shown, 100)) for kind in titles]
    return Figure(
        "mask-out",
        "What masking the neighbors costs",
        "Going right, each query loses more keys and the rest are rescaled to sum to one; a steeper fall on the left "
        "than on the right means that the neighbors carry the answer.",
        tuple(panels),
        "mask_out",
        height=330,
        columns=2,
    )


def _masked(
    kind: str,
    title: str,
    points: dict[tuple[str, str], dict[int, Any]],
    looks: Mapping[str, Look],
    heights: list[float],
) -> Panel:
    traces, places = [], set()
    for id_, look in looks.items():
        line = dict(sorted(points.get((kind, id_), {}).items()))
        if line:
            places |= set(line)
            traces.append(
                look.trace()
                | {
                    "x": list(line),
                    "y": means(line.values(), 100),
                    "error_y": whiskers(list(line.values()), 100) | {"color": look.color},
                    "mode": "lines+markers",
                    "hovertemplate": f"<b>{look.label}</b><br>without %{{x}} keys: %{{y:.1f}}%<extra></extra>",
                }
            )
    names = [f"{keys**0.5:g} x {keys**0.5:g}" if keys and kind == "local" else f"{keys}" for keys in sorted(places)]
    x = {"title": "keys masked for each query", "tickvals": sorted(places), "ticktext": names}
    return Panel(plot(traces, x=x, y=PERCENT | {"range": heights}), f"Accuracy, {title}", title)


def induced(rows: list[dict[str, Any]], looks: Mapping[str, Look]) -> Figure | None:
    """Marks in the order of the study."""
    traces = []
    for id_, look in looks.items():
        own = [row for row in rows if row["twin"] == id_]
        estimates = [row.get("accuracy") for row in own]
        if has_numbers(means(estimates)):
            traces.append(
                look.trace()
                | {
                    "x": [row["what"] for row in own],
                    "y": means(estimates, 100),
                    "error_y": whiskers(estimates, 100) | {"color": look.color},
                    "mode": "markers",
                    "hovertemplate": f"<b>{look.label}</b><br>%{{x}}: %{{y:.1f}}%<extra></extra>",
                }
            )
    if not traces:
        return None
    return Figure(
        "induced",
        "Confusion on purpose",
        "Queries are made to collide before the softmax, by f1(q) = relu(q) or f2(q) = relu(Aq + b), each divided by "
        "its length, or by sharing rows; what is lost is what telling queries apart is worth.",
        (Panel(plot(traces, x={"type": "category"}, y=PERCENT), "Accuracy under induced confusion"),),
        "induced",
        height=300,
    )
