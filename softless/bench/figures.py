"""Draw a document of `softless bench` or `softless bench-model` as one HTML page.

Calls: time against tokens on log-log axes, with the floor as a dashed line. Our mechanisms are thick lines, each in its
own color. The plain formulas have the color of their mechanism: dotted as typed, dash-dotted compiled. SDPA is black,
other libraries are gray.

Models: images per second against resolution or window, as in figure 5 of Han et al. 2024. The model is a thick blue
line, its plain formulas are blue and dotted, its softmax twin is black and timm's model gray. Compiled models have
filled markers.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import cycle
from typing import TYPE_CHECKING, Any

from softless.bench.documents import CallResult, CallsDocument, ModelDocument, SettingResult
from softless.report import units
from softless.report.page import COLORS, FAINT, FONT, GRAYS, INK, write

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

LINES: dict[str, dict[str, Any]] = {
    "ours": {"width": 3.5},
    "sdpa": {"width": 2.5},
    "softmax": {"width": 2.5},
    "plain": {"width": 1.8, "dash": "dot"},
    "compiled": {"width": 1.8, "dash": "dashdot"},
    "rival": {"width": 1.8},
    "timm": {"width": 1.8},
    "bound": {"width": 1.8, "dash": "dot"},
}
MARKS = {"ours": "circle", "sdpa": "square", "plain": "circle-open", "compiled": "diamond-open", "rival": "triangle-up"}
PANEL_HEIGHT = 520
IMAGES = "%{y:,.3g} images/s"
MODEL_COLORS = {"ours": COLORS[0], "plain": COLORS[0], "softmax": INK, "timm": GRAYS[0], "bound": GRAYS[1]}


def calls_page(document: CallsDocument) -> str:
    """Return a document of `softless bench` as one HTML file that fetches nothing."""
    names = ", ".join(mechanism["name"] for mechanism in document["mechanisms"])
    causal = "causal, " if document["causal"] else ""
    rate = f"{document['copy_bytes_per_second'] / 1e9:,.0f} GB/s"
    about = (
        f"{document['machine']['processor']}, {causal}{document['dtype']}, torch {document['versions']['torch']}",
        f"Dashed: the time this machine takes to copy the bytes of q, k, v and o ({rate}).",
    )
    return write(f"Time against tokens: {names}", about, draw_calls(document), document)


def model_page(document: ModelDocument) -> str:
    """Return a document of `softless bench-model` as one HTML file that fetches nothing."""
    against = "window" if _by_window(document) else "resolution"
    machine, torch = document["machine"]["processor"], document["versions"]["torch"]
    about = f"{machine}, {document['dtype']}, torch {torch}", "Filled: compiled. Higher is faster."
    return write(f"Throughput against {against}: {document['model']}", about, draw_model(document), document)


def draw_calls(document: CallsDocument) -> "Figure":
    """Draw milliseconds against tokens, with one panel for each batch, heads, width and pass."""
    colors, panels = _call_colors(document), {}
    for title, unsorted in _grouped(document["results"], _call_title).items():
        results = sorted(unsorted, key=_tokens)
        lines = [
            _line(row, points, colors[row["label"]], MARKS[row["role"]], "%{y:.3g} ms")
            for row, points in _points(results, _tokens, "ms")
        ]
        tokens = [_tokens(result) for result in results]
        ticks = {"tickvals": tokens, "ticktext": [f"{n:,}" for n in tokens], "minor": {"showgrid": False}}
        panels[title] = [*lines, _floor(results)], {"title": "tokens N", "type": "log", **ticks}
    return _figure(panels, {"title": "milliseconds", "type": "log", "dtick": 1, "exponentformat": "none"})


def draw_model(document: ModelDocument) -> "Figure":
    """Draw images per second, with one panel for each pass and window, or image size if windows were swept."""
    by_window, panels = _by_window(document), {}
    panel, place = (_size, _window_side) if by_window else (_window, _size)
    axis = {"title": "window" if by_window else "image size", "type": "category"}
    for title, results in _grouped(document["results"], lambda result: f"{result['pass']}, {panel(result)}").items():
        lines = [
            _line(row, points, MODEL_COLORS[row["role"]], "circle" if row["compiled"] else "circle-open", IMAGES)
            for row, points in _points(results, place, "images_per_second")
        ]
        panels[title] = lines, axis
    return _figure(panels, {"title": "images per second", "type": "log", "exponentformat": "none"})


def _figure(panels: Mapping[str, tuple[list[Any], dict[str, Any]]], y_axis: dict[str, Any]) -> "Figure":
    """Stack panels, each with its lines and its x axis; every name is in the legend once."""
    from plotly.subplots import make_subplots

    spacing = 0.3 / len(panels) if len(panels) > 1 else 0
    figure = make_subplots(rows=len(panels), cols=1, subplot_titles=list(panels), vertical_spacing=spacing)
    named = set()
    for number, (lines, x_axis) in enumerate(panels.values(), start=1):
        for line in lines:
            figure.add_trace(line.update(showlegend=line.name not in named), row=number, col=1)
            named.add(line.name)
        figure.update_xaxes(**x_axis, row=number, col=1)
    grid = {"gridcolor": FAINT, "linecolor": INK, "ticks": "outside", "tickcolor": INK, "zeroline": False}
    figure.update_xaxes(**grid)
    figure.update_yaxes(**y_axis, **grid)
    return figure.update_layout(
        height=PANEL_HEIGHT * len(panels),
        plot_bgcolor="white",
        paper_bgcolor="white",
        font={"family": FONT, "size": 14, "color": INK},
        hovermode="x unified",
        legend={"traceorder": "normal", "font": {"size": 13}, "itemsizing": "constant"},
        margin={"l": 70, "r": 20, "t": 60, "b": 60},
    )


def _grouped(results: Iterable[Any], title: Callable[[Any], str]) -> dict[str, list[Any]]:
    groups: dict[str, list[Any]] = {}
    for result in results:
        groups.setdefault(title(result), []).append(result)
    return groups


def _points(results: Iterable[Any], place: Callable[[Any], Any], value: str) -> list[tuple[Any, list[tuple[Any, Any]]]]:
    """Return the first row and the measured points of every label."""
    rows: dict[str, Any] = {}
    points: dict[str, list[tuple[Any, Any]]] = {}
    for result in results:
        for row in result["rows"]:
            if row[value] is not None:
                rows.setdefault(row["label"], row)
                points.setdefault(row["label"], []).append((place(result), row[value]))
    return [(row, points[label]) for label, row in rows.items()]


def _line(row: Any, points: list[tuple[Any, Any]], color: str, symbol: str, hover: str) -> Any:
    from plotly.graph_objects import Scatter

    x, y = zip(*points, strict=True)
    style = {"line": {**LINES[row["role"]], "color": color}, "marker": {"symbol": symbol, "size": 8, "color": color}}
    return Scatter(x=x, y=y, name=row["label"], mode="lines+markers", hovertemplate=hover, **style)


def _floor(results: list[CallResult]) -> Any:
    from plotly.graph_objects import Scatter

    return Scatter(
        x=[_tokens(result) for result in results],
        y=[result["floor_ms"] for result in results],
        name="floor: one copy",
        mode="lines+markers" if len(results) == 1 else "lines",
        line={"color": INK, "width": 1.5, "dash": "dash"},
        hovertemplate="%{y:.3g} ms",
    )


def _call_colors(document: CallsDocument) -> dict[str, str]:
    """Give every label a color: by mechanism for ours and the plain formulas, a gray for each other library."""
    by_mechanism = {each["name"]: COLORS[i % len(COLORS)] for i, each in enumerate(document["mechanisms"])}
    rows = {row["label"]: row for result in document["results"] for row in result["rows"]}
    grays = cycle(GRAYS)
    return {
        label: next(grays) if row["role"] == "rival" else by_mechanism.get(row["mechanism"] or "", INK)
        for label, row in rows.items()
    }


def _tokens(result: CallResult) -> int:
    return result["shape"]["queries"]


def _call_title(result: CallResult) -> str:
    shape = result["shape"]
    return f"{result['pass']}, [{shape['batch']}, {shape['heads']}, N, {shape['head_dim']}]"


def _by_window(document: ModelDocument) -> bool:
    """Return whether the document sweeps windows rather than image sizes."""
    windows, sizes = ({of(result) for result in document["results"]} for of in (_window, _size))
    return len(windows) > len(sizes)


def _window(result: SettingResult) -> str:
    side = result["window"]
    return "no windows" if side is None else f"{side} x {side} windows"


def _window_side(result: SettingResult) -> str:
    return str(result["window"] or "none")


def _size(result: SettingResult) -> str:
    return units.picture(result["image_size"])
