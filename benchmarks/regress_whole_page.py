"""What the whole models of docs/regress.md are, and their table from the records of benchmarks/regress_whole.py."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from dense_page import MISSING, listed_machines, table
from packed_runs import Record

from softless.report.units import counted
from softless.study.tables import Group, instead, interval, shared_spread
from softless.train.metrics import Answers

RESULTS = Path(__file__).parent / "results" / "regress-whole.json"
SCHEMA = "softless.regress-whole/1"
PAGE = Path(__file__).parents[1] / "docs" / "regress.md"
MARKS = ("<!-- whole: python benchmarks/regress_whole.py page -->", "<!-- end of whole -->")
PARTS = ("time", "train")
FAMILIES = {"deit": "DeiT-T, patch 8", "swin": "Swin-T", "cswin": "CSwin-T"}
ATTENTIONS = ("softmax", "inline", "regress")
MODELS = {f"{family}-{attention}": (family, attention) for family in FAMILIES for attention in ATTENTIONS}
COMPARED = (("inline", "softmax"), ("regress", "softmax"), ("regress", "inline"))


def changes_of(model: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is changed in the recipe to train this model; `options` are those of regress."""
    family, attention = MODELS[model]
    changes: dict[str, Any] = {"model.name": f"{'' if attention == 'softmax' else 'inline_'}{family}_tiny"}
    if family == "deit":
        changes |= {"model.patch_size": 8, "model.local": "true"}
    if attention == "regress":
        words = [f"{key} = {json.dumps(value)}" for key, value in {"name": "regress", **options}.items()]
        changes["model.mechanism"] = f"{{{', '.join(words)}}}"
    return changes


def kept() -> dict[str, dict[str, Record]]:
    """Return the records that are stored in the repository: part -> name -> record."""
    document = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return {part: {record["name"]: record for record in document.get(part, ())} for part in PARTS}


def group(model: str, runs: Sequence[Record]) -> Group:
    own = [run for run in runs if run["model"] == model]
    done = [run for run in own if run["status"] == "done"]
    return Group(
        model, model, tuple(100 * run["top1"] for run in done), len(own),
        instead(run["status"] for run in own) if own else MISSING,
        answers=np.stack([Answers(**run["answers"]).bits() for run in done]) if done else None,
    )  # fmt: skip


def page(records: Mapping[str, Mapping[str, Record]]) -> str:
    """Return the table of docs/regress.md, and a sentence on how it was measured."""
    timings, runs = records["time"], [*records["train"].values()]
    groups = {model: group(model, runs) for model in MODELS}
    spread, family = shared_spread(groups), len(COMPARED) * len(FAMILIES)
    rows = []
    for model, (name, attention) in MODELS.items():
        mine, timing = groups[model], timings.get(model)
        cells = (
            [f"{timing['parameters'] / 1e6:.1f} M", f"{1000 * timing['update_seconds']:.1f}"] if timing else ["", ""]
        )
        epochs = next((str(run["epochs"]) for run in runs if run["model"] == model), "")
        cells += [epochs, ", ".join(f"{score:.2f}" for score in mine.scores)]
        cells.append(mine.instead if mine.mean is None else f"{mine.mean:.2f}")
        for rival in ("softmax", "inline"):
            compared = (attention, rival) in COMPARED
            apart = interval(mine, groups[f"{name}-{rival}"], spread, family) if compared else None
            half = f" ± {apart.half:.2f}" if apart and apart.half is not None else ""
            cells.append(f"{apart.difference:+.2f}{half}" if apart else "")
        rows.append([FAMILIES[name], attention, *cells])
    columns = ("model", "attention", "parameters", "ms per update", "epochs", "top-1 by seed", "mean", "minus softmax",
               "minus inline")  # fmt: skip
    return "\n\n".join([table(columns, rows), *conditions(runs)])


def conditions(runs: Sequence[Record]) -> list[str]:
    """Say for how long models were trained, on how many images, and where; nothing without a run."""
    done = [run for run in runs if run["status"] == "done"]
    if not done:
        return []
    images, recipe = done[0]["images"], done[0]["recipe"]
    mechanisms = {json.dumps(run["mechanism"]): run["mechanism"] for run in done if run["mechanism"]}.values()
    options = [", ".join(f"{key} {value}" for key, value in one.items() if key != "name") for one in mechanisms]
    return [
        f"{done[0]['budget']:g} s of updates per run; {images['train']:,} images to train on and {images['test']:,} to "
        f"test on, batch {recipe['batch']}, {recipe['precision']}; {counted(len(done), 'run')} on "
        f"{listed_machines(done)}, up to {max(run['together'] for run in done)} at once. "
        + "".join(f"regress has {each}." for each in options)
    ]
