"""The page of `softless bench`: time against tokens, log-log, one line a contestant and the floor dashed below them.

Ours are the thick lines, each in its own color; the plain formulas share the color of the mechanism they compute,
dotted as typed and dash-dotted compiled; SDPA is black, other libraries are gray.
"""

from typing import TYPE_CHECKING, Any

from softless.report.page import COLORS, GRAYS, INK, dress, panels, require_plotly, write

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

LINES: dict[str, dict[str, Any]] = {
    "ours": {"width": 3.5},
    "sdpa": {"width": 2.5},
    "plain": {"width": 1.8, "dash": "dot"},
    "compiled": {"width": 1.8, "dash": "dashdot"},
    "rival": {"width": 1.8},
}
MARKS = {"ours": "circle", "sdpa": "square", "plain": "circle-open", "compiled": "diamond-open", "rival": "triangle-up"}


def page(document: dict[str, Any]) -> str:
    """A document of `softless bench` as one HTML file that fetches nothing."""
    require_plotly()
    names = ", ".join(each["name"] for each in document["mechanisms"])
    causal = "causal, " if document["causal"] else ""
    rate = f"{document['copy_bytes_per_second'] / 1e9:,.0f} GB/s"
    about = (
        f"{document['machine']['processor']}, {causal}{document['dtype']}, torch {document['versions']['torch']}",
        f"Dashed: the time this machine takes to copy the bytes of q, k, v and o ({rate}).",
    )
    return write(f"Time against tokens: {names}", about, draw(document), document)


def draw(document: dict[str, Any]) -> "Figure":
    """One panel for each batch, heads, width and pass; in each, tokens to the right and milliseconds up."""
    drawn = _panels(document["results"])
    figure = panels(list(drawn))
    styles, named = _styles(document), set()
    for row, results in enumerate(drawn.values(), start=1):
        tokens = [result["shape"]["queries"] for result in results]
        for trace in _traces(results, styles):
            figure.add_trace(trace.update(showlegend=trace.name not in named), row=row, col=1)
            named.add(trace.name)
        ticks = {"tickvals": tokens, "ticktext": [f"{n:,}" for n in tokens], "minor": {"showgrid": False}}
        figure.update_xaxes(title="tokens N", type="log", row=row, col=1, **ticks)
    y_axis = {"title": "milliseconds", "type": "log", "dtick": 1, "exponentformat": "none"}
    return dress(figure, len(drawn), y_axis)


def _panels(results: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    def title(result: dict[str, Any]) -> str:
        shape = result["shape"]
        return f"{result['pass']}, [{shape['batch']}, {shape['heads']}, N, {shape['head_dim']}]"

    panels: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        panels.setdefault(title(result), []).append(result)
    return {name: sorted(panel, key=lambda result: result["shape"]["queries"]) for name, panel in panels.items()}


def _styles(document: dict[str, Any]) -> dict[str, str]:
    """A color for every label: by mechanism for ours and the plain formulas, grays for rivals."""
    colors = {each["name"]: COLORS[i % len(COLORS)] for i, each in enumerate(document["mechanisms"])}
    styles: dict[str, str] = {}
    rivals = 0
    for row in (row for result in document["results"] for row in result["rows"]):
        if row["label"] in styles:
            continue
        if row["role"] == "rival":
            styles[row["label"]] = GRAYS[rivals % len(GRAYS)]
            rivals += 1
        else:
            styles[row["label"]] = INK if row["role"] == "sdpa" else colors[row["mechanism"]]
    return styles


def _traces(results: list[dict[str, Any]], styles: dict[str, str]) -> list[Any]:
    from plotly.graph_objects import Scatter

    points: dict[str, list[tuple[int, float]]] = {}
    roles: dict[str, str] = {}
    for result in results:
        for row in result["rows"]:
            if row["ms"] is not None:
                points.setdefault(row["label"], []).append((result["shape"]["queries"], row["ms"]))
                roles[row["label"]] = row["role"]
    traces = [
        Scatter(
            x=[n for n, _ in line],
            y=[ms for _, ms in line],
            name=label,
            mode="lines+markers",
            line={**LINES[roles[label]], "color": styles[label]},
            marker={"symbol": MARKS[roles[label]], "size": 8, "color": styles[label]},
            hovertemplate="%{y:.3g} ms",
        )
        for label, line in points.items()
    ]
    floor = Scatter(
        x=[result["shape"]["queries"] for result in results],
        y=[result["floor_ms"] for result in results],
        name="floor: one copy",
        mode="lines+markers" if len(results) == 1 else "lines",
        line={"color": INK, "width": 1.5, "dash": "dash"},
        hovertemplate="%{y:.3g} ms",
    )
    return [*traces, floor]
