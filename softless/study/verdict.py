"""What a study found, in plain language: the answer first (study/decision.py), then a row for each subject."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from softless.report import units
from softless.study.decision import CANNOT, FAIR, answer_in_words, gain, listed, points
from softless.study.statistics import Group, Spread
from softless.study.tables import compare

REFERENCE = "SDPA"
ROUGH = 1.5  # median / fastest repeat, beyond which timings say more about the machine than about the call
RIVALS = {linear: softmax for softmax, linear in FAIR}
FEW = 0.05  # confused pairs, fewer than which would be shown as 0.0

Document = dict[str, Any]


def verdict(
    document: Document, found: Mapping[str, Group], spread: Spread, left: int, in_windows: Collection[Group] = ()
) -> list[dict[str, Any]]:
    """Rows by subject; a subject without numbers is left out. `in_windows` were trained beside those found."""
    every, decision = [*found.values(), *in_windows], document["decision"]
    headline = decision["headline"]
    said: list[tuple[str, str, dict[str, Any]]] = [
        (
            "Softmax",
            answer_in_words(decision, found, document["data"]["test"]),
            {"answer": CANNOT if headline is None else decision["pairs"][headline]["answer"]},
        ),
        ("Local residual", _residual(found, spread), {}),
        ("Dividing", _dividing(found, spread), {}),
        ("Queries", _queries(document["layers"], document["twins"]), {}),
        ("Neighbors", *_neighbors(document["mask_out"], document["twins"])),
        ("Score range", _range(document["layers"], document["range"]["curves"]), {}),
        ("Speed", _speed(document["speed"]), {}),
        ("Memory", _memory(document["speed"]), {}),
        ("Training", _training(found.values(), decision["margin"]), {}),
        ("Trust", _trust(document["speed"], document["machine"]["threads"], every, spread), {}),
        ("Left", f"{left} of the runs are left: the same command goes on with them." if left else "", {}),
    ]
    return [{"about": about, "says": says, **more} for about, says, more in said if says]


def _residual(found: Mapping[str, Group], spread: Spread) -> str:
    pairs = [(f"{id_}-local", id_) for id_ in found if f"{id_}-local" in found]
    return " ".join(compare(found[a], found[b], spread) for a, b in pairs)


def _dividing(found: Mapping[str, Group], spread: Spread) -> str:
    """Plain linear attention beside softmax."""
    both = [id_ for id_ in ("linear-elu", "linear-relu") if id_ in found and "softmax" in found]
    return " ".join(compare(found["softmax"], found[id_], spread) for id_ in both)


def _queries(layers: Sequence[Document], twins: Sequence[Document]) -> str:
    """Confused pairs per image and head, in the worst layer of each twin, by the one definition of confusion.py."""
    worst = [
        (max((layer["confusions"]["mean"] for layer in layers if layer["twin"] == twin["id"]), default=None), twin)
        for twin in twins
    ]
    known = sorted(((count, twin["label"]) for count, twin in worst if count is not None), key=lambda each: -each[0])
    if not known:
        return ""
    some = [(count, label) for count, label in known if count >= FEW]
    counts = ", ".join(f"{label} {count:.0f}" if count >= 10 else f"{label} {count:.1f}" for count, label in some)
    says = f"Confused pairs per image and head, in the worst layer of each twin: {counts}"
    says += f"; the others have less than {FEW:g}." if len(some) < len(known) else "."
    return (
        "two different queries are confused where their rows of weights differ by less than 0.001 in all (Euclidean "
        f"distance). {says if some else f'No twin has {FEW:g} confused pairs per image and head in any layer.'}"
    )


def _neighbors(rows: Sequence[Document], twins: Sequence[Document]) -> tuple[str, dict[str, Any]]:
    """A sentence, and a small table of what hidden keys cost."""
    lost = []
    for twin in twins:
        mean = {row["mask"]: row["accuracy"]["mean"] for row in rows if row["twin"] == twin["id"]}
        if {"none", "local 3", "random 9"} <= mean.keys():
            near, far = (round(100 * (mean["none"] - mean[mask]), 1) for mask in ("local 3", "random 9"))
            lost.append([twin["label"], near, far])
    if not lost:
        return "", {}
    says = "points of accuracy that a twin loses when every query is kept from seeing some keys, without retraining."
    table = {
        "columns": ["twin", "the 3 x 3 around it", "9 keys elsewhere"],
        "rows": sorted(lost, key=lambda row: -row[1]),
    }
    return says, {"table": table}


def _range(layers: Sequence[Document], curves: Sequence[Document]) -> str:
    own = [layer for layer in layers if layer["twin"] == "softmax"]
    safe = next((curve["safe_range"] for curve in curves if curve["label"] == "inline"), None)
    says = ""
    if own:
        spans = [layer["score_range"]["mean"] for layer in own]
        ends = [units.short(min(spans)), units.short(max(spans))]
        errors = [layer["first_order_error"]["mean"] for layer in own]
        says = (
            f"in the softmax twin, the scores of one query span {' to '.join(dict.fromkeys(ends))} on average, by "
            f"layer. Weights to first order in those scores, as inline has them, are {units.percent(fmean(errors))} "
            "away from the softmax's."
        )
    if safe is not None:
        says += f" On random scores they stay within 10 % while scores span less than {safe:.1f}."
    return says.strip()


def _speed(part: Document) -> str:
    """At the twins' own number of tokens, where mechanisms pass SDPA, and at the longest input."""
    return " ".join(each for each in (_own_speed(part), _crossover(part), _longest(part)) if each)


