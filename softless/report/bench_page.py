"""The page of `softless bench`: time against tokens, log-log, one line a contestant and the floor dashed below them.

Ours are the thick lines, each in its own color; the plain formulas share the color of the mechanism they compute,
dotted as typed and dash-dotted compiled; SDPA is black, other libraries are gray.
"""

from html import escape
from typing import TYPE_CHECKING, Any

from softless.errors import MissingExtraError

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # told apart by every kind of eye
INK, GRAYS, FAINT = "#1a1a1a", ("#6b6b6b", "#9a9a9a", "#bdbdbd"), "#e8e8e8"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif"
LINES: dict[str, dict[str, Any]] = {
    "ours": {"width": 3.5},
    "sdpa": {"width": 2.5},
    "plain": {"width": 1.8, "dash": "dot"},
    "compiled": {"width": 1.8, "dash": "dashdot"},
    "rival": {"width": 1.8},
}
MARKS = {"ours": "circle", "sdpa": "square", "plain": "circle-open", "compiled": "diamond-open", "rival": "triangle-up"}
PANEL_HEIGHT = 520

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font-family: {font}; color: {ink}; max-width: 1080px; margin: 40px auto; padding: 0 24px; }}
h1 {{ font-size: 26px; margin: 0 0 6px; }}
p {{ margin: 0 0 4px; color: #555; line-height: 1.5; }}
ul {{ color: #555; font-size: 14px; line-height: 1.6; padding-left: 20px; }}
code {{ background: #f4f4f4; padding: 2px 6px; border-radius: 4px; font-size: 13px; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{where}</p>
<p>Dashed: the time this machine takes to copy the bytes of q, k, v and o ({rate:,.0f} GB/s).</p>
{figure}
{missing}
<p><code>{command}</code></p>
<p>{date}, softless {version}</p>
</body>
</html>
"""


def require_plotly() -> None:
    """Say what is missing before anything is measured."""
    from importlib.util import find_spec

    if find_spec("plotly") is None:
        raise MissingExtraError("--plot needs plotly, which is not installed: pip install 'softless[report]'")


def page(document: dict[str, Any]) -> str:
    """A document of `softless bench` as one HTML file that fetches nothing."""
    require_plotly()
    names = ", ".join(each["name"] for each in document["mechanisms"])
    machine = document["machine"]["processor"]
    causal = "causal, " if document["causal"] else ""
    figure = draw(document).to_html(
        full_html=False, include_plotlyjs=True, config={"displayModeBar": False, "responsive": True}
    )
    return PAGE.format(
        title=escape(f"Time against tokens: {names}"),
        where=escape(f"{machine}, {causal}{document['dtype']}, torch {document['versions']['torch']}"),
        rate=document["copy_bytes_per_second"] / 1e9,
        figure=figure,
        missing=_missing(document),
        command=escape(document["command"]),
        date=escape(document["date"]),
        version=escape(document["versions"]["softless"]),
        font=FONT,
        ink=INK,
    )


def draw(document: dict[str, Any]) -> "Figure":
    """One panel for each batch, heads, width and pass; in each, tokens to the right and milliseconds up."""
    from plotly.subplots import make_subplots

    panels = _panels(document["results"])
    figure = make_subplots(
        rows=len(panels),
        cols=1,
        subplot_titles=list(panels),
        vertical_spacing=0.3 / len(panels) if len(panels) > 1 else 0,
    )
    styles, named = _styles(document), set()
    for row, results in enumerate(panels.values(), start=1):
        tokens = [result["shape"]["queries"] for result in results]
        for trace in _traces(results, styles):
            figure.add_trace(trace.update(showlegend=trace.name not in named), row=row, col=1)
            named.add(trace.name)
        ticks = {"tickvals": tokens, "ticktext": [f"{n:,}" for n in tokens], "minor": {"showgrid": False}}
        figure.update_xaxes(title="tokens N", type="log", row=row, col=1, **ticks)
    grid = {"gridcolor": FAINT, "linecolor": INK, "ticks": "outside", "tickcolor": INK, "zeroline": False}
    figure.update_xaxes(**grid)
    figure.update_yaxes(title="milliseconds", type="log", dtick=1, exponentformat="none", **grid)
    figure.update_layout(
        height=PANEL_HEIGHT * len(panels),
        plot_bgcolor="white",
        paper_bgcolor="white",
        font={"family": FONT, "size": 14, "color": INK},
        hovermode="x unified",
        legend={"traceorder": "normal", "font": {"size": 13}, "itemsizing": "constant"},
        margin={"l": 70, "r": 20, "t": 60, "b": 60},
    )
    return figure


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


def _missing(document: dict[str, Any]) -> str:
    rows = [row for result in document["results"] for row in result["rows"] if row["skipped"]]
    lines = dict.fromkeys(f"<li>not timed: {escape(row['label'])}: {escape(row['skipped'])}</li>" for row in rows)
    return f"<ul>{''.join(lines)}</ul>" if lines else ""
