"""A grid as a picture: each twin a row, a dot for each seed, a bar at their mean, softmax a line through all rows."""

from collections.abc import Iterable
from html import escape
from math import ceil, floor

from softless.study.tables import Group, learned

ROW, LEFT, WIDTH, TOP = 22, 290, 900, 34
STYLE = """text { font: 13px system-ui, sans-serif; fill: #24292f } .quiet { fill: #6e7781 } .grid { stroke: #d0d7de }
.softmax { stroke: #bc4c00; stroke-dasharray: 4 3 } .mean { stroke: #0550ae; stroke-width: 3 }
.seed { fill: #54aeff }"""


def picture(groups: Iterable[Group]) -> str:
    """SVG: best first; a twin that did not learn is a number at the edge."""
    known = sorted((g for g in groups if g.mean is not None), key=lambda g: -(g.mean or 0))
    placed = learned(known)
    every = [a for g in placed for a in g.scores]
    low, high = floor(min(every, default=0)), ceil(max(every, default=100))
    step = next(s for s in (1, 2, 5, 10, 20) if (high - low) / s <= 10)
    low -= low % step
    height = TOP + ROW * len(known) + 12

    def x(accuracy: float) -> float:
        return LEFT + (accuracy - low) / max(high - low, 1) * (WIDTH - LEFT - 30)

    marks = [
        f'<line class="grid" x1="{x(a):.1f}" x2="{x(a):.1f}" y1="{TOP - 8}" y2="{height - 8}"/>'
        f'<text class="quiet" x="{x(a):.1f}" y="{TOP - 14}" text-anchor="middle">{a} %</text>'
        for a in range(low, high + 1, step)
    ]
    marks += [
        f'<line class="softmax" x1="{x(g.mean or 0):.1f}" x2="{x(g.mean or 0):.1f}" y1="{TOP - 8}" y2="{height - 8}"/>'
        for g in placed
        if g.id == "softmax"
    ]
    for row, g in enumerate(known):
        middle = TOP + ROW * row + ROW / 2
        marks.append(f'<text x="{LEFT - 14}" y="{middle + 4:.1f}" text-anchor="end">{escape(g.label)}</text>')
        if g not in placed:
            marks.append(f'<text class="quiet" x="{LEFT}" y="{middle + 4:.1f}">{g.mean:.1f} %: did not learn</text>')
            continue
        marks += [f'<circle class="seed" cx="{x(a):.1f}" cy="{middle:.1f}" r="4"/>' for a in g.scores]
        at = x(g.mean or 0)
        marks.append(f'<line class="mean" x1="{at:.1f}" x2="{at:.1f}" y1="{middle - 7:.1f}" y2="{middle + 7:.1f}"/>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    ground = f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", ground, *marks, "</svg>"]) + "\n"
