"""Sentences and tables around the figures: what was studied, on which machine, the decision, and each layer."""

import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from softless.report import units
from softless.study.page.figure import OWN, Look, Table, layer_names, means, mechanism_of
from softless.study.schema import LARGEST, Estimated, FairPair, ImageSizes, PaperTable, StudyDocument

MISSING = "\u2013"
CLOSE = 0.05  # points from the margin: closer, one decimal would hide on which side an interval ends
DECIMALS = 2  # at most, in a table
HEADS = {"accuracy": "accuracy, %", "against softmax": "minus softmax"}
REASONS = {"spread": "one seed has no spread", "paper": "the paper has no number for this twin"}


def sentence(text: str) -> str:
    """Begin with a capital, unless the first word is the name of a mechanism."""
    return text if mechanism_of(text) in OWN else text[:1].upper() + text[1:]


def after(text: str, answer: str) -> str:
    """Drop the answer that a sentence begins with, because the page shows it above."""
    begins = answer and text.lower().startswith(answer.lower()) and text[len(answer) : len(answer) + 1] in ".,:;"
    return text[len(answer) + 1 :].lstrip() or text if begins else text


def first_sentence(text: str) -> tuple[str, str]:
    """Split a text into the first sentence, which the page shows large, and the rest."""
    first, dot, rest = text.partition(". ")
    return first + dot.rstrip(), rest


def short(value: float | None, form: str, unit: str = "") -> str:
    """Format a number, or write a dash if it was not measured."""
    return MISSING if value is None else f"{value:{form}}{unit}"


def bare(name: str) -> str:
    """Return the name of a file without its folders, on any system."""
    return re.split(r"[\\/]", name)[-1]


def cells(rows: Sequence[Sequence[Any]]) -> list[list[str]]:
    """Return the rows of a table as texts; all numbers of a column have as many decimals as one of them needs."""
    columns = [_column(column) for column in zip_longest(*rows)]
    return [list(row) for row in zip(*columns, strict=True)]


def _column(values: Sequence[Any]) -> list[str]:
    decimals = max((_decimals(value) for value in values if _is_number(value)), default=0)
    return [
        MISSING if value is None else f"{value:,.{decimals}f}" if _is_number(value) else str(value) for value in values
    ]


def _is_number(value: Any) -> bool:
    """Tell whether a value can be formatted as a number."""
    return isinstance(value, float | int) and not isinstance(value, bool) and abs(value) <= LARGEST


def _decimals(value: float) -> int:
    """Return the decimals that a number needs, at most DECIMALS; a float has at least one."""
    if isinstance(value, int):
        return 0
    return max(1, len(f"{value:.{DECIMALS}f}".rstrip("0").partition(".")[2]))


def paper_table(table: PaperTable) -> Table:
    """Return a table of the paper as the page shows it: empty columns are left out, and dashes are explained."""
    columns, rows, setting = table["columns"], cells(table["rows"]), table.get("setting")
    shown = [i for i in range(min(len(columns), *map(len, rows)) if rows else len(columns))
            if not rows or any(row[i] != MISSING for row in rows)]  # fmt: skip
    heads = tuple(_head(columns[i], setting) for i in shown)
    body = tuple(tuple(row[i] for i in shown) for row in rows)
    empty = [columns[i] for i in shown if any(row[i] == MISSING for row in rows)]
    notes = [f"{MISSING} under “{_head(name, setting)}”: {REASONS.get(name, 'not measured')}." for name in empty]
    if table.get("paper"):
        where = f" ({setting})" if setting else ""
        notes.append(f"The paper{where}: {table['paper']}")
    number = f" (Table {table['id']} of the paper)" if table.get("id") else ""
    return Table(f"{table['title']}{number}", table.get("says") or "", heads, body, tuple(notes))


def _head(name: str, setting: str | None) -> str:
    """Return the heading of a column."""
    if name == "paper":
        return "paper, %" + (f" ({setting})" if setting else "")
    if mask := re.fullmatch(r"(local|random) (\d+)", name):
        size = mask[2]
        return f"{size} x {size}" if mask[1] == "local" else f"{size} random"
    return HEADS.get(name, name)


def facts(document: StudyDocument) -> str:
    """Say how many images, classes, twins and seeds were studied."""
    data, twins = document["data"], document["twins"]
    seeds = max((len(twin.get("seeds") or []) for twin in twins), default=0)
    train, test = ("an unknown number of" if n is None else f"{n:,.0f}" for n in (data.get("train"), data.get("test")))
    classes, count = units.counted(len(data["classes"]), "class", "classes"), units.counted(len(twins), "twin")
    return f"{train} images to train on and {test} to test on, {classes}, {count}, {units.counted(seeds, 'seed')} each."


