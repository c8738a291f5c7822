"""The page of `softless bench --model`: images a second against resolution or window, as in the paper's figure 5.

The model is the thick blue line; its plain formulas are blue and dotted, its softmax twin black, timm's model gray.
Filled marks are compiled, open ones are not.
"""

from typing import TYPE_CHECKING, Any

from softless.report.page import COLORS, GRAYS, INK, dress, panels, require_plotly, write

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

LINES: dict[str, dict[str, Any]] = {
    "ours": {"width": 3.5, "color": COLORS[0]},
    "plain": {"width": 1.8, "color": COLORS[0], "dash": "dot"},
    "softmax": {"width": 2.5, "color": INK},
    "timm": {"width": 1.8, "color": GRAYS[0]},
}


def page(document: dict[str, Any]) -> str:
    """A document of `softless bench --model` as one HTML file that fetches nothing."""
    require_plotly()
    against = "window" if _by_window(document) else "resolution"
    versions, machine = document["versions"], document["machine"]["processor"]
    about = f"{machine}, {document['dtype']}, torch {versions['torch']}", "Filled: compiled. Higher is faster."
    return write(f"Throughput against {against}: {document['model']}", about, draw(document), document)


def draw(document: dict[str, Any]) -> "Figure":
    """A panel for each pass, and for each window (image size, where windows are swept); images a second go up."""
    by_window = _by_window(document)
    drawn: dict[str, list[dict[str, Any]]] = {}
    for result in document["results"]:
        kept = _size(result) if by_window else _window(result)
        drawn.setdefault(f"{result['pass']}, {kept}", []).append(result)
    figure, named = panels(list(drawn)), set()
    for row, results in enumerate(drawn.values(), start=1):
        for trace in _traces(results, by_window):
            figure.add_trace(trace.update(showlegend=trace.name not in named), row=row, col=1)
            named.add(trace.name)
        title = "window" if by_window else "image size"
        figure.update_xaxes(title=title, type="category", row=row, col=1)
    return dress(figure, len(drawn), {"title": "images a second", "type": "log", "exponentformat": "none"})


def _by_window(document: dict[str, Any]) -> bool:
    """Whether windows are what was swept."""
    windows, sizes = ({each(result) for result in document["results"]} for each in (_window, _size))
    return len(windows) > len(sizes)


def _window(result: dict[str, Any]) -> str:
    side = result["window"]
    return "no windows" if side is None else f"{side} x {side} windows"


def _size(result: dict[str, Any]) -> str:
    height, width = result["image_size"]
    return f"{height} x {width}"


def _traces(results: list[dict[str, Any]], by_window: bool) -> list[Any]:
    from plotly.graph_objects import Scatter

    points: dict[tuple[str, str, bool], list[tuple[str, float]]] = {}
    for result in results:
        place = str(result["window"] or "none") if by_window else _size(result)
        for row in result["rows"]:
            if row["images_per_second"] is not None:
                line = points.setdefault((row["label"], row["role"], row["compiled"]), [])
                line.append((place, row["images_per_second"]))
    return [
        Scatter(
            x=[place for place, _ in line],
            y=[images for _, images in line],
            name=label,
            mode="lines+markers",
            line=LINES[role],
            marker={"symbol": "circle" if compiled else "circle-open", "size": 9, "color": LINES[role]["color"]},
            hovertemplate="%{y:,.3g} images/s",
        )
        for (label, role, compiled), line in points.items()
    ]
