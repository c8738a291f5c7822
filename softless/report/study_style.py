"""How a twin looks, in every figure of the page: the color says its mechanism, dash and mark which of its variants.

Figures are drawn in the colors of paper; `DARK` is what each of them becomes on a dark screen. Colors are those of
Okabe and Ito, told apart by every kind of eye; softmax, the yardstick, is ink.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from softless.report.page import COLORS, FAINT, GRAYS, INK

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
class Look:
    """A twin as it is drawn."""

    id: str
    label: str
    mechanism: str
    color: str
    variant: int  # among the twins of its mechanism

    @property
    def dash(self) -> str:
        return DASHES[self.variant % len(DASHES)]

    @property
    def strokes(self) -> str:
        return STROKES[self.variant % len(STROKES)]

    @property
    def mark(self) -> str:
        return MARKS[self.variant % len(MARKS)]

    @property
    def glyph(self) -> str:
        return GLYPHS[self.variant % len(GLYPHS)]

    def trace(self, **also: Any) -> dict[str, Any]:
        """What every trace of this twin shares; `meta.twin` is how the page's one legend finds it."""
        return {
            "name": self.label,
            "showlegend": False,
            "line": {"color": self.color, "dash": self.dash, "width": 2.2},
            "marker": {"color": self.color, "symbol": self.mark, "size": 9},
            "meta": {"twin": self.id, **also},
        }


def mechanism_of(label: str) -> str:
    """The first word of a label such as `linear relu` or `inline, identity`."""
    return label.replace(",", " ").partition(" ")[0]


def mechanism_color(label: str, others: Sequence[str] = ()) -> str:
    """The color of a label's mechanism; of `others` the first few have one too."""
    name = mechanism_of(label)
    if name in OWN:
        return OWN[name]
    place = others.index(name) if name in others else len(SPARE)
    return SPARE[place] if place < len(SPARE) else GRAYS[1]


def looks(twins: Sequence[dict[str, Any]]) -> dict[str, Look]:
    """By id, in the order of the study."""
    others = [name for name in dict.fromkeys(twin["mechanism"] for twin in twins) if name not in OWN]
    seen: Counter[str] = Counter()
    found = {}
    for twin in twins:
        color = mechanism_color(twin["mechanism"], others)
        found[twin["id"]] = Look(twin["id"], twin["label"], twin["mechanism"], color, seen[twin["mechanism"]])
        seen[twin["mechanism"]] += 1
    return found
