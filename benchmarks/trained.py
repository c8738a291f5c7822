"""Store finished trainings of whole models, and write their part of docs/results.md.

    softless train swin_tiny --recipe imagenette --seed 1 --out runs/swin_tiny-1 ...
    python benchmarks/trained.py imagenette runs/*swin_tiny-*     # writes benchmarks/results/trained-imagenette.json

The runs share a recipe and differ in model or seed. `benchmarks/twins.py page` writes docs/results.md from the stored
files.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from softless.errors import ArgumentError, FileError, SoftlessError
from softless.study.tables import Group, compare, shared_spread
from softless.train.recipe import IMAGES, PROSE, TABLES, from_document, read_recipe
from softless.train.run import Run
from softless.train.tasks.classify import build

RESULTS = Path(__file__).parent / "results"
SCHEMA = "softless.trained/1"
SHARED = ("data", "images", "fingerprint", "versions", "machine", "recipe")


def keep(name: str, folders: list[Path], together: int) -> Path:
    """Write one file with the settings that all runs share, and the model, seed, result and curve of each run."""
    runs = [told(Run(folder)) for folder in folders]
    seen: dict[tuple[str, int], Path] = {}
    for run, folder in zip(runs, folders, strict=True):
        if other := next((key for key in SHARED if run[key] != runs[0][key]), None):
            raise ArgumentError(f"{folder} and {folders[0]} differ in {other}, and runs that are compared must not")
        first = seen.setdefault((run["model"], run["seed"]), folder)
        if first is not folder:
            raise ArgumentError(f"{folder} and {first} are both {run['model']} of seed {run['seed']}")
    path = RESULTS / f"trained-{name}.json"
    each = [{key: value for key, value in run.items() if key not in SHARED} for run in runs]
    document = {"schema": SCHEMA, **{key: runs[0][key] for key in SHARED}, "together": together, "runs": each}
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def told(run: Run) -> dict[str, Any]:
    """Return the record of a finished run."""
    about = run.read()
    if not run.result.exists():
        raise FileError(f"{run.folder} is not finished: softless train --out {run.folder} --resume")
    result = json.loads(run.result.read_text())
    recipe = from_document(about["recipe"])
    model = build(recipe.model, recipe.image_size, len(about["classes"]))
    lines = [json.loads(line) for line in run.log.read_text().splitlines()]
    return {
        "data": None if about["data"] is None else Path(about["data"]).name,
        "recipe": {**about["recipe"], "model": {**about["recipe"]["model"], "name": None}},
        **{key: about[key] for key in ("images", "fingerprint", "seed")},
        **{key: result[key] for key in ("versions", "machine", "steps", "best_step", "best_top1", "last", "seconds")},
        "model": recipe.model.name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "curve": [{"epoch": line["epoch"], "accuracy": line["top1"]} for line in lines if "top1" in line],
    }


def section(path: Path) -> str:
    """Return a section of the page: the commands, a table with a row per model, and a comparison of two models."""
    document, name = json.loads(path.read_text()), path.stem.removeprefix("trained-")
    models: dict[str, list[dict[str, Any]]] = {}
    for run in document["runs"]:
        models.setdefault(run["model"], []).append(run)
    groups = {model: group(model, runs) for model, runs in models.items()}
    lines = [
        f"## {name}, whole models",
        about(document),
        "",
        "```console",
        *(command(name, document, runs[0]) for runs in models.values()),
        "```",
        "",
        *changed(name, document["recipe"]),
        "| model | parameters | top-1 by seed | mean | calibration error | seconds of training |",
        "|---|---|---|---|---|---|",
        *(row(groups[model], runs) for model, runs in models.items()),
        "",
    ]
    if len(groups) == 2:
        lines += [compare(*groups.values(), shared_spread(groups)), ""]
    return "\n".join(lines)


def group(model: str, runs: list[dict[str, Any]]) -> Group:
    return Group(model, model, tuple(100 * run["last"]["top1"] for run in runs), len(runs))


def about(document: dict[str, Any]) -> str:
    """Describe the images, the length of the training and the machine."""
    recipe, images, together = (document[key] for key in ("recipe", "images", "together"))
    size = f"{recipe['image_size']} x {recipe['image_size']}"
    said = f"{document['data'] or 'digits'}: {images['train']:,} images to train on, "
    said += f"{images['test']:,} to test on, at {size}; "
    said += f"{recipe['epochs']} epochs of batch {recipe['batch']}, {recipe['precision']}, "
    return said + f"on {document['machine']['device']}" + (f", {together} at once." if together > 1 else ".")


def command(name: str, document: dict[str, Any], run: dict[str, Any]) -> str:
    images = "" if document["data"] is None else f" --data {document['data']}"
    graph = "" if document["machine"]["device"] == "cpu" else " --graph"
    out = f"runs/{run['model']}-{run['seed']}"
    return f"$ softless train {run['model']} --recipe {name}{images} --seed {run['seed']} --out {out}{graph}"


def changed(name: str, before: dict[str, Any]) -> list[str]:
    """Return a line that warns if the recipe was changed after the runs."""
    keys = ", ".join(f"`{key}`" for key in since(name, before))
    if not keys:
        return []
    return [f"The recipe has changed since these runs ({keys}), so the command trains with other settings.", ""]


def since(name: str, before: dict[str, Any]) -> list[str]:
    """List the keys of a recipe that have changed, except the model's name and the prose about cost and result."""
    old, new = (flat(asdict(each)) for each in (from_document(before), read_recipe(name)))
    return [key for key in new if old[key] != new[key] and key not in (*PROSE, "model.name")]


def flat(recipe: dict[str, Any]) -> dict[str, Any]:
    parts = {f"{table}.{key}": value for table in TABLES[IMAGES] for key, value in recipe[table].items()}
    return {key: value for key, value in {**recipe, **parts}.items() if key not in TABLES[IMAGES]}


def row(summary: Group, runs: list[dict[str, Any]]) -> str:
    cells = [
        summary.label,
        f"{runs[0]['parameters'] / 1e6:.2f} M",
        ", ".join(f"{accuracy:.2f}" for accuracy in summary.scores),
        f"{summary.mean:.2f}" + ("" if summary.spread is None else f" ± {summary.spread:.2f}"),
        f"{fmean(run['last']['ece'] for run in runs):.3f}",
        f"{fmean(run['seconds'] for run in runs):.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="of the recipe")
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--together", type=int, default=1, help="runs that shared the device")
    args = parser.parse_args()
    try:
        print(keep(args.name, args.folders, args.together))
    except SoftlessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
