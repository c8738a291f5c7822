"""How local a twin looks: the mass of the 3 x 3 around a query, and what masking it costs (Fig. 3, Tables 1 and 2)."""

from collections.abc import Mapping
from typing import Any

from softless.report.page import GRAYS
from softless.study.page.figure import (
    Figure,
    Panel,
    Section,
    has_numbers,
    layer_names,
    means,
    measured_on,
    percent_axis,
    plot,
    whiskers,
)
from softless.study.page.style import Look

PER_TWIN = "test images per twin"
INDUCED = {
    "none": "unchanged",
    "f1": "f1(q) = relu(q)",
    "f2": "f2(q) = relu(Aq + b)",
}


def section(document: dict[str, Any], looks: Mapping[str, Look]) -> Section:
    """Mass, masks, then confusion brought about on purpose."""
    counts = document.get("examined") or {}
    made = (
        local_mass(document.get("layers") or [], looks, counts.get("images")),
        mask_out(document.get("mask_out") or [], looks, counts.get("masked")),
        induced(document.get("induced") or [], looks, document["twins"], counts.get("masked")),
    )
    figures = tuple(figure for figure in made if figure)
    return Section(
        "locality",
        "How local it looks",
        "Locality",
        "In images, much of what attention does is to look at the patches next to the query. These figures show how "
        "much each twin looks there, and how much accuracy it loses when it cannot. InLine's local residual, a 3 x 3 "
        "convolution beside attention, gives a linear twin the same view.",
        figures,
        "" if figures else "No locality: this study ran no probes of it.",
    )


def local_mass(layers: list[dict[str, Any]], looks: Mapping[str, Look], images: float | None = None) -> Figure | None:
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
            "meta": {"label": "equal weights", "ink": GRAYS[0]},
            "hovertemplate": "equal weights: %{y:.1f}%<extra></extra>",
        }
    )
    x = {"title": "layer", "tickvals": [int(number) for number in numbers.values()]}
    y = {"title": "weight on the 3 x 3, %", "rangemode": "tozero"}
    return Figure(
        "local-mass",
        "Weight on the neighbors",
        "Each mark is the share of a layer's attention that falls on the 3 x 3 patches around the query. The dotted "
        "line is that share if all keys had equal weights: a layer above it prefers its neighbors."
        + measured_on(images, PER_TWIN),
        (Panel(plot(traces, x=x, y=y), "Weight on the 3 x 3 around a query, by layer"),),
        "layers",
    )


def mask_out(rows: list[dict[str, Any]], looks: Mapping[str, Look], images: float | None = None) -> Figure | None:
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
    titles = {"local": "keys around the query masked", "random": "as many random keys masked"}
    panels = [_masked(kind, titles[kind], points, looks, percent_axis(shown)) for kind in titles]
    return Figure(
        "mask-out",
        "What masking the neighbors costs",
        "Further right, more keys are masked for each query, without retraining; the other weights are rescaled to sum "
        "to one. If accuracy falls faster in the first plot than in the second, the twin relies on its neighbors. Bars "
        f"are 95% intervals over test images.{measured_on(images, PER_TWIN)}",
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
    heights: dict[str, Any],
) -> Panel:
    """The twins stand side by side at each number of keys, so that their bars can be told apart."""
    traces: list[dict[str, Any]] = []
    lines = {id_: dict(sorted(points[kind, id_].items())) for id_ in looks if points.get((kind, id_))}
    places = sorted({keys for line in lines.values() for keys in line})
    step = 0.008 * max(places, default=0)
    for place, (id_, line) in enumerate(lines.items()):
        look = looks[id_]
        traces.append(
            look.trace()
            | {
                "x": [keys + step * (place - (len(lines) - 1) / 2) for keys in line],
                "customdata": list(line),
                "y": means(line.values(), 100),
                "error_y": whiskers(list(line.values()), 100) | {"color": look.color},
                "mode": "lines+markers",
                "hovertemplate": f"<b>{look.label}</b><br>without %{{customdata}} keys: %{{y:.1f}}%<extra></extra>",
            }
        )
    names = [f"{keys**0.5:g} x {keys**0.5:g}" if keys and kind == "local" else f"{keys}" for keys in places]
    x = {"title": "keys masked for each query", "tickvals": places, "ticktext": names}
    return Panel(plot(traces, x=x, y=heights), f"Accuracy, {title}", title)


def induced(
    rows: list[dict[str, Any]], looks: Mapping[str, Look], twins: list[dict[str, Any]], images: float | None = None
) -> Figure | None:
    """A trained twin whose weights are exchanged, beside twins trained with their own."""
    traces = []
    for id_, look in looks.items():
        own = [row for row in rows if row["twin"] == id_]
        if has_numbers(means(row.get("accuracy") for row in own)):
            traces.append(_across(look, [_named(row["what"]) for row in own], [row.get("accuracy") for row in own]))
    if not traces:
        return None
    trained = [twin for twin in twins if means([twin["accuracy"]])[0] is not None]
    beside = [_across(looks[twin["id"]], [twin["label"]], [twin["accuracy"]]) for twin in trained]
    kinds = len({what for trace in traces for what in trace["y"]})
    exchanged = "weights exchanged, not retrained"
    panels = [Panel(_rows(traces), f"Accuracy of softmax twins: {exchanged}", exchanged, height=_tall(kinds))]
    if beside:
        panels.append(Panel(_rows(beside), "Accuracy of the trained twins", "trained twins", height=_tall(len(beside))))
    return Figure(
        "induced",
        "Confusion on purpose",
        "The queries of a trained softmax twin are made to collide, by f1 or f2 (each divided by its length) or by "
        "letting pairs of queries share a row. Its weights are exchanged without retraining, so this shows how much "
        "the trained twin relies on telling queries apart, not what a model trained that way would reach. For that, "
        f"see the second plot: its twins were trained with their own attention.{measured_on(images)}",
        tuple(panels),
        "induced",
        height=_tall(kinds),
        columns=2,
    )


def _named(what: str) -> str:
    return INDUCED.get(what) or (f"{what[5:].replace(' ', '')} of rows shared" if what.startswith("rows ") else what)


def _tall(rows: int) -> int:
    return 80 + 28 * rows


def _across(look: Look, names: list[str], estimates: list[Any]) -> dict[str, Any]:
    return look.trace() | {
        "x": means(estimates, 100),
        "y": names,
        "error_x": whiskers(estimates, 100) | {"color": look.color},
        "mode": "markers",
        "hovertemplate": f"<b>{look.label}</b><br>%{{y}}: %{{x:.1f}}%<extra></extra>",
    }


def _rows(traces: list[dict[str, Any]]) -> Any:
    """The first row on top; from 0 to 100, because some of them fall to chance."""
    y = {"type": "category", "autorange": "reversed", "showgrid": True}
    return plot(traces, x={"title": "accuracy, %", "range": [0, 101], "showgrid": True}, y=y)
