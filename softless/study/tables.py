"""From the runs of a grid to the paper's tables: which twin is ahead, and whether by more than chance does."""

from collections.abc import Mapping, Sequence
from typing import Any

from softless.report import units
from softless.study.decision import named
from softless.study.grid import Record
from softless.study.statistics import Group, Spread, groups, interval, shared_spread
from softless.study.twins import QUESTIONS, TWINS, Question

COLUMNS = ("twin", "accuracy", "spread", "seeds", "against softmax", "paper")
PARAMETERS = "parameters"  # a column more, where they differ


def compare(a: Group, b: Group, spread: Spread) -> str:
    """One sentence: which of two twins is ahead, by how much, and whether chance alone differs as much.

    Chance is seeds and test images, or seeds alone where the answers to single images are not known. Twins with more
    parameters than the other are named with their number.
    """
    apart = interval(a, b, spread)
    if apart is None:
        lost = " and ".join(group.label for group in (a, b) if group.mean is None)
        return f"{lost} did not get through a training."
    counted = a.parameters != b.parameters
    ahead, behind = (named(group, counted=counted) for group in ((a, b) if apart.difference >= 0 else (b, a)))
    by = f"{abs(apart.difference):.1f} points"
    if apart.half is None:
        return f"{ahead} is {by} ahead of {behind}, from one seed each."
    chance = f"the spread of seeds{' and test images' if apart.images else ''} ({apart.half:.1f})"
    if abs(apart.difference) <= apart.half:
        return f"{ahead} and {behind} are {by} apart, within {chance}."
    return f"{ahead} is {by} ahead of {behind}, more than {chance}."


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
    rows = [_row(found[each], softmax, question.found.get(each)) for each in ids]
    columns = list(COLUMNS)
    if len(sizes := {found[each].parameters for each in ids}) > 1 and None not in sizes:
        columns.insert(1, PARAMETERS)
        for row, each in zip(rows, ids, strict=True):
            row.insert(1, found[each].parameters)
    return {
        "id": question.id,
        "title": question.title,
        "says": " ".join(compare(a, b, spread) for a, b in pairs),
        "columns": columns,
        "rows": rows,
        "paper": question.paper,
        "setting": question.setting,
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
    rows = [("twin", "parameters", "top-1", "seeds", "against softmax", "the paper's")]
    for each in table["rows"]:
        row = dict(zip(table["columns"], each, strict=True))
        mean, spread, against, paper = (row[key] for key in ("accuracy", "spread", "against softmax", "paper"))
        top1 = mean if isinstance(mean, str) else f"{mean:.2f}" + ("" if spread is None else f" ± {spread:.2f}")
        size = units.count(row[PARAMETERS]) if PARAMETERS in row else ""
        versus = "" if against is None else f"{against:+.2f}"
        rows.append((cell(row["twin"]), size, top1, str(row["seeds"]), versus, "" if paper is None else str(paper)))
    told = [column for column in zip(*rows, strict=True) if any(column[1:])]
    head, *body = (f"| {' | '.join(row)} |" for row in zip(*told, strict=True))
    lines = [f"### Table {table['id']}: {table['title']}", "", head, "|---" * len(told) + "|", *body]
    return "\n".join([*lines, "", table["says"], "", f"In the paper ({table['setting']}): {table['paper']}"])
