"""The sections of the page of a study of text: perplexity, recall, decoding and a sample of each twin."""

from collections.abc import Iterable, Mapping, Sequence
from math import log10
from typing import Literal

from softless.report.page import GRAYS, Trace, plot
from softless.report.units import listed
from softless.study.page import figure as draw
from softless.study.page.figure import Figure, Look, Panel, Pick, Section, Table
from softless.study.page.text import MISSING, short
from softless.study.schema import Estimated
from softless.study.text.recall import INDUCTION, RECALL, VALUES
from softless.study.text.schema import DecodingResult, RecallResult, TextDocument, TextTwinResult

BITS = 0.2  # bits per byte that an axis spans at least: less would magnify the differences between seeds
ROOM = {"l": 56, "r": 110, "t": 16, "b": 48}  # names of curves stand at the right
TITLES = {RECALL: "Associative recall", INDUCTION: "Induction"}
Measured = Literal["seconds", "bytes"]
COSTS: dict[Measured, tuple[str, str, float]] = {
    "seconds": ("time", "milliseconds per token", 1e3),
    "bytes": ("memory", "cache, kB", 1e-3),
}


def perplexity_section(document: TextDocument, looks: Mapping[str, Look]) -> Section:
    """Return the section on bits per byte: a mark per twin, learning curves and a table."""
    twins = document["twins"]
    figures = tuple(figure for figure in (marks(twins, looks), learning(twins, looks)) if figure)
    says = (
        "All twins read the same text, from the same seeds, with the same recipe, depth and width. They differ in "
        "attention alone. Bits per byte say how well a twin predicts text that it has not seen: fewer are better."
    )
    return Section(
        "perplexity", "How well each twin predicts the text", "Perplexity", says, figures,
        "" if figures else "This study trained no twins.", tables=(numbers(twins),) if figures else (),
    )  # fmt: skip


def marks(twins: Sequence[TextTwinResult], looks: Mapping[str, Look]) -> Figure | None:
    """Draw one row per twin: its bits per byte with the interval."""
    known = [twin for twin in twins if twin["bits_per_byte"] is not None]
    if not known:
        return None
    ends = [end for twin in known for end in draw.interval_ends(twin["bits_per_byte"])]
    traces = [
        looks[twin["id"]].trace()
        | {
            "x": draw.means([twin["bits_per_byte"]]),
            "y": [twin["label"]],
            "error_x": draw.whiskers([twin["bits_per_byte"]]) | {"color": looks[twin["id"]].color},
            "mode": "markers",
            "hovertemplate": f"<b>{twin['label']}</b><br>%{{x:.3f}} bits per byte<extra></extra>",
        }
        for twin in known
    ]
    order = [twin["label"] for twin in sorted(known, key=lambda twin: -_mean(twin["bits_per_byte"]))]
    y = {"categoryorder": "array", "categoryarray": order, "showgrid": True}
    x = {"title": "bits per byte", "range": draw.span(ends, least=BITS)}
    about = "; ".join(f"{twin['label']} {_mean(twin['bits_per_byte']):.3f}" for twin in known)
    one = all(twin["bits_per_byte"] and twin["bits_per_byte"].get("low") is None for twin in known)
    sure = (
        "Each twin was trained from one seed, so there are no intervals: small differences may be chance."
        if one
        else "Bars are 95% intervals over seeds: where two of them overlap, the order may be chance."
    )
    return Figure(
        "bits", "Bits per byte", f"Further left is better. {sure} The axis spans at least {BITS:g} bits per byte.",
        (Panel(plot(traces, x=x, y=y), f"Bits per byte of each twin: {about}"),), "twins",
        height=90 + 34 * len(known),
    )  # fmt: skip


