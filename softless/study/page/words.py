"""Words and cells around the figures: what was studied, on what, what was decided, and each layer in a sentence."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from softless.study.page.figure import Table, layer_names, means
from softless.study.page.style import OWN, Look, mechanism_of
from softless.study.schema import LARGEST

MISSING = "\u2013"
CLOSE = 0.05  # points from the margin, within which one decimal would hide on which side an interval ends
DECIMALS = 2  # of a number in a table, at most
HEADS = {
    "accuracy": "accuracy, %",
    "against softmax": "minus softmax",
}
REASONS = {"spread": "one seed has no spread", "paper": "the paper has no number for this twin"}


def sentence(text: str) -> str:
    """Begins with a capital, where its first word is not the name of a mechanism."""
    return text if mechanism_of(text) in OWN else text[:1].upper() + text[1:]


def after(text: str, answer: str) -> str:
    """A sentence without the answer that it begins with, because the page shows that above it."""
    begins = answer and text.lower().startswith(answer.lower()) and text[len(answer) : len(answer) + 1] in ".,:;"
    return text[len(answer) + 1 :].lstrip() or text if begins else text


def first_sentence(text: str) -> tuple[str, str]:
    """The first sentence, which the page shows large, and the rest."""
    first, dot, rest = text.partition(". ")
    return first + dot.rstrip(), rest


def listed(names: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def short(value: float | None, form: str, unit: str = "") -> str:
    """A number in a form, a dash for one that was not measured."""
    return MISSING if value is None else f"{value:{form}}{unit}"


def bare(name: str) -> str:
    """The file's own name, without the folders of the machine that the study ran on."""
    return re.split(r"[\\/]", name)[-1]


def cells(rows: Sequence[Sequence[Any]]) -> list[list[str]]:
    """The rows of a table as texts; the numbers of a column have the same decimals, as many as one of them needs."""
    columns = [_column(column) for column in zip(*_filled(rows), strict=True)]
    return [list(row) for row in zip(*columns, strict=True)]


