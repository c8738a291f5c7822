"""What `softless evaluate` says about a detection: average precision, as COCO defines it, and that of each class.

For Mask R-CNN, the same of its masks.
"""

from typing import Any, TypedDict

from softless.commands.common import console, plain, plain_table
from softless.commands.evaluate_dense import DenseResult, share
from softless.report import units

SCHEMA = "softless.evaluate-boxes/1"


class EvaluatedPrecisions(TypedDict):
    """The average precision of boxes or of masks. Shares run from 0 to 1, and are None where there is none to find."""

    ap: float | None  # over IoU 0.5 to 0.95
    ap50: float | None
    ap75: float | None
    ap_small: float | None  # objects below 32 x 32 pixels
    ap_medium: float | None
    ap_large: float | None  # above 96 x 96
    by_class: dict[str, float | None]  # AP
    by_class50: dict[str, float | None]  # AP50


class EvaluatedBoxes(EvaluatedPrecisions):
    """The JSON document of a detection: the average precision of its boxes, and more."""

    schema: str
    target: str
    step: int
    data: str
    device: str
    images: int
    boxes: int  # to be found, without crowds
    masks: EvaluatedPrecisions | None  # None if the head finds boxes alone
    loss: float
    images_per_second: float  # with decoding
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
        **precisions_of(scores, measured.classes),
        "masks": None if scores.masks is None else precisions_of(scores.masks, measured.classes),
        "loss": scores.loss,
        "images_per_second": measured.rate,
        "skipped": measured.skipped,
    }


def precisions_of(scores: Any, classes: tuple[str, ...]) -> EvaluatedPrecisions:
    """Return the part of a document that boxes and masks share."""
    return {
        "ap": scores.ap,
        "ap50": scores.ap50,
        "ap75": scores.ap75,
        "ap_small": scores.small,
        "ap_medium": scores.medium,
        "ap_large": scores.large,
        "by_class": dict(zip(classes, scores.by_class, strict=True)),
        "by_class50": dict(zip(classes, scores.by_class50, strict=True)),
    }


def show(measured: DenseResult) -> None:
    out, scores, masks = console(), measured.scores, measured.scores.masks
    shown = {"AP": scores.by_class, "AP50": scores.by_class50}
    lines = measured.lines() + lines_of(
        scores, f"   mean over the classes and IoU 0.5 to 0.95; {scores.boxes:,} boxes to find"
    )
    if masks is not None:
        shown |= {"mask AP": masks.by_class, "mask AP50": masks.by_class50}
        lines += [f"mask {line}" for line in lines_of(masks)]
    lines += [f"speed  {units.short(measured.rate)} images/s, decoding included", ""]
    out.print("\n".join(lines), soft_wrap=True)
    table = plain_table("class", *shown)
    for name, *shares in zip(measured.classes, *shown.values(), strict=True):
        table.add_row(plain(name), *map(share, shares))
    out.print(table)


def lines_of(scores: Any, meaning: str = "") -> list[str]:
    """Return what boxes and masks show alike."""
    return [
        f"AP     {share(scores.ap)}{meaning}",
        f"AP50   {share(scores.ap50)}",
        f"AP75   {share(scores.ap75)}",
        f"sizes  small {share(scores.small)}, medium {share(scores.medium)}, large {share(scores.large)}",
    ]
