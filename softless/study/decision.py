"""Do you need the softmax? The rule that turns the numbers of a study into no, yes or cannot tell, with its reasons.

The study of images and that of text share the rule. What follows is said of images; `Measure` has what differs.

A fair pair is a softmax twin and a linear twin that differ in attention alone, with the same number of parameters:

    softmax          inline
    softmax-local    inline-local

Let d be the accuracy of the linear twin minus that of the softmax twin, in points, with its 95 % interval over seeds
and test images (study/tables.py), and let `margin` be the smallest loss of accuracy that matters:

    no            the whole interval lies above -margin: dropping the softmax costs nothing that matters
    yes           the whole interval lies below -margin
    cannot tell   the interval contains -margin, or the pair fails one of these conditions:

    - every run is done
    - both twins have learned: they reach twice chance or, where that is less, half the way from chance to 100 %
    - neither twin gains more than `margin` in the last tenth of its training
    - both twins have two seeds or more, and their answers to single images are known

Chance is the share of the most frequent class among the test images. The gain in the last tenth is taken from the mean
curve over seeds. A single evaluation is noisy, so two windows of w evaluations are compared. w is a tenth of all
evaluations but at least 2 (fewer if there are not 4):

    gain = (mean of the last w - mean of the w before) / (epochs between their middles) * epochs / 10

The study answers for the pair with the higher mean accuracy, and also reports the answer of the other pair.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import fmean

from softless.probes.running import Z
from softless.report.units import listed
from softless.study.schema import DecisionPart, FairPair
from softless.study.tables import Curve, Group, Interval, Spread, half_width, interval

FAIR = (("softmax", "inline"), ("softmax-local", "inline-local"))
MARGIN = 1.0  # points
MOST_SEEDS, MANY_SEEDS = 30, 10  # advise no more seeds; advise more images together with this many seeds
LONGER, LONGEST = 1.5, 10.0  # advise at least and at most this many times the epochs
NO, YES, CANNOT = "no", "yes", "cannot tell"


def decide(twins: Mapping[str, Group], spread: Spread, *, chance: float, margin: float = MARGIN) -> DecisionPart:
    """Decide each fair pair that was trained, and choose the pair that the study answers for; chance is from 0 to 1."""
    pairs = [(twins[a], twins[b]) for a, b in FAIR if a in twins and b in twins]
    means = [fmean([group.mean or 0.0 for group in pair]) for pair in pairs]
    return {
        "margin": margin,
        "pairs": [decide_pair(*pair, spread, Rule(100 * chance, margin)) for pair in pairs],
        "headline": means.index(max(means)) if means else None,
    }


class Measure:
    """What twins are compared by, and the words for it: accuracy, in points. Another study replaces what differs.

    noun, examples   words for the scores, and for what is tested on
    trend            what the numbers do while a twin learns
    sign             of a number that is shown, relative to the score, of which more is better
    """

    noun, examples, trend, sign = "accuracy", "test images", "rises", 1

    def amount(self, value: float) -> str:
        """Write an amount: -1 point."""
        return points(value)

    def span(self, low: float, high: float, margin: float) -> str:
        """Write an interval: -0.4 to +1.0."""
        return span(low, high, margin)

    def near(self, value: float) -> str:
        """Write a small distance: 0.3 points."""
        return f"{value:.1f} points"

    def unlearned(self, pair: Sequence[Group], chance: float) -> dict[str, str]:
        """Return {why: what would help} if a twin did not learn."""
        least = min(2 * chance, (chance + 100) / 2)
        low = [f"{group.label} ({group.mean:.1f} %)" for group in pair if (group.mean or 0.0) < least]
        why = f"{listed(low)} did not learn: it takes {least:.1f} %, and chance is {chance:.1f} %"
        return {why: "longer training, more images to train on, or a recipe with larger images"} if low else {}

    def rising(self, gains: Mapping[str, float], margin: float, epochs: float) -> dict[str, str]:
        """Return {why: what would help} if the gains in the last tenth show that the training was too short."""
        rising = {label: points for label, points in gains.items() if points > margin}
        if not rising:
            return {}
        factor = min(max(LONGER, max(rising.values()) / margin), LONGEST)
        by = listed([f"{label} by {points:.1f} points" for label, points in rising.items()])
        return {
            f"accuracy still rises in the last tenth of training ({by})": f"about {ceil(factor * epochs)} epochs "
            f"instead of {epochs:g} (--epochs {ceil(factor * epochs)})"
        }


ACCURACY = Measure()


@dataclass(frozen=True)
class Rule:
    """How pairs are decided: the measure, the score of chance, the margin, and how many pairs are decided together."""

    chance: float
    margin: float
    measure: Measure = ACCURACY
    family: int = 1


def decide_pair(softmax: Group, linear: Group, spread: Spread, rule: Rule) -> FairPair:
    """Apply the rule to one pair."""
    apart, would_tell = interval(linear, softmax, spread, rule.family), None
    obstacles = _obstacles(softmax, linear, rule, apart)
    if obstacles:
        answer, because = CANNOT, "; ".join(obstacles)
        would_tell = "; ".join(dict.fromkeys(obstacles.values()))
    else:
        assert apart is not None
        answer, because, would_tell = _judge(apart, spread, len(linear.scores), rule)
    return {
        "softmax": softmax.id, "linear": linear.id, "labels": [softmax.label, linear.label],
        "difference": None if apart is None else apart.difference, "low": None if apart is None else apart.low,
        "high": None if apart is None else apart.high, "parameters": [softmax.parameters, linear.parameters],
        "answer": answer, "because": because, "would_tell": would_tell,
    }  # fmt: skip


def _judge(apart: Interval, spread: Spread, seeds: int, rule: Rule) -> tuple[str, str, str | None]:
    """Return answer, because and would_tell of a pair that has an interval."""
    assert apart.low is not None
    assert apart.high is not None
    margin, measure = rule.margin, rule.measure
    low, high = sorted((measure.sign * apart.low, measure.sign * apart.high))
    better, worse = ("above", "below")[:: measure.sign]
    span_text = f"95 % interval of the difference, {measure.span(low, high, margin)}"
    edge = measure.amount(-measure.sign * margin)
    if apart.low > -margin:
        return NO, f"the whole {span_text}, lies {better} {edge}", None
    if apart.high < -margin:
        return YES, f"the whole {span_text}, lies {worse} {edge}", None
    return CANNOT, f"the {span_text}, contains {edge}", would_tell(apart, spread, seeds, rule)


def _obstacles(softmax: Group, linear: Group, rule: Rule, apart: Interval | None) -> dict[str, str]:
    """Return {why the pair cannot be decided: what would help} for each condition that fails."""
    obstacles, both = dict[str, str](), (softmax, linear)
    if lost := [group for group in both if len(group.scores) < group.runs]:
        count = sum(group.runs - len(group.scores) for group in lost)
        runs, whose = "run" if count == 1 else "runs", listed([group.label for group in lost])
        obstacles[f"{count} {runs} of {whose} did not finish"] = (
            "running the same command again, which tries failed runs again"
        )
    if apart is None:
        return obstacles
    obstacles |= rule.measure.unlearned(both, rule.chance)
    gains = {group.label: gain(group.curves) for group in both}
    if unseen := [label for label, points in gains.items() if points is None]:
        obstacles[f"one evaluation of {listed(unseen)} does not show whether {_still(rule)}"] = (
            "training for several epochs (--epochs)"
        )
    else:
        epochs = max(curve[-1][0] for group in both for curve in group.curves if curve)
        known = {label: points for label, points in gains.items() if points is not None}
        obstacles |= rule.measure.rising(known, rule.margin, epochs)
    if apart.half is None:
        obstacles[f"one seed does not show how much {rule.measure.noun} differs between seeds"] = _first_seeds(
            apart, rule.margin
        )
    elif not apart.examples:
        obstacles["an older version wrote these runs, and did not store the answer to each image"] = (
            "training them again, in another folder"
        )
    return obstacles


def _still(rule: Rule) -> str:
    return f"{rule.measure.noun} still {rule.measure.trend}"


def _first_seeds(apart: Interval, margin: float) -> str:
    """Estimate the seeds needed after one seed: the spread over images stands in for the unknown spread over seeds."""
    room = abs(apart.difference + margin)
    least = next((n for n in range(2, MOST_SEEDS) if Z * (apart.from_examples / n) ** 0.5 < room), MOST_SEEDS)
    return f"more seeds: at least {max(least, 2)} per twin (--seeds {max(least, 2)})"


def would_tell(apart: Interval, spread: Spread, seeds: int, rule: Rule) -> str:
    """Say how many seeds or examples would put the interval on one side of -margin, if the difference stays."""
    assert spread.deviation is not None
    variance, twins = spread.deviation**2, spread.freedom / max(seeds - 1, 1)
    room, measure = abs(apart.difference + rule.margin), rule.measure

    def half(count: int, over_examples: float) -> float:
        return half_width(2 * variance / count, twins * (count - 1), over_examples, apart.examples, rule.family)

    enough = next((n for n in range(seeds + 1, MOST_SEEDS + 1) if half(n, apart.from_examples) < room), None)
    if enough is not None:
        return f"about {enough} seeds per twin instead of {seeds} (--seeds {enough}), if the difference stays"
    many = max(seeds, MANY_SEEDS)
    if half(many, 0.0) < room:
        times = next((n for n in (2, 3, 5, 10, 20, 50, 100) if half(many, apart.from_examples / n) < room), None)
        if times is not None:
            return (
                f"about {times * apart.examples:,} {measure.examples} instead of {apart.examples:,}, with {many} seeds "
                "per twin, if the difference stays"
            )
    return (
        f"hardly any number of seeds or {measure.examples}: the difference is only {measure.near(room)} away from the "
        "margin; another --margin may"
    )


def gain(curves: Sequence[Curve]) -> float | None:
    """Return the points gained in the last tenth of training, on the mean curve over seeds; None for one evaluation."""
    by_epoch: dict[float, list[float]] = {}
    for curve in curves:
        for epoch, accuracy in curve:
            by_epoch.setdefault(epoch, []).append(accuracy)
    points = [(epoch, fmean(values)) for epoch, values in sorted(by_epoch.items())]
    width = min(max(2, ceil(len(points) / 10)), len(points) // 2)
    if width == 0:
        return None
    (early, before), (late, after) = (
        (fmean(epoch for epoch, _ in part), fmean(value for _, value in part))
        for part in (points[-2 * width : -width], points[-width:])
    )
    return (after - before) / (late - early) * points[-1][0] / 10


def points(value: float, *, signed: bool = False) -> str:
    """Write a number of points: -1 point, +0.3 points."""
    text = f"{value:+.1f}" if signed else f"{value:g}"
    return f"{text} {'point' if abs(value) == 1 else 'points'}"


def span(low: float, high: float, margin: float) -> str:
    """Write an interval: -0.4 to +1.0; an end close to -margin has two decimals, which show its side."""
    return " to ".join(f"{x:+.2f}" if abs(x + margin) < 0.05 else f"{x:+.1f}" for x in (low, high))
