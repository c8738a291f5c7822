"""The look of a twin, the same in every figure of the page.

The color says the mechanism; dash and marker say the variant. Twins without the local residual take the even variants
and twins with it the odd ones, so the dashed line with diamonds is always a mechanism's first twin with the residual.
A curve that is not a twin (timings, random scores) but has a twin's label is drawn as that twin.

Figures are drawn in the colors of paper; `DARK` is what each of them becomes on a dark screen. Colors are those of
Okabe and Ito, which color-blind readers can tell apart; softmax, the yardstick, is ink.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
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
        """Shifted by one after each round of dashes: 36 twins of one mechanism still look different."""
        return (self.variant + self.variant // len(DASHES)) % len(MARKS)

    def trace(self, **also: Any) -> dict[str, Any]:
        """What every trace of this twin shares; the page's legend finds it by `meta.twin`."""
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
    seen: Counter[tuple[str, bool]] = Counter()
    found = {}
    for twin in twins:
        mechanism, local = twin["mechanism"], bool(twin.get("local"))
        variant = 2 * seen[mechanism, local] + local
        found[twin["id"]] = Look(twin["id"], twin["label"], mechanism, mechanism_color(mechanism, others), variant)
        seen[mechanism, local] += 1
    return found


def look_of(label: str, looks: Mapping[str, Look]) -> Look | None:
    """The look of the twin with this label; None where no twin has it."""
    return next((look for look in looks.values() if look.label == label), None)