def images(document: StudyDocument) -> str:
    """Say what was done to the images before a twin saw them."""
    data = document["data"]
    side, patch, tokens, original = data.get("image_size"), data.get("patch"), data.get("tokens"), data.get("came")
    rows, columns = [*data["grid"], 0, 0][:2]
    seen = f"at {side:g} x {side:g} pixels, " if isinstance(side, int | float) else ""
    size = f" of {patch:g} x {patch:g} pixels" if patch else ""
    total = f": {tokens:,.0f} tokens in all" if tokens else ""
    epochs = f", {data['epochs']:g} epochs" if data.get("epochs") else ""
    sentences = (
        f"The images have {_sizes(original)} pixels." if original and original.get("median") else None,
        f"The twins see them {seen}in {rows} x {columns} patches{size}{total}.",
        f"Recipe: {data['recipe']}{epochs}." if data.get("recipe") else None,
        data.get("split"),
    )
    return " ".join(filter(None, sentences))


def _sizes(original: ImageSizes) -> str:
    sizes = original.get("smallest"), original.get("median"), original.get("largest")
    small, middle, large = (units.picture(size or ()) for size in sizes)
    if small == large or not small or not large:
        return middle
    return f"{small} to {large} (median {middle})"


def decision(document: StudyDocument) -> dict[str, Any] | None:
    """Return the answer and the table of the pairs that it rests on, the headline first; None without a pair."""
    decided = document.get("decision")
    if not decided or not decided["pairs"]:
        return None
    pairs, margin = decided["pairs"], decided["margin"]
    first = min(max(decided.get("headline") or 0, 0), len(pairs) - 1)
    ordered = [pairs[first], *(pair for i, pair in enumerate(pairs) if i != first)]
    rule = (
        "The difference is the accuracy of the linear twin minus that of the softmax twin, in points. A loss of "
        f"{margin:g} or less does not matter here: “no” means that the whole interval lies above {-margin:g}, “yes” "
        "that it lies below."
    )
    columns = ("comparison", "softmax needed?", "difference", "95% interval", "parameters")
    ends = [end for pair in ordered for end in (pair.get("low"), pair.get("high")) if end is not None]
    decimals = 2 if any(abs(end + margin) < CLOSE for end in ends) else 1
    rows = tuple(_pair(pair, decimals) for pair in ordered)
    alone = any(pair.get("low") is None for pair in ordered)
    notes = (rule, *((f"{MISSING}: one seed has no interval over seeds.",) if alone else ()))
    verdict = " ".join(row["says"] for row in document["verdict"][:1]).lower()
    reasons = [
        f"{_versus(pair)}: {'. What would settle it: '.join(new)}."
        for pair in ordered
        if (
            new := [
                text.rstrip(".")
                for text in (pair["because"], pair.get("would_tell"))
                if text and text.rstrip(".").lower() not in verdict
            ]
        )
    ]
    return {
        "answer": ordered[0]["answer"],
        "table": Table("", "", columns, rows, notes, "decision"),
        "reasons": reasons,
    }


def _versus(pair: FairPair) -> str:
    labels = [*pair["labels"], pair["softmax"], pair["linear"]][:2] if len(pair["labels"]) > 1 else []
    softmax, linear = labels or (pair["softmax"], pair["linear"])
    return f"{linear} against {softmax}"


def _pair(pair: FairPair, decimals: int) -> tuple[str, ...]:
    low, high = pair.get("low"), pair.get("high")
    between = MISSING if low is None or high is None else f"{low:+.{decimals}f} to {high:+.{decimals}f}"
    sizes = list(dict.fromkeys(short(count, ",.0f") for count in pair.get("parameters") or []))
    counts = MISSING if not sizes else f"{sizes[0]} both" if len(sizes) == 1 else f"{sizes[1]} against {sizes[0]}"
    return _versus(pair), pair["answer"], short(pair.get("difference"), f"+.{decimals}f"), between, counts


def origin(document: StudyDocument) -> str:
    """Say when, where and with which versions the study was made."""
    machine, versions = document["machine"], document["versions"]
    count = machine.get("threads")
    threads = f", {units.counted(count, 'thread')}" if count else ""
    on = f"{machine['processor']}, {machine['device']}{threads}"
    date = document["date"].replace("T", " ").replace("+00:00", " UTC")
    return f"{date}, preset {document['preset']}. {on}. softless {versions['softless']}, torch {versions['torch']}."


def layers(document: StudyDocument, looks: Mapping[str, Look]) -> list[dict[str, Any]]:
    """Return the rows of the table of layers; only layers that run a softmax have something to lose."""
    every = document.get("layers") or []
    numbers = layer_names([layer["name"] for layer in every])
    softmax = [layer for layer in every if looks[layer["twin"]].mechanism == "softmax"]
    return [
        {
            "twin": looks[layer["twin"]].label,
            "cells": [
                numbers[layer["name"]],
                _mean(layer.get("score_range"), ".2f"),
                _mean(layer.get("first_order_error"), ".1%"),
                _mean(layer.get("effective_rank"), ".1f"),
            ],
            "verdict": sentence(verdict),
        }
        for layer in softmax
        if (verdict := layer.get("verdict"))
    ]


def _mean(estimated: Estimated | None, form: str) -> str:
    return short(means([estimated])[0], form)
