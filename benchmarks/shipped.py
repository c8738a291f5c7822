"""Ship the weights of a trained model with softless, and list all that ship on docs/model-card.md.

    softless train --recipe cifar10 --data cifar10-jpeg-train.parquet --out runs/a ...
    python benchmarks/shipped.py keep runs/a inline_cifar10     # writes softless/weights/inline_cifar10.safetensors
    python benchmarks/shipped.py page                           # fills the page from the files

`keep` takes the weights that `softless evaluate RUN` would measure, rounds them to float16, and measures the rounded
model on the test images of the run, in float32. softless/models/shipped.py says what the file holds.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from gpu import fill
from safetensors.torch import save
from torch import Tensor, nn

from softless.data import Images, open_images
from softless.errors import ArgumentError, FileError, SoftlessError
from softless.io.files import to_json
from softless.mechanisms import resolve
from softless.models import shipped
from softless.models.table import CONFIGS
from softless.report.units import count, size
from softless.train.devices import Devices
from softless.train.metrics import ClassCounts, Scores
from softless.train.recipe import Recipe, from_document
from softless.train.run import Run
from softless.train.tasks import evaluate
from softless.train.tasks.classify import check_classes, image_loader, trained

PAGE = Path(__file__).parents[1] / "docs" / "model-card.md"
MARKS = ("<!-- shipped: python benchmarks/shipped.py page -->", "<!-- end of shipped -->")
NONE = "This version of softless ships no trained weights yet."
MOST_PARAMETERS, MOST_BYTES = 3_000_000, 12_000_000  # of a model, and of all files together
PREPARED = {"mean": "mean", "std": "std", "crop_pct": "crop_share", "crop_mode": "crop_mode"}  # timm's word and ours


def keep(folder: Path, name: str, data: str | None, device: str) -> Path:
    """Write the file of a finished run, and return its path."""
    run = Run(folder)
    recipe = from_document(run.read()["recipe"])
    if not run.result.exists():
        raise FileError(f"{folder} is not finished: softless train --out {folder} --resume")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in CONFIGS:
        raise ArgumentError(f"{name!r} is no new name of small letters, digits and underscores, such as inline_cifar10")
    if recipe.model.name not in CONFIGS:
        raise ArgumentError(f"{folder} has a model {recipe.model.name!r}, and one of {', '.join(CONFIGS)} is needed")
    model, about = trained(folder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters > MOST_PARAMETERS:
        raise ArgumentError(f"{folder} has {parameters:,} parameters, and a model may have {MOST_PARAMETERS:,}")
    weights = rounded(model)
    model.load_state_dict(weights)
    images = open_images(about["data"] if data is None else data, "test")
    check_classes(folder, about, images.classes)
    scores = measured(model, images, recipe, device)
    document = {
        "schema": shipped.SCHEMA,
        **described(about, recipe),
        "parameters": parameters,
        "top1": scores.top1,
        "test_images": scores.images,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": json.loads(run.result.read_text())["versions"],
    }
    path, file = shipped.FOLDER / f"{name}{shipped.SUFFIX}", save(weights, {shipped.METADATA: to_json(document)})
    others = sum(other.stat().st_size for other in shipped.FOLDER.glob(f"*{shipped.SUFFIX}") if other != path)
    if others + len(file) > MOST_BYTES:
        raise ArgumentError(
            f"{name} has {len(file):,} bytes and the other files have {others:,}, and all files together may have "
            f"{MOST_BYTES:,}"
        )
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(file)
    return path


def rounded(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights in float16."""
    weights = {name: x.half() if x.is_floating_point() else x for name, x in model.state_dict().items()}
    if beyond := [name for name, x in weights.items() if not x.isfinite().all()]:
        raise FileError(f"float16 cannot hold the numbers of {', '.join(beyond)}")
    return weights


def described(about: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Return how to build the model of a run, how its images are prepared, and how it was trained."""
    options = {key: value for key, value in about["recipe"]["model"].items() if value is not None}
    names = {key: about[key] and Path(about[key]).name for key in ("data", "teacher", "init")}  # without folders
    return {
        "model": options | {"img_size": recipe.image_size, "num_classes": len(about["classes"])},
        "classes": about["classes"],
        "images": {key: getattr(recipe.augment, word) for key, word in PREPARED.items()},
        "data": {"name": names.pop("data") or "digits", "images": about["images"], "fingerprint": about["fingerprint"]},
        **{key: about[key] for key in ("recipe", "seed", "step")},
        **names,
    }


def measured(model: nn.Module, images: Images, recipe: Recipe, device: str) -> Scores:
    """Measure the model on all images as `softless evaluate` does, but in float32."""
    devices = Devices(device)
    plain = replace(recipe, batch=128, accumulate=1, mixup=0.0, cutmix=0.0)
    batches = image_loader(images, plain, 0, devices, train=False)
    metrics = partial(ClassCounts, len(images.classes), len(images), devices.device)
    return evaluate(model.to(devices.device), batches, metrics, devices).scores()


def section() -> str:
    """Return a table with a row per model, and how each was trained; or that there is none."""
    models = [shipped.ShippedModel(name) for name in shipped.shipped_names()]
    if not models:
        return NONE
    lines = ["| model | architecture | attention | parameters | file | top-1 |", "|---|---|---|---|---|---|"]
    return "\n".join([*lines, *map(row, models), "", *map(training, models)])


def row(model: shipped.ShippedModel) -> str:
    about, options, config = model.document, model.options, CONFIGS[model.base]
    attention = resolve(options.get("mechanism", config.mechanism)).name
    cells = [
        f"`{model.name}`",
        f"`{model.base}`",
        attention + " + local" * options.get("local", config.local),
        count(about["parameters"]),
        size(model.path.stat().st_size),
        f"{about['top1']:.2%}",
    ]
    return f"| {' | '.join(cells)} |"


def training(model: shipped.ShippedModel) -> str:
    """Say in one line how a model was trained."""
    about = model.document
    recipe, data = about["recipe"], about["data"]
    side = f"{recipe['image_size']} x {recipe['image_size']}"
    guide = f", and learned from the model {about['teacher']}" if about["teacher"] else ""
    start = f", and began with the weights of {about['init']}" if about["init"] else ""
    return (
        f"- `{model.name}` saw {data['images']['train']:,} images of {side} pixels from {data['name']} for "
        f"{recipe['epochs']} epochs in batches of {recipe['batch']}, with seed {about['seed']}{guide}{start}. "
        f"Its top-1 accuracy is measured on {about['test_images']:,} other images. "
        f"Written on {about['date']} with torch {about['versions']['torch']}."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    keeper = verbs.add_parser("keep", help="write the weights of a finished run")
    keeper.add_argument("run", type=Path)
    keeper.add_argument("name", help="of the model, as create_model takes it")
    keeper.add_argument("--data", help="the images of the run, if they have moved")
    keeper.add_argument("--device", default="auto", help="auto, cpu or cuda")
    verbs.add_parser("page", help="fill docs/model-card.md")
    args = parser.parse_args()
    try:
        if args.verb == "keep":
            print(keep(args.run, args.name, args.data, args.device))
        else:
            PAGE.write_text(fill(PAGE.read_text(), section(), MARKS))
    except SoftlessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
