"""From the runs of a grid to numbers: the mean of each twin, the spread over seeds, and the interval of a difference.

All twins of a grid share a recipe, so their spread over seeds is estimated together, in points of accuracy:

    s^2 = sum over twins and seeds (a - mean)^2 / nu,    nu = sum over twins (seeds - 1)

Twins that did not learn (below half of the best) have a spread of their own kind and are left out. A mean of n seeds
has the 95 % interval mean +- t s / sqrt(n), with t the quantile of Student's distribution with nu degrees of freedom.

The difference d of two twins, with n and m seeds and the same I test images, varies with both:

    var(d) = s^2 (1/n + 1/m)  +  (V - R_a/n - R_b/m) / I                   95 % interval: d +- t sqrt(var(d))

    V      variance over images of D_i, the share of a's seeds that answer image i right less the share of b's
    R      variance of a twin's answers that neither the seed nor the image explains; s^2 holds it, so it leaves V

Seeds and images are crossed random effects: another seed would answer these images otherwise, and other images would
favor another twin. Before V is taken, two images are added, one that only a answers right and one that only b does
(Bonett and Price 2012): without them two twins that agree on every image would have an interval of no width. t has the
degrees of freedom of Satterthwaite, var(d)^2 / (seeds' part^2 / nu + images' part^2 / (I - 1)).
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from softless.errors import FileError
from softless.probes.running import student
from softless.study.grid import Record, read_record
from softless.study.twins import TWINS
from softless.train.metrics import Answers

Curve = tuple[tuple[float, float], ...]  # (epoch, accuracy in percent), as far as it was evaluated


@dataclass(frozen=True)
class Group:
    """The runs of one twin, in percent of the test images."""

    id: str
    label: str
    accuracies: tuple[float, ...]
    runs: int  # those that diverged or failed among them
    instead: str = "failed"  # the word where there is no accuracy
    parameters: int | None = None
    curves: tuple[Curve, ...] = ()
    right: np.ndarray | None = field(default=None, compare=False)  # bool [seeds, images]; None where none were kept

    @property
    def mean(self) -> float | None:
        return fmean(self.accuracies) if self.accuracies else None

    @property
    def spread(self) -> float | None:
        return stdev(self.accuracies) if len(self.accuracies) > 1 else None

    @property
    def images(self) -> int:
        """Test images whose answers are known."""
        return 0 if self.right is None else self.right.shape[1]


@dataclass(frozen=True)
class Spread:
    """The deviation over seeds that twins share, and its degrees of freedom; None where each twin has one seed."""

    deviation: float | None
    freedom: int

    def margin(self, *seeds: int) -> float | None:
        """Half of the 95 % interval of a mean over n seeds, or of the difference of means over n and m."""
        if self.deviation is None or not all(seeds):
            return None
        return student(self.freedom) * self.deviation * sqrt(sum(1 / n for n in seeds))


@dataclass(frozen=True)
class Interval:
    """A difference of two means in points, and the 95 % interval around it; None where a twin has one seed."""

    difference: float
    half: float | None
    from_images: float  # its variance over test images
    images: int  # 0 where the answers to single images are not known, and the interval is over seeds alone

    @property
    def low(self) -> float | None:
        return None if self.half is None else self.difference - self.half

    @property
    def high(self) -> float | None:
        return None if self.half is None else self.difference + self.half


def read_runs(folder: Path) -> list[Record]:
    """The records of a grid, of every run that is over."""
    paths = sorted((folder / "runs").glob("*.json"))
    if not paths:
        raise FileError(f"{folder} holds no runs: there is no JSON in {folder / 'runs'}")
    return [read_record(path) for path in paths]


def groups(records: Iterable[Record]) -> dict[str, Group]:
    """By twin, in the order of the table of twins."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record["twin"]["id"], []).append(record)
    order = [twin.id for twin in TWINS]
    ranked = sorted(found.items(), key=lambda item: order.index(item[0]) if item[0] in order else 999)
    return {each: _group(each, runs) for each, runs in ranked}


