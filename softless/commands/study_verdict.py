"""What a study found, in plain language, the answer first; nothing is claimed that seeds alone could have done."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from softless.commands import units
from softless.commands.study_tables import Group, Spread, compare

REFERENCE = "SDPA"
ROUGH = 1.5  # median / fastest repeat, beyond which timings say more about the machine than about the call
LEARNED = 2  # times chance, below which a twin has not learned
STILL = 0.01  # accuracy gained in the last quarter of a training, above which it was too short
FEW = 1 / 2  # confused pairs an image and head, below which a layer counts as telling queries apart

Document = dict[str, Any]


def verdict(
    document: Document, found: Mapping[str, Group], spread: Spread, left: int, in_windows: Collection[Group] = ()
) -> list[dict[str, str]]:
    """Sentences by subject; a subject without numbers is left out. `in_windows` were trained beside those found."""
    every = [*found.values(), *in_windows]
    said = [
        ("Softmax", needed(found, spread, document["data"])),
        ("Local residual", _residual(found, spread)),
        ("Dividing", _dividing(found, spread)),
        ("Queries", _queries(document["layers"], document["twins"])),
        ("Neighbors", _neighbors(document["mask_out"], document["twins"])),
        ("Score range", _range(document["layers"], document["range"]["curves"])),
        ("Speed", _speed(document["speed"])),
        ("Memory", _memory(document["speed"])),
        ("Training", _training(document["twins"])),
        ("Trust", _trust(document["speed"], document["machine"]["threads"], every, spread)),
        ("Left", f"{left} of the runs are left: the same command goes on with them." if left else ""),
    ]
    return [{"about": about, "says": says} for about, says in said if says]


def needed(found: Mapping[str, Group], spread: Spread, data: Document) -> str:
    """Do you need the softmax here?"""
    with_it = _best(group for id_, group in found.items() if id_.startswith("softmax"))
    without = _best(group for id_, group in found.items() if not id_.startswith("softmax"))
    if with_it is None or without is None:
        return "no answer yet: a twin with softmax and one without must be trained."
    assert with_it.mean is not None
    assert without.mean is not None
    numbers = f"{without.label} reaches {without.mean:.1f} %, {with_it.label} {with_it.mean:.1f} %"
    of, chance = f" of {data['test']:,} test images", 100 / len(data["classes"])
    if max(with_it.mean, without.mean) < LEARNED * chance:
        return f"no answer: no twin learned much more than chance ({chance:.0f} %); {numbers}{of}."
    margin, ahead = spread.margin(len(with_it.accuracies), len(without.accuracies)), without.mean - with_it.mean
    if margin is None:
        answer = "it seems not" if ahead >= 0 else "it seems so"
        return f"{answer}: {numbers}{of}, from one seed each, so that chance is not ruled out."
    if abs(ahead) <= margin:
        return f"no: {numbers}{of}, and the difference is within the spread of seeds."
    if ahead > 0:
        return f"no: {numbers}{of}, ahead by more than the spread of seeds."
    return f"yes, for accuracy: {numbers}{of}, behind by more than the spread of seeds."


def _best(groups: Any) -> Group | None:
    return max((group for group in groups if group.mean is not None), key=lambda group: group.mean, default=None)


def _residual(found: Mapping[str, Group], spread: Spread) -> str:
    pairs = [(f"{id_}-local", id_) for id_ in found if f"{id_}-local" in found]
    return " ".join(compare(found[a], found[b], spread) for a, b in pairs)


def _dividing(found: Mapping[str, Group], spread: Spread) -> str:
    """Plain linear attention beside softmax."""
    both = [id_ for id_ in ("linear-elu", "linear-relu") if id_ in found and "softmax" in found]
    return " ".join(compare(found["softmax"], found[id_], spread) for id_ in both)


def _queries(layers: Sequence[Document], twins: Sequence[Document]) -> str:
    """Confused pairs an image and head, in the worst layer of each twin."""
    worst = {
        twin["label"]: max(
            (layer["confusions"]["mean"] for layer in layers if layer["twin"] == twin["id"]), default=None
        )
        for twin in twins
    }
    known = {label: count for label, count in worst.items() if count is not None}
    if not known:
        return ""
    apart = [label for label, count in known.items() if count < FEW]
    confused = sorted(((count, label) for label, count in known.items() if count >= FEW), reverse=True)
    counts = ", ".join(f"{label} {units.short(count)}" for count, label in confused)
    says = f"pairs of queries with the same weights, an image and head in the worst layer: {counts}." if counts else ""
    never = f"{_list(apart)} {'tells' if len(apart) == 1 else 'tell'} queries apart." if apart else ""
    return f"{says} {never}".strip()


def _neighbors(rows: Sequence[Document], twins: Sequence[Document]) -> str:
    said = []
    for twin in twins:
        mean = {row["mask"]: row["accuracy"]["mean"] for row in rows if row["twin"] == twin["id"]}
        if {"none", "local 3", "random 9"} <= mean.keys():
            near, far = (100 * (mean["none"] - mean[mask]) for mask in ("local 3", "random 9"))
            said.append((near, f"{twin['label']} {near:.1f} points (nine others: {far:.1f})"))
    if not said:
        return ""
    return "hiding a query's 3 x 3 costs " + ", ".join(text for _, text in sorted(said, reverse=True)) + "."


def _range(layers: Sequence[Document], curves: Sequence[Document]) -> str:
    own = [layer for layer in layers if layer["twin"] == "softmax"]
    safe = next((curve["safe_range"] for curve in curves if curve["label"] == "inline"), None)
    says = ""
    if own:
        spans = [layer["score_range"]["mean"] for layer in own]
        errors = [layer["first_order_error"]["mean"] for layer in own]
        says = (
            f"the scores of the softmax twin span {units.short(min(spans))} to {units.short(max(spans))} a query, and "
            f"first order is {units.percent(fmean(errors))} away from its weights."
        )
    if safe is not None:
        says += f" On random scores first order (inline) is within 10 % while they span less than {safe:.1f}."
    return says.strip()


def _speed(part: Document) -> str:
    longest = max(part["tokens"])
    laps = {lap["label"]: lap for lap in _laps(part, longest) if lap["seconds"] is not None}
    reference = laps.pop(REFERENCE, None)
    laps.pop("softmax", None)
    if reference is None or not laps:
        return ""
    best = max(laps.values(), key=lambda lap: lap["speedup"])
    times = f"{units.seconds(best['seconds'])} against {units.seconds(reference['seconds'])}"
    if best["speedup"] <= 1:
        return f"at {longest:,} tokens nothing is faster than SDPA; {best['label']} comes closest ({times})."
    says = f"at {longest:,} tokens {best['label']} is fastest, {ratio(best['speedup'])}x SDPA ({times})."
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
    others = f"from {units.size(laps[least])} ({least}) to {units.size(laps[most])} ({most})"
    return f"at {longest:,} tokens SDPA takes {units.size(reference)}, the others {others}."


def _training(twins: Sequence[Document]) -> str:
    """Which twins gained more than a point in the last quarter of their epochs, on the mean of their seeds."""
    rising = []
    for twin in twins:
        gains = [
            curve[-1]["accuracy"] - curve[3 * (len(curve) - 1) // 4]["accuracy"]
            for curve in (seed["curve"] for seed in twin["seeds"])
            if len(curve) > 3
        ]
        if gains and fmean(gains) > STILL:
            rising.append(twin["label"])
    return f"{_list(rising)} still gained at the end: longer training may change the order." if rising else ""


def _trust(part: Document, threads: int, found: Iterable[Group], spread: Spread) -> str:
    says = ""
    if spread.deviation is not None:
        says = (
            f"accuracies of one twin differ by {spread.deviation:.1f} points from seed to seed (standard deviation). "
        )
    lost = list(dict.fromkeys(group.label for group in found if len(group.accuracies) < group.runs))
    says += f"Not every run of {_list(lost)} came to an end. " if lost else ""
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
    return f"{value:.2f}{unit}" if value < 1 else f"{value:.1f}{unit}" if value < 10 else f"{value:,.0f}{unit}"


def _laps(part: Document, tokens: int) -> list[Document]:
    return [lap for lap in part["laps"] if (lap["tokens"], lap["head_dim"]) == (tokens, part["head_dim"])]


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""
