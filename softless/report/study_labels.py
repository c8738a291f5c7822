"""Names beside marks and lines, so that no reader has to look for a legend, and no name stands on another."""

from collections.abc import Mapping, Sequence
from math import log10
from typing import Any

LETTER, LINE = 7.2, 16.0  # pixels
WIDTH, HEIGHT = 780.0, 330.0  # of a plot on a wide screen; on a narrow one the page leaves names out
PLACES = ("middle right", "middle left", "top right", "bottom right", "top left", "bottom left")


def beside_marks(marks: Sequence[tuple[float, float, str]], x_top: float, y_span: Sequence[float]) -> list[str]:
    """Where to put the name of each (x, y, name): the first place where it meets no mark and no earlier name."""
    low, high = y_span
    centers = [(WIDTH * x / (x_top or 1), HEIGHT * (high - y) / ((high - low) or 1)) for x, y, _ in marks]
    taken = [(x - 8, y - 8, x + 8, y + 8) for x, y in centers]
    chosen = []
    for own, ((x, y), (_, _, name)) in enumerate(zip(centers, marks, strict=True)):
        others = taken[:own] + taken[own + 1 :]
        boxes = [_box(x, y, name, place) for place in PLACES]
        fits = [i for i, box in enumerate(boxes) if box[2] <= WIDTH and not any(_meet(box, each) for each in others)]
        best = fits[0] if fits else 0
        chosen.append(PLACES[best])
        taken.append(boxes[best])
    return chosen


def at_ends(ends: Mapping[str, tuple[float, float, str]], heights: Sequence[float]) -> list[dict[str, Any]]:
    """Annotations right of lines on logarithmic axes, name to (x, y, color), moved apart where they would touch."""
    low, high = log10(min(heights)), log10(max(heights))
    wanted = {name: HEIGHT * (log10(y) - low) / ((high - low) or 1) for name, (_, y, _) in ends.items()}
    placed: dict[str, float] = {}
    floor = float("-inf")
    for name in sorted(wanted, key=wanted.__getitem__):
        placed[name] = floor = max(wanted[name], floor + LINE)
    return [
        {
            "x": log10(x), "y": log10(y), "text": name, "showarrow": False, "xanchor": "left", "xshift": 8,
            "yshift": placed[name] - wanted[name], "font": {"color": color, "size": 12},
        }
        for name, (x, y, color) in ends.items()
    ]  # fmt: skip


def _box(x: float, y: float, name: str, place: str) -> tuple[float, float, float, float]:
    height, side = place.split()
    width = LETTER * len(name) + 10
    left = x if side == "right" else x - width
    top = y + {"middle": -LINE / 2, "top": -LINE - 6, "bottom": 6}[height]
    return left, top, left + width, top + LINE


def _meet(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
