"""From the runs of a grid to numbers and tables: means, spreads and intervals, and the tables of the paper.

All twins of a grid share a recipe, so their spread over seeds is estimated together, in points of accuracy:

    s^2 = sum over twins and seeds (a - mean)^2 / nu,    nu = sum over twins (seeds - 1)

Twins that did not learn (below half of the best) spread differently and are left out. A mean over n seeds has the 95 %
interval mean +- t s / sqrt(n), where t is the quantile of Student's distribution with nu degrees of freedom.

The difference d of two twins, with n and m seeds and the same I test images, varies with both seeds and images:

    var(d) = s^2 (1/n + 1/m)  +  (V - R_a/n - R_b/m) / I                   95 % interval: d +- t sqrt(var(d))

    V      variance over images of D_i, the share of a's seeds that answer image i right minus the share of b's
    R      variance of a twin's answers that neither the seed nor the image explains; s^2 contains it, so V must not

Seeds and images are crossed random effects: another seed would answer these images differently, and other images would
favor another twin. Before V is computed, two images are added: only a answers the first one right, and only b the
second one (Bonett and Price 2012). Without them, twins that agree on every image would have an interval of zero width.
t has Satterthwaite's degrees of freedom, var(d)^2 / (seeds' part^2 / nu + images' part^2 / (I - 1)).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import fmean, stdev

import numpy as np

from softless.probes.running import student
from softless.report import units
from softless.study.schema import Estimated, MaskedAccuracy, PaperTable
from softless.study.twin_run import RunRecord
from softless.study.twins import QUESTIONS, TWINS, Question
from softless.train.metrics import Answers

Curve = tuple[tuple[float, float], ...]  # (epoch, accuracy in percent), for each evaluation
COLUMNS = ("twin", "accuracy", "spread", "seeds", "against softmax", "paper")
PARAMETERS = "parameters"  # one more column, where twins differ in size


@dataclass(frozen=True)
class Group:
    """The runs of one twin. A score is the accuracy in percent, or minus the bits per byte: more is better."""

    id: str
    label: str
    scores: tuple[float, ...]
    runs: int  # including those that diverged or failed
    instead: str = "failed"  # shown where there is no accuracy
    parameters: int | None = None
    curves: tuple[Curve, ...] = ()
    answers: np.ndarray | None = field(default=None, compare=False)  # [seeds, examples]; None if not recorded

    @property
    def mean(self) -> float | None:
        return fmean(self.scores) if self.scores else None

    @property
    def spread(self) -> float | None:
        return stdev(self.scores) if len(self.scores) > 1 else None

    @property
    def examples(self) -> int:
        """Number of test examples whose answers are known."""
        return 0 if self.answers is None else self.answers.shape[1]


@dataclass(frozen=True)
class Spread:
    """Standard deviation over seeds that all twins share, and its degrees of freedom; None with one seed per twin."""

    deviation: float | None
    freedom: int

    def margin(self, *seeds: int) -> float | None:
        """Return half the 95 % interval of a mean over n seeds, or of the difference of means over n and m seeds."""
        if self.deviation is None or not all(seeds):
            return None
        return student(self.freedom) * self.deviation * sqrt(sum(1 / n for n in seeds))


@dataclass(frozen=True)
class Interval:
    """The difference of two mean scores, and half its 95 % interval; None where a twin has one seed."""

    difference: float
    half: float | None
    from_examples: float  # the part of its variance that comes from test examples
    examples: int  # 0 where single answers are not known: the interval is over seeds alone

    @property
    def low(self) -> float | None:
        return None if self.half is None else self.difference - self.half

    @property
    def high(self) -> float | None:
        return None if self.half is None else self.difference + self.half


def groups(records: Iterable[RunRecord]) -> dict[str, Group]:
    """Group records by twin, in the order of `TWINS`."""
    by_twin: dict[str, list[RunRecord]] = {}
    for record in records:
        by_twin.setdefault(record["twin"]["id"], []).append(record)
    order = [twin.id for twin in TWINS]
    ranked = sorted(by_twin.items(), key=lambda item: order.index(item[0]) if item[0] in order else 999)
    return {id_: _group(id_, runs) for id_, runs in ranked}


def _group(id_: str, runs: list[RunRecord]) -> Group:
    done = [run for run in runs if run["status"] == "done"]
    answers = [Answers(**answers).bits() for run in done if (answers := run.get("answers"))]
    complete = len(answers) == len(done) > 0 and len({len(bits) for bits in answers}) == 1
    points = [[(point["epoch"], point["accuracy"]) for point in run.get("curve", ())] for run in done]
    return Group(
        id_, runs[0]["twin"]["label"], tuple(100 * (run["accuracy"] or 0.0) for run in done), len(runs),
        instead(run["status"] for run in runs), max((run.get("parameters") or 0 for run in runs), default=0) or None,
        tuple(tuple((epoch, 100 * share) for epoch, share in curve if share is not None) for curve in points),
        np.stack(answers) if complete else None,
    )  # fmt: skip


def instead(statuses: Iterable[str]) -> str:
    """Name runs without an accuracy: "not finite" is a result, "failed" is none."""
    return "not finite" if "diverged" in statuses else "failed"


def learned(twins: Collection[Group]) -> list[Group]:
    """Return the twins that are at least half as accurate as the best."""
    best = max((group.mean for group in twins if group.mean is not None), default=0.0)
    return [group for group in twins if group.mean is not None and group.mean >= best / 2]


def shared_spread(twins: Mapping[str, Group]) -> Spread:
    """Estimate the spread over seeds from all twins that learned."""
    known = learned(twins.values())
    freedom = sum(len(group.scores) - 1 for group in known)
    if freedom == 0:
        return Spread(None, 0)
    squares = sum((a - fmean(g.scores)) ** 2 for g in known for a in g.scores)
    return Spread(sqrt(squares / freedom), freedom)


def estimate(group: Group, spread: Spread) -> Estimated:
    """Return the mean accuracy from 0 to 1 with its 95 % interval over seeds, which one seed does not have."""
    mean, margin = group.mean, spread.margin(len(group.scores))
    low, high = (None, None) if mean is None or margin is None else (mean - margin, mean + margin)

    def share(percent: float | None) -> float | None:
        return None if percent is None else min(max(percent / 100, 0.0), 1.0)

    return {"mean": share(mean), "low": share(low), "high": share(high), "n": len(group.scores)}


def interval(a: Group, b: Group, spread: Spread, family: int = 1) -> Interval | None:
    """Return a's mean score minus b's with its interval; None where a or b has no run that is done.

    The intervals of a `family` of differences hold together with 95 % confidence (Bonferroni).
    """
    if a.mean is None or b.mean is None:
        return None
    n, m = len(a.scores), len(b.scores)
    examples = a.examples if a.examples == b.examples else 0
    over_examples = example_variance(a, b) if examples else 0.0
    if spread.deviation is None or min(n, m) < 2:
        return Interval(a.mean - b.mean, None, over_examples, examples)
    half = half_width(spread.deviation**2 * (1 / n + 1 / m), spread.freedom, over_examples, examples, family)
    return Interval(a.mean - b.mean, half, over_examples, examples)


def half_width(over_seeds: float, freedom: float, over_examples: float, examples: int, family: int = 1) -> float:
    """Return t sqrt(var) for a variance of two parts, the first with `freedom` degrees of freedom."""
    both = over_seeds + over_examples
    if both == 0:
        return 0.0
    weights = over_seeds**2 / freedom + (over_examples**2 / (examples - 1) if examples > 1 else 0.0)
    return student(max(1, int(both**2 / weights)), family) * sqrt(both)


def example_variance(a: Group, b: Group) -> float:
    """Return (V - R_a/n - R_b/m) / I, never below 0; R is 0 for a twin with one seed.

    Answers that are right or wrong count in percent, and get the two imaginary images. Other answers are scores.
    """
    assert a.answers is not None
    assert b.answers is not None
    whole, added = (100.0, [1.0, -1.0]) if a.answers.dtype == bool else (1.0, [])
    apart = np.append(a.answers.mean(0) - b.answers.mean(0), added)
    rest = sum(_unexplained(answers) / len(answers) for answers in (a.answers, b.answers))
    return whole**2 * max(float(apart.var(ddof=1)) - rest, 0.0) / len(apart)


def _unexplained(answers: np.ndarray) -> float:
    """Return the mean square of answers minus the means of their seed and their example; 0 for one seed."""
    seeds, examples = answers.shape
    if seeds < 2 or examples < 2:
        return 0.0
    answers = answers.astype(np.float64)
    rest = answers - answers.mean(1, keepdims=True) - answers.mean(0, keepdims=True) + answers.mean()
    return float(np.square(rest).sum()) / ((seeds - 1) * (examples - 1))


def named(group: Group, *, counted: bool) -> str:
    """Return the label of a twin, with its number of parameters if `counted`."""
    size = f" ({units.count(group.parameters)} parameters)" if counted and group.parameters else ""
    return f"{group.label}{size}"


def compare(a: Group, b: Group, spread: Spread) -> str:
    """Say in one sentence which of two twins is ahead, by how much, and whether chance alone differs as much.

    Chance is seeds and test images, or seeds alone where the answers to single images are not known. Twins that differ
    in size are named with their number of parameters.
    """
    apart = interval(a, b, spread)
    if apart is None:
        lost = " and ".join(group.label for group in (a, b) if group.mean is None)
        return f"{lost} did not finish a training."
    counted = a.parameters != b.parameters
    ahead, behind = (named(group, counted=counted) for group in ((a, b) if apart.difference >= 0 else (b, a)))
    by = f"{abs(apart.difference):.1f} points"
    if apart.half is None:
        return f"{ahead} is {by} ahead of {behind}, from one seed each."
    chance = f"the spread of seeds{' and test images' if apart.examples else ''} ({apart.half:.1f})"
    if abs(apart.difference) <= apart.half:
        return f"{ahead} and {behind} are {by} apart, within {chance}."
    return f"{ahead} is {by} ahead of {behind}, more than {chance}."


def tables(records: Sequence[RunRecord], in_windows: Sequence[RunRecord] = ()) -> list[PaperTable]:
    """Return the tables of the paper for which these runs have at least one comparison.

    Table 4 comes from `in_windows`, if there are any: runs of a model whose attention can be cut in windows.
    """
    answered = _tables(records)
    if in_windows:
        answered = [table for table in answered if table["id"] != "4"]
        answered += [table for table in _tables(in_windows) if table["id"] == "4"]
    return sorted(answered, key=lambda table: int(table["id"] or 0))


def _tables(records: Sequence[RunRecord]) -> list[PaperTable]:
    twins = groups(records)
    spread = shared_spread(twins)
    return [
        _table(question, twins, spread)
        for question in QUESTIONS
        if any(a in twins and b in twins for a, b in question.compares)
    ]


def _table(question: Question, twins: Mapping[str, Group], spread: Spread) -> PaperTable:
    ids = [twin.id for twin in TWINS if question.id in twin.tables and twin.id in twins]
    pairs = [(twins[a], twins[b]) for a, b in question.compares if a in twins and b in twins]
    rows = [_row(twins[id_], twins.get("softmax"), question.top1.get(id_)) for id_ in ids]
    columns = list(COLUMNS)
    if len(sizes := {twins[id_].parameters for id_ in ids}) > 1 and None not in sizes:
        columns.insert(1, PARAMETERS)
        for row, id_ in zip(rows, ids, strict=True):
            row.insert(1, twins[id_].parameters)
    return {
        "id": question.id, "title": question.title, "says": " ".join(compare(a, b, spread) for a, b in pairs),
        "columns": columns, "rows": rows, "paper": question.paper, "setting": question.setting,
    }  # fmt: skip


def _row(group: Group, softmax: Group | None, paper: float | None) -> list[object]:
    against = None
    if softmax is not None and softmax.mean is not None and group.mean is not None:
        against = round(group.mean - softmax.mean, 2)
    mean = group.instead if group.mean is None else round(group.mean, 2)
    spread = None if group.spread is None else round(group.spread, 2)
    seeds = len(group.scores)
    return [group.label, mean, spread, seeds if seeds == group.runs else f"{seeds} of {group.runs}", against, paper]


def table_2(masked: Sequence[MaskedAccuracy], labels: Mapping[str, str]) -> list[PaperTable]:
    """Return table 2, which compares the accuracies of trained twins under masks; no table if there are none."""
    masks: dict[str, dict[str, float | None]] = {}
    for row in masked:
        masks.setdefault(row["twin"], {})[row["mask"]] = row["accuracy"] and row["accuracy"]["mean"]
    columns = list(next(iter(masks.values()), ()))
    rows: list[list[object]] = [
        [labels[twin], *(None if (share := row.get(mask)) is None else round(100 * share, 1) for mask in columns)]
        for twin, row in masks.items()
    ]
    table: PaperTable = {
        "id": "2",
        "title": "Keys hidden from every query",
        "says": "Accuracy in percent, without retraining; rows still sum to one.",
        "columns": ["twin", *columns],
        "rows": rows,
        "paper": "Hiding the nearest nine keys costs softmax 20.6 points and InLine 12.0; nine others cost 0.5 and 0.",
        "setting": "ImageNet-1K, DeiT-T",
    }
    return [table] if rows else []
