"""Average precision (AP), as COCO defines it, through pycocotools.

Boxes that are found are taken in the order of their scores. Each is matched with the free box of its class in its image
that it overlaps most, if their IoU (intersection over union) is at least a threshold. Then, over all images,

    AP_c   mean of the highest precision at a recall of at least 0, 0.01, ..., 1, and over the thresholds 0.5, 0.55,
           ..., 0.95
    AP     mean of AP_c over the classes that have boxes

What is found in a crowd counts neither for nor against. At most 100 boxes per image count. For the AP of masks, the IoU
is that of masks.
"""

from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import chain
from typing import Any

import numpy as np

from softless.data.boxes import Boxes
from softless.data.object_masks import Code, area
from softless.errors import needs_extra

SIZES = ("all", "small", "medium", "large")


@dataclass(frozen=True, kw_only=True)
class Precisions:
    """The average precision of a set. Shares are None where there is no object to find.

    ap, ap50, ap75       over all thresholds, and for the thresholds 0.5 and 0.75
    small, medium, large AP for objects below 32 x 32 pixels, up to 96 x 96, and above
    by_class, by_class50 AP and AP50 of each class
    """

    ap: float | None
    ap50: float | None
    ap75: float | None
    small: float | None
    medium: float | None
    large: float | None
    by_class: tuple[float | None, ...]
    by_class50: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class BoxScores(Precisions):
    """The scores of a set: the `Precisions` of its boxes, and:

    images   that were searched
    boxes    to be found in them, without crowds
    loss     mean of the loss per image
    masks    Precisions of the masks; None if only boxes are found
    """

    images: int
    boxes: int
    loss: float
    masks: Precisions | None


def box_scores(
    truth: Sequence[Boxes],
    detections: Sequence[np.ndarray],
    classes: int,
    loss: float = 0.0,
    masks: Sequence[Sequence[Code]] | None = None,
) -> BoxScores:
    """Return the scores of what was found in some images.

    truth        the boxes of each image
    detections   float32 [n, 6] for each image: left, top, right, bottom, score, label
    classes      int: their number
    loss         float: passed on
    masks        n codes for each image: the masks that were found; None if only boxes are found
    """
    known = [
        _entry(image, corners, label, iscrowd=int(crowd), area=float(area))
        for image, boxes in enumerate(truth)
        for corners, label, crowd, area in zip(*boxes[:4], strict=True)
    ]
    called = [
        _entry(image, row[:4], row[5], score=float(row[4])) for image, rows in enumerate(detections) for row in rows
    ]
    of_boxes, of_masks = _precisions("bbox", known, called, len(truth), classes), None
    if masks is not None:
        own: Any = [boxes.masks for boxes in truth]
        known = [entry | {"segmentation": code} for entry, code in zip(known, chain(*own), strict=True)]
        called = [
            entry | {"segmentation": code, "area": area(code)}
            for entry, code in zip(called, chain(*masks), strict=True)
        ]
        of_masks = _precisions("segm", known, called, len(truth), classes)
    boxes = sum(not entry["iscrowd"] for entry in known)
    return BoxScores(**vars(of_boxes), images=len(truth), boxes=boxes, loss=loss, masks=of_masks)


def _precisions(
    kind: str, known: list[dict[str, Any]], called: list[dict[str, Any]], images: int, classes: int
) -> Precisions:
    with needs_extra("average precision is computed by pycocotools", "train"):
        from pycocotools.cocoeval import COCOeval
    with redirect_stdout(StringIO()):  # it prints its progress
        judge = COCOeval(*(_dataset(entries, images, classes) for entries in (known, called)), kind)
        judge.evaluate()
        judge.accumulate()
    precision = judge.eval["precision"][:, :, :, :, -1]  # [thresholds, recalls, classes, sizes]; -1 without an object
    by_size = [_mean(precision[..., at]) for at in range(len(SIZES))]
    return Precisions(
        ap=by_size[0],
        ap50=_mean(precision[0, ..., 0]),
        ap75=_mean(precision[5, ..., 0]),
        small=by_size[1],
        medium=by_size[2],
        large=by_size[3],
        by_class=tuple(_mean(precision[:, :, label, 0]) for label in range(classes)),
        by_class50=tuple(_mean(precision[0, :, label, 0]) for label in range(classes)),
    )


def _entry(image: int, corners: Any, label: Any, **rest: Any) -> dict[str, Any]:
    left, top, right, bottom = map(float, corners)
    width, height = right - left, bottom - top
    return {
        "image_id": image + 1, "category_id": int(label), "bbox": [left, top, width, height],
        "area": width * height, "iscrowd": 0, **rest,
    }  # fmt: skip


def _dataset(entries: list[dict[str, Any]], images: int, classes: int) -> Any:
    from pycocotools.coco import COCO

    coco = COCO()
    coco.dataset = {
        # it reads the height and width of images, and uses them for polygons alone, of which there are none
        "images": [{"id": image + 1, "height": 0, "width": 0} for image in range(images)],
        "categories": [{"id": label} for label in range(classes)],
        "annotations": [{"id": place + 1, **entry} for place, entry in enumerate(entries)],  # 0 would mean no match
    }
    coco.createIndex()
    return coco


def _mean(precision: np.ndarray) -> float | None:
    measured = precision[precision > -1]
    return float(measured.mean()) if measured.size else None