def _group(id_: str, runs: list[Record]) -> Group:
    done = [run for run in runs if run["status"] == "done"]
    answers = [Answers(**run["answers"]).bits() for run in done if run.get("answers")]
    whole = len(answers) == len(done) > 0 and len({len(each) for each in answers}) == 1
    return Group(
        id_,
        runs[0]["twin"]["label"],
        tuple(100 * run["accuracy"] for run in done),
        len(runs),
        instead(run["status"] for run in runs),
        max((run.get("parameters") or 0 for run in runs), default=0) or None,
        tuple(tuple((point["epoch"], 100 * point["accuracy"]) for point in run.get("curve", ())) for run in done),
        np.stack(answers) if whole else None,
    )


def instead(statuses: Iterable[str]) -> str:
    """The word for runs without an accuracy: one that diverged is a result, one that failed is none."""
    return "not finite" if "diverged" in statuses else "failed"


def learned(found: Collection[Group]) -> list[Group]:
    """Those that are at least half as good as the best."""
    runtime = {group.id: group.mean for group in found if group.mean is not None}
    return [group for group in found if runtime.get(group.id, -1.0) >= max(runtime.values(), default=0.0) / 2]


def shared_spread(found: Mapping[str, Group]) -> Spread:
    """Over seeds, of all twins that learned."""
    known = learned(found.values())
    freedom = sum(len(group.accuracies) - 1 for group in known)
    if freedom == 0:
        return Spread(None, 0)
    squares = sum((a - fmean(g.accuracies)) ** 2 for g in known for a in g.accuracies)
    return Spread(sqrt(squares / freedom), freedom)


def estimate(group: Group, spread: Spread) -> dict[str, float | int | None]:
    """Mean accuracy from 0 to 1 with its 95 % interval over seeds, which one seed alone does not have."""
    mean, margin = group.mean, spread.margin(len(group.accuracies))
    low, high = (None, None) if mean is None or margin is None else (mean - margin, mean + margin)
    parts = {"mean": mean, "low": low, "high": high}
    shares: dict[str, float | int | None] = {
        name: None if value is None else min(max(value / 100, 0.0), 1.0) for name, value in parts.items()
    }
    return {**shares, "n": len(group.accuracies)}


def interval(a: Group, b: Group, spread: Spread) -> Interval | None:
    """Of a's mean accuracy less b's; None where one of them has no run that came to its end."""
    if a.mean is None or b.mean is None:
        return None
    n, m = len(a.accuracies), len(b.accuracies)
    images = a.images if a.images == b.images else 0
    over_images = image_variance(a, b) if images else 0.0
    if spread.deviation is None or min(n, m) < 2:
        return Interval(a.mean - b.mean, None, over_images, images)
    half = half_width(spread.deviation**2 * (1 / n + 1 / m), spread.freedom, over_images, images)
    return Interval(a.mean - b.mean, half, over_images, images)


def half_width(over_seeds: float, freedom: float, over_images: float, images: int) -> float:
    """t sqrt(var): of two parts of a variance, the first with `freedom` degrees of freedom."""
    both = over_seeds + over_images
    if both == 0:
        return 0.0
    weights = over_seeds**2 / freedom + (over_images**2 / (images - 1) if images > 1 else 0.0)
    return student(max(1, int(both**2 / weights))) * sqrt(both)


def image_variance(a: Group, b: Group) -> float:
    """(V - R_a/n - R_b/m) / I in points^2, as far as the seeds tell R apart; never below 0."""
    assert a.right is not None
    assert b.right is not None
    apart = a.right.mean(0) - b.right.mean(0)
    varied = np.append(apart, [1.0, -1.0]).var(ddof=1)
    rest = sum(_rest(each.right) / len(each.right) for each in (a, b) if each.right is not None)
    return 1e4 * max(float(varied) - rest, 0.0) / (len(apart) + 2)


def _rest(right: np.ndarray) -> float:
    """The mean square of answers less their seed's mean and their image's mean; 0 for one seed, which cannot tell."""
    seeds, images = right.shape
    if seeds < 2 or images < 2:
        return 0.0
    answers = right.astype(np.float64)
    rest = answers - answers.mean(1, keepdims=True) - answers.mean(0, keepdims=True) + answers.mean()
    return float(np.square(rest).sum()) / ((seeds - 1) * (images - 1))
