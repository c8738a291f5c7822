"""The report of a study: report.json from all its parts, the decision and the verdict, the CSVs and the page."""

from pathlib import Path
from typing import Any

import numpy as np

from softless.data import open_splits
from softless.io.files import write_json
from softless.machine import circumstances, timestamp
from softless.study import document as study_document
from softless.study.decision import decide
from softless.study.examine import Exhibit, png
from softless.study.grid import Ran
from softless.study.page.page import write_page
from softless.study.plan import Asked
from softless.study.statistics import groups, shared_spread
from softless.study.twins import patch_of, tokens_a_side
from softless.study.verdict import verdict
from softless.train.recipe import Recipe

SCHEMA = "softless.study/4"
SPLIT = "The 360 test images are a fixed fifth of scikit-learn's 1,797 digits, with the digits in equal shares."


def assemble(
    asked: Asked, recipe: Recipe, recipe_name: str, ran: Ran, found: dict[str, Any], exhibit: Exhibit
) -> dict[str, Any]:
    """The document, but for its ranges, its speed, its verdict and its files."""
    train, test = open_splits(asked.data)
    grid = [tokens_a_side(recipe)] * 2
    shown = exhibit.one_a_class(asked.settled().shown).tolist()
    images = [
        {
            "png": png(exhibit.images.pixels[index]),
            "label": test.classes[int(exhibit.images.labels[index])],
            "name": Path(test.names(int(exhibit.images.ids[index]))).name,
        }
        for index in shown
    ]
    twins = study_document.twins(ran.records)
    return {
        "schema": SCHEMA,
        "command": asked.command(exhibit.device),
        "date": timestamp(),
        **circumstances(exhibit.device),
        "seed": asked.seed,
        "preset": asked.preset,
        "data": {
            "name": "digits" if asked.data is None else Path(asked.data).name,
            "train": len(train),
            "test": len(test),
            "classes": list(train.classes),
            "image_size": recipe.image_size,
            "patch": patch_of(recipe),
            "grid": grid,
            "came": study_document.came_in((train, test)),
            "tokens": next((layer["tokens"] for each in found.values() for layer in each["layers"]), grid[0] * grid[1]),
            "recipe": recipe_name,
            "epochs": recipe.all_epochs,
            "chance": float(np.bincount(test.labels).max() / len(test)),
            "split": SPLIT if asked.data in (None, "digits") else None,
        },
        "decision": {},
        "verdict": [],
        "twins": twins,
        "tables": study_document.all_tables(ran.records, found, {twin["id"]: twin["label"] for twin in twins}),
        "examined": {
            "images": max((each["images"] for each in found.values()), default=0),
            "masked": min(asked.settled().masked, len(exhibit.images.labels)),
        },
        "layers": study_document.layers(found),
        "mask_out": study_document.rows(found, "mask_out"),
        "induced": study_document.rows(found, "induced"),
        "collinear": study_document.collinear(found),
        "range": None,
        "viewer": study_document.viewer(found, images, grid),
        "speed": None,
        "files": {},
    }


def conclude(document: dict[str, Any], ran: Ran, in_windows: Ran | None, margin: float) -> None:
    """Table 4 from the model that sees windows, if there is one, the decision, and the verdict on all runs."""
    by_twin, beside = groups(ran.records), in_windows or Ran((), 0)
    spread = shared_spread(by_twin)
    document["decision"] = decide(by_twin, spread, chance=document["data"]["chance"], margin=margin)
    if in_windows:
        study_document.put_table_4(document["tables"], in_windows.records)
    left = ran.left + beside.left
    document["verdict"] = verdict(document, by_twin, spread, left, groups(beside.records).values())


def write(folder: Path, document: dict[str, Any]) -> Path:
    """CSVs, report.json, the page."""
    document["files"] = study_document.write_csvs(folder, document)
    write_json(folder / "report.json", document)
    return write_page(folder)
