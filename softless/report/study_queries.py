"""Which queries a twin confuses: Fig. 1 on keys of the reader's own model, and Fig. 2's histograms."""

from collections.abc import Mapping
from math import ceil
from typing import Any

from softless.errors import FileError
from softless.report.page import GRAYS, INK
from softless.report.study_figure import Figure, Panel, Pick, Section, layer_names, plot
from softless.report.study_style import Look, mechanism_color

MOST_TICKS = 9  # of a small histogram
SAME = 1e-3  # the distance below which rows of weights count as equal, as in the paper's Fig. 2


def section(document: dict[str, Any], looks: Mapping[str, Look]) -> Section:
    """Collinear queries, then histograms."""
    made = [figure for figure in (collinear(document.get("collinear")), confusions(document, looks)) if figure]
    return Section(
        "queries",
        "Which queries it confuses",
        "Queries",
        "Attention is injective when different queries get different weights. Dividing by a row's sum cancels the "
        "length of a query, so a query and its double read the same; subtracting the mean keeps them apart.",
        tuple(made),
        "" if made else "No queries were compared: this study ran no probes.",
    )


def collinear(found: dict[str, Any] | None) -> Figure | None:
    """Keys and two queries on one line through the origin; beside them, the weights each mechanism gives them."""
    if not found or not found["rows"]:
        return None
    panels = [_plane(found), *(_rows(row) for row in found["rows"])]
    return Figure(
        "collinear",
        "Two queries on one line",
        f"p and q point the same way over keys of {found['layer']}; where the filled row of p and the line of q "
        "coincide, the mechanism cannot tell them apart.",
        tuple(panels),
        "collinear",
        height=230,
        columns=2,
    )


def _plane(found: dict[str, Any]) -> Panel:
    keys, p, q = found["keys"], found["p"], found["q"]
    dots = {
        "x": [key[0] for key in keys],
        "y": [key[1] for key in keys],
        "mode": "markers",
        "marker": {"color": GRAYS[1], "size": 5, "opacity": 0.7},
        "hovertemplate": "key %{pointNumber}<extra></extra>",
    }
    arrows = [
        {
            "x": end[0], "y": end[1], "ax": 0, "ay": 0, "xref": "x", "yref": "y", "axref": "x", "ayref": "y",
            "text": "", "showarrow": True, "arrowhead": 2, "arrowwidth": width, "arrowcolor": INK,
        }
        for end, width in ((q, 1.5), (p, 3))
    ]  # fmt: skip
    names = [
        {"x": end[0], "y": end[1], "text": f"<b>{name}</b>", "showarrow": False, "yshift": 14}
        for name, end in (("p", p), ("q", q))
    ]
    plane = plot(
        [dots],
        x={"title": "along p", "zeroline": True},
        y={"title": "first principal direction"},
        annotations=[*arrows, *names],
    )
    return Panel(plane, "Keys as dots; p and q as arrows on one line", "the keys, p and q")


def _rows(row: dict[str, Any]) -> Panel:
    color = mechanism_color(row["label"])
    order = sorted(range(min(len(row["p"]), len(row["q"]))), key=lambda key: -row["p"][key])
    place = list(range(1, len(order) + 1))
    p = {
        "type": "bar",
        "x": place,
        "y": [row["p"][key] for key in order],
        "marker": {"color": color, "opacity": 0.35},
        "hovertemplate": "p gives %{y:.4f}<extra></extra>",
    }
    q = {
        "x": place,
        "y": [row["q"][key] for key in order],
        "mode": "lines",
        "line": {"color": color, "width": 2, "shape": "hvh"},
        "hovertemplate": "q gives %{y:.4f}<extra></extra>",
    }
    distance = sum((a - b) ** 2 for a, b in zip(row["p"], row["q"], strict=False)) ** 0.5
    says = "the same row" if distance < SAME else f"rows differ by {distance:.2g}"
    drawn = plot(
        [p, q], x={"title": "keys, by p's weight", "tickformat": "d"}, y={"title": "weight", "nticks": 5}, bargap=0
    )
    return Panel(drawn, f"{row['label']}: {says}", f"{row['label']}: {says}")


def confusions(document: dict[str, Any], looks: Mapping[str, Look]) -> Figure | None:
    """One small histogram a twin, all on the same axes."""
    layers = [layer for layer in document.get("layers") or [] if layer.get("confusion_histogram")]
    if not layers:
        return None
    numbers = layer_names([layer["name"] for layer in layers])
    edges = sorted({edge for layer in layers for edge in _counts([layer])})
    panels = []
    for id_, look in looks.items():
        own = [layer for layer in layers if layer["twin"] == id_]
        if own:
            panels.append(_histogram(look, own, numbers, edges))
    picks = [Pick("all", "all layers"), *(Pick(name, f"layer {number}") for name, number in numbers.items())]
    return Figure(
        "confusions",
        "Pairs of queries that read the same",
        "Each bar is the share of images and heads with so many pairs of different queries whose rows differ by less "
        "than 0.001; all weight at 0 is an injective layer.",
        tuple(panels),
        "layers",
        height=200,
        picks=tuple(picks) if len(numbers) > 1 else (),
        columns=3,
    )


def _histogram(look: Look, layers: list[dict[str, Any]], numbers: Mapping[str, str], edges: list[float]) -> Panel:
    groups = {"all": layers} | {name: [layer for layer in layers if layer["name"] == name] for name in numbers}
    counts = {pick: _counts(group) for pick, group in groups.items()}
    traces = []
    for pick, bins in counts.items():
        total = sum(bins.values()) or 1
        traces.append(
            {
                "type": "bar",
                "x": [edges.index(start) + 0.5 for start in bins],
                "y": [100 * count / total for count in bins.values()],
                "customdata": [_name(start, [*edges, None][edges.index(start) + 1]) for start in bins],
                "marker": {"color": look.color},
                "meta": {"pick": pick},
                "visible": pick == "all",
                "hovertemplate": "%{customdata} pairs: %{y:.0f}%<extra></extra>",
            }
        )
    some = range(0, len(edges), ceil(len(edges) / MOST_TICKS))
    places = {"tickvals": list(some), "ticktext": [f"{edges[place]:g}" for place in some], "tickangle": 0}
    drawn = plot(
        traces,
        x={"title": "confused pairs", "range": [0, len(edges)], **places, "tickfont": {"size": 11, "color": GRAYS[0]}},
        y={"range": [0, 104], "ticksuffix": "%", "nticks": 4},
        bargap=0.06,
    )
    return Panel(drawn, f"Confused pairs under {look.label}", look.label, look.id)


def _counts(layers: list[dict[str, Any]]) -> dict[float, float]:
    """How many images and heads, by the start of the bin."""
    found: dict[float, float] = {}
    for layer in layers:
        edges, counts = layer["confusion_histogram"]["edges"], layer["confusion_histogram"]["counts"]
        if len(edges) not in (len(counts), len(counts) + 1):
            raise FileError(f"the confusion_histogram of {layer['name']} has {len(counts)} counts, {len(edges)} edges")
        for start, count in zip(edges, counts, strict=False):
            found[start] = found.get(start, 0) + count
    return found


def _name(start: float, end: float | None) -> str:
    if end is None:
        return f"{start:g} or more"
    return f"{start:g}" if end - start <= 1 else f"{start:g} to {end - 1:g}"
