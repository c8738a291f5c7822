"""How a grid learns, as a picture: each twin a line, the mean over its seeds of the accuracy by epoch.

Of a few twins all are named; of many, those whose ends leave room: softmax, inline and the local residual first, then
the best. Others are gray.
"""

from collections.abc import Mapping
from html import escape

from twins_picture import STYLE, WIDTH

LEFT, RIGHT, TOP, BOTTOM, HEIGHT, LINE = 50, 290, 16, 30, 460, 15
FEW = 12
FIRST = ("softmax", "inline-local", "inline")
LINES = """.curve { fill: none; stroke: #d0d7de } .named { stroke: #0550ae; stroke-width: 1.6 }
.curve.softmax { stroke: #bc4c00; stroke-width: 1.6 }"""

Curves = Mapping[str, tuple[str, list[tuple[int, float]]]]  # by twin: its label, and epochs with percent


def curves_picture(curves: Curves) -> str:
    """SVG of curves that hold a point at least."""
    points = [point for _, curve in curves.values() for point in curve]
    percents, last = [percent for _, percent in points], max(epoch for epoch, _ in points)
    low, high = 10 * int(min(percents) // 10), 10 * int(-(-max(percents) // 10))

    def x(epoch: float) -> float:
        return LEFT + epoch / last * (WIDTH - LEFT - RIGHT)

    def y(percent: float) -> float:
        return TOP + (high - percent) / max(high - low, 1) * (HEIGHT - TOP - BOTTOM)

    marks = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(p):.1f}" y2="{y(p):.1f}"/>'
        f'<text class="quiet" x="{LEFT - 8}" y="{y(p) + 4:.1f}" text-anchor="end">{p} %</text>'
        for p in range(low, high + 1, 10)
    ]
    epochs = sorted({epoch for epoch, _ in points})
    marks += [
        f'<text class="quiet" x="{x(epoch):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{epoch}</text>'
        for epoch in epochs[:: -(-len(epochs) // 8)]
    ]
    ends = {id_: y(curve[-1][1]) for id_, (_, curve) in curves.items()}
    names = named(ends)
    for id_ in sorted(curves, key=lambda id_: id_ in names):
        line = " ".join(f"{x(epoch):.1f},{y(percent):.1f}" for epoch, percent in curves[id_][1])
        kind = "" if id_ not in names else " softmax" if id_ == "softmax" else " named"
        marks.append(f'<polyline class="curve{kind}" points="{line}"/>')
    for id_, place in names.items():
        marks.append(f'<line class="grid" x1="{x(last)}" x2="{x(last) + 20}" y1="{ends[id_]:.1f}" y2="{place:.1f}"/>')
        marks.append(f'<text x="{x(last) + 24}" y="{place + 4:.1f}">{escape(curves[id_][0])}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
    ground = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    return "\n".join([head, f"<style>{STYLE}\n{LINES}</style>", ground, *marks, "</svg>"]) + "\n"


def named(ends: Mapping[str, float]) -> dict[str, float]:
    """Which lines, by the height of their ends, and the height of each name: in that order, and apart."""
    chosen: list[str] = []
    for id_ in sorted(ends, key=lambda id_: (FIRST.index(id_) if id_ in FIRST else len(FIRST), ends[id_])):
        if len(ends) <= FEW or all(abs(ends[id_] - ends[other]) >= LINE for other in chosen):
            chosen.append(id_)
    places, above = {}, 0.0
    for id_ in sorted(chosen, key=lambda id_: ends[id_]):
        places[id_] = above = max(ends[id_], above + LINE)
    return places
