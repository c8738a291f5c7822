"""The frame, colors and panels that all HTML pages share. A page is one file and fetches nothing."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from softless.errors import MissingExtraError

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # safe for color-blind readers
INK, GRAYS, FAINT = "#1a1a1a", ("#6b6b6b", "#9a9a9a", "#bdbdbd"), "#e8e8e8"
Trace = dict[str, Any]  # as plotly takes it
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif"

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
h2 {{ font-size: 19px; margin: 36px 0 6px; }}
ul {{ color: #555; font-size: 14px; line-height: 1.6; padding-left: 20px; }}
code {{ background: #f4f4f4; padding: 2px 6px; border-radius: 4px; font-size: 13px; }}
</style>
</head>
<body>
<h1>{title}</h1>
{about}
{figure}
{missing}
<p><code>{command}</code></p>
<p>{date}, softless {version}</p>
</body>
</html>
"""


def require(*packages: str, by: str) -> None:
    """Raise an error that says which package is missing and how to install it."""
    from importlib.util import find_spec

    for name in packages:
        if find_spec(name) is None:
            raise MissingExtraError(f"{by} needs {name}, which is not installed: pip install 'softless[report]'")


def write(title: str, about: Sequence[str], figure: "Figure", document: Mapping[str, Any]) -> str:
    """Return one page: title, lines about it, figure, rows that were not timed, and the command that repeats it."""
    html = figure.to_html(full_html=False, include_plotlyjs=True, config={"displayModeBar": False, "responsive": True})
    return _page(title, about, html, _missing(document), document)


def plot(traces: Sequence[Trace], *, x: dict[str, Any], y: dict[str, Any], **layout: Any) -> "Figure":
    """Draw traces on quiet axes: no frame, a faint grid, the background of the page.

    A trace with `meta.label` is named in the figure; static/labels.js finds a free place for the name.
    """
    from plotly.graph_objects import Figure

    return Figure(
        data=[{"type": "scatter", **trace} for trace in traces],
        layout={
            "template": "none", "font": {"family": FONT, "size": 13, "color": INK}, "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)", "margin": {"l": 56, "r": 16, "t": 16, "b": 48}, "hovermode": "closest",
            "hoverlabel": {"align": "left", "font": {"family": FONT, "size": 13}}, "showlegend": False,
            "xaxis": _axis({"showgrid": False, "zeroline": False} | x), "yaxis": _axis(y), **layout,
        },
    )  # fmt: skip


def _axis(options: dict[str, Any]) -> dict[str, Any]:
    return {
        "gridcolor": FAINT, "linecolor": GRAYS[1], "tickcolor": GRAYS[1], "zerolinecolor": GRAYS[2], "ticks": "outside",
        "ticklen": 4, "tickfont": {"color": GRAYS[0], "size": 12}, "automargin": True, "exponentformat": "none",
        "fixedrange": True, **options,
        "title": {"text": options.get("title", ""), "font": {"color": GRAYS[0], "size": 13}, "standoff": 10},
    }  # fmt: skip


class Chapter(NamedTuple):
    """One figure of a page, or a part that is HTML already, with its heading and a sentence on how to read it."""

    heading: str
    reading: str
    figure: "Figure | str"


def write_chapters(title: str, about: Sequence[str], chapters: Sequence[Chapter], document: Mapping[str, Any]) -> str:
    """Return one page: title, lines about it, figures one below the other, and the command that repeats it."""
    sections = [
        f"<h2>{escape(chapter.heading)}</h2><p>{escape(chapter.reading)}</p>"
        + (
            chapter.figure
            if isinstance(chapter.figure, str)
            else chapter.figure.to_html(
                full_html=False, include_plotlyjs=not at, config={"displayModeBar": False, "responsive": True}
            )
        )
        for at, chapter in enumerate(chapters)
    ]
    return _page(title, about, "\n".join(sections), "", document)


def _page(title: str, about: Sequence[str], figure: str, missing: str, document: Mapping[str, Any]) -> str:
    return PAGE.format(
        title=escape(title),
        about="\n".join(f"<p>{escape(line)}</p>" for line in about),
        figure=figure,
        missing=missing,
        command=escape(document["command"]),
        date=escape(document["date"]),
        version=escape(document["versions"]["softless"]),
        font=FONT,
        ink=INK,
    )


def _missing(document: Mapping[str, Any]) -> str:
    rows = [row for result in document["results"] for row in result["rows"] if row["skipped"]]
    lines = dict.fromkeys(f"<li>not timed: {escape(row['label'])}: {escape(row['skipped'])}</li>" for row in rows)
    return f"<ul>{''.join(lines)}</ul>" if lines else ""
