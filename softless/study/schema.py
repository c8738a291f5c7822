"""What a page is made of: report.json in a folder that `softless study` wrote, checked before anything is drawn.

`SHAPE` is the part of schema softless.study/4 that the page reads. A number may be null where it could not be
measured, and a section may be null, empty or absent where it was not asked for.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from softless.errors import FileError

NAME, SCHEMA = "report.json", "softless.study/4"
LARGEST = 1e300  # beyond it, and NaN, is no number to draw


@dataclass(frozen=True)
class Maybe:
    """Null or absent, or of this shape."""

    shape: Any


NUMBER = Maybe(float)
ESTIMATE = Maybe({"mean": NUMBER, "low": NUMBER, "high": NUMBER})
CURVE = {"label": str, "points": [{"range": NUMBER, "error": NUMBER, "bound": NUMBER}]}
SIZE = Maybe([int])  # width, height
PAIR = {
    "softmax": str,
    "linear": str,
    "labels": [str],
    "difference": NUMBER,
    "low": NUMBER,
    "high": NUMBER,
    "parameters": Maybe([NUMBER]),
    "answer": str,
    "because": str,
    "would_tell": Maybe(str),
}
OWN = {
    "twin": str,
    "label": str,
    "training_seconds": NUMBER,
    "inference_seconds": NUMBER,
    "training_ratio": NUMBER,
    "inference_ratio": NUMBER,
    "together": NUMBER,
}
LAP = {"label": str, "tokens": float, "head_dim": float, "seconds": NUMBER, "peak_bytes": NUMBER}
SHAPE = {
    "command": str,
    "date": str,
    "versions": {"softless": str, "torch": str},
    "machine": {"processor": str, "threads": NUMBER, "device": str},
    "seed": NUMBER,
    "preset": str,
    "data": {
        "name": str,
        "train": NUMBER,
        "test": NUMBER,
        "classes": [str],
        "image_size": Maybe(object),
        "grid": [int],
        "came": Maybe({"smallest": SIZE, "median": SIZE, "largest": SIZE}),
        "patch": NUMBER,
        "tokens": NUMBER,
        "recipe": Maybe(str),
        "epochs": NUMBER,
        "split": Maybe(str),
    },
    "decision": Maybe({"margin": float, "pairs": [PAIR], "headline": Maybe(int)}),
    "verdict": [
        {
            "about": str,
            "says": str,
            "answer": Maybe(str),
            "table": Maybe({"columns": [str], "rows": [[object]]}),
        }
    ],
    "twins": [
        {
            "id": str,
            "label": str,
            "mechanism": str,
            "parameters": NUMBER,
            "macs": NUMBER,
            "seconds_per_epoch": NUMBER,
            "accuracy": ESTIMATE,
            "seeds": Maybe([{"curve": Maybe([{"epoch": float, "accuracy": NUMBER}])}]),
        }
    ],
    "tables": Maybe(
        [
            {
                "title": str,
                "says": Maybe(str),
                "columns": [str],
                "rows": [[object]],
                "paper": Maybe(str),
                "setting": Maybe(str),
            }
        ]
    ),
    "examined": Maybe({"images": NUMBER, "masked": NUMBER}),
    "layers": Maybe(
        [
            {
                "twin": str,
                "name": str,
                "confusions": ESTIMATE,
                "confusion_histogram": Maybe({"edges": [float], "counts": [float]}),
                "local_mass": ESTIMATE,
                "local_baseline": NUMBER,
                "score_range": ESTIMATE,
                "first_order_error": ESTIMATE,
                "effective_rank": ESTIMATE,
                "verdict": Maybe(str),
            }
        ]
    ),
    "mask_out": Maybe([{"twin": str, "mask": str, "accuracy": ESTIMATE}]),
    "induced": Maybe([{"twin": str, "what": str, "accuracy": ESTIMATE}]),
    "collinear": Maybe(
        {
            "twin": str,
            "layer": str,
            "keys": [[float]],
            "p": [float],
            "q": [float],
            "rows": [{"label": str, "p": [float], "q": [float]}],
        }
    ),
    "range": Maybe(
        {
            "curves": Maybe([CURVE]),
            "layers": Maybe([{"twin": str, "layer": str, "range": ESTIMATE, "error": ESTIMATE}]),
            "threshold": Maybe([{"twin": str, "layer": str, "tau": [float], "kept": [float], "discarded": [float]}]),
            "distributions": Maybe([{"name": str, "weights": [float]}]),
        }
    ),
    "viewer": Maybe(
        {
            "grid": [int],
            "images": [{"png": str, "label": str, "name": str}],
            "maps": [{"twin": str, "layer": str, "image": int, "weights": str, "row_max": [float]}],
        }
    ),
    "speed": Maybe(
        {
            "heads": NUMBER,
            "head_dim": float,
            "dtype": str,
            "laps": [LAP],
            "trends": Maybe([{"label": str, "head_dim": float, "crossover": NUMBER}]),
            "own": Maybe({"tokens": float, "rows": [OWN]}),
        }
    ),
    "files": Maybe(dict),
}
CALLED = {str: "a text", float: "a number", int: "a whole number", list: "a list", dict: "an object"}


def read(folder: Path) -> dict[str, Any]:
    """The document in a folder, or one sentence that says why it is none."""
    path = folder / NAME
    if not path.is_file():
        raise FileError(f"{str(folder)!r} is not a report: it has no {NAME}, which softless study writes")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FileError(f"{str(path)!r} is damaged: {error}") from None
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise FileError(f"{str(path)!r} has schema {schema!r}, and a page is made of {SCHEMA!r}: run softless study")
    try:
        _check(document, SHAPE, "")
        _check_twins(document)
    except FileError as error:
        raise FileError(f"{str(path)!r}: {error}") from None
    return document


def _check(value: Any, shape: Any, where: str) -> None:
    if isinstance(shape, Maybe):
        if value is not None:
            _check(value, shape.shape, where)
    elif isinstance(shape, list):
        _needs(value, list, where)
        for index, item in enumerate(value):
            _check(item, shape[0], f"{where}[{index}]")
    elif isinstance(shape, dict):
        _needs(value, dict, where)
        for key, inner in shape.items():
            _check(value.get(key), inner, f"{where}.{key}".lstrip("."))
    elif shape is not object:
        _needs(value, shape, where)


def _needs(value: Any, kind: type, where: str) -> None:
    fits = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
    if not fits or (kind in (int, float) and not abs(value) <= LARGEST):
        given = "missing" if value is None else f"{value!r:.40}"
        raise FileError(f"{where} is {given}, and {CALLED[kind]} was needed")


def _check_twins(document: dict[str, Any]) -> None:
    known = {twin["id"] for twin in document["twins"]}
    parts = {name: document.get(name) or [] for name in ("layers", "mask_out", "induced")}
    parts |= {f"range.{name}": (document.get("range") or {}).get(name) or [] for name in ("layers", "threshold")}
    parts["viewer.maps"] = (document.get("viewer") or {}).get("maps", [])
    for name, items in parts.items():
        for index, item in enumerate(items):
            if item["twin"] not in known:
                raise FileError(f"{name}[{index}] is about the twin {item['twin']!r}, which twins does not list")
