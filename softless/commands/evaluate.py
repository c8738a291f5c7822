"""softless evaluate: measure a trained model on images or text it was not trained on.

TARGET is a run of `softless train`, or the name of a model with `--weights`. A run brings its best weights, its images
and how to prepare them. For a named model, images are prepared as its authors do. `--json` prints an `Evaluated`, an
`EvaluatedText` for the run of a language model, an `EvaluatedMasks` for that of a segmentation, or an `EvaluatedBoxes`
for that of a detection.

Exit status: 0 evaluated, 1 the loss is not finite, 2 usage, 3 bad input.
"""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from softless.commands.arguments import MOST_PROCESSES, OnBad, Where
from softless.commands.common import (
    console,
    emit_json,
    must_be_finite,
    plain,
    refuse,
    reports_errors,
    task_of_run,
    warnings_in_one_line,
)
from softless.errors import ArgumentError, did_you_mean

if TYPE_CHECKING:
    from torch import nn

    from softless.data.images import Images
    from softless.train.recipe import Recipe

SCHEMA, TEXT_SCHEMA = "softless.evaluate/1", "softless.evaluate-text/1"
SUMMARY = "Measure a trained model: accuracy, calibration, mIoU, AP, speed."
HELP = """Evaluate a trained model: top-1, top-5, accuracy per class, calibration, images per second.

A segmentation: mean intersection over union, and that of each class.
A detection: average precision as COCO defines it, and that of each class.
A language model: loss per token and per byte, perplexity, tokens per second.

\b
$ softless evaluate runs/a
$ softless evaluate runs/text --data other.txt
$ softless evaluate inline_swin_tiny --weights swin_t.pth --data imagenet
"""
WORST = 5  # classes that are shown
LARGEST_BATCH = 10**15 - 1


class Evaluated(TypedDict):
    """The JSON document. Accuracies are shares from 0 to 1."""

    schema: str
    target: str
    step: int | None  # the update of a run that these weights come from
    data: str
    device: str
    images: int
    top1: float
    top5: float
    ece: float
    loss: float
    images_per_second: float  # with decoding
    by_class: dict[str, float | None]  # None for a class without images
    skipped: dict[str, str]  # name of each image that could not be decoded, and why


class EvaluatedText(TypedDict):
    """The JSON document of a language model. Losses are in nats."""

    schema: str
    target: str
    step: int
    data: str
    device: str
    tokens: int
    bytes: int
    loss: float  # per token
    loss_per_byte: float
    bits_per_byte: float
    perplexity: float  # per token
    tokens_per_second: float


