"""The building blocks of the page: sections, figures, tables, and the look of a twin, the same in every figure.

The color shows the mechanism; dash and marker show the variant. Twins without the local residual take the even variants
and twins with it the odd ones, so a dashed line with diamonds is always a mechanism's first twin with the residual. A
curve that is not a twin (timings, random scores) but has the label of a twin is drawn as that twin.

Figures have the colors of the light theme; `DARK` maps each of them to the dark theme. Colors are those of Okabe and
Ito, which color-blind readers can tell apart. Softmax, the yardstick, is black.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from softless.report.page import COLORS, FAINT, GRAYS, INK, Trace
from softless.study.schema import Estimated, TwinResult

if TYPE_CHECKING:
    from plotly.graph_objects import Figure as Plot

POINTS = 10.0  # points of accuracy that an axis spans at least: less would magnify the differences between seeds
OWN = {"softmax": INK, "SDPA": INK, "inline": COLORS[0], "linear": COLORS[1], "threshold": COLORS[2]}
SPARE = COLORS[3:]
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MARKS = ("circle", "diamond", "square", "triangle-up", "x", "cross")
STROKES = ("none", "6 3", "2 2.5", "6 2.5 2 2.5", "10 3", "10 2.5 2 2.5")
GLYPHS = ("●", "◆", "■", "▲", "✕", "✚")
DARK = {
    INK: "#ecebe8",
    FAINT: "#30343a",
    GRAYS[0]: "#a9adb3",
    GRAYS[1]: "#858a91",
    GRAYS[2]: "#5d636b",
    COLORS[0]: "#5ab0e8",
    COLORS[1]: "#ff8f3f",
    COLORS[2]: "#3fd0a4",
    COLORS[3]: "#eba3cb",
    COLORS[4]: "#ffc24a",
    COLORS[5]: "#a5dcff",
}


@dataclass(frozen=True)
class Pick:
    """One choice of a figure's switch: traces with another `meta.pick` are hidden, and `layout` is applied."""

    value: str
    label: str
    layout: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Panel:
    """One plot. A screen reader reads `about`; hiding the twin `twin` hides the panel."""

    plot: "Plot"
    about: str
    title: str = ""
    twin: str = ""
    height: int | None = None  # default: the figure's


@dataclass(frozen=True)
class Figure:
    """`part` is the CSV file that holds the data; without that file, `within` is the place in report.json."""

    id: str
    title: str
    reading: str
    panels: tuple[Panel, ...]
    part: str
    height: int = 380
    picks: tuple[Pick, ...] = ()
    within: str = ""  # default: the same as `part`
    columns: int = 1  # columns of panels, on a wide screen


@dataclass(frozen=True)
class Table:
    """Columns and rows as the page shows them; `notes` explain dashes and where numbers come from."""

    title: str
    reading: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    part: str = ""  # the CSV file that holds the data, if there is one
    within: str = ""


@dataclass(frozen=True)
class Section:
    """Figures and tables on one question; if there is nothing to draw, `missing` says why."""

    id: str
    title: str
    short: str
    says: str
    figures: tuple[Figure, ...] = ()
    missing: str = ""
    tables: tuple[Table, ...] = ()
    table_first: bool = False
    remark: str = ""  # a sentence below the figures


def means(estimates: Iterable[Estimated | None], factor: float = 1) -> list[float | None]:
    """Return the means, None where there is none."""
    values = [interval_ends(estimated)[0] for estimated in estimates]
    return [None if value is None else factor * value for value in values]


def interval_ends(estimated: Estimated | None) -> tuple[float | None, float | None, float | None]:
    """Return mean, low and high; None where a number is not known."""
    return (estimated.get("mean"), estimated.get("low"), estimated.get("high")) if estimated else (None, None, None)


def whiskers(estimates: Sequence[Estimated | None], factor: float = 1) -> dict[str, Any]:
    """Return the 95% intervals as error bars; none where an interval is not known."""
    bars: dict[str, list[float]] = {"array": [], "arrayminus": []}
    for estimated in estimates:
        mean, low, high = interval_ends(estimated)
        if mean is None or low is None or high is None:
            mean = low = high = 0.0
        bars["array"].append(factor * (high - mean))
        bars["arrayminus"].append(factor * (mean - low))
    return {"type": "data", "symmetric": False, **bars, "thickness": 1.2, "width": 3}


