"""softless evaluate: how good a trained model is, by class and in its confidence.

TARGET is a run of `softless train`, whose best weights, images and preparation are used, or the name of a model with
`--weights`. Images are prepared as the paper does: squeezed to a square of size / 0.875, then the middle of that.

JSON (schema softless.evaluate/1); accuracies are shares, null for a class without images:

    {"schema", "target", "step": of a run, the update whose weights these are,
     "data", "device", "images", "top1", "top5", "ece", "loss", "images_per_second",
     "by_class": {class: accuracy}, "skipped": {image that could not be decoded: why}}

images_per_second is of the whole pass, decoding included.
Exit status: 0 evaluated, 1 the loss is not finite, 2 usage, 3 bad input.
"""

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from softless.commands.arguments import OnBad, Where, processes
from softless.commands.common import (
    CHECK_FAILED,
    complain,
    console,
    emit_json,
    plain,
    refuse,
    reports_errors,
    warnings_in_one_line,
    whole_number,
)
from softless.errors import ArgumentError, did_you_mean

if TYPE_CHECKING:
    from torch import nn

    from softless.data.images import Images
    from softless.train.recipe import Recipe

SCHEMA = "softless.evaluate/1"
SUMMARY = "Top-1, top-5, by class, calibration and speed of a trained model."
HELP = """Evaluate a trained model: top-1, top-5, accuracy by class, calibration, images a second.

\b
$ softless evaluate runs/a
$ softless evaluate inline_swin_tiny --weights swin_t.pth --data imagenet
"""
WORST = 5


@reports_errors
def run(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A run's folder, or the name of a model.")],
    data: Annotated[
        str | None, typer.Option(metavar="PATH", help="Other images than the run's.", show_default=False)
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of a model given by its name.", show_default=False)
    ] = None,
    batch: Annotated[Any, typer.Option(parser=whole_number, metavar="NUMBER", help="Images at a time.")] = "128",
    device: Annotated[Where, typer.Option(help="auto is cuda where there is one.")] = Where.auto,
    workers: Annotated[Any, typer.Option(parser=processes, metavar="NUMBER", help="Processes that decode.")] = "0",
    on_bad_image: Annotated[OnBad, typer.Option(help="skip stops above 0.1 %.")] = OnBad.fail,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Load, look at every image once, tell."""
    from softless.train.assemble import Runtime, feed
    from softless.train.devices import Devices, runnable
    from softless.train.evaluate import evaluate

    with warnings_in_one_line():
        model, recipe, images, source, step = _loaded(target, weights, data)
    devices = Devices(device.value, runnable(recipe.precision, device.value))
    runtime = Runtime(device=device.value, workers=int(workers), on_bad_image=on_bad_image.value)
    looking = replace(recipe, batch=int(batch), accumulate=1, mixup=0.0, cutmix=0.0)
    start = time.monotonic()
    feeding = feed(images, looking, 0, devices, runtime, train=False)
    scores = evaluate(model.to(devices.device), feeding, devices).scores()
    if not math.isfinite(scores.loss):
        complain(f"the loss of {target} on the images of {source} is {scores.loss}: its answers are no numbers")
        raise typer.Exit(CHECK_FAILED)
    rate = scores.images / max(time.monotonic() - start, 1e-9)
    document = {
        "schema": SCHEMA,
        "target": target,
        "step": step,
        "data": source,
        "device": str(devices.device),
        "images": scores.images,
        "top1": scores.top1,
        "top5": scores.top5,
        "ece": scores.ece,
        "loss": scores.loss,
        "images_per_second": rate,
        "by_class": dict(zip(images.classes, scores.by_class, strict=True)),
        "skipped": feeding.skipped(devices),
    }
    if not devices.main:
        return
    if json:
        emit_json(document)
    else:
        _show(document)


def _loaded(target: str, weights: Path | None, data: str | None) -> "tuple[nn.Module, Recipe, Images, str, int | None]":
    """The model, how its images are prepared, the images, where they lie, and the update of a run it is of."""
    from softless.data import open_images
    from softless.data.augment import as_timm_tests
    from softless.io.weights import load_weights
    from softless.models.table import CONFIGS, settings
    from softless.train.assemble import build, trained
    from softless.train.recipe import Architecture, Recipe
    from softless.train.recipe_file import from_document

    if target in CONFIGS and not Path(target).is_dir():
        if weights is None:
            raise ArgumentError(f"{target} is a model without weights: give --weights FILE, or the folder of a run")
        images, side = open_images(data, "test"), CONFIGS[target].img_size[0]
        model = build(Architecture(name=target), side, len(images.classes))
        load_weights(model, weights)
        augment = as_timm_tests(settings(target, CONFIGS[target]))
        recipe = Recipe(model=Architecture(name=target), image_size=side, augment=augment)
        return model, recipe, images, data or "digits", None
    refuse({"--weights": weights}, f"{target} is a run, which has its own")
    if not Path(target).is_dir():
        hint = did_you_mean(target, CONFIGS) or "softless list --models names the models"
        raise ArgumentError(f"{target!r} is neither the folder of a run nor a model: {hint}")
    model, about = trained(Path(target))
    source = about["data"] if data is None else data
    images = open_images(source, "test")
    if list(images.classes) != about["classes"]:
        raise ArgumentError(
            f"{target} knows {len(about['classes'])} classes ({', '.join(about['classes'][:3])}, ...), and the images "
            f"of {source} have {len(images.classes)} ({', '.join(images.classes[:3])}, ...)"
        )
    return model, from_document(about["recipe"]), images, source or "digits", about["step"]


def _show(document: dict[str, Any]) -> None:
    from softless.report import units

    out = console()
    out.print(
        f"{units.counted(document['images'], 'image')} of {plain(document['data'])}, {document['device']}",
        soft_wrap=True,
    )
    for name, why in document["skipped"].items():
        out.print(f"skipped {plain(name)}: {plain(why)}", soft_wrap=True)
    out.print(f"top-1  {document['top1']:.2%}")
    out.print(f"top-5  {document['top5']:.2%}")
    out.print(f"ECE    {document['ece']:.3f}   how far confidence is from accuracy")
    out.print(f"speed  {units.short(document['images_per_second'])} images/s, decoding included")
    known = [(share, name) for name, share in document["by_class"].items() if share is not None]
    worst = ", ".join(f"{plain(name)} {share:.1%}" for share, name in sorted(known)[:WORST])
    out.print(f"worst  {worst}", soft_wrap=True)
