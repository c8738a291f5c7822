"""A study's parts put together: report.json as its page reads it, and a CSV for each table of numbers."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from softless.bench.anatomy import anatomy
from softless.data.images import Images
from softless.errors import FileError
from softless.io.files import write_text
from softless.study.statistics import estimate, groups, shared_spread
from softless.study.tables import tables
from softless.train.recipe import from_document
from softless.train.tasks.classify import model_options

SIZED = 500  # images whose size is looked at

Record = dict[str, Any]
Found = Mapping[str, Mapping[str, Any]]  # what the probes found, by twin


def twins(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One entry a twin: its runs, their mean, and what one image costs."""
    found = groups(records)
    spread = shared_spread(found)
    return [
        _twin([record for record in records if record["twin"]["id"] == each], estimate(found[each], spread))
        for each in found
    ]


def _twin(runs: Sequence[Record], accuracy: Mapping[str, Any]) -> dict[str, Any]:
    done = [run for run in runs if run["status"] == "done"]
    recipe = from_document(runs[0]["recipe"])
    epochs = recipe.all_epochs
    counted = anatomy(recipe.model.name, (recipe.image_size, recipe.image_size), **model_options(recipe.model))
    return {
        **runs[0]["twin"],
        "parameters": max(run["parameters"] for run in runs) or None,
        "macs": counted.total.macs,
        "seconds_per_epoch": fmean(run["seconds"] for run in done) / epochs if done else None,
        "accuracy": accuracy,
        "seeds": [
            {key: run[key] for key in ("seed", "accuracy", "loss", "seconds", "curve", "status", "reason")}
            for run in runs
        ],
    }


def layers(found: Found) -> list[dict[str, Any]]:
    """Of all twins; what a linear kernel would cost is said only of layers that run a softmax."""
    every = [{"twin": twin, **layer} for twin, each in found.items() for layer in each["layers"]]
    return [{**layer, "verdict": layer["verdict"] if layer["mechanism"] == "softmax" else None} for layer in every]


def rows(found: Found, part: str) -> list[dict[str, Any]]:
    """mask_out or induced, of all twins."""
    return [{"twin": twin, **row} for twin, each in found.items() for row in each[part]]


def all_tables(records: Sequence[Record], found: Found, labels: Mapping[str, str]) -> list[dict[str, Any]]:
    """The paper's tables that were run, and table 2, which needs no training."""
    made = tables(records)
    masks = {twin: {row["mask"]: row["accuracy"]["mean"] for row in each["mask_out"]} for twin, each in found.items()}
    masks = {twin: row for twin, row in masks.items() if row}
    if masks:
        columns = list(next(iter(masks.values())))
        made.append(
            {
                "id": "2",
                "title": "Keys hidden from every query",
                "says": "Accuracy in percent, without retraining; rows still sum to one.",
                "columns": ["twin", *columns],
                "rows": [
                    [labels[twin], *(None if row.get(c) is None else round(100 * row[c], 1) for c in columns)]
                    for twin, row in masks.items()
                ],
                "paper": "Hiding the neighbors costs softmax 20.6 points and InLine 12.0; nine others cost 0.5 and 0.",
                "setting": "ImageNet-1K, DeiT-T",
            }
        )
    return sorted(made, key=lambda table: int(table["id"]))


def put_table_4(made: list[dict[str, Any]], records: Sequence[Record]) -> None:
    """Windows and the local residual, from runs of a model that sees windows."""
    others = [table for table in made if table["id"] != "4"]
    made[:] = sorted([*others, *(t for t in tables(records) if t["id"] == "4")], key=lambda table: int(table["id"]))


