"""Bits per byte of the twins of a text, their intervals, and the pairs that decide.

The score of a twin is minus its bits per byte on the text to test on, so that more is better, as of an accuracy. Its
intervals and the rule are those of images (study/tables.py, study/decision.py), with test sequences as the examples:

    x_i = I loss_i / (bytes ln 2)        sequence i of I: the mean over sequences is the bits per byte of the text

Every twin is compared with softmax, and the study answers for the best of them. Among several, one may be ahead by
chance. So the intervals of all pairs hold together with 95 % confidence (Bonferroni).
"""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, log, log2
from statistics import fmean
from typing import Any

import numpy as np

from softless.report.units import listed
from softless.study.decision import LONGER, LONGEST, Measure, Rule, decide_pair
from softless.study.schema import DecisionPart, FairPair
from softless.study.tables import Group, Spread, instead
from softless.study.text.run import TextRecord
from softless.study.text.schema import RecallResult
from softless.study.text.twins import TEXT_TWINS
from softless.train.language_recipe import SOFTMAX
from softless.train.tasks.language import SequenceAnswers


class Bits(Measure):
    """Bits per byte, of which fewer are better: numbers are shown as more bits than softmax."""

    noun, examples, trend, sign = "the loss in bits per byte", "test sequences", "falls", -1

    def amount(self, value: float) -> str:
        return f"{value:g} bits per byte"

    def span(self, low: float, high: float, margin: float) -> str:
        decimals = 4 if any(abs(end - margin) < 5e-4 for end in (low, high)) else 3
        return f"{low:+.{decimals}f} to {high:+.{decimals}f}"

    def near(self, value: float) -> str:
        return f"{value:.3f} bits per byte"

    def unlearned(self, pair: Sequence[Group], chance: float) -> dict[str, str]:
        high = [f"{group.label} ({-(group.mean or 0.0):.2f} bits per byte)" for group in pair if group.mean < chance]  # type: ignore[operator]
        why = f"{listed(high)} did not learn: the frequencies of single bytes alone give {-chance:.2f} bits per byte"
        return {why: "more text, or longer training (--epochs)"} if high else {}

    def rising(self, gains: Mapping[str, float], margin: float, epochs: float) -> dict[str, str]:
        """Small models of text improve as long as they train, so what counts is whether the twins' distance changes."""
        apart = max(gains.values()) - min(gains.values())
        if apart <= margin:
            return {}
        longer = max(ceil(LONGER * epochs), ceil(min(apart / margin, LONGEST) * epochs))
        return {
            f"the difference between {listed(list(gains))} still changes in the last tenth of training, by {apart:.3f} "
            "bits per byte": f"about {longer} epochs instead of {epochs:g} (--epochs {longer})"
        }


BITS = Bits()


def text_groups(records: Iterable[TextRecord]) -> dict[str, Group]:
    """Group records by twin, in the order of `TEXT_TWINS`."""
    by_twin: dict[str, list[TextRecord]] = {}
    for record in records:
        by_twin.setdefault(record["twin"]["id"], []).append(record)
    order = [twin.id for twin in TEXT_TWINS]
    return {id_: _text_group(id_, by_twin[id_]) for id_ in sorted(by_twin, key=order.index)}


def _text_group(id_: str, runs: list[TextRecord]) -> Group:
    done = [run for run in runs if run["status"] == "done"]
    curves = [[(point["epoch"], -point["bits_per_byte"]) for point in run["curve"]] for run in done]
    return Group(
        id_, runs[0]["twin"]["label"], tuple(-(run["bits_per_byte"] or 0.0) for run in done), len(runs),
        instead(run["status"] for run in runs), max((run["parameters"] for run in runs), default=0) or None,
        tuple(map(tuple, curves)), np.stack([sequence_scores(run) for run in done]) if done else None,
    )  # fmt: skip


def sequence_scores(run: TextRecord) -> np.ndarray:
    """Return -x_i for every test sequence."""
    assert run["answers"] is not None
    losses, sizes = SequenceAnswers(**run["answers"]).arrays()
    return -losses.astype(np.float64) * len(losses) / (sizes.sum() * log(2))


def spread_of_bits(twins: Mapping[str, Group], chance: float) -> Spread:
    """Estimate the spread over seeds from the twins that learned, or from all where none did."""
    known = [group for group in twins.values() if group.mean is not None and group.mean > chance] or [*twins.values()]
    freedom = sum(len(group.scores) - 1 for group in known)
    if freedom == 0:
        return Spread(None, 0)
    squares = sum((score - fmean(group.scores)) ** 2 for group in known for score in group.scores)
    return Spread((squares / freedom) ** 0.5, freedom)


def entropy(data: bytes) -> float:
    """Return the bits per byte of a text whose bytes are coded by their frequencies alone."""
    counts = np.bincount(np.frombuffer(data, np.uint8))
    return sum(-count / len(data) * log2(count / len(data)) for count in counts.tolist() if count)


def decide_text(twins: Mapping[str, Group], spread: Spread, *, chance: float, margin: float) -> DecisionPart:
    """Decide softmax against every other twin; the study answers for the twin with the fewest bits per byte."""
    others = [group for id_, group in twins.items() if id_ != SOFTMAX] if SOFTMAX in twins else []
    rule = Rule(chance, margin, BITS, max(len(others), 1))
    pairs = [_as_bits(decide_pair(twins[SOFTMAX], group, spread, rule)) for group in others]
    ranked = [(group.mean, place) for place, group in enumerate(others) if group.mean is not None]
    return {"margin": margin, "pairs": pairs, "headline": max(ranked)[1] if ranked else None}


def _as_bits(pair: FairPair) -> FairPair:
    """Return a pair whose difference is in bits per byte more than softmax."""
    flipped = {key: None if (value := pair[key]) is None else -value for key in ("difference", "low", "high")}
    return {**pair, "difference": flipped["difference"], "low": flipped["high"], "high": flipped["low"]}


def recall_results(records: Iterable[Mapping[str, Any]]) -> list[RecallResult]:
    """Return the accuracy of each twin by task and length: the mean, the lowest and the highest seed."""
    accuracies: dict[tuple[str, str, str, int, bool], list[float]] = {}
    for record in records:
        for point in record["points"] or []:
            key = record["twin"]["id"], record["twin"]["label"], point["task"], point["tokens"], point["inside"]
            accuracies.setdefault(key, []).append(point["accuracy"])
    return [
        {
            "twin": twin, "label": label, "task": task, "tokens": tokens, "inside": inside,
            "accuracy": {"mean": fmean(values), "low": min(values), "high": max(values), "n": len(values)},
        }
        for (twin, label, task, tokens, inside), values in accuracies.items()
    ]  # fmt: skip
