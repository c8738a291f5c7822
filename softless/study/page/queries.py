"""Which queries a twin confuses: Fig. 1 on keys of the reader's own model, and Fig. 2's histograms.

The page has one definition: a mechanism confuses two different queries if their rows of weights are less than SAME
apart, and tells them apart otherwise.
"""

from collections.abc import Mapping
from math import ceil
from typing import Any

from softless.errors import FileError
from softless.report.page import GRAYS, INK
from softless.study.page.figure import Figure, Panel, Pick, Section, layer_names, measured_on, plot
from softless.study.page.style import Look, look_of, mechanism_color
from softless.study.page.words import listed

MOST_TICKS = 9  # of a small histogram
SAME = 1e-3  # Euclidean distance of rows; probes.injectivity counts with the same one, after the paper's Fig. 2


def section(document: dict[str, Any], looks: Mapping[str, Look]) -> Section:
    """A query and its double, then histograms of real queries; twins that confuse none are named in a sentence."""
    pair, counted = collinear(document.get("collinear"), looks), confusions(document, looks)
    figures = tuple(figure for figure in (pair, counted) if figure)
    remark = told_apart(document, looks)
    return Section(
        "queries",
        "Which queries it confuses",
        "Queries",
        f"A mechanism confuses two different queries if their rows of weights are less than {SAME:g} apart (Euclidean "
        "distance), and tells them apart otherwise. Linear attention divides each row by its sum, which cancels the "
        "length of the query: with a feature map such as relu, a query and its double get the same row. InLine "
        "subtracts instead, and tells the two apart.",
        figures,
        "" if figures or remark else "No queries were compared: this study ran no probes.",
        remark=remark,
    )


def collinear(found: dict[str, Any] | None, looks: Mapping[str, Look]) -> Figure | None:
    """Keys and two queries on one line through the origin; beside them, the weights each mechanism gives them."""
    if not found or not found["rows"]:
        return None
    panels = [_plane(found), *(_rows(row, looks) for row in found["rows"])]
    owner = looks.get(found["twin"])
    whose = f"layer {found['layer']}" + (f" of the twin {owner.label}" if owner else "")
    return Figure(
        "collinear",
        "A query and its double",
        f"The query q points the same way as p and is twice as long. Filled areas are the weights that p gives to the "
        "keys, lines those that q gives; where the two coincide, the mechanism confuses p and q. This pair was made to "
        f"show the effect: p and the keys come from one head in {whose}, for one test image.",
        tuple(panels),
        "collinear",
        height=230,
        columns=2,
    )


def _plane(found: dict[str, Any]) -> Panel:
    keys = found["keys"]
    dots = {
        "x": [key[0] for key in keys],
        "y": [key[1] for key in keys],
        "mode": "markers",
        "marker": {"color": GRAYS[1], "size": 5, "opacity": 0.7},
        "hovertemplate": "key %{pointNumber}<extra></extra>",
    }
    arrows = [
        {
            "x": [0, found[name][0]],
            "y": [0, found[name][1]],
            "mode": "lines+markers",
            "line": {"color": INK, "width": width},
            "marker": {"symbol": "arrow", "angleref": "previous", "size": [0, 13], "color": INK},
            "meta": {"label": name},
            "hovertemplate": f"{name}<extra></extra>",
        }
        for name, width in (("q", 1.5), ("p", 3))
    ]
    plane = plot([dots, *arrows], x={"title": "along p", "zeroline": True}, y={"title": "first principal direction"})
    return Panel(plane, "Keys as dots; p and q as arrows on one line", "the keys, p and q")


def _rows(row: dict[str, Any], looks: Mapping[str, Look]) -> Panel:
    look = look_of(row["label"], looks)
    color = look.color if look else mechanism_color(row["label"])
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
    says = f"confused, less than {SAME:g} apart" if distance < SAME else f"told apart, {distance:.2f} apart"
    drawn = plot(
        [p, q],
        x={"title": "keys, sorted by p's weight", "tickformat": "d"},
        y={"title": "weight", "nticks": 5},
        bargap=0,
    )
    return Panel(drawn, f"{row['label']}: {says}", f"{row['label']}: {says}")


def confusions(document: dict[str, Any], looks: Mapping[str, Look]) -> Figure | None:
    """One small histogram for each twin that confuses a pair, all on the same axes."""
    layers = _counted(document)
    shown = [look for look in looks.values() if _confuses(look, layers)]
    if not shown:
        return None
    numbers = layer_names([layer["name"] for layer in layers])
    edges = sorted({edge for layer in layers for edge in _counts([layer])})
    panels = [_histogram(look, _of(look, layers), numbers, edges) for look in shown]
    picks = [Pick("all", "all layers"), *(Pick(name, f"layer {number}") for name, number in numbers.items())]
    images = (document.get("examined") or {}).get("images")
    return Figure(
        "confusions",
        "Pairs of real queries that are confused",
        "Each bar is the share of images and heads in which that many pairs of different queries are confused. A twin "
        f"that tells all queries apart has its whole bar at 0.{measured_on(images, 'test images per twin')}",
        tuple(panels),
        "layers",
        height=200,
        picks=tuple(picks) if len(numbers) > 1 else (),
        columns=3,
    )


def told_apart(document: dict[str, Any], looks: Mapping[str, Look]) -> str:
    """The twins that need no histogram, in one sentence."""
    layers = _counted(document)
    apart = [look.label for look in looks.values() if _of(look, layers) and not _confuses(look, layers)]
    if not apart:
        return ""
    images = (document.get("examined") or {}).get("images")
    on = "the test images examined" if images is None else f"{images:,.0f} test images"
    whole = "All twins" if len(apart) == len(looks) else listed(apart)
    verb = "tells" if len(apart) == 1 and len(looks) > 1 else "tell"
    return f"{whole} {verb} all queries apart: in {on}, every layer and head, no pair of real queries is confused."


def _counted(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [layer for layer in document.get("layers") or [] if layer.get("confusion_histogram")]


def _of(look: Look, layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [layer for layer in layers if layer["twin"] == look.id]


def _confuses(look: Look, layers: list[dict[str, Any]]) -> bool:
    return any(count > 0 for start, count in _counts(_of(look, layers)).items() if start > 0)


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