def _filled(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    width = max(map(len, rows), default=0)
    return [[*row, *[None] * (width - len(row))] for row in rows]


def _column(values: Sequence[Any]) -> list[str]:
    decimals = max((_decimals(value) for value in values if _is_number(value)), default=0)
    return [
        MISSING if value is None else f"{value:,.{decimals}f}" if _is_number(value) else str(value) for value in values
    ]


def _is_number(value: Any) -> bool:
    """One to format: what is too large for that is shown as it is."""
    return isinstance(value, float | int) and not isinstance(value, bool) and abs(value) <= LARGEST


def _decimals(value: float) -> int:
    """How many a number needs, of DECIMALS at most; a float has one at least."""
    if isinstance(value, int):
        return 0
    return max(1, len(f"{value:.{DECIMALS}f}".rstrip("0").partition(".")[2]))


def paper_table(table: Mapping[str, Any]) -> Table:
    """A table of the study beside the paper's: columns without a number are left out, dashes are explained."""
    columns, rows, setting = table["columns"], cells(table["rows"]), table.get("setting")
    told = [i for i in range(min(len(columns), *map(len, rows)) if rows else len(columns))
            if not rows or any(row[i] != MISSING for row in rows)]  # fmt: skip
    heads = tuple(_head(columns[i], setting) for i in told)
    body = tuple(tuple(row[i] for i in told) for row in rows)
    empty = [columns[i] for i in told if any(row[i] == MISSING for row in rows)]
    notes = [f"{MISSING} under “{_head(name, setting)}”: {REASONS.get(name, 'not measured')}." for name in empty]
    if table.get("paper"):
        where = f" ({setting})" if setting else ""
        notes.append(f"The paper{where}: {table['paper']}")
    number = f" (Table {table['id']} of the paper)" if table.get("id") else ""
    return Table(f"{table['title']}{number}", table.get("says") or "", heads, body, tuple(notes))


def _head(name: str, setting: str | None) -> str:
    """Plain words for the column of a table."""
    if name == "paper":
        return "paper, %" + (f" ({setting})" if setting else "")
    if found := re.fullmatch(r"(local|random) (\d+)", name):
        size = found[2]
        return f"{size} x {size}" if found[1] == "local" else f"{size} random"
    return HEADS.get(name, name)


def facts(document: dict[str, Any]) -> str:
    """What was studied."""
    data, twins = document["data"], document["twins"]
    seeds = max((len(twin.get("seeds") or []) for twin in twins), default=0)
    said = [
        f"{_count(data.get('train'))} images to train on and {_count(data.get('test'))} to test on",
        f"{len(data['classes'])} classes",
        f"{len(twins)} twins, {seeds} {'seed' if seeds == 1 else 'seeds'} each",
    ]
    return ", ".join(said) + "."


def images(document: dict[str, Any]) -> str:
    """What was done to the images before a twin saw them."""
    data = document["data"]
    side, patch, tokens, came = data.get("image_size"), data.get("patch"), data.get("tokens"), data.get("came")
    rows, columns = [*data["grid"], 0, 0][:2]
    said = []
    if came and came.get("median"):
        said.append(f"The images came in {_sizes(came)} pixels")
    if isinstance(side, int | float):
        said.append(f"{'and were' if said else 'Images were'} trained at {side:g} x {side:g}")
    says = " ".join(said) + "." if said else ""
    each = f", each {patch:g} x {patch:g} pixels" if patch else ""
    says += f" That makes {rows} x {columns} patches{each}" + (f", {tokens:,.0f} tokens in all." if tokens else ".")
    if data.get("recipe"):
        long = f", {data['epochs']:g} epochs" if data.get("epochs") else ""
        says += f" Recipe: {data['recipe']}{long}."
    return " ".join(filter(None, (says.strip(), data.get("split"))))


def _sizes(came: Mapping[str, Any]) -> str:
    small, middle, large = (_size(came.get(key)) for key in ("smallest", "median", "largest"))
    if small == large or not small or not large:
        return middle
    return f"{small} to {large} (median {middle})"


def _size(size: Sequence[int] | None) -> str:
    return " x ".join(map(str, size or ()))


def decision(document: dict[str, Any]) -> dict[str, Any] | None:
    """The answer, and the pairs of twins that it rests on, the headline first."""
    found = document.get("decision")
    if not found or not found["pairs"]:
        return None
    pairs, margin = found["pairs"], found["margin"]
    first = min(max(found.get("headline") or 0, 0), len(pairs) - 1)
    ordered = [pairs[first], *(pair for i, pair in enumerate(pairs) if i != first)]
    rule = (
        f"Difference: the linear twin minus the softmax twin, in points of accuracy. A loss of {margin:g} or less does "
        f"not matter here: “no” means that the whole interval lies above {-margin:g}, “yes” that it lies below."
    )
    columns = ("comparison", "softmax needed?", "difference", "95% interval", "parameters")
    ends = [end for pair in ordered for end in (pair.get("low"), pair.get("high")) if end is not None]
    decimals = 2 if any(abs(end + margin) < CLOSE for end in ends) else 1
    rows = tuple(_pair(pair, decimals) for pair in ordered)
    alone = any(pair.get("low") is None for pair in ordered)
    notes = (rule, *((f"{MISSING}: one seed has no interval over seeds.",) if alone else ()))
    said = " ".join(row["says"] for row in document["verdict"][:1]).lower()
    reasons = [
        f"{_versus(pair)}: {'. What would tell: '.join(new)}."
        for pair in ordered
        if (
            new := [
                text.rstrip(".")
                for text in (pair["because"], pair.get("would_tell"))
                if text and text.rstrip(".").lower() not in said
            ]
        )
    ]
    return {
        "answer": ordered[0]["answer"],
        "table": Table("", "", columns, rows, notes, "decision"),
        "reasons": reasons,
    }


def _versus(pair: Mapping[str, Any]) -> str:
    labels = [*pair["labels"], pair["softmax"], pair["linear"]][:2] if len(pair["labels"]) > 1 else []
    softmax, linear = labels or (pair["softmax"], pair["linear"])
    return f"{linear} against {softmax}"


def _pair(pair: Mapping[str, Any], decimals: int) -> tuple[str, ...]:
    low, high = pair.get("low"), pair.get("high")
    between = MISSING if low is None or high is None else f"{low:+.{decimals}f} to {high:+.{decimals}f}"
    sizes = list(dict.fromkeys(short(count, ",.0f") for count in pair.get("parameters") or []))
    counts = MISSING if not sizes else f"{sizes[0]} both" if len(sizes) == 1 else f"{sizes[1]} against {sizes[0]}"
    return _versus(pair), pair["answer"], short(pair.get("difference"), f"+.{decimals}f"), between, counts


def made(document: dict[str, Any]) -> str:
    """With what, and where."""
    machine, versions = document["machine"], document["versions"]
    count = machine.get("threads")
    threads = f", {count:g} {'thread' if count == 1 else 'threads'}" if count else ""
    on = f"{machine['processor']}, {machine['device']}{threads}"
    date = document["date"].replace("T", " ").replace("+00:00", " UTC")
    return f"{date}, preset {document['preset']}. {on}. softless {versions['softless']}, torch {versions['torch']}."


def layers(document: dict[str, Any], looks: Mapping[str, Look]) -> list[dict[str, Any]]:
    """Rows of the table of layers: those that run a softmax, for a linear kernel costs the others nothing new."""
    every = document.get("layers") or []
    numbers = layer_names([layer["name"] for layer in every])
    found = [layer for layer in every if layer.get("verdict") and looks[layer["twin"]].mechanism == "softmax"]
    return [
        {
            "twin": looks[layer["twin"]].label,
            "cells": [
                numbers[layer["name"]],
                _number(layer, "score_range", "{:.2f}"),
                _number(layer, "first_order_error", "{:.1%}"),
                _number(layer, "effective_rank", "{:.1f}"),
            ],
            "verdict": sentence(layer["verdict"]),
        }
        for layer in found
    ]


def _number(layer: dict[str, Any], key: str, form: str) -> str:
    (mean,) = means([layer.get(key)])
    return MISSING if mean is None else form.format(mean)


def _count(number: float | None) -> str:
    return "an unknown number of" if number is None else f"{number:,.0f}"
