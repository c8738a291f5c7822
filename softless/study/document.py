"""The report of a study: put report.json together, and write it with its CSV files and its page."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import numpy as np

from softless.bench.anatomy import anatomy
from softless.data import open_splits
from softless.data.images import Images
from softless.errors import FileError
from softless.io.files import write_json, write_text
from softless.machine import circumstances, timestamp
from softless.study import schema
from softless.study.decision import decide
from softless.study.examine import SampleImages, TwinExamination, png
from softless.study.grid import GridResult
from softless.study.page import write_page
from softless.study.plan import Preset, StudyOptions
from softless.study.tables import estimate, groups, shared_spread, table_2, tables
from softless.study.twin_run import RunRecord
from softless.study.twins import patch_of, tokens_per_side
from softless.study.verdict import verdict
from softless.train.recipe import Recipe, from_document
from softless.train.tasks.classify import model_options

SIZED = 500  # images whose original size is read
SPLIT = "The 360 test images are a fixed fifth of scikit-learn's 1,797 digits, with the digits in equal shares."

Examined = Mapping[str, TwinExamination]  # by twin


def assemble(
    options: StudyOptions,
    preset: Preset,
    recipe: Recipe,
    recipe_name: str,
    sample: SampleImages,
    *,
    grid_result: GridResult,
    in_windows: GridResult | None,
    examined: Examined,
    speed: Mapping[str, Any],
    curves: list[schema.RangeCurve],
    seconds: Mapping[str, float],
) -> schema.StudyDocument:
    """Put the document of a study together, without its files; `in_windows` are the runs of table 4."""
    train, test = open_splits(options.data, recipe.hold_out)
    by_twin, windows = groups(grid_result.records), in_windows or GridResult((), 0)
    spread, side = shared_spread(by_twin), tokens_per_side(recipe)
    tokens = next((layer["tokens"] for twin in examined.values() for layer in twin["layers"]), side * side)
    chance = float(np.bincount(test.labels).max() / len(test))
    twins = twin_results(grid_result.records)
    masked: Any = [{"twin": id_, **row} for id_, twin in examined.items() for row in twin["mask_out"]]
    induced: Any = [{"twin": id_, **row} for id_, twin in examined.items() for row in twin["induced"]]
    answered = [
        *tables(grid_result.records, windows.records),
        *table_2(masked, {twin["id"]: twin["label"] for twin in twins}),
    ]
    where = circumstances(sample.device)
    document: schema.StudyDocument = {
        "schema": schema.SCHEMA, "command": options.command(sample.device), "date": timestamp(),
        "versions": where["versions"], "machine": where["machine"], "seed": options.seed, "preset": options.preset,
        "data": {
            "name": "digits" if options.data is None else Path(options.data).name, "train": len(train),
            "test": len(test), "classes": list(train.classes), "image_size": recipe.image_size,
            "patch": patch_of(recipe), "grid": [side, side], "came": original_sizes((train, test)), "tokens": tokens,
            "recipe": recipe_name, "epochs": recipe.all_epochs, "chance": chance,
            "split": SPLIT if options.data in (None, "digits") else None,
        },
        "decision": decide(by_twin, spread, chance=chance, margin=options.margin), "verdict": [], "twins": twins,
        "tables": sorted(answered, key=lambda table: int(table["id"] or 0)),
        "examined": {
            "images": max((twin["images"] for twin in examined.values()), default=0),
            "masked": min(preset.masked, len(sample.images.labels)),
        },
        "layers": layer_results(examined), "mask_out": masked, "induced": induced, "collinear": collinear(examined),
        "range": score_ranges(examined, curves),
        "viewer": viewer(examined, shown_images(sample, test, preset.shown), [side, side]),
        "speed": cast("schema.SpeedPart", {**speed, "own": own_speed(twins, grid_result.records, seconds, tokens)}),
        "files": {},
    }  # fmt: skip
    left, others = grid_result.left + windows.left, groups(windows.records).values()
    document["verdict"] = verdict(document, by_twin, spread, left, others)
    return document


def write(folder: Path, document: schema.StudyDocument) -> Path:
    """Write the CSV files, report.json and the page; return the path of the page."""
    document["files"] = dict(write_csvs(folder, document))
    write_json(folder / schema.NAME, document)
    return write_page(folder)


def twin_results(records: Sequence[RunRecord]) -> list[schema.TwinResult]:
    """Return one entry per twin: its runs, their mean accuracy, and the cost of one image."""
    by_twin = groups(records)
    spread, results = shared_spread(by_twin), []
    for id_, group in by_twin.items():
        runs: Any = [record for record in records if record["twin"]["id"] == id_]
        recipe = from_document(runs[0]["recipe"])
        seconds = [run["seconds"] for run in runs if run["status"] == "done" and run["seconds"] is not None]
        counted = anatomy(recipe.model.name, (recipe.image_size, recipe.image_size), **model_options(recipe.model))
        result = {key: value for key, value in runs[0]["twin"].items() if key in schema.TwinResult.__annotations__} | {
            "parameters": max(run["parameters"] for run in runs) or None,
            "macs": counted.total.macs,
            "seconds_per_epoch": fmean(seconds) / recipe.all_epochs if seconds else None,
            "accuracy": estimate(group, spread),
            "seeds": [{key: run[key] for key in schema.SeedResult.__annotations__} for run in runs],
        }
        results.append(cast("schema.TwinResult", result))
    return results


def layer_results(examined: Examined) -> list[schema.LayerResult]:
    """Return the layers of all twins; the verdict on a linear kernel stays only where a layer runs a softmax."""
    layers: Any = [{"twin": id_, **layer} for id_, twin in examined.items() for layer in twin["layers"]]
    for layer in layers:
        layer["verdict"] = layer["verdict"] if layer["mechanism"] == "softmax" else None
    return layers


def score_ranges(examined: Examined, curves: list[schema.RangeCurve]) -> schema.RangePart:
    """Return the score ranges of all layers, the curves on random scores, and what a threshold keeps."""
    layers = [(id_, layer) for id_, twin in examined.items() for layer in twin["layers"]]
    rows = [twin["row"]["weights"] for id_, twin in examined.items() if id_.startswith("softmax")]
    return {
        "curves": list(curves),
        "layers": [
            {"twin": id_, "layer": layer["name"], "range": layer["score_range"], "error": layer["first_order_error"]}
            for id_, layer in layers
        ],
        "threshold": [
            {
                "twin": id_,
                "layer": layer["name"],
                "tau": layer["tau"],
                "kept": [share["mean"] for share in layer["kept"]],
                "discarded": [share["mean"] for share in layer["discarded"]],
            }
            for id_, layer in layers
        ],
        "distributions": [{"name": name, "weights": weights} for name, weights in (rows[0] if rows else {}).items()],
    }


def collinear(examined: Examined) -> schema.CollinearPart | None:
    """Return figure 1 on the keys of the twin that divides, or else of the first twin; None without a twin."""
    twin = next((id_ for id_ in ("linear-relu", *examined) if id_ in examined), None)
    return None if twin is None else cast("schema.CollinearPart", {"twin": twin, **examined[twin]["collinear"]})


def shown_images(sample: SampleImages, test: Images, count: int) -> list[schema.ViewerImage]:
    """Return one image per class for the attention viewer."""
    return [
        {
            "png": png(sample.images.pixels[index]),
            "label": test.classes[int(sample.images.labels[index])],
            "name": Path(test.names(int(sample.images.ids[index]))).name,
        }
        for index in sample.one_per_class(count).tolist()
    ]


def viewer(examined: Examined, images: list[schema.ViewerImage], grid: list[int]) -> schema.ViewerPart | None:
    """Return the attention maps of the twins whose tokens are the whole picture in every layer."""
    every: Any = [{"twin": id_, **weights} for id_, twin in examined.items() for weights in twin["maps"]]
    maps = [weights for weights in every if len(weights["row_max"]) >= grid[0] * grid[1]]
    return {"grid": grid, "images": images, "maps": maps} if maps else None


def original_sizes(splits: Sequence[Images]) -> schema.ImageSizes | None:
    """Return the smallest, median and largest size [width, height] by area, of at most SIZED images, evenly chosen."""
    sizes = []
    for split in splits:
        count = min(len(split), SIZED // len(splits))
        for index in range(count):
            with suppress(FileError):  # a damaged image was skipped, or training has refused it
                sizes.append(split.size(index * len(split) // count))
    if not sizes:
        return None
    ranked = [list(size) for size in sorted(sizes, key=lambda size: (size[0] * size[1], size))]
    return {"smallest": ranked[0], "median": ranked[len(ranked) // 2], "largest": ranked[-1]}


def own_speed(
    twins: Sequence[schema.TwinResult], records: Sequence[RunRecord], inference: Mapping[str, float], tokens: int
) -> schema.OwnSpeed:
    """Return the seconds per image of each twin; a ratio is the softmax twin's time divided by the twin's own."""
    together = {record["twin"]["id"]: record["together"] for record in records}
    images = {record["twin"]["id"]: record["images"]["train"] for record in records if record["images"]}
    training = {
        twin["id"]: twin["seconds_per_epoch"] / images[twin["id"]]
        for twin in twins
        if twin["seconds_per_epoch"] and twin["id"] in images
    }

    def ratio(seconds: Mapping[str, float], twin: schema.TwinResult) -> float | None:
        softmax, own = seconds.get("softmax-local" if twin["local"] else "softmax"), seconds.get(twin["id"])
        return None if softmax is None or own is None else softmax / own

    rows: list[schema.TwinSpeed] = [
        {
            "twin": twin["id"], "label": twin["label"], "training_seconds": training.get(twin["id"]),
            "inference_seconds": inference.get(twin["id"]), "training_ratio": ratio(training, twin),
            "inference_ratio": ratio(inference, twin), "together": together[twin["id"]],
        }
        for twin in twins
    ]  # fmt: skip
    return {"tokens": tokens, "rows": rows}


def write_csvs(folder: Path, document: Mapping[str, Any]) -> dict[str, str]:
    """Write a CSV file for each list of numbers in the document; return the file names."""
    curves = [
        {"twin": twin["id"], "seed": seed["seed"], **point}
        for twin in document["twins"]
        for seed in twin["seeds"]
        for point in seed["curve"]
    ]
    lists = {"twins": document["twins"], "curves": curves} | {
        **{name: document[name] for name in ("layers", "mask_out", "induced")},
        "speed": document["speed"]["laps"],
        "own_speed": document["speed"]["own"]["rows"],
        "decision": document["decision"]["pairs"],
    }
    names = {name: f"{name}.csv" for name, items in lists.items() if items}
    for name, file in names.items():
        write_text(folder / file, as_csv(lists[name]))
    return names


def as_csv(items: Iterable[Mapping[str, Any]]) -> str:
    """Write numbers and texts as CSV; an estimate becomes NAME, NAME_low, NAME_high, NAME_n, and lists are left out."""
    flat = [dict(_columns(item)) for item in items]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(key for row in flat for key in row)), lineterminator="\n")
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