def score_ranges(found: Found, curves: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Where the layers of the twins lie on the curves of random scores, and what a threshold keeps of them."""
    every = layers(found)
    of_softmax = [each["row"]["weights"] for twin, each in found.items() if twin.startswith("softmax")]
    return {
        "curves": list(curves),
        "layers": [
            {
                "twin": layer["twin"],
                "layer": layer["name"],
                "range": layer["score_range"],
                "error": layer["first_order_error"],
            }
            for layer in every
        ],
        "threshold": [
            {
                "twin": layer["twin"],
                "layer": layer["name"],
                "tau": layer["tau"],
                "kept": [each["mean"] for each in layer["kept"]],
                "discarded": [each["mean"] for each in layer["discarded"]],
            }
            for layer in every
        ],
        "distributions": [
            {"name": name, "weights": weights} for name, weights in (of_softmax[0] if of_softmax else {}).items()
        ],
    }


def collinear(found: Found) -> dict[str, Any] | None:
    """Figure 1 on the keys of the twin that divides, if there is one."""
    twin = next((twin for twin in ("linear-relu", *found) if twin in found), None)
    return None if twin is None else {"twin": twin, **found[twin]["collinear"]}


def viewer(found: Found, images: Sequence[Mapping[str, str]], grid: Sequence[int]) -> dict[str, Any] | None:
    """Maps of the twins whose tokens are the whole picture in every layer."""
    patches = grid[0] * grid[1]
    maps = [
        {"twin": twin, **each}
        for twin, parts in found.items()
        for each in parts["maps"]
        if len(each["row_max"]) >= patches
    ]
    return {"grid": list(grid), "images": list(images), "maps": maps} if maps else None


def came_in(parts: Sequence[Images]) -> dict[str, list[int]] | None:
    """The smallest, median and largest size [width, height] of the images, by area; of at most SIZED, evenly chosen."""
    sizes = []
    for part in parts:
        count = min(len(part), SIZED // len(parts))
        for index in range(count):
            with suppress(FileError):  # a damaged image was skipped, or training has refused it
                sizes.append(part.size(index * len(part) // count))
    if not sizes:
        return None
    ranked = sorted(sizes, key=lambda size: (size[0] * size[1], size))
    chosen = {"smallest": ranked[0], "median": ranked[len(ranked) // 2], "largest": ranked[-1]}
    return {name: list(size) for name, size in chosen.items()}


def own_speed(
    twins: Sequence[Mapping[str, Any]], records: Sequence[Record], seconds: Mapping[str, float], tokens: int
) -> dict[str, Any]:
    """Seconds per image of each twin; a ratio is the time of the softmax twin of the same kind over its own."""
    trained = {
        twin["id"]: twin["seconds_per_epoch"] / record["images"]["train"]
        for twin in twins
        for record in records
        if record["twin"]["id"] == twin["id"] and twin["seconds_per_epoch"] and record["images"]
    }
    together = {record["twin"]["id"]: record["together"] for record in records}

    def against(times: Mapping[str, float], twin: Mapping[str, Any]) -> float | None:
        rival, own = times.get("softmax-local" if twin["local"] else "softmax"), times.get(twin["id"])
        return None if rival is None or own is None else rival / own

    rows = [
        {
            "twin": twin["id"],
            "label": twin["label"],
            "training_seconds": trained.get(twin["id"]),
            "inference_seconds": seconds.get(twin["id"]),
            "training_ratio": against(trained, twin),
            "inference_ratio": against(seconds, twin),
            "together": together[twin["id"]],
        }
        for twin in twins
    ]
    return {"tokens": tokens, "rows": rows}


def write_csvs(folder: Path, document: Mapping[str, Any]) -> dict[str, str]:
    """A file for each list of numbers in the document; an estimate becomes NAME, NAME_low, NAME_high, NAME_n."""
    curves = [
        {"twin": twin["id"], "seed": seed["seed"], **point}
        for twin in document["twins"]
        for seed in twin["seeds"]
        for point in seed["curve"]
    ]
    lists = {
        "twins": document["twins"],
        "curves": curves,
        "layers": document["layers"],
        "mask_out": document["mask_out"],
        "induced": document["induced"],
        "speed": document["speed"]["laps"],
        "own_speed": document["speed"]["own"]["rows"],
        "decision": document["decision"]["pairs"],
    }
    names = {}
    for name, items in lists.items():
        if items:
            write_text(folder / f"{name}.csv", as_csv(items))
            names[name] = f"{name}.csv"
    return names


def as_csv(items: Iterable[Mapping[str, Any]]) -> str:
    """Numbers and words; what is a list or a table has its place in report.json."""
    flat = [dict(_columns(item)) for item in items]
    heads = list(dict.fromkeys(key for row in flat for key in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, heads, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def _columns(item: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for key, value in item.items():
        if isinstance(value, dict) and value.keys() == {"mean", "low", "high", "n"}:
            yield key, value["mean"]
            yield from ((f"{key}_{part}", value[part]) for part in ("low", "high", "n"))
        elif not isinstance(value, dict | list | tuple):
            yield key, value