@reports_errors
def run(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A run's folder, or the name of a model.")],
    data: Annotated[str | None, typer.Option(metavar="PATH", help="Other images or text than the run's.")] = None,
    weights: Annotated[Path | None, typer.Option(metavar="FILE", help="Weights of a model given by its name.")] = None,
    batch: Annotated[
        int, typer.Option(min=1, max=LARGEST_BATCH, metavar="NUMBER", help="Images or sequences per batch.")
    ] = 128,
    device: Annotated[Where, typer.Option(help="auto uses CUDA if there is one.")] = "auto",
    workers: Annotated[int, typer.Option(min=0, max=MOST_PROCESSES, help="Processes that decode.")] = 0,
    on_bad_image: Annotated[OnBad, typer.Option(help="skip stops above 0.1 %.")] = "fail",
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Load the model, run it on every image once, and show its scores."""
    from softless.commands import evaluate_boxes, evaluate_masks
    from softless.commands.evaluate_dense import evaluate_dense
    from softless.train.devices import Devices, runnable
    from softless.train.metrics import ClassCounts
    from softless.train.recipe import DENSE, LANGUAGE
    from softless.train.tasks import all_skipped, evaluate
    from softless.train.tasks.classify import image_loader

    task = task_of_run(target)
    if task in DENSE:
        refuse({"--weights": weights}, f"{target} is a run, which has its own")
        measured = evaluate_dense(target, data, batch, device, workers, on_bad_image, quiet=json)
        page = evaluate_masks if task == "segment" else evaluate_boxes
        if measured is not None:
            emit_json(page.document_of(measured)) if json else page.show(measured)
        return
    if task == LANGUAGE:
        refuse(
            {"--weights": weights, "--workers": workers, "--on-bad-image": on_bad_image == "skip"},
            f"{target} is the run of a language model, which has its own weights and reads no images",
        )
        _evaluate_text(target, data, batch, device, json)
        return
    with warnings_in_one_line():
        model, recipe, images, source, step = _loaded(target, weights, data)
    devices = Devices(device, runnable(recipe.precision, device))
    recipe = replace(recipe, batch=batch, accumulate=1, mixup=0.0, cutmix=0.0)
    start = time.monotonic()
    batches = image_loader(images, recipe, 0, devices, train=False, workers=workers, on_bad_image=on_bad_image)
    metrics = partial(ClassCounts, len(images.classes), len(images), devices.device)
    scores = evaluate(model.to(devices.device), batches, metrics, devices).scores()
    must_be_finite(scores.loss, target, f"the images of {source}")
    rate = scores.images / max(time.monotonic() - start, 1e-9)
    document: Evaluated = {
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
        "skipped": all_skipped(batches, devices),
    }
    if not devices.main:
        return
    if json:
        emit_json(document)
    else:
        _show(document)


def _evaluate_text(target: str, data: str | None, batch: int, device: str, json: bool) -> None:
    """Run the best model of a run on the text to test on, and show its scores."""
    from softless.data.sequences import TokenizedText
    from softless.data.text import open_test_text, open_text
    from softless.train.devices import Devices, runnable
    from softless.train.tasks import evaluate
    from softless.train.tasks.language import TokenCounts, sequence_loader, trained

    with warnings_in_one_line():
        model, recipe, tokenizer, about = trained(Path(target))
    text = open_test_text(about["data"], recipe.hold_out) if data is None else open_text(data, "test")
    devices = Devices(device, runnable(recipe.precision, device))
    sequences = TokenizedText(text, tokenizer, recipe.length, train=False)
    batches = sequence_loader(sequences, batch, devices, seed=0, train=False)
    start = time.monotonic()
    metrics = partial(TokenCounts, sequences.count, tokenizer.sizes, devices.device)
    scores = evaluate(model.to(devices.device), batches, metrics, devices).scores()
    must_be_finite(scores.loss, target, f"the text of {text.name}")
    document: EvaluatedText = {
        "schema": TEXT_SCHEMA,
        "target": target,
        "step": about["step"],
        "data": text.name,
        "device": str(devices.device),
        "tokens": scores.tokens,
        "bytes": scores.bytes,
        "loss": scores.loss,
        "loss_per_byte": scores.loss_per_byte,
        "bits_per_byte": scores.bits_per_byte,
        "perplexity": scores.perplexity,
        "tokens_per_second": scores.tokens / max(time.monotonic() - start, 1e-9),
    }
    if not devices.main:
        return
    if json:
        emit_json(document)
    else:
        _show_text(document)


def _loaded(target: str, weights: Path | None, data: str | None) -> "tuple[nn.Module, Recipe, Images, str, int | None]":
    """Return the model, the recipe that prepares its images, the images, their source, and the update of a run."""
    from softless.data import open_images
    from softless.data.augment import as_timm_tests
    from softless.io.weights import load_weights
    from softless.models.table import CONFIGS, settings
    from softless.train.architecture import Architecture
    from softless.train.recipe import Recipe, from_document
    from softless.train.tasks.classify import build, check_classes, trained

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
    check_classes(Path(target), about, images.classes)
    return model, from_document(about["recipe"]), images, source or "digits", about["step"]


def _show(document: Evaluated) -> None:
    from softless.report import units

    known = [(share, name) for name, share in document["by_class"].items() if share is not None]
    worst = ", ".join(f"{plain(name)} {share:.1%}" for share, name in sorted(known)[:WORST])
    lines = (
        f"{units.counted(document['images'], 'image')} of {plain(document['data'])}, {document['device']}",
        *(f"skipped {plain(name)}: {plain(why)}" for name, why in document["skipped"].items()),
        f"top-1  {document['top1']:.2%}",
        f"top-5  {document['top5']:.2%}",
        f"ECE    {document['ece']:.3f}   how far confidence is from accuracy",
        f"speed  {units.short(document['images_per_second'])} images/s, decoding included",
        f"worst  {worst}",
    )
    console().print("\n".join(lines), soft_wrap=True)


def _show_text(document: EvaluatedText) -> None:
    from softless.report import units

    tokens, size = units.counted(document["tokens"], "token"), units.counted(document["bytes"], "byte")
    lines = (
        f"{tokens} ({size}) of {plain(document['data'])}, {document['device']}",
        f"bits per byte  {document['bits_per_byte']:.4f}   {document['loss_per_byte']:.4f} nats per byte",
        f"perplexity     {document['perplexity']:,.3f}   {document['loss']:.4f} nats per token",
        f"speed          {units.short(document['tokens_per_second'])} tokens/s",
    )
    console().print("\n".join(lines), soft_wrap=True)