def learning(twins: Sequence[TextTwinResult], looks: Mapping[str, Look]) -> Figure | None:
    """Draw the mean bits per byte over seeds, evaluation by evaluation."""
    traces: list[Trace] = []
    for twin in twins:
        places: dict[float, list[float]] = {}
        for point in (point for seed in twin.get("seeds") or [] for point in seed.get("curve") or []):
            if (value := point.get("bits_per_byte")) is not None:
                places.setdefault(point["epoch"], []).append(value)
        if places:
            mean = [sum(values) / len(values) for values in places.values()]
            hover = f"<b>{twin['label']}</b><br>epoch %{{x:.2f}}: %{{y:.3f}} bits per byte<extra></extra>"
            traces.append(
                looks[twin["id"]].trace(label=twin["label"])
                | {"x": list(places), "y": mean, "mode": "lines" if len(places) > 1 else "markers"}
                | {"hovertemplate": hover}
            )
    if not traces:
        return None
    y = {"title": "bits per byte", "range": draw.span((y for trace in traces for y in trace["y"]), least=BITS)}
    return Figure(
        "learning", "How fast the twins learn",
        "Each line is a twin's bits per byte on the test text while it trains, averaged over its seeds.",
        (Panel(plot(traces, x={"title": "epoch"}, y=y, margin=ROOM), "Bits per byte of each twin by epoch"),),
        "curves", height=360, within="twins",
    )  # fmt: skip


def numbers(twins: Sequence[TextTwinResult]) -> Table:
    """Return the table of the numbers in both figures."""
    rows = []
    for twin in twins:
        mean, low, high = draw.interval_ends(twin["bits_per_byte"])
        between = MISSING if low is None or high is None else f"{low:.3f} to {high:.3f}"
        rows.append(
            (
                twin["label"], short(mean, ".3f"), between, short(twin.get("perplexity"), ".3f"),
                str(len(twin.get("seeds") or [])), short(twin.get("parameters"), ",.0f"),
                short(twin.get("seconds"), ".0f"),
            )
        )  # fmt: skip
    columns = ("twin", "bits per byte", "95% interval", "perplexity", "seeds", "parameters", "seconds of training")
    alone = any(row[2] == MISSING and row[1] != MISSING for row in rows)
    notes = (f"{MISSING} in the interval: a single seed has none.",) if alone else ()
    return Table(
        "The twins in numbers", "After the last update, on the test text. Perplexity is per token.", columns,
        tuple(rows), notes, "twins",
    )  # fmt: skip


def recall_section(document: TextDocument, looks: Mapping[str, Look]) -> Section:
    """Return the section on recall: accuracy against length, a panel per task."""
    points = document.get("recall") or []
    panels = tuple(_task(task, points, looks) for task in TITLES if any(point["task"] == task for point in points))
    says = (
        "Small models of one block, trained on synthetic sequences. In associative recall, keys and values are "
        "listed, and then every key is asked once. In induction, the model must repeat the token that followed the "
        "trigger."
    )
    figure = Figure(
        "recall", "Recall by length",
        "Accuracy on sequences of a length. Lengths left of the dotted line were seen in training. "
        f"A model that guesses answers {1 / VALUES:.0%} of associative recall.",
        panels, "recall", height=340, columns=2,
    )  # fmt: skip
    return Section(
        "recall", "What each twin finds again", "Recall", says, (figure,) if panels else (),
        "" if panels else "This study tested no recall.",
    )  # fmt: skip


def _task(task: str, points: Iterable[RecallResult], looks: Mapping[str, Look]) -> Panel:
    own = [point for point in points if point["task"] == task]
    lengths = sorted({point["tokens"] for point in own})
    edge = max((point["tokens"] for point in own if point["inside"]), default=0)
    traces: list[Trace] = []
    for id_, look in looks.items():
        if curve := sorted((p["tokens"], 100 * _mean(p["accuracy"])) for p in own if p["twin"] == id_):
            hover = f"<b>{look.label}</b>, %{{x}} tokens<br>%{{y:.1f}}%<extra></extra>"
            coordinates = {"x": [n for n, _ in curve], "y": [y for _, y in curve], "mode": "lines+markers"}
            traces.append(look.trace() | coordinates | {"hovertemplate": hover})
    beyond = [length for length in lengths if length > edge]
    if beyond:
        middle = (edge * beyond[0]) ** 0.5
        traces.append(_vertical(middle, 0, 100))
    x = {"title": "tokens", "type": "log", "tickvals": lengths, "ticktext": [f"{n:g}" for n in lengths]}
    y = {"title": "accuracy, %", "range": [0, 104]}
    about = f"{TITLES[task]}: accuracy of each twin against the tokens of a sequence"
    return Panel(plot(traces, x=x, y=y), about, title=TITLES[task])


def _vertical(x: float, low: float, high: float) -> Trace:
    line = {"color": GRAYS[1], "width": 1.4, "dash": "dot"}
    return {"x": [x, x], "y": [low, high], "mode": "lines", "line": line, "hoverinfo": "skip", "meta": {}}


