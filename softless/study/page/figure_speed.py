"""Speed without softmax: the twins at their own number of tokens, then time and memory against N (Fig. 5)."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import log, log10
from typing import Literal

from softless.report.page import GRAYS, Trace, plot
from softless.report.units import listed
from softless.study.page import figure as draw
from softless.study.page.figure import Figure, Look, Panel, Pick, Section, Table
from softless.study.page.text import MISSING, short
from softless.study.schema import LapResult, OwnSpeed, SpeedPart, StudyDocument, TrendResult

REFERENCE = "SDPA"
ROOM = 0.08  # powers of ten beside the first and the last length
Key = Literal["seconds", "peak_bytes"]
MEASURES: dict[Key, tuple[str, str, float]] = {
    "seconds": ("time", "milliseconds per call", 1e3),
    "peak_bytes": ("memory", "peak memory of a call, MB", 1e-6),
}


def section(document: StudyDocument, looks: Mapping[str, Look]) -> Section:
    """Return the section on speed: a table of the twins, then a figure of the mechanisms."""
    speed, machine = document.get("speed"), document["machine"]
    figure = curves(speed, looks) if speed and speed.get("laps") else None
    table, heads = own(speed.get("own")) if speed else None, ""
    if speed and speed.get("heads"):
        heads = f", with {speed['heads']:g} heads of {speed['head_dim']:g} and {speed['dtype']}"
    first = "The table times whole twins at this study's own number of tokens. " if table else ""
    then = f"The figure times attention alone on random inputs of growing length{heads}. " if figure else ""
    return Section(
        "speed", "How fast it is without softmax", "Speed",
        f"{first}{then}All times are from {machine['processor']} ({machine['device']}).", (figure,) if figure else (),
        "" if figure or table else "This study measured no speed.", tables=(table,) if table else (),
        table_first=True,
    )  # fmt: skip


def own(speed: OwnSpeed | None) -> Table | None:
    """Return the table of training and inference times, and their ratio to the softmax twin of the same kind."""
    if not speed or not speed["rows"]:
        return None
    rows = []
    for row in speed["rows"]:
        times = row.get("training_seconds"), row.get("inference_seconds")
        ratios = row.get("training_ratio"), row.get("inference_ratio")
        milliseconds = (short(None if time is None else 1e3 * time, ".3f") for time in times)
        rows.append((row["label"], *milliseconds, *(short(ratio, ".2f", "x") for ratio in ratios)))
    columns = ("twin", "training, ms per image", "inference, ms per image", "training speed", "inference speed")
    note = (
        "Speed is the softmax twin's time divided by the twin's own: above 1x, the twin is faster than softmax. A twin "
        "with the local residual is compared with softmax + local."
    )
    gap = f"{MISSING}: not measured, or no softmax twin of the same kind to compare with."
    together = max(row.get("together") or 1 for row in speed["rows"])
    beside = f"{together:g} runs shared the device while training; inference was timed one twin at a time."
    notes = (note, *([beside] if together > 1 else []), *([gap] if any(MISSING in row for row in rows) else []))
    title = f"Speed at this study's {speed['tokens']:,.0f} tokens"
    return Table(
        title, "Measured on whole twins, on this machine.", columns, tuple(rows), notes, "own_speed", "speed.own"
    )


def curves(speed: SpeedPart, looks: Mapping[str, Look]) -> Figure | None:
    """Draw the mechanisms of the twins in color and all others in gray; a ring marks a crossing with SDPA's line."""
    laps = [lap for lap in speed["laps"] if lap["head_dim"] == speed["head_dim"] and lap["tokens"] > 0]
    own_tokens = own_speed["tokens"] if (own_speed := speed.get("own")) else None
    ours = {look.mechanism for look in looks.values()} | {REFERENCE, "softmax"}
    labels = sorted(dict.fromkeys(lap["label"] for lap in laps), key=lambda label: _named(label, ours))
    known = [key for key in MEASURES if any((lap.get(key) or 0) > 0 for lap in laps)]
    if not known:
        return None
    traces: list[Trace] = []
    for key in known:
        lines = [line for label in labels if (line := _line(label, key, laps, ours, looks))]
        here = _here(own_tokens, key, [y for line in lines for y in line["y"]])
        traces += [line | {"visible": key == known[0]} for line in [*lines, *here]]
    lengths = sorted({lap["tokens"] for lap in laps})
    ends = sorted([*lengths, own_tokens or lengths[0]])
    x = {
        "title": "tokens N (1k is 1,024)",
        "type": "log",
        "tickvals": lengths,
        "ticktext": [f"{n / 1024:g}k" if n >= 1024 and n % 1024 == 0 else f"{n:g}" for n in lengths],
        "range": [log10(max(ends[0], 1)) - ROOM, log10(ends[-1]) + ROOM],
    }
    y = {"title": MEASURES[known[0]][1], "type": "log", "dtick": 1, "tickformat": ",~g"}
    picks = tuple(Pick(key, MEASURES[key][0], {"yaxis.title": MEASURES[key][1]}) for key in known)
    room = {"l": 56, "r": 110, "t": 16, "b": 48}
    figure = plot([*traces, *_crossings(speed, laps, ours, looks)], x=x, y=y, margin=room)
    marked = " The dotted vertical line is this study's own N." if own_tokens else ""
    always = [trend["label"] for trend in _faster(speed, ours) if trend.get("faster_everywhere")]
    if always:
        verb = "is" if len(always) == 1 else "are"
        marked += (
            f" No ring: {listed(always)} {verb} faster than SDPA at every length timed, from {lengths[0]:,} tokens."
        )
    return Figure(
        "speed-curves", "Time and memory for longer inputs",
        "Both axes are logarithmic, so a steeper line is a cost that grows faster with the number of tokens N. A ring "
        "marks the crossover, the N from which a mechanism stays faster than PyTorch's own softmax attention (SDPA). "
        f"Thin gray lines are mechanisms that no twin runs.{marked}",
        (Panel(figure, "Time and memory of attention against tokens"),), "speed", height=440,
        picks=picks if len(picks) > 1 else (),
    )  # fmt: skip


