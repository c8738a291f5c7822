"""Which queries a twin confuses: the paper's Fig. 1 on keys of a trained twin, and the histograms of Fig. 2.

A mechanism confuses two different queries if their rows of weights are less than SAME apart.
"""

from collections.abc import Mapping, Sequence
from math import ceil

from softless.errors import FileError
from softless.report.page import GRAYS, INK, Trace, plot
from softless.report.units import listed
from softless.study.page import figure as draw
from softless.study.page.figure import Figure, Look, Panel, Pick, Section
from softless.study.schema import CollinearPart, CollinearRow, LayerResult, StudyDocument

MOST_TICKS = 9  # in a small histogram
SAME = 1e-3  # Euclidean distance of rows, as in probes/injectivity.py and in the paper's Fig. 2


def section(document: StudyDocument, looks: Mapping[str, Look]) -> Section:
    """Return the section on confused queries; a sentence names the twins that confuse none."""
    pair, counted = collinear(document.get("collinear"), looks), confusions(document, looks)
    figures = tuple(figure for figure in (pair, counted) if figure)
    remark = told_apart(document, looks)
    return Section(
        "queries", "Which queries it confuses", "Queries",
        f"A mechanism confuses two different queries if their rows of weights are less than {SAME:g} apart (Euclidean "
        "distance), and tells them apart otherwise. Linear attention divides each row by its sum, which cancels the "
        "length of the query: with a feature map such as relu, a query and its double get the same row. InLine "
        "subtracts instead, and tells the two apart.", figures,
        "" if figures or remark else "This study did not compare queries.", remark=remark,
    )  # fmt: skip


def collinear(part: CollinearPart | None, looks: Mapping[str, Look]) -> Figure | None:
    """Draw the keys and two queries on one line through the origin, and the weights that each mechanism gives."""
    if not part or not part["rows"]:
        return None
    panels = [_plane(part), *(_rows(row, looks) for row in part["rows"])]
    owner = looks.get(part["twin"])
    whose = f"layer {part['layer']}" + (f" of the twin {owner.label}" if owner else "")
    return Figure(
        "collinear", "A query and its double",
        f"The query q points the same way as p and is twice as long. Filled areas are the weights that p gives to the "
        "keys, lines those that q gives; where the two coincide, the mechanism confuses p and q. This pair was made to "
        f"show the effect: p and the keys come from one head in {whose}, for one test image.", tuple(panels),
        "collinear", height=230, columns=2,
    )  # fmt: skip


def _plane(part: CollinearPart) -> Panel:
    keys, ends = part["keys"], {"q": part["q"], "p": part["p"]}
    dots: Trace = {
        "x": [key[0] for key in keys], "y": [key[1] for key in keys], "mode": "markers",
        "marker": {"color": GRAYS[1], "size": 5, "opacity": 0.7}, "hovertemplate": "key %{pointNumber}<extra></extra>",
    }  # fmt: skip
    arrows = [
        {
            "x": [0, ends[name][0]], "y": [0, ends[name][1]], "mode": "lines+markers",
            "line": {"color": INK, "width": width},
            "marker": {"symbol": "arrow", "angleref": "previous", "size": [0, 13], "color": INK},
            "meta": {"label": name}, "hovertemplate": f"{name}<extra></extra>",
        }
        for name, width in (("q", 1.5), ("p", 3))
    ]  # fmt: skip
    plane = plot([dots, *arrows], x={"title": "along p", "zeroline": True}, y={"title": "first principal direction"})
    return Panel(plane, "Keys as dots; p and q as arrows on one line", "the keys, p and q")


def _rows(row: CollinearRow, looks: Mapping[str, Look]) -> Panel:
    look = draw.look_of(row["label"], looks)
    color = look.color if look else draw.mechanism_color(row["label"])
    order = sorted(range(min(len(row["p"]), len(row["q"]))), key=lambda key: -row["p"][key])
    place = list(range(1, len(order) + 1))
    p = {
        "type": "bar", "x": place, "y": [row["p"][key] for key in order], "marker": {"color": color, "opacity": 0.35},
        "hovertemplate": "p gives %{y:.4f}<extra></extra>",
    }  # fmt: skip
    q = {
        "x": place, "y": [row["q"][key] for key in order], "mode": "lines",
        "line": {"color": color, "width": 2, "shape": "hvh"}, "hovertemplate": "q gives %{y:.4f}<extra></extra>",
    }  # fmt: skip
    distance = sum((a - b) ** 2 for a, b in zip(row["p"], row["q"], strict=False)) ** 0.5
    says = f"confused, less than {SAME:g} apart" if distance < SAME else f"told apart, {distance:.2f} apart"
    figure = plot(
        [p, q],
        x={"title": "keys, sorted by p's weight", "tickformat": "d"},
        y={"title": "weight", "nticks": 5},
        bargap=0,
    )
    return Panel(figure, f"{row['label']}: {says}", f"{row['label']}: {says}")


