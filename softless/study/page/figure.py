"""What the figures and tables of the page share: a title, a sentence on how to read them, and where their data is."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from softless.report.page import FAINT, FONT, GRAYS, INK

if TYPE_CHECKING:
    from plotly.graph_objects import Figure as Plot

Estimate = dict[str, Any] | None
POINTS = 10.0  # of accuracy, that an axis spans at least: less would magnify what seeds alone do


@dataclass(frozen=True)
class Pick:
    """One choice of a figure's switch: traces of another `meta.pick` hide, and the layout changes so."""

    value: str
    label: str
    layout: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Panel:
    """One plot. `about` is what a screen reader says in its place; `twin` hides it together with that twin."""

    plot: "Plot"
    about: str
    title: str = ""
    twin: str = ""
    height: int | None = None  # where it is not the figure's


@dataclass(frozen=True)
class Figure:
    """`part` names the file that holds the data; `within` where it is in report.json, for want of that file."""

    id: str
    title: str
    reading: str
    panels: tuple[Panel, ...]
    part: str
    height: int = 380
    picks: tuple[Pick, ...] = ()
    within: str = ""  # the same as `part`, unless it says otherwise
    columns: int = 1  # of panels, on a wide screen


@dataclass(frozen=True)
class Table:
    """Columns and rows as the page shows them; `notes` says what a dash means and where the numbers come from."""

    title: str
    reading: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    part: str = ""  # the file that holds the data, if it has one of its own
    within: str = ""


@dataclass(frozen=True)
class Section:
    """Figures and tables around one question; where there is nothing to draw, `missing` says why."""

    id: str
    title: str
    short: str
    says: str
    figures: tuple[Figure, ...] = ()
    missing: str = ""
    tables: tuple[Table, ...] = ()
    table_first: bool = False
    remark: str = ""  # below the figures, for what a sentence says better than they would


def plot(traces: Sequence[dict[str, Any]], *, x: dict[str, Any], y: dict[str, Any], **layout: Any) -> "Plot":
    """Traces on quiet axes: no frame, a faint grid, the page's own background.

    A trace with `meta.label` is named in the figure; static/labels.js finds a free place for the name.
    """
    from plotly.graph_objects import Figure

    return Figure(
        data=[{"type": "scatter", **trace} for trace in traces],
        layout={
            "template": "none",
            "font": {"family": FONT, "size": 13, "color": INK},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "margin": {"l": 56, "r": 16, "t": 16, "b": 48},
            "hovermode": "closest",
            "hoverlabel": {"align": "left", "font": {"family": FONT, "size": 13}},
            "showlegend": False,
            "xaxis": _axis({"showgrid": False, "zeroline": False} | x),
            "yaxis": _axis(y),
            **layout,
        },
    )


def _axis(given: dict[str, Any]) -> dict[str, Any]:
    return {
        "gridcolor": FAINT,
        "linecolor": GRAYS[1],
        "tickcolor": GRAYS[1],
        "zerolinecolor": GRAYS[2],
        "ticks": "outside",
        "ticklen": 4,
        "tickfont": {"color": GRAYS[0], "size": 12},
        "automargin": True,
        "exponentformat": "none",
        "fixedrange": True,
        **given,
        "title": {"text": given.get("title", ""), "font": {"color": GRAYS[0], "size": 13}, "standoff": 10},
    }


def means(estimates: Iterable[Estimate], factor: float = 1) -> list[float | None]:
    """The values, null where there is none."""
    return [None if not each or each.get("mean") is None else factor * each["mean"] for each in estimates]


def whiskers(estimates: Sequence[Estimate], factor: float = 1) -> dict[str, Any]:
    """The 95% intervals as error bars; none where an interval is not known."""
    known = [
        each if each and None not in (each["mean"], each.get("low"), each.get("high")) else None for each in estimates
    ]
    return {
        "type": "data",
        "symmetric": False,
        "array": [factor * (each["high"] - each["mean"]) if each else 0 for each in known],
        "arrayminus": [factor * (each["mean"] - each["low"]) if each else 0 for each in known],
        "thickness": 1.2,
        "width": 3,
    }


def span(
    estimates: Iterable[Estimate], factor: float = 1, *, least: float = 0.0, most: float | None = None
) -> list[float]:
    """From the lowest to the highest end of the intervals with a little room, `least` wide and not above `most`."""
    known = [each for each in estimates if each]
    ends = [factor * each[end] for each in known for end in ("mean", "low", "high") if each.get(end) is not None]
    low, high = min(ends, default=0.0), max(ends, default=1.0)
    room = 0.05 * (high - low) or 1.0
    low, high = low - room, high + room
    lacking = max(0.0, least - (high - low)) / 2
    low, high = low - lacking, high + lacking
    down = 0.0 if most is None else max(0.0, high - most)
    return [low - down, high - down]


def percent_axis(estimates: Iterable[Estimate]) -> dict[str, Any]:
    """Accuracies in percent, on an axis that spans at least POINTS."""
    return {"title": "accuracy, %", "range": span(estimates, 100, least=POINTS, most=101)}


def measured_on(count: float | None, what: str = "test images") -> str:
    """The last sentence of a caption; nothing where the count is not known."""
    return "" if count is None else f" Measured on {count:,.0f} {what}."


def layer_names(names: Sequence[str]) -> dict[str, str]:
    """Layers numbered as they come: `blocks.0.attn` is 1."""
    return {name: str(index) for index, name in enumerate(dict.fromkeys(names), start=1)}


def has_numbers(values: Iterable[float | None]) -> bool:
    return any(value is not None for value in values)
