"""From the runs of a grid to its tables: mean and spread over seeds, and whether a difference is more than the spread.

All twins of a grid share a recipe, so their spread over seeds is estimated together:

    s^2 = sum over twins and seeds (a - mean)^2 / nu,    nu = sum over twins (seeds - 1)

A mean of n seeds then has the 95 % interval mean +- t s / sqrt(n), t the quantile of Student's distribution with nu
degrees of freedom, and two means differ by more than the spread if they are further apart than
t s sqrt(1/n + 1/m). Twins that did not learn (below half of the best) have a spread of their own kind and are left out.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from softless.errors import FileError
from softless.probes.running import student
from softless.train.grid import Record, read_record
from softless.train.twins import QUESTIONS, TWINS, Question

COLUMNS = ("twin", "accuracy", "spread", "seeds", "against softmax", "paper")


@dataclass(frozen=True)
class Group:
    """The runs of one twin, in percent of the test images."""

    id: str
    label: str
    accuracies: tuple[float, ...]
    runs: int  # those that diverged or failed among them
    instead: str = "failed"  # the word where there is no accuracy

    @property
    def mean(self) -> float | None:
        return fmean(self.accuracies) if self.accuracies else None

    @property
    def spread(self) -> float | None:
        return stdev(self.accuracies) if len(self.accuracies) > 1 else None


@dataclass(frozen=True)
class Spread:
    """The deviation over seeds that twins share, and what follows from it; None where each twin has one seed."""

    deviation: float | None
    quantile: float

    def margin(self, *seeds: int) -> float | None:
        """Half of the 95 % interval of a mean over n seeds, or of the difference of means over n and m."""
        if self.deviation is None or not all(seeds):
            return None
        return self.quantile * self.deviation * sqrt(sum(1 / n for n in seeds))


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
    return {
        each: Group(
            each,
            runs[0]["twin"]["label"],
            tuple(100 * run["accuracy"] for run in runs if run["status"] == "done"),
            len(runs),
            instead(run["status"] for run in runs),
        )
        for each, runs in sorted(found.items(), key=lambda item: order.index(item[0]) if item[0] in order else 999)
    }


def instead(statuses: Iterable[str]) -> str:
    """The word for runs without an accuracy: one that diverged is a result, one that failed is none."""
    return "not finite" if "diverged" in statuses else "failed"


def learned(found: Collection[Group]) -> list[Group]:
    """Those that are at least half as good as the best."""
    means = {group.id: group.mean for group in found if group.mean is not None}
    return [group for group in found if means.get(group.id, -1.0) >= max(means.values(), default=0.0) / 2]


def shared_spread(found: Mapping[str, Group]) -> Spread:
    """Over seeds, of all twins that learned."""
    known = learned(found.values())
    freedom = sum(len(group.accuracies) - 1 for group in known)
    if freedom == 0:
        return Spread(None, 0.0)
    squares = sum((a - fmean(g.accuracies)) ** 2 for g in known for a in g.accuracies)
    return Spread(sqrt(squares / freedom), student(freedom))


def estimate(group: Group, spread: Spread) -> dict[str, float | int | None]:
    """Mean accuracy from 0 to 1 with its 95 % interval, which one seed alone does not have."""
    mean, margin = group.mean, spread.margin(len(group.accuracies))
    low, high = (None, None) if mean is None or margin is None else (mean - margin, mean + margin)
    parts = {"mean": mean, "low": low, "high": high}
    shares: dict[str, float | int | None] = {
        name: None if value is None else min(max(value / 100, 0.0), 1.0) for name, value in parts.items()
    }
    return {**shares, "n": len(group.accuracies)}


def compare(a: Group, b: Group, spread: Spread) -> str:
    """One sentence: which of two twins is ahead, by how much, and whether seeds alone differ as much."""
    if a.mean is None or b.mean is None:
        lost = " and ".join(group.label for group in (a, b) if group.mean is None)
        return f"{lost} did not get through a training."
    difference = a.mean - b.mean
    ahead, behind = (a, b) if difference >= 0 else (b, a)
    says = f"{ahead.label} is {abs(difference):.1f} points ahead of {behind.label}"
    margin = spread.margin(len(a.accuracies), len(b.accuracies))
    if margin is None:
        return f"{says}, from one seed each."
    of_seeds = f"the spread of seeds ({margin:.1f})"
    if abs(difference) <= margin:
        return f"{ahead.label} and {behind.label} are {abs(difference):.1f} points apart, within {of_seeds}."
    return f"{says}, more than {of_seeds}."


def tables(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Those of the paper that these runs answer: at least one of a table's comparisons can be made."""
    found = groups(records)
    spread = shared_spread(found)
    return [
        _table(question, found, spread)
        for question in QUESTIONS
        if any(a in found and b in found for a, b in question.compares)
    ]


def _table(question: Question, found: Mapping[str, Group], spread: Spread) -> dict[str, Any]:
    ids = [twin.id for twin in TWINS if question.id in twin.tables and twin.id in found]
    softmax = found.get("softmax")
    pairs = [(found[a], found[b]) for a, b in question.compares if a in found and b in found]
    return {
        "id": question.id,
        "title": question.title,
        "says": " ".join(compare(a, b, spread) for a, b in pairs),
        "columns": list(COLUMNS),
        "rows": [_row(found[each], softmax, question.found.get(each)) for each in ids],
        "paper": question.paper,
    }


def _row(group: Group, softmax: Group | None, paper: float | None) -> list[Any]:
    against = None
    if softmax is not None and softmax.mean is not None and group.mean is not None:
        against = round(group.mean - softmax.mean, 2)
    mean = group.instead if group.mean is None else round(group.mean, 2)
    spread = None if group.spread is None else round(group.spread, 2)
    seeds = len(group.accuracies)
    return [group.label, mean, spread, seeds if seeds == group.runs else f"{seeds} of {group.runs}", against, paper]


def markdown(found: Sequence[Mapping[str, Any]]) -> str:
    """The tables for a page: accuracy in percent, plus or minus the deviation over seeds."""
    return "\n\n".join(_markdown(each) for each in found) + "\n"


def cell(text: str) -> str:
    """A bar in it ends no cell."""
    return text.replace("|", r"\|")


def _markdown(table: Mapping[str, Any]) -> str:
    rows = [("twin", "top-1", "seeds", "against softmax", "the paper's")]
    for label, mean, spread, seeds, against, paper in table["rows"]:
        top1 = mean if isinstance(mean, str) else f"{mean:.2f}" + ("" if spread is None else f" ± {spread:.2f}")
        versus = "" if against is None else f"{against:+.2f}"
        rows.append((cell(label), top1, str(seeds), versus, "" if paper is None else str(paper)))
    told = [column for column in zip(*rows, strict=True) if any(column[1:])]
    head, *body = (f"| {' | '.join(row)} |" for row in zip(*told, strict=True))
    lines = [f"### Table {table['id']}: {table['title']}", "", head, "|---" * len(told) + "|", *body]
    return "\n".join([*lines, "", table["says"], "", f"In the paper: {table['paper']}"])