def _own_speed(part: Document) -> str:
    own = part.get("own") or {"rows": []}
    said = []
    for row in own["rows"]:
        if row["twin"] in RIVALS and row["inference_ratio"] is not None:
            trains = "" if row["training_ratio"] is None else f" and trains at {ratio(row['training_ratio'])}x"
            rival = next(other["label"] for other in own["rows"] if other["twin"] == RIVALS[row["twin"]])
            said.append(f"{row['label']} answers at {ratio(row['inference_ratio'])}x the speed of {rival}{trains}")
    if not said:
        return ""
    together = max(row["together"] for row in own["rows"])
    beside = f" ({together} runs shared the device while training)" if together > 1 else ""
    return f"at the {own['tokens']:,} tokens of these twins, {'; '.join(said)}{beside}."


def _crossover(part: Document) -> str:
    trend = next((each for each in part["trends"] if each["label"] == "inline"), None)
    if trend is None or len(part["tokens"]) < 2:
        return ""
    shortest, longest = min(part["tokens"]), max(part["tokens"])
    if trend["crossover"] is None:
        return f"Timed alone, inline is not faster than SDPA up to {longest:,} tokens."
    if trend["faster_everywhere"]:
        return f"Timed alone, inline is faster than SDPA from {shortest:,} tokens on, the shortest length timed."
    return f"Timed alone, inline is faster than SDPA from about {trend['crossover']:,} tokens on."


def _longest(part: Document) -> str:
    longest = max(part["tokens"])
    laps = {lap["label"]: lap for lap in _laps(part, longest) if lap["seconds"] is not None}
    reference = laps.pop(REFERENCE, None)
    laps.pop("softmax", None)
    if reference is None or not laps:
        return ""
    best = max(laps.values(), key=lambda lap: lap["speedup"])
    times = f"{units.seconds(best['seconds'])} against {units.seconds(reference['seconds'])}"
    if best["speedup"] <= 1:
        return f"At {longest:,} tokens nothing is faster than SDPA; {best['label']} comes closest ({times})."
    says = f"At {longest:,} tokens {best['label']} is fastest, {ratio(best['speedup'])}x SDPA ({times})."
    inline = laps.get("inline")
    if inline and inline is not best:
        says += f" inline is {ratio(inline['speedup'])}x."
    slower = [label for label, lap in laps.items() if lap["speedup"] < 1]
    return says + (f" Slower than SDPA there: {', '.join(slower)}." if slower else "")


def _memory(part: Document) -> str:
    longest = max(part["tokens"])
    laps = {lap["label"]: lap["peak_bytes"] for lap in _laps(part, longest) if lap["peak_bytes"]}
    reference = laps.pop(REFERENCE, None)
    laps.pop("softmax", None)
    if reference is None or not laps:
        return ""
    least, most = min(laps, key=laps.__getitem__), max(laps, key=laps.__getitem__)
    others = f"{most} {units.size(laps[most])}"
    if least != most:
        others = f"the others from {units.size(laps[least])} ({least}) to {units.size(laps[most])} ({most})"
    return f"at {longest:,} tokens SDPA takes {units.size(reference)}, {others}."


def _training(found: Iterable[Group], margin: float) -> str:
    """Which twins gained more than the margin in the last tenth of their training (study/decision.py)."""
    rising = [group.label for group in found if (gain(group.curves) or 0.0) > margin]
    if not rising:
        return ""
    return (
        f"{listed(rising)} still gained more than {points(margin)} in the last tenth of training: longer training may "
        "change the order."
    )


def _trust(part: Document, threads: int, found: Iterable[Group], spread: Spread) -> str:
    says = ""
    if spread.deviation is not None:
        says = (
            f"accuracies of one twin differ by {spread.deviation:.1f} points from seed to seed (standard deviation). "
        )
    lost = list(dict.fromkeys(group.label for group in found if len(group.accuracies) < group.runs))
    says += f"Not every run of {listed(lost)} came to an end. " if lost else ""
    if part["threads"] < threads:
        says += f"Calls were timed on {part['threads']} thread: with {threads}, they waited for other programs. "
    spreads = sorted(lap["seconds"] / lap["fastest"] for lap in part["laps"] if lap["seconds"])
    typical = spreads[len(spreads) // 2]
    if typical >= ROUGH:
        says += f"Repeats of one call differ by {typical:.1f}x: read the timings as rough."
    return says.strip()


def ratio(value: float | None, unit: str = "") -> str:
    """0.85, 4.2, 31."""
    if value is None:
        return "-"
    return f"{value:.2f}{unit}" if value < 0.995 else f"{value:.1f}{unit}" if value < 9.95 else f"{value:,.0f}{unit}"


def _laps(part: Document, tokens: int) -> list[Document]:
    return [lap for lap in part["laps"] if (lap["tokens"], lap["head_dim"]) == (tokens, part["head_dim"])]
