"""The verdict of a study of text in plain sentences: the answer first (study/decision.py), then a row per subject."""

from collections.abc import Mapping, Sequence

from softless.report import units
from softless.report.units import listed
from softless.study.decision import CANNOT
from softless.study.schema import DecisionPart, FairPair, Finding
from softless.study.tables import Group, Spread
from softless.study.text import schema
from softless.study.text.measures import BITS
from softless.study.text.recall import INDUCTION, RECALL
from softless.study.verdict import ratio
from softless.train.language_recipe import SOFTMAX

SOLVED = 0.99


def text_verdict(document: schema.TextDocument, twins: Mapping[str, Group], spread: Spread, left: int) -> list[Finding]:
    """Write one row per subject that has numbers."""
    decision = document["decision"]
    assert decision is not None
    headline = decision["headline"]
    answer = CANNOT if headline is None else decision["pairs"][headline]["answer"]
    rows: list[Finding] = [
        {"about": "Softmax", "says": _answer(decision, twins, document["data"]["sequences"]), "answer": answer},
        {"about": "Recall", "says": _recall(document["recall"] or [], RECALL)},
        {"about": "Induction", "says": _recall(document["recall"] or [], INDUCTION)},
        {"about": "Decoding", "says": _decoding(document["decoding"] or [])},
        {"about": "Trust", "says": _trust(twins, spread)},
        {"about": "Left", "says": f"{left} of the runs are not trained yet: run the same command again." * (left > 0)},
    ]
    return [row for row in rows if row["says"]]


OTHERS = (
    ("no", "does as well", "do as well"),
    ("yes", "does worse", "do worse"),
    (CANNOT, "cannot be judged yet", "cannot be judged yet"),
)  # an answer, and what it says of one twin and of several


def _answer(decision: DecisionPart, twins: Mapping[str, Group], sequences: float | None) -> str:
    pairs, headline = decision["pairs"], decision["headline"]
    if headline is None:
        missing = "softmax" if SOFTMAX not in twins else "a twin beside softmax"
        return f"Cannot tell: there is no pair to compare. What would settle it: add {missing} to --twins."
    first = pairs[headline]
    seeds = units.counted(len(twins[first["linear"]].scores), "seed")
    counts = f"({seeds}, {sequences:,.0f} test sequences); anything below {BITS.amount(decision['margin'])}"
    sentences = [f"{first['answer'].capitalize()}. {_numbers(first, twins)} {counts} counts as no loss."]
    if first["answer"] == CANNOT:
        settle = f" What would settle it: {first['would_tell']}." if first["would_tell"] else ""
        sentences.append(f"Why: {first['because']}.{settle}")
    parts = []
    for answer, one, several in OTHERS:
        if others := [twins[pair["linear"]].label for pair in pairs if pair is not first and pair["answer"] == answer]:
            parts.append(f"{listed(others)} {one if len(others) == 1 else several}")
    if parts:
        sentences.append(f"Of the others, {'; '.join(parts)}.")
    return " ".join(sentences)


def _numbers(pair: FairPair, twins: Mapping[str, Group]) -> str:
    softmax, linear = twins[pair["softmax"]], twins[pair["linear"]]
    if softmax.mean is None or linear.mean is None:
        return f"{linear.label} and {softmax.label} cannot be compared"
    says = f"{linear.label} takes {-linear.mean:.3f} bits per byte and {softmax.label} {-softmax.mean:.3f}: "
    says += f"{pair['difference']:+.3f}"
    if pair["low"] is not None and pair["high"] is not None:
        says += f", interval {pair['low']:+.3f} to {pair['high']:+.3f}"
    return says


def _recall(points: Sequence[schema.RecallResult], task: str) -> str:
    """Say which twins solve a task at every length of training, what the others reach, and who solves longer ones."""
    inside, beyond = dict[str, float](), dict[str, float]()
    for point in points:
        if point["task"] == task and point["accuracy"] is not None:
            worst = inside if point["inside"] else beyond
            mean = point["accuracy"]["mean"] or 0.0
            worst[point["label"]] = min(worst.get(point["label"], 1.0), mean)
    if not inside:
        return ""
    solved = [label for label, share in inside.items() if share >= SOLVED]
    others = [f"{label} {share:.0%}" for label, share in inside.items() if share < SOLVED]
    says = f"{listed(solved) if solved else 'no twin'} answered {SOLVED:.0%} or more at every length seen in training"
    says += f"; at their worst length, the others reach: {', '.join(others)}." if others else "."
    if beyond:
        longer = [label for label, share in beyond.items() if share >= SOLVED]
        says += f" At lengths beyond training: {listed(longer) if longer else 'none'}."
    return says


def _decoding(points: Sequence[schema.DecodingResult]) -> str:
    """Compare the longest text with the shortest, for softmax and for the twin that is fastest at the longest."""
    lengths = sorted({point["tokens"] for point in points})
    at = {(point["twin"], point["tokens"]): point for point in points}
    if len(lengths) < 2 or (SOFTMAX, lengths[-1]) not in at:
        return ""
    short, long = lengths[0], lengths[-1]
    softmax = at[SOFTMAX, long]
    others = [point for point in points if point["tokens"] == long and point["twin"] != SOFTMAX]
    if not others:
        return ""
    best = min(others, key=lambda point: point["seconds"] or 0.0)
    grown = (softmax["seconds"] or 0.0) / (at[SOFTMAX, short]["seconds"] or 1.0)
    sizes = [point["bytes"] or 0.0 for point in others]
    least, most = units.size(min(sizes)), units.size(max(sizes))
    return (
        f"after {long:,.0f} tokens, one more token takes {units.seconds(softmax['seconds'] or 0.0)} with softmax, "
        f"{ratio(grown)}x its time after {short:,.0f} tokens, and {units.seconds(best['seconds'] or 0.0)} with "
        f"{best['label']}, the fastest of the others. The keys and values of softmax take "
        f"{units.size(softmax['bytes'] or 0.0)}, and the states of the others "
        f"{least if least == most else f'{least} to {most}'}."
    )


def _trust(twins: Mapping[str, Group], spread: Spread) -> str:
    says = ""
    if spread.deviation is not None:
        says = f"one twin differs by {spread.deviation:.3f} bits per byte from seed to seed (standard deviation). "
    lost = [group.label for group in twins.values() if len(group.scores) < group.runs]
    return (says + (f"Not every run of {listed(lost)} finished." if lost else "")).strip()