def _line(label: str, key: Key, laps: Sequence[LapResult], ours: set[str], looks: Mapping[str, Look]) -> Trace | None:
    _, unit, factor = MEASURES[key]
    values = [(lap["tokens"], factor * (lap.get(key) or 0)) for lap in laps if lap["label"] == label]
    points = sorted((n, value) for n, value in values if value > 0)
    if not points:
        return None
    named, look = _named(label, ours), draw.look_of(label, looks)
    color = look.color if look else draw.mechanism_color(label) if named else GRAYS[2]
    dash = look.dash if look else "dot" if label == REFERENCE else "solid"
    return {
        "x": [n for n, _ in points],
        "y": [value for _, value in points],
        "name": label,
        "mode": "lines+markers" if named and label != REFERENCE else "lines",
        "line": {"color": color, "width": 2.4 if named else 1, "dash": dash},
        "marker": {"size": 7, "color": color, "symbol": look.mark if look else "circle"},
        "meta": {"pick": key} | ({"label": label} if named else {}),
        "hovertemplate": f"<b>{label}</b>, %{{x:,}} tokens<br>%{{y:.3g}} {unit}<extra></extra>",
    }


def _here(tokens: float | None, key: str, heights: list[float]) -> list[Trace]:
    """Mark the study's own number of tokens with a vertical line."""
    if not tokens or not heights:
        return []
    return [
        {
            "x": [tokens, tokens],
            "y": [min(heights), max(heights)],
            "mode": "lines",
            "line": {"color": GRAYS[1], "width": 1.4, "dash": "dot"},
            "meta": {"pick": key, "label": f"this study, N = {tokens:,.0f}", "ink": GRAYS[0]},
            "hovertemplate": f"this study: {tokens:,.0f} tokens<extra></extra>",
        }
    ]


def _named(label: str, ours: set[str]) -> bool:
    return draw.mechanism_of(label) in ours


def _faster(speed: SpeedPart, ours: set[str]) -> list[TrendResult]:
    """Return the trends of the twins' mechanisms that become faster than SDPA."""
    return [
        trend
        for trend in speed.get("trends") or []
        if trend.get("crossover") and trend["head_dim"] == speed["head_dim"] and _named(trend["label"], ours)
        and trend["label"] not in (REFERENCE, "softmax")
    ]  # fmt: skip


def _crossings(speed: SpeedPart, laps: Sequence[LapResult], ours: set[str], looks: Mapping[str, Look]) -> list[Trace]:
    """Draw a ring where a line crosses SDPA's."""
    rings: list[Trace] = []
    for trend in _faster(speed, ours):
        label, n = trend["label"], trend["crossover"]
        if n is None or trend.get("faster_everywhere"):
            continue
        times = sorted((lap["tokens"], lap["seconds"]) for lap in laps if lap["label"] == label and lap["seconds"])
        time = _between(n, times)
        if time is not None:
            look = draw.look_of(label, looks)
            color = look.color if look else draw.mechanism_color(label)
            rings.append(
                {
                    "x": [n],
                    "y": [1e3 * time],
                    "mode": "markers",
                    "marker": {"symbol": "circle-open", "size": 15, "color": color, "line": {"width": 2}},
                    "meta": {"pick": "seconds", "label": f"N = {n:,.0f}"},
                    "hovertemplate": f"{label} is faster than SDPA from %{{x:,}} tokens<extra></extra>",
                }
            )
    return rings


def _between(n: float, points: list[tuple[float, float]]) -> float | None:
    """Interpolate the time at n along the straight line of a log-log plot; before the first point, take the first."""
    for (a, start), (b, end) in pairwise(points):
        if a <= n <= b and a < b:
            share = log(n / a) / log(b / a)
            return start ** (1 - share) * end**share
    return points[0][1] if points and n <= points[0][0] else None