def decoding_section(document: TextDocument, looks: Mapping[str, Look]) -> Section:
    """Return the section on decoding: time and memory of a token against the tokens seen."""
    points, machine = document.get("decoding") or [], document["machine"]
    known = [key for key in COSTS if any((point.get(key) or 0) > 0 for point in points)]
    says = (
        "One more token, after a text of growing length. A softmax layer keeps keys and values of every token; a "
        f"linear layer keeps a state of fixed size. All times are from {machine['processor']} ({machine['device']}), "
        "with one thread."
    )
    if not known:
        return Section("decoding", "What one more token costs", "Decoding", says, missing="This study timed nothing.")
    traces = [
        trace | {"visible": key == known[0]}
        for key in known
        for look in looks.values()
        if (trace := _curve(look, key, points))
    ]
    lengths = sorted({point["tokens"] for point in points})
    x = {
        "title": "tokens seen (1k is 1,024)", "type": "log", "tickvals": lengths,
        "ticktext": [f"{n / 1024:g}k" if n >= 1024 and n % 1024 == 0 else f"{n:g}" for n in lengths],
        "range": [log10(lengths[0]) - 0.1, log10(lengths[-1]) + 0.1],
    }  # fmt: skip
    y = {"title": COSTS[known[0]][1], "type": "log", "tickformat": ",~g"}
    picks = tuple(Pick(key, COSTS[key][0], {"yaxis.title": COSTS[key][1]}) for key in known)
    figure = Figure(
        "decoding-cost", "A decode step against the tokens seen",
        "Both axes are logarithmic. A flat line costs the same after any number of tokens. The cache of a linear "
        "layer also holds its last tokens, so that they can be taken back.",
        (Panel(plot(traces, x=x, y=y, margin=ROOM), "Time and memory of a decode step against the tokens seen"),),
        "decoding", height=440, picks=picks if len(picks) > 1 else (),
    )  # fmt: skip
    table = _costs(points, lengths)
    return Section("decoding", "What one more token costs", "Decoding", says, (figure,), tables=(table,))


def _curve(look: Look, key: Measured, points: Iterable[DecodingResult]) -> Trace | None:
    _, unit, factor = COSTS[key]
    curve = sorted((p["tokens"], factor * (p.get(key) or 0)) for p in points if p["twin"] == look.id and p.get(key))
    if not curve:
        return None
    coordinates = {"x": [n for n, _ in curve], "y": [y for _, y in curve], "mode": "lines+markers"}
    hover = f"<b>{look.label}</b> after %{{x:,}} tokens<br>%{{y:.3g}} {unit}<extra></extra>"
    return look.trace(pick=key, label=look.label) | coordinates | {"hovertemplate": hover}


def _costs(points: Sequence[DecodingResult], lengths: Sequence[float]) -> Table:
    """Return the table of the first and the last length."""
    rows = []
    for label in dict.fromkeys(point["label"] for point in points):
        own = {point["tokens"]: point for point in points if point["label"] == label}
        ends = [own.get(length) for length in (lengths[0], lengths[-1])]
        times = [short(end and end["seconds"] and 1e3 * end["seconds"], ".2f") for end in ends]
        sizes = [short(end and end["bytes"], ",.0f") for end in ends]
        rows.append((label, *times, *sizes))
    first, last = f"{lengths[0]:,.0f}", f"{lengths[-1]:,.0f}"
    columns = ("twin", f"ms after {first}", f"ms after {last}", f"bytes after {first}", f"bytes after {last}")
    return Table("Decoding in numbers", "", columns, tuple(rows), part="decoding")


def sample_section(document: TextDocument) -> Section:
    """Return the section that shows how each twin writes on."""
    rows = tuple((twin["label"], twin["sample"] or "") for twin in document["twins"] if twin.get("sample"))
    labels = listed([label for label, _ in rows])
    table = Table(
        "One beginning, continued by each twin",
        f"Bytes drawn with one seed, after “{document.get('prompt') or ''}”, the beginning of the test text.",
        ("twin", "continuation"), rows,
    )  # fmt: skip
    return Section(
        "sample", "How each twin writes", "Sample",
        f"Models this small write no sense. The samples of {labels} only show what they have learned to spell.",
        tables=(table,) if rows else (), missing="" if rows else "Models of learned tokens show no sample.",
    )  # fmt: skip


def _mean(estimated: Estimated | None) -> float:
    return draw.interval_ends(estimated)[0] or 0.0
