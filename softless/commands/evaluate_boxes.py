"""What `softless evaluate` says about a detection: average precision, as COCO defines it, and that of each class."""

from typing import TypedDict

from softless.commands.common import console, plain, plain_table
from softless.commands.evaluate_dense import DenseResult, share
from softless.report import units

SCHEMA = "softless.evaluate-boxes/1"


class EvaluatedBoxes(TypedDict):
    """The JSON document of a detection. Shares run from 0 to 1, and are None where there is no box to find."""

    schema: str
    target: str
    step: int
    data: str
    device: str
    images: int
    boxes: int  # to be found, without crowds
    ap: float | None  # over IoU 0.5 to 0.95
    ap50: float | None
    ap75: float | None
    ap_small: float | None  # objects below 32 x 32 pixels
    ap_medium: float | None
    ap_large: float | None  # above 96 x 96
    loss: float
    images_per_second: float  # with decoding
    by_class: dict[str, float | None]  # AP
    by_class50: dict[str, float | None]  # AP50
    skipped: dict[str, str]  # name of each image that is bad, and why


def document_of(measured: DenseResult) -> EvaluatedBoxes:
    scores = measured.scores
    return {
        "schema": SCHEMA,
        "target": measured.target,
        "step": measured.step,
        "data": measured.data,
        "device": measured.device,
        "images": measured.images,
        "boxes": scores.boxes,
        "ap": scores.ap,
        "ap50": scores.ap50,
        "ap75": scores.ap75,
        "ap_small": scores.small,
        "ap_medium": scores.medium,
        "ap_large": scores.large,
        "loss": scores.loss,
        "images_per_second": measured.rate,
        "by_class": dict(zip(measured.classes, scores.by_class, strict=True)),
        "by_class50": dict(zip(measured.classes, scores.by_class50, strict=True)),
        "skipped": measured.skipped,
    }


def show(measured: DenseResult) -> None:
    out, scores = console(), measured.scores
    lines = (
        *measured.lines(),
        f"AP     {share(scores.ap)}   mean over the classes and IoU 0.5 to 0.95; {scores.boxes:,} boxes to find",
        f"AP50   {share(scores.ap50)}",
        f"AP75   {share(scores.ap75)}",
        f"sizes  small {share(scores.small)}, medium {share(scores.medium)}, large {share(scores.large)}",
        f"speed  {units.short(measured.rate)} images/s, decoding included",
        "",
    )
    out.print("\n".join(lines), soft_wrap=True)
    table = plain_table("class", "AP", "AP50")
    for name, *shares in zip(measured.classes, scores.by_class, scores.by_class50, strict=True):
        table.add_row(plain(name), *map(share, shares))
    out.print(table)