def span(values: Iterable[float | None], *, least: float = 0.0, most: float | None = None) -> list[float]:
    """Return the ends of an axis that covers all values, at least `least` wide and not above `most`."""
    ends = [value for value in values if value is not None]
    low, high = min(ends, default=0.0), max(ends, default=1.0)
    room = 0.05 * (high - low) or 1.0
    low, high = low - room, high + room
    lacking = max(0.0, least - (high - low)) / 2
    low, high = low - lacking, high + lacking
    down = 0.0 if most is None else max(0.0, high - most)
    return [low - down, high - down]


def percent_axis(estimates: Iterable[Estimated | None]) -> dict[str, Any]:
    """Return an axis of accuracies in percent that spans at least POINTS."""
    ends = [end for estimated in estimates for end in interval_ends(estimated)]
    return {"title": "accuracy, %", "range": span([end and 100 * end for end in ends], least=POINTS, most=101)}


def measured_on(count: float | None, what: str = "test images") -> str:
    """Return the last sentence of a caption; nothing if the count is not known."""
    return "" if count is None else f" Measured on {count:,.0f} {what}."


def layer_names(names: Sequence[str]) -> dict[str, str]:
    """Number layers from 1, in the order given: `blocks.0.attn` is 1."""
    return {name: str(index) for index, name in enumerate(dict.fromkeys(names), start=1)}


def has_numbers(values: Iterable[float | None]) -> bool:
    return any(value is not None for value in values)


@dataclass(frozen=True)
class Look:
    """How a twin is drawn."""

    id: str
    label: str
    mechanism: str
    color: str
    variant: int  # among the twins of its mechanism: even without the local residual, odd with it

    @property
    def dash(self) -> str:
        return DASHES[self.variant % len(DASHES)]

    @property
    def strokes(self) -> str:
        return STROKES[self.variant % len(STROKES)]

    @property
    def mark(self) -> str:
        return MARKS[self._mark]

    @property
    def glyph(self) -> str:
        return GLYPHS[self._mark]

    @property
    def _mark(self) -> int:
        """Shift the marker after each round of dashes, so that 36 twins of one mechanism look different."""
        return (self.variant + self.variant // len(DASHES)) % len(MARKS)

    def trace(self, **meta: Any) -> Trace:
        """Return what every trace of this twin shares; the legend of the page finds traces by `meta.twin`."""
        return {
            "name": self.label, "showlegend": False, "line": {"color": self.color, "dash": self.dash, "width": 2.2},
            "marker": {"color": self.color, "symbol": self.mark, "size": 9}, "meta": {"twin": self.id, **meta},
        }  # fmt: skip


def mechanism_of(label: str) -> str:
    """Return the first word of a label such as `linear relu` or `inline, identity`."""
    return label.replace(",", " ").partition(" ")[0]


def mechanism_color(label: str, others: Sequence[str] = ()) -> str:
    """Return the color of a label's mechanism; the first few of `others` have colors, too."""
    name = mechanism_of(label)
    if name in OWN:
        return OWN[name]
    place = others.index(name) if name in others else len(SPARE)
    return SPARE[place] if place < len(SPARE) else GRAYS[1]


def looks(twins: Sequence[TwinResult]) -> dict[str, Look]:
    """Return the look of each twin by id, in the order of the study."""
    others = [name for name in dict.fromkeys(twin["mechanism"] for twin in twins) if name not in OWN]
    seen: Counter[tuple[str, bool]] = Counter()
    by_id = {}
    for twin in twins:
        mechanism, local = twin["mechanism"], bool(twin.get("local"))
        variant = 2 * seen[mechanism, local] + local
        by_id[twin["id"]] = Look(twin["id"], twin["label"], mechanism, mechanism_color(mechanism, others), variant)
        seen[mechanism, local] += 1
    return by_id


def look_of(label: str, looks: Mapping[str, Look]) -> Look | None:
    """Return the look of the twin with this label; None if no twin has it."""
    return next((look for look in looks.values() if look.label == label), None)
