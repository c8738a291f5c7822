"""What `softless evaluate` says about a segmentation: mIoU, the IoU of each class, and pixel accuracy."""

from typing import TypedDict

from softless.commands.common import console, plain, plain_table
from softless.commands.evaluate_dense import DenseResult, share
from softless.report import units

SCHEMA = "softless.evaluate-masks/1"


class EvaluatedMasks(TypedDict):
    """The JSON document of a segmentation. Shares run from 0 to 1, and are None where there is nothing to divide by."""

    schema: str
    target: str
    step: int
    data: str
    device: str
    images: int
    pixels: int  # with a class
    miou: float
    pixel_accuracy: float
    loss: float
    images_per_second: float  # with decoding
    by_class: dict[str, float | None]  # IoU
    recall: dict[str, float | None]
    skipped: dict[str, str]  # name of each image that is bad, and why


def document_of(measured: DenseResult) -> EvaluatedMasks:
    scores = measured.scores
    return {
        "schema": SCHEMA,
        "target": measured.target,
        "step": measured.step,
        "data": measured.data,
        "device": measured.device,
        "images": measured.images,
        "pixels": scores.pixels,
        "miou": scores.miou,
        "pixel_accuracy": scores.accuracy,
        "loss": scores.loss,
        "images_per_second": measured.rate,
        "by_class": dict(zip(measured.classes, scores.by_class, strict=True)),
        "recall": dict(zip(measured.classes, scores.recall, strict=True)),
        "skipped": measured.skipped,
    }


def show(measured: DenseResult) -> None:
    out, scores = console(), measured.scores
    lines = (
        *measured.lines(),
        f"mIoU            {scores.miou:.2%}   mean over the classes",
        f"pixel accuracy  {scores.accuracy:.2%}",
        f"speed           {units.short(measured.rate)} images/s, decoding included",
        "",
    )
    out.print("\n".join(lines), soft_wrap=True)
    table = plain_table("class", "IoU", "found")
    for name, *shares in zip(measured.classes, scores.by_class, scores.recall, strict=True):
        table.add_row(plain(name), *map(share, shares))
    out.print(table)