def confusions(document: StudyDocument, looks: Mapping[str, Look]) -> Figure | None:
    """Draw one small histogram for each twin that confuses a pair, all on the same axes."""
    layers = _counted(document)
    shown = [look for look in looks.values() if _confuses(look, layers)]
    if not shown:
        return None
    numbers = draw.layer_names([layer["name"] for layer in layers])
    edges = sorted({edge for layer in layers for edge in _counts([layer])})
    panels = [_histogram(look, _of(look, layers), numbers, edges) for look in shown]
    picks = [Pick("all", "all layers"), *(Pick(name, f"layer {number}") for name, number in numbers.items())]
    return Figure(
        "confusions", "Pairs of real queries that are confused",
        "Each bar is the share of images and heads in which that many pairs of different queries are confused. A twin "
        "that tells all queries apart has its whole bar at 0."
        + draw.measured_on(_examined(document), "test images per twin"), tuple(panels), "layers", height=200,
        picks=tuple(picks) if len(numbers) > 1 else (), columns=3,
    )  # fmt: skip


def told_apart(document: StudyDocument, looks: Mapping[str, Look]) -> str:
    """Name the twins that confuse no queries, in one sentence."""
    layers = _counted(document)
    apart = [look.label for look in looks.values() if _of(look, layers) and not _confuses(look, layers)]
    if not apart:
        return ""
    images = _examined(document)
    on = "the test images examined" if images is None else f"{images:,.0f} test images"
    who = "All twins" if len(apart) == len(looks) else listed(apart)
    verb = "tells" if len(apart) == 1 and len(looks) > 1 else "tell"
    return f"{who} {verb} all queries apart: in {on}, every layer and head, no pair of real queries is confused."


def _examined(document: StudyDocument) -> float | None:
    examined = document.get("examined")
    return examined and examined.get("images")


def _counted(document: StudyDocument) -> list[LayerResult]:
    return [layer for layer in document.get("layers") or [] if layer.get("confusion_histogram")]


def _of(look: Look, layers: Sequence[LayerResult]) -> list[LayerResult]:
    return [layer for layer in layers if layer["twin"] == look.id]


def _confuses(look: Look, layers: Sequence[LayerResult]) -> bool:
    return any(count > 0 for start, count in _counts(_of(look, layers)).items() if start > 0)


def _histogram(look: Look, layers: list[LayerResult], numbers: Mapping[str, str], edges: list[float]) -> Panel:
    groups = {"all": layers} | {name: [layer for layer in layers if layer["name"] == name] for name in numbers}
    counts = {pick: _counts(group) for pick, group in groups.items()}
    traces: list[Trace] = []
    for pick, bins in counts.items():
        total = sum(bins.values()) or 1
        traces.append(
            {
                "type": "bar", "x": [edges.index(start) + 0.5 for start in bins],
                "y": [100 * count / total for count in bins.values()],
                "customdata": [_bin_name(start, [*edges, None][edges.index(start) + 1]) for start in bins],
                "marker": {"color": look.color}, "meta": {"pick": pick}, "visible": pick == "all",
                "hovertemplate": "%{customdata} pairs: %{y:.0f}%<extra></extra>",
            }
        )  # fmt: skip
    ticks = range(0, len(edges), ceil(len(edges) / MOST_TICKS))
    places = {"tickvals": list(ticks), "ticktext": [f"{edges[place]:g}" for place in ticks], "tickangle": 0}
    figure = plot(
        traces,
        x={"title": "confused pairs", "range": [0, len(edges)], **places, "tickfont": {"size": 11, "color": GRAYS[0]}},
        y={"range": [0, 104], "ticksuffix": "%", "nticks": 4},
        bargap=0.06,
    )
    return Panel(figure, f"Confused pairs under {look.label}", look.label, look.id)


def _counts(layers: Sequence[LayerResult]) -> dict[float, float]:
    """Return the number of images and heads by the start of the bin."""
    total: dict[float, float] = {}
    for layer in layers:
        histogram = layer["confusion_histogram"]
        edges, counts = (histogram["edges"], histogram["counts"]) if histogram else ([], [])
        if len(edges) not in (len(counts), len(counts) + 1):
            raise FileError(f"the confusion_histogram of {layer['name']} has {len(counts)} counts, {len(edges)} edges")
        for start, count in zip(edges, counts, strict=False):
            total[start] = total.get(start, 0) + count
    return total


def _bin_name(start: float, end: float | None) -> str:
    if end is None:
        return f"{start:g} or more"
    return f"{start:g}" if end - start <= 1 else f"{start:g} to {end - 1:g}"
