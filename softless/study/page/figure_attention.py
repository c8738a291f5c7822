"""Where a twin looks: the attention viewer, the weight on the 3 x 3 around a query, and the cost of masking it.

The figures of locality answer Fig. 3 and Tables 1 and 2 of the paper.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from softless.errors import FileError
from softless.report.page import GRAYS, Trace, plot
from softless.study import schema
from softless.study.page import figure as draw
from softless.study.page.figure import Figure, Look, Panel, Section

READING = (
    "Point at a patch of the image, click it to hold it, or move with the arrow keys. In each map, the area of a "
    "square is the weight that this patch gives to that place; a negative weight has no square."
)
PNG = "data:image/png;base64,"
PER_TWIN = "test images per twin"
INDUCED = {"none": "unchanged", "f1": "f1(q) = relu(q)", "f2": "f2(q) = relu(Aq + b)"}


def viewer_section(document: schema.StudyDocument, _: Mapping[str, Look]) -> Section:
    """Return the section of the attention viewer, which static/viewer.js draws from the checked data."""
    viewer, test = document.get("viewer"), document["data"].get("test")
    ready, shown = bool(viewer and viewer["images"] and viewer["maps"]), ""
    if viewer and ready:
        check(viewer)
        of = "" if test is None else f" of {test:,.0f}"
        shown = f" Shown: {len(viewer['images'])}{of} test images."
    return Section(
        "viewer",
        "Where it looks",
        "Where it looks",
        "Attention on real images, averaged over the heads of a layer. A twin's local residual is included.",
        (Figure("attention", "Where each twin looks from a patch", READING + shown, (), "viewer"),) if ready else (),
        "" if ready else "This study stored no attention maps.",
    )


def viewer_layers(document: schema.StudyDocument) -> dict[str, str]:
    """Return the names of the layers that have maps, each with its number."""
    viewer = document.get("viewer")
    return draw.layer_names([each["layer"] for each in viewer["maps"]] if viewer else [])


def check(viewer: schema.ViewerPart) -> None:
    """Raise a FileError for data that static/viewer.js cannot draw."""
    if len(viewer["grid"]) != 2 or min(viewer["grid"]) < 1:
        raise FileError(f"viewer.grid is {viewer['grid']}, and rows and columns were needed")
    for index, image in enumerate(viewer["images"]):
        if not image["png"].startswith(PNG) or _decoded(image["png"][len(PNG) :]) is None:
            raise FileError(f"viewer.images[{index}].png is not a PNG as a data address")
    patches = viewer["grid"][0] * viewer["grid"][1]
    for index, each in enumerate(viewer["maps"]):
        tokens, weights = len(each["row_max"]), _decoded(each["weights"])
        if tokens < patches or weights is None or len(weights) != tokens**2:
            size = "no base64" if weights is None else f"{len(weights)} bytes"
            raise FileError(f"viewer.maps[{index}] has {size} for {tokens} tokens and {patches} patches")
        if not 0 <= each["image"] < len(viewer["images"]):
            raise FileError(f"viewer.maps[{index}] is of image {each['image']}, of {len(viewer['images'])}")


def _decoded(text: str) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None


def locality_section(document: schema.StudyDocument, looks: Mapping[str, Look]) -> Section:
    """Return the section on locality: weight on the neighbors, masked keys, and queries that are made to collide."""
    counts = document.get("examined") or {"images": None, "masked": None}
    drawn = (
        local_mass(document.get("layers") or [], looks, counts.get("images")),
        mask_out(document.get("mask_out") or [], looks, counts.get("masked")),
        induced(document.get("induced") or [], looks, document["twins"], counts.get("masked")),
    )
    figures = tuple(figure for figure in drawn if figure)
    return Section(
        "locality", "How local it looks", "Locality",
        "In images, attention looks mostly at the patches next to the query. These figures show how much weight each "
        "twin puts there, and how much accuracy it loses when it cannot look there. InLine's local residual, a 3 x 3 "
        "convolution beside attention, lets a linear twin see its neighbors, too.", figures,
        "" if figures else "This study did not measure locality.",
    )  # fmt: skip


def local_mass(
    layers: Sequence[schema.LayerResult], looks: Mapping[str, Look], images: float | None = None
) -> Figure | None:
    """Draw the weight on the 3 x 3 layer by layer, beside that of equal weights."""
    numbers, traces = draw.layer_names([layer["name"] for layer in layers]), list[Trace]()
    for id_, look in looks.items():
        own = [layer for layer in layers if layer["twin"] == id_]
        masses = [layer.get("local_mass") for layer in own]
        if draw.has_numbers(draw.means(masses)):
            traces.append(
                look.trace()
                | {
                    "x": [int(numbers[layer["name"]]) for layer in own],
                    "y": draw.means(masses, 100),
                    "error_y": draw.whiskers(masses, 100) | {"color": look.color},
                    "mode": "lines+markers",
                    "hovertemplate": f"<b>{look.label}</b><br>layer %{{x}}: %{{y:.1f}}%<extra></extra>",
                }
            )
    if not traces:
        return None
    shares = {int(numbers[layer["name"]]): layer.get("local_baseline") for layer in layers}
    baseline = {number: 100 * share for number, share in shares.items() if share is not None}
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
        + draw.measured_on(images, PER_TWIN),
        (Panel(plot(traces, x=x, y=y), "Weight on the 3 x 3 around a query, by layer"),),
        "layers",
    )


def mask_out(
    rows: Sequence[schema.MaskedAccuracy], looks: Mapping[str, Look], images: float | None = None
) -> Figure | None:
    """Draw accuracy against masked keys in two panels: keys around the query, and random keys."""
    points: dict[tuple[str, str], dict[int, schema.Estimated | None]] = {}
    for row in rows:
        kind, _, size = row["mask"].partition(" ")
        if kind == "none":
            for side in ("local", "random"):
                points.setdefault((side, row["twin"]), {})[0] = row["accuracy"]
        elif kind in ("local", "random") and size.isdecimal():
            keys = int(size) ** 2 if kind == "local" else int(size)
            points.setdefault((kind, row["twin"]), {})[keys] = row["accuracy"]
    shown = [estimate for line in points.values() for estimate in line.values()]
    if not draw.has_numbers(draw.means(shown)):
        return None
    titles = {"local": "keys around the query masked", "random": "as many random keys masked"}
    panels = [_masked(kind, titles[kind], points, looks, draw.percent_axis(shown)) for kind in titles]
    return Figure(
        "mask-out", "What masking the neighbors costs",
        "Further right, more keys are masked for each query, without retraining; the other weights are rescaled to sum "
        "to one. If accuracy falls faster in the first plot than in the second, the twin relies on its neighbors. Bars "
        f"are 95% intervals over test images.{draw.measured_on(images, PER_TWIN)}", tuple(panels), "mask_out",
        height=330, columns=2,
    )  # fmt: skip


def _masked(
    kind: str,
    title: str,
    points: dict[tuple[str, str], dict[int, schema.Estimated | None]],
    looks: Mapping[str, Look],
    heights: dict[str, Any],
) -> Panel:
    """Draw one panel; twins stand side by side at each number of keys, so that their bars do not overlap."""
    traces: list[Trace] = []
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
                "y": draw.means(line.values(), 100),
                "error_y": draw.whiskers(list(line.values()), 100) | {"color": look.color},
                "mode": "lines+markers",
                "hovertemplate": f"<b>{look.label}</b><br>without %{{customdata}} keys: %{{y:.1f}}%<extra></extra>",
            }
        )
    names = [f"{keys**0.5:g} x {keys**0.5:g}" if keys and kind == "local" else f"{keys}" for keys in places]
    x = {"title": "keys masked for each query", "tickvals": places, "ticktext": names}
    return Panel(plot(traces, x=x, y=heights), f"Accuracy, {title}", title)


def induced(
    rows: Sequence[schema.InducedAccuracy],
    looks: Mapping[str, Look],
    twins: Sequence[schema.TwinResult],
    images: float | None = None,
) -> Figure | None:
    """Draw the accuracy of a trained softmax twin whose queries are made to collide, beside that of all twins."""
    traces = []
    for id_, look in looks.items():
        own = [row for row in rows if row["twin"] == id_]
        if draw.has_numbers(draw.means(row.get("accuracy") for row in own)):
            traces.append(_across(look, [_named(row["what"]) for row in own], [row.get("accuracy") for row in own]))
    if not traces:
        return None
    trained = [twin for twin in twins if draw.means([twin["accuracy"]])[0] is not None]
    beside = [_across(looks[twin["id"]], [twin["label"]], [twin["accuracy"]]) for twin in trained]
    kinds = len({what for trace in traces for what in trace["y"]})
    exchanged = "attention changed, not retrained"
    panels = [Panel(_rows(traces), f"Accuracy of softmax twins: {exchanged}", exchanged, height=_tall(kinds))]
    if beside:
        panels.append(Panel(_rows(beside), "Accuracy of the trained twins", "trained twins", height=_tall(len(beside))))
    return Figure(
        "induced", "Confusion on purpose",
        "The queries of a trained softmax twin are made to collide: by f1 or f2, each divided by its length, or by "
        "letting pairs of queries share a row of weights. The twin is not retrained, so the first plot shows how much "
        "it relies on telling queries apart, not what a model trained that way would reach. The second plot shows "
        f"twins that were trained with their own attention.{draw.measured_on(images)}", tuple(panels), "induced",
        height=_tall(kinds), columns=2,
    )  # fmt: skip


def _named(what: str) -> str:
    return INDUCED.get(what) or (f"{what[5:].replace(' ', '')} of rows shared" if what.startswith("rows ") else what)


def _tall(rows: int) -> int:
    return 80 + 28 * rows


def _across(look: Look, names: list[str], estimates: list[schema.Estimated | None]) -> Trace:
    return look.trace() | {
        "x": draw.means(estimates, 100), "y": names, "error_x": draw.whiskers(estimates, 100) | {"color": look.color},
        "mode": "markers", "hovertemplate": f"<b>{look.label}</b><br>%{{y}}: %{{x:.1f}}%<extra></extra>",
    }  # fmt: skip


def _rows(traces: list[Trace]) -> Any:
    """Plot rows, the first on top, from 0 to 100 because some of them fall to chance."""
    y = {"type": "category", "autorange": "reversed", "showgrid": True}
    return plot(traces, x={"title": "accuracy, %", "range": [0, 101], "showgrid": True}, y=y)
