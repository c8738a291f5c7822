"""Do you need the softmax? The rule that turns the numbers of a study into one of three answers, and into words.

A fair pair is a softmax twin and a linear twin that differ in attention alone, with the same number of parameters:

    softmax          inline
    softmax-local    inline-local

Let d be the accuracy of the linear twin less that of the softmax twin, in points, with its 95 % interval over seeds and
test images (study/statistics.py), and `margin` the smallest difference that matters:

    no            the whole interval lies above -margin: without the softmax, at most a difference that does not matter
    yes           the whole interval lies below -margin
    cannot tell   the interval contains -margin, or the pair fails one of these conditions

A pair has no verdict, whatever its interval, unless
    - every run came to its end
    - both twins have learned: they reach twice chance, or, where that is less, half of the way from chance to 100 %
    - neither gains more than `margin` in the last tenth of its training
    - both have two seeds or more, and their answers to single images are known

Chance is the share of the most frequent class among the test images. The gain in the last tenth follows from the mean
curve over seeds. A single evaluation is noisy, so windows of w evaluations are compared, a tenth of them but at least 2
(fewer if there are not 4):

    gain = (mean of the last w - mean of the w before) / (epochs between their middles) * epochs / 10

The study answers for the pair with the higher mean accuracy, and says the other pair's answer beside it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from statistics import fmean
from typing import Any

from softless.probes.running import Z
from softless.report import units
from softless.study.statistics import Curve, Group, Interval, Spread, half_width, interval

FAIR = (("softmax", "inline"), ("softmax-local", "inline-local"))
MARGIN = 1.0  # points
MOST_SEEDS, MANY_SEEDS = 30, 10  # beyond which more seeds are no advice; with which more images are advised
LONGER, LONGEST = 1.5, 10.0  # times as many epochs, at least and at most, to be advised
NO, YES, CANNOT = "no", "yes", "cannot tell"


@dataclass(frozen=True)
class Pair:
    """What was decided about two twins that differ in attention alone."""

    softmax: str
    linear: str
    labels: tuple[str, str]
    difference: float | None
    low: float | None
    high: float | None
    parameters: tuple[int | None, int | None]
    answer: str
    because: str
    would_tell: str | None


def decide(found: Mapping[str, Group], spread: Spread, *, chance: float, margin: float = MARGIN) -> dict[str, Any]:
    """Of each fair pair that was trained, and which of them the study answers for; JSON. Chance is from 0 to 1."""
    pairs = [(found[a], found[b]) for a, b in FAIR if a in found and b in found]
    decided = [decide_pair(*pair, spread, 100 * chance, margin) for pair in pairs]
    means = [fmean([group.mean or 0.0 for group in pair]) for pair in pairs]
    headline = means.index(max(means)) if means else None
    return {"margin": margin, "pairs": [asdict(pair) for pair in decided], "headline": headline}


def decide_pair(softmax: Group, linear: Group, spread: Spread, chance: float, margin: float) -> Pair:
    """The rule; chance in percent."""
    apart = interval(linear, softmax, spread)
    obstacles = _obstacles(softmax, linear, chance, margin, apart)
    if obstacles:
        answer, because = CANNOT, "; ".join(reason for reason, _ in obstacles)
        remedies = list(dict.fromkeys(remedy for _, remedy in obstacles))
        would_tell: str | None = "; ".join(remedies)
    else:
        assert apart is not None
        answer, because, would_tell = _judge(apart, spread, len(linear.accuracies), margin)
    return Pair(
        softmax.id,
        linear.id,
        (softmax.label, linear.label),
        None if apart is None else apart.difference,
        None if apart is None else apart.low,
        None if apart is None else apart.high,
        (softmax.parameters, linear.parameters),
        answer,
        because,
        would_tell,
    )


def _judge(apart: Interval, spread: Spread, seeds: int, margin: float) -> tuple[str, str, str | None]:
    """answer, because, would_tell, where there is an interval."""
    assert apart.low is not None
    assert apart.high is not None
    whole, edge = f"95 % interval of the difference, {span(apart.low, apart.high, margin)}", points(-margin)
    if apart.low > -margin:
        return NO, f"the whole {whole}, lies above {edge}", None
    if apart.high < -margin:
        return YES, f"the whole {whole}, lies below {edge}", None
    room = abs(apart.difference + margin)
    return CANNOT, f"the {whole}, contains {edge}", would_tell(apart, spread, seeds, room)


def _obstacles(
    softmax: Group, linear: Group, chance: float, margin: float, apart: Interval | None
) -> list[tuple[str, str]]:
    """(why there is no verdict, what would help)."""
    found, both = [], (softmax, linear)
    if lost := [group for group in both if len(group.accuracies) < group.runs]:
        count = sum(group.runs - len(group.accuracies) for group in lost)
        runs, whose = "run" if count == 1 else "runs", listed([group.label for group in lost])
        found.append(
            (
                f"{count} {runs} of {whose} did not come to an end",
                "runs that all come to an end: the same command tries failed ones again",
            )
        )
    if apart is None:
        return found
    least = min(2 * chance, (chance + 100) / 2)
    if low := [group for group in both if (group.mean or 0.0) < least]:
        reached = listed([f"{group.label} ({group.mean:.1f} %)" for group in low])
        found.append(
            (
                f"{reached} did not learn: with chance at {chance:.1f} %, that takes {least:.1f} %",
                "longer training, more images to train on, or a recipe with larger images",
            )
        )
    gains = {group.label: gain(group.curves) for group in both}
    if unseen := [label for label, each in gains.items() if each is None]:
        found.append(
            (
                f"one evaluation of {listed(unseen)} does not show whether accuracy still rises",
                "training for several epochs (--epochs)",
            )
        )
    rising = {label: each for label, each in gains.items() if each is not None and each > margin}
    if rising:
        epochs = max(curve[-1][0] for group in both for curve in group.curves if curve)
        factor = min(max(LONGER, max(rising.values()) / margin), LONGEST)
        by = listed([f"{label} by {each:.1f} points" for label, each in rising.items()])
        found.append(
            (
                f"accuracy still rises in the last tenth of training ({by})",
                f"about {ceil(factor * epochs)} epochs instead of {epochs:g} (--epochs {ceil(factor * epochs)})",
            )
        )
    if apart.half is None:
        found.append(("one seed does not show how much seeds differ", _first_seeds(apart, margin)))
    elif not apart.images:
        found.append(
            (
                "these runs kept no answers to single images, which an older version wrote",
                "training them again, in another folder",
            )
        )
    return found


def _first_seeds(apart: Interval, margin: float) -> str:
    """From one seed: images that the twins answer differently stand in for the spread of seeds, which adds to it."""
    room = abs(apart.difference + margin)
    least = next((n for n in range(2, MOST_SEEDS) if Z * (apart.from_images / n) ** 0.5 < room), MOST_SEEDS)
    return f"more seeds: at least {max(least, 2)} per twin (--seeds {max(least, 2)})"


def would_tell(apart: Interval, spread: Spread, seeds: int, room: float) -> str:
    """Seeds or images with which the interval would lie on one side, if the difference stays what it is."""
    assert spread.deviation is not None
    each, twins = spread.deviation**2, spread.freedom / max(seeds - 1, 1)

    def half(count: int, over_images: float) -> float:
        return half_width(2 * each / count, twins * (count - 1), over_images, apart.images)

    enough = next((n for n in range(seeds + 1, MOST_SEEDS + 1) if half(n, apart.from_images) < room), None)
    if enough is not None:
        return f"about {enough} seeds per twin instead of {seeds} (--seeds {enough}), if the difference stays"
    many = max(seeds, MANY_SEEDS)
    if half(many, 0.0) < room:
        times = next((n for n in (2, 3, 5, 10, 20, 50, 100) if half(many, apart.from_images / n) < room), None)
        if times is not None:
            return (
                f"about {times * apart.images:,} test images instead of {apart.images:,}, with {many} seeds per twin, "
                "if the difference stays"
            )
    return (
        f"hardly any number of seeds or test images: the difference is {room:.1f} points from the line; "
        "another --margin may"
    )


def gain(curves: Sequence[Curve]) -> float | None:
    """Points in the last tenth of training, on the mean curve over seeds; None for a curve of one evaluation."""
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


def answer_in_words(decision: Mapping[str, Any], found: Mapping[str, Group], test_images: int) -> str:
    """The first row of the verdict: the answer, its numbers, and the other pair beside it."""
    margin, pairs = decision["margin"], decision["pairs"]
    if decision["headline"] is None:
        return _no_pair(found)
    first = pairs[decision["headline"]]
    said = [f"{first['answer'].capitalize()}. {_numbers(first, found, margin, test_images)}."]
    said += _reasons(first)
    for other in pairs:
        if other is not first:
            said.append(f"{_kind(other)}: {other['answer']}. {_numbers(other, found, margin, None)}.")
            said += _reasons(other)
    return " ".join(said)


def _reasons(pair: Mapping[str, Any]) -> list[str]:
    """Of an answer that is none: why, and what would tell."""
    if pair["answer"] != CANNOT:
        return []
    return [
        f"Why: {pair['because']}.",
        *([f"What would tell: {pair['would_tell']}."] if pair["would_tell"] else []),
    ]


def _numbers(pair: Mapping[str, Any], found: Mapping[str, Group], margin: float, test_images: int | None) -> str:
    softmax, linear = found[pair["softmax"]], found[pair["linear"]]
    if softmax.mean is None or linear.mean is None:
        return f"{linear.label} and {softmax.label} cannot be compared"
    says = f"{linear.label} reaches {linear.mean:.1f} % and {softmax.label} {softmax.mean:.1f} %: "
    says += points(pair["difference"], signed=True)
    if pair["low"] is not None:
        says += f", 95 % interval {span(pair['low'], pair['high'], margin)}"
    if test_images is not None:
        seeds = min(len(softmax.accuracies), len(linear.accuracies))
        says += f" ({seeds} {'seed' if seeds == 1 else 'seeds'}, {test_images:,} test images)"
        says += "" if pair["low"] is None else f"; anything above {points(-margin)} counts as no loss"
    return says


def _kind(pair: Mapping[str, Any]) -> str:
    return "With the local residual" if pair["linear"].endswith("-local") else "Without the local residual"


def _no_pair(found: Mapping[str, Group]) -> str:
    """What to add, and why the twins that are there do not answer."""
    have = " and ".join(named(group, counted=True) for group in found.values()) or "no twin"
    partner = {**dict(FAIR), **{b: a for a, b in FAIR}}
    missing = [partner[id_] for id_ in found if id_ in partner] or ["softmax", "inline"]
    return (
        f"Cannot tell: no two of the twins trained ({have}) differ in attention alone. "
        f"What would tell: add {' or '.join(dict.fromkeys(missing))} to --twins."
    )


def named(group: Group, *, counted: bool) -> str:
    """The label, with the number of parameters where a comparison differs in it."""
    size = f" ({units.count(group.parameters)} parameters)" if counted and group.parameters else ""
    return f"{group.label}{size}"


def points(value: float, *, signed: bool = False) -> str:
    """-1 point, +0.3 points."""
    text = f"{value:+.1f}" if signed else f"{value:g}"
    return f"{text} {'point' if abs(value) == 1 else 'points'}"


def span(low: float, high: float, margin: float) -> str:
    """-0.4 to +1.0; with more decimals where one would hide on which side of -margin an end lies."""
    return " to ".join(f"{x:+.2f}" if abs(x + margin) < 0.05 else f"{x:+.1f}" for x in (low, high))


def listed(names: Sequence[str]) -> str:
    """a, b and c."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""
