"""Words and cells around the figures: what was studied, on what, and each layer in a sentence."""

from collections.abc import Mapping
from typing import Any

from softless.report.study_figure import layer_names, means
from softless.report.study_style import OWN, Look, mechanism_of

MISSING = "\u2013"


def sentence(text: str) -> str:
    """Begins with a capital, where its first word is not the name of a mechanism."""
    return text if mechanism_of(text) in OWN else text[:1].upper() + text[1:]


def cell(value: Any) -> str:
    """A number to three digits, a dash for what was not measured; texts as they are."""
    if value is None:
        return MISSING
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def facts(document: dict[str, Any]) -> str:
    """What was studied."""
    data, twins = document["data"], document["twins"]
    seeds = max((len(twin.get("seeds") or []) for twin in twins), default=0)
    rows, columns = [*data["grid"], 0, 0][:2]
    said = [
        f"{_count(data.get('train'))} images to train on and {_count(data.get('test'))} to test on",
        f"{len(data['classes'])} classes",
        f"{rows} x {columns} patches",
        f"{len(twins)} twins, {seeds} {'seed' if seeds == 1 else 'seeds'} each",
    ]
    return ", ".join(said) + "."


def made(document: dict[str, Any]) -> str:
    """With what, and where."""
    machine, versions = document["machine"], document["versions"]
    count = machine.get("threads")
    threads = f", {count:g} {'thread' if count == 1 else 'threads'}" if count else ""
    on = f"{machine['processor']}, {machine['device']}{threads}"
    date = document["date"].replace("T", " ").replace("+00:00", " UTC")
    return f"{date}, preset {document['preset']}. {on}. softless {versions['softless']}, torch {versions['torch']}."


def layers(document: dict[str, Any], looks: Mapping[str, Look]) -> list[dict[str, Any]]:
    """Rows of the table of layers: those that say something."""
    found = [layer for layer in document.get("layers") or [] if layer.get("verdict")]
    numbers = layer_names([layer["name"] for layer in found])
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
