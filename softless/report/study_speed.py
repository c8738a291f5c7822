"""What dropping the softmax buys: time and memory against N, and the N from which each mechanism is faster (Fig. 5)."""

from collections.abc import Mapping
from itertools import pairwise
from math import log
from typing import Any

from softless.report.page import GRAYS
from softless.report.study_figure import Figure, Panel, Pick, Section, plot
from softless.report.study_labels import at_ends
from softless.report.study_style import Look, mechanism_color, mechanism_of

REFERENCE = "SDPA"
WHAT = {"seconds": ("time", "milliseconds a call", 1e3), "peak_bytes": ("memory", "peak memory of a call, MB", 1e-6)}


def section(document: dict[str, Any], looks: Mapping[str, Look]) -> Section:
    """One figure with a switch."""
    found = document.get("speed") or {}
    figure = curves(found, looks) if found.get("laps") else None
    machine = document["machine"]
    heads = f"{found['heads']:g} heads of {found['head_dim']:g}, {found['dtype']}, " if found.get("heads") else ""
    says = f"Attention alone, without the rest of a model: {heads}on {machine['processor']} ({machine['device']})."
    missing = "" if figure else "No timings: this study measured no speed."
    return Section("speed", "What dropping it buys", "Speed", says, (figure,) if figure else (), missing)


def curves(found: dict[str, Any], looks: Mapping[str, Look]) -> Figure | None:
    """The twins' mechanisms in their colors, all others in gray; a ring where a line crosses SDPA's for good."""
    laps = [lap for lap in found["laps"] if lap["head_dim"] == found["head_dim"] and lap["tokens"] > 0]
    ours = {look.mechanism for look in looks.values()} | {REFERENCE, "softmax"}
    labels = sorted(dict.fromkeys(lap["label"] for lap in laps), key=lambda label: _named(label, ours))
    known = [key for key in WHAT if any((lap.get(key) or 0) > 0 for lap in laps)]
    if not known:
        return None
    lines = {key: [line for label in labels if (line := _line(label, key, laps, ours))] for key in known}
    names = {key: _names(lines[key], ours) for key in known}
    traces = [line | {"visible": key == known[0]} for key in known for line in lines[key]]
    lengths = sorted({lap["tokens"] for lap in laps})
    x = {"title": "tokens N", "type": "log", "tickvals": lengths, "ticktext": [f"{n:,}" for n in lengths]}
    y = {"title": WHAT[known[0]][1], "type": "log", "dtick": 1, "tickformat": ",~g"}
    picks = tuple(Pick(key, WHAT[key][0], {"yaxis.title": WHAT[key][1], "annotations": names[key]}) for key in known)
    room = {"l": 56, "r": 110, "t": 16, "b": 48}
    drawn = plot([*traces, *_crossings(found, laps, ours)], x=x, y=y, annotations=names[known[0]], margin=room)
    return Figure(
        "speed-curves",
        "Time and memory against N",
        "Both axes are logarithmic, so a line twice as steep grows with the square of N; a ring marks the N from which "
        "a mechanism stays faster than PyTorch's own softmax attention (SDPA), and gray lines are other mechanisms.",
        (Panel(drawn, "Time and memory of attention against tokens"),),
        "speed",
        height=440,
        picks=picks if len(picks) > 1 else (),
    )


def _line(label: str, key: str, laps: list[dict[str, Any]], ours: set[str]) -> dict[str, Any] | None:
    _, unit, factor = WHAT[key]
    points = sorted(
        (lap["tokens"], factor * lap[key]) for lap in laps if lap["label"] == label and (lap.get(key) or 0) > 0
    )
    if not points:
        return None
    drawn = _named(label, ours)
    color = mechanism_color(label) if drawn else GRAYS[2]
    return {
        "x": [n for n, _ in points],
        "y": [value for _, value in points],
        "name": label,
        "mode": "lines+markers" if drawn else "lines",
        "line": {"color": color, "width": 2.4 if drawn else 1, "dash": "dot" if label == REFERENCE else "solid"},
        "marker": {"size": 6, "color": color},
        "meta": {"pick": key},
        "hovertemplate": f"<b>{label}</b>, %{{x:,}} tokens<br>%{{y:.3g}} {unit}<extra></extra>",
    }


def _names(lines: list[dict[str, Any]], ours: set[str]) -> list[dict[str, Any]]:
    ends = {line["name"]: (line["x"][-1], line["y"][-1], line["line"]["color"]) for line in lines}
    heights = [y for line in lines for y in line["y"]]
    return at_ends({name: end for name, end in ends.items() if _named(name, ours)}, heights) if heights else []


def _named(label: str, ours: set[str]) -> bool:
    return mechanism_of(label) in ours


def _crossings(found: dict[str, Any], laps: list[dict[str, Any]], ours: set[str]) -> list[dict[str, Any]]:
    """Rings on the lines where they cross SDPA's, which is where both have the same time."""
    rings: list[dict[str, Any]] = []
    for trend in found.get("trends") or []:
        label, n = trend["label"], trend.get("crossover")
        if (
            not n
            or trend["head_dim"] != found["head_dim"]
            or not _named(label, ours)
            or label in (REFERENCE, "softmax")
        ):
            continue
        time = _between(
            n, sorted((lap["tokens"], lap["seconds"]) for lap in laps if lap["label"] == label and lap["seconds"])
        )
        if time is not None:
            color = mechanism_color(label)
            rings.append(
                {
                    "x": [n],
                    "y": [1e3 * time],
                    "mode": "markers+text",
                    "text": [f"{'N at most' if trend.get('faster_everywhere') else 'N ='} {n:,.0f}"],
                    "textposition": "top right" if len(rings) % 2 else "bottom right",
                    "textfont": {"color": color, "size": 12},
                    "marker": {"symbol": "circle-open", "size": 15, "color": color, "line": {"width": 2}},
                    "meta": {"pick": "seconds"},
                    "hovertemplate": f"{label} is faster than SDPA from %{{x:,}} tokens<extra></extra>",
                }
            )
    return rings


def _between(n: float, points: list[tuple[float, float]]) -> float | None:
    """The time at n, along the straight line that a log-log plot draws; at the ends, the end."""
    for (a, start), (b, end) in pairwise(points):
        if a <= n <= b and a < b:
            share = log(n / a) / log(b / a)
            return start ** (1 - share) * end**share
    return points[0][1] if points and n <= points[0][0] else None
