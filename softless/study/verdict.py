"""The verdict of a study in plain sentences: the answer first (study/decision.py), then a row for each subject."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import fmean

from softless.report import units
from softless.report.units import listed
from softless.study import schema
from softless.study.decision import CANNOT, FAIR, gain, points, span
from softless.study.tables import Group, Spread, compare, named

REFERENCE = "SDPA"
ROUGH = 1.5  # median / fastest repeat: above it, timings say more about the machine than about the call
RIVALS = {linear: softmax for softmax, linear in FAIR}
FEW = 0.05  # confused pairs: fewer would be shown as 0.0


def verdict(
    document: schema.StudyDocument,
    twins: Mapping[str, Group],
    spread: Spread,
    left: int,
    in_windows: Collection[Group] = (),
) -> list[schema.Finding]:
    """Write one row per subject that has numbers. `in_windows` are the twins of table 4, from a grid of their own."""
    decision, speed, ranges = document["decision"], document["speed"], document["range"]
    assert decision is not None and speed is not None and ranges is not None  # noqa: PT018
    headline, layers = decision["headline"], document["layers"] or []
    neighbors, table = _neighbors(document["mask_out"] or [], document["twins"])
    answer = CANNOT if headline is None else decision["pairs"][headline]["answer"]
    sentences = answer_in_words(decision, twins, document["data"]["test"])
    threads = document["machine"]["threads"]
    rows: list[schema.Finding] = [
        {"about": "Softmax", "says": sentences, "answer": answer},
        {"about": "Local residual", "says": _residual(twins, spread)},
        {"about": "Dividing", "says": _dividing(twins, spread)},
        {"about": "Queries", "says": _queries(layers, document["twins"])},
        {"about": "Neighbors", "says": neighbors, "table": table},
        {"about": "Score range", "says": _range(layers, ranges["curves"] or [])},
        {"about": "Speed", "says": _speed(speed)},
        {"about": "Memory", "says": _memory(speed)},
        {"about": "Training", "says": _training(twins.values(), decision["margin"])},
        {"about": "Trust", "says": _trust(speed, threads, [*twins.values(), *in_windows], spread)},
        {"about": "Left", "says": f"{left} of the runs are not trained yet: run the same command again." * (left > 0)},
    ]
    return [row for row in rows if row["says"]]


def answer_in_words(decision: schema.DecisionPart, twins: Mapping[str, Group], test_images: float | None) -> str:
    """Write the first row of the verdict: the answer with its numbers, then the other pair."""
    margin, pairs = decision["margin"], decision["pairs"]
    if decision["headline"] is None:
        return _no_pair(twins)
    first = pairs[decision["headline"]]
    sentences = [f"{first['answer'].capitalize()}. {_numbers(first, twins, margin, test_images)}."]
    sentences += _reasons(first)
    for other in pairs:
        if other is not first:
            sentences.append(f"{_kind(other)}: {other['answer']}. {_numbers(other, twins, margin, None)}.")
            sentences += _reasons(other)
    return " ".join(sentences)


def _reasons(pair: schema.FairPair) -> list[str]:
    """Say why a pair cannot be decided, and what would settle it."""
    if pair["answer"] != CANNOT:
        return []
    would_tell = [f"What would settle it: {pair['would_tell']}."] if pair["would_tell"] else []
    return [f"Why: {pair['because']}.", *would_tell]


def _numbers(pair: schema.FairPair, twins: Mapping[str, Group], margin: float, test_images: float | None) -> str:
    softmax, linear = twins[pair["softmax"]], twins[pair["linear"]]
    if softmax.mean is None or linear.mean is None:
        return f"{linear.label} and {softmax.label} cannot be compared"
    says = f"{linear.label} reaches {linear.mean:.1f} % and {softmax.label} {softmax.mean:.1f} %: "
    says += points(pair["difference"] or 0.0, signed=True)
    if pair["low"] is not None and pair["high"] is not None:
        says += f", 95 % interval {span(pair['low'], pair['high'], margin)}"
    if test_images is not None:
        seeds = units.counted(min(len(softmax.scores), len(linear.scores)), "seed")
        says += f" ({seeds}, {test_images:,.0f} test images)"
        says += "" if pair["low"] is None else f"; anything above {points(-margin)} counts as no loss"
    return says


def _kind(pair: schema.FairPair) -> str:
    return "With the local residual" if pair["linear"].endswith("-local") else "Without the local residual"


def _no_pair(twins: Mapping[str, Group]) -> str:
    """Say why the trained twins give no answer, and which twin to add."""
    have = " and ".join(named(group, counted=True) for group in twins.values()) or "no twin"
    partner = {**dict(FAIR), **{b: a for a, b in FAIR}}
    missing = [partner[id_] for id_ in twins if id_ in partner] or ["softmax", "inline"]
    return (
        f"Cannot tell: no two of the trained twins ({have}) differ in attention alone. "
        f"What would settle it: add {' or '.join(dict.fromkeys(missing))} to --twins."
    )


def _residual(twins: Mapping[str, Group], spread: Spread) -> str:
    pairs = [(f"{id_}-local", id_) for id_ in twins if f"{id_}-local" in twins]
    return " ".join(compare(twins[a], twins[b], spread) for a, b in pairs)


def _dividing(twins: Mapping[str, Group], spread: Spread) -> str:
    """Compare plain linear attention with softmax."""
    both = [id_ for id_ in ("linear-elu", "linear-relu") if id_ in twins and "softmax" in twins]
    return " ".join(compare(twins["softmax"], twins[id_], spread) for id_ in both)


def _queries(layers: Sequence[schema.LayerResult], twins: Sequence[schema.TwinResult]) -> str:
    """Count confused pairs per image and head, in the worst layer of each twin (probes/injectivity.py)."""
    counts: dict[str, float] = {}
    for twin in twins:
        own = [_mean(layer["confusions"]) for layer in layers if layer["twin"] == twin["id"]]
        if own:
            counts[twin["label"]] = max(own)
    if not counts:
        return ""
    ranked = sorted((item for item in counts.items() if item[1] >= FEW), key=lambda item: -item[1])
    listing = ", ".join(f"{label} {count:.0f}" if count >= 10 else f"{label} {count:.1f}" for label, count in ranked)
    says = f"Confused pairs per image and head, in the worst layer of each twin: {listing}"
    says += f"; the others have less than {FEW:g}." if len(ranked) < len(counts) else "."
    if not ranked:
        says = f"No twin has at least {FEW:g} confused pairs per image and head in any layer."
    return (
        "a twin confuses two different queries if their rows of weights differ by less than 0.001 (Euclidean "
        f"distance). {says}"
    )


def _neighbors(
    rows: Sequence[schema.MaskedAccuracy], twins: Sequence[schema.TwinResult]
) -> tuple[str, schema.SmallTable | None]:
    """Return a sentence, and a table of the accuracy that hidden keys cost."""
    lost: list[tuple[str, float, float]] = []
    for twin in twins:
        mean = {row["mask"]: _mean(row["accuracy"]) for row in rows if row["twin"] == twin["id"]}
        if {"none", "local 3", "random 9"} <= mean.keys():
            near, far = (round(100 * (mean["none"] - mean[mask]), 1) for mask in ("local 3", "random 9"))
            lost.append((twin["label"], near, far))
    if not lost:
        return "", None
    says = "the table shows how many points a twin loses, without retraining, when keys are hidden from every query."
    ranked: list[list[object]] = [list(row) for row in sorted(lost, key=lambda row: -row[1])]
    return says, {"columns": ["hidden:", "the 3 x 3 around the query", "9 random keys"], "rows": ranked}


def _range(layers: Sequence[schema.LayerResult], curves: Sequence[schema.RangeCurve]) -> str:
    own = [layer for layer in layers if layer["twin"] == "softmax"]
    safe = next((curve["safe_range"] for curve in curves if curve["label"] == "inline"), None)
    says = ""
    if own:
        spans = [_mean(layer["score_range"]) for layer in own]
        ends = [units.short(min(spans)), units.short(max(spans))]
        error = units.percent(fmean(_mean(layer["first_order_error"]) for layer in own))
        says = (
            f"in the softmax twin, the scores of one query span {' to '.join(dict.fromkeys(ends))} on average, "
            f"depending on the layer. There, weights that are linear in the scores, as inline has them, differ from "
            f"softmax's by {error}."
        )
    if safe is not None:
        says += f" On random scores they differ by less than 10 % while scores span less than {safe:.1f}."
    return says.strip()


def _speed(part: schema.SpeedPart) -> str:
    """Describe the speed of the twins, the length from which inline is faster than SDPA, and the longest input."""
    return " ".join(filter(None, (_own_speed(part), _crossover(part), _longest(part))))


def _own_speed(part: schema.SpeedPart) -> str:
    own, sentences = part.get("own"), []
    if own is None:
        return ""
    for row in own["rows"]:
        if row["twin"] in RIVALS and row["inference_ratio"] is not None:
            trains = "" if row["training_ratio"] is None else f" and trains at {ratio(row['training_ratio'])}x"
            rival = next(other["label"] for other in own["rows"] if other["twin"] == RIVALS[row["twin"]])
            sentences.append(f"{row['label']} answers at {ratio(row['inference_ratio'])}x the speed of {rival}{trains}")
    if not sentences:
        return ""
    together = max(row["together"] or 1 for row in own["rows"])
    shared = f" ({together} runs shared the device while training)" if together > 1 else ""
    return f"at the {own['tokens']:,} tokens of these twins, {'; '.join(sentences)}{shared}."


def _crossover(part: schema.SpeedPart) -> str:
    trend, tokens = next((trend for trend in part["trends"] or [] if trend["label"] == "inline"), None), part["tokens"]
    if trend is None or tokens is None or len(tokens) < 2:
        return ""
    if trend["crossover"] is None:
        return f"Timed alone, inline is not faster than SDPA up to {max(tokens):,} tokens."
    if trend["faster_everywhere"]:
        return f"Timed alone, inline is faster than SDPA from {min(tokens):,} tokens on, the shortest length timed."
    return f"Timed alone, inline is faster than SDPA from about {trend['crossover']:,} tokens on."


def _longest(part: schema.SpeedPart) -> str:
    longest, laps = _longest_laps(part)
    times = {label: lap["seconds"] for label, lap in laps.items() if lap["seconds"] is not None}
    reference = times.pop(REFERENCE, None)
    if reference is None or not times:
        return ""
    speedups = {label: laps[label]["speedup"] or 0.0 for label in times}
    best = max(speedups, key=speedups.__getitem__)
    against = f"{units.seconds(times[best])} against {units.seconds(reference)}"
    if speedups[best] <= 1:
        return f"At {longest:,} tokens nothing is faster than SDPA; {best} comes closest ({against})."
    says = f"At {longest:,} tokens {best} is fastest, {ratio(speedups[best])}x SDPA ({against})."
    if "inline" in speedups and best != "inline":
        says += f" inline is {ratio(speedups['inline'])}x."
    slower = [label for label, speedup in speedups.items() if speedup < 1]
    return says + (f" Slower than SDPA there: {', '.join(slower)}." if slower else "")


def _memory(part: schema.SpeedPart) -> str:
    longest, laps = _longest_laps(part)
    sizes = {label: lap["peak_bytes"] for label, lap in laps.items() if lap["peak_bytes"]}
    reference = sizes.pop(REFERENCE, None)
    if reference is None or not sizes:
        return ""
    least, most = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
    others = f"{most} {units.size(sizes[most])}"
    if least != most:
        others = f"the others from {units.size(sizes[least])} ({least}) to {units.size(sizes[most])} ({most})"
    return f"at {longest:,} tokens SDPA takes {units.size(reference)}, {others}."


def _longest_laps(part: schema.SpeedPart) -> tuple[int, dict[str, schema.LapResult]]:
    """Return the largest number of tokens, and the laps there by label; softmax itself is left out, SDPA stays."""
    longest = max(part["tokens"] or [0])
    laps = [lap for lap in part["laps"] if (lap["tokens"], lap["head_dim"]) == (longest, part["head_dim"])]
    return longest, {lap["label"]: lap for lap in laps if lap["label"] != "softmax"}


def _training(twins: Iterable[Group], margin: float) -> str:
    """Name the twins that gained more than the margin in the last tenth of their training (study/decision.py)."""
    rising = [group.label for group in twins if (gain(group.curves) or 0.0) > margin]
    if not rising:
        return ""
    return (
        f"{listed(rising)} still gained more than {points(margin)} in the last tenth of training: longer training may "
        "change the order."
    )


def _trust(part: schema.SpeedPart, threads: int, twins: Iterable[Group], spread: Spread) -> str:
    says = ""
    if spread.deviation is not None:
        says = (
            f"accuracies of one twin differ by {spread.deviation:.1f} points from seed to seed (standard deviation). "
        )
    lost = list(dict.fromkeys(group.label for group in twins if len(group.scores) < group.runs))
    says += f"Not every run of {listed(lost)} finished. " if lost else ""
    if (part["threads"] or threads) < threads:
        says += f"Calls were timed on {part['threads']} thread, because {threads} threads waited for other programs. "
    ratios = sorted(lap["seconds"] / lap["fastest"] for lap in part["laps"] if lap["seconds"] and lap["fastest"])
    typical = ratios[len(ratios) // 2]
    if typical >= ROUGH:
        says += f"Repeats of one call differ by {typical:.1f}x, so the timings are rough."
    return says.strip()


def ratio(value: float) -> str:
    """Write a ratio: 0.85, 4.2, 31."""
    return f"{value:.2f}" if value < 0.995 else f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def _mean(estimated: schema.Estimated | None) -> float:
    assert estimated is not None
    assert estimated["mean"] is not None
    return estimated["mean"]
