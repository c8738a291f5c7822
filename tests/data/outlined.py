"""Small sets of images with boxes and masks: a red ellipse on the left and a blue rectangle on the right."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from softless.data.boxes import MaskedBoxValues
from tests.data import boxed
from tests.data.boxed import CLASSES, COLORS, GROUND
from tests.data.masked import png

VALUES = MaskedBoxValues(classes=CLASSES)


def ellipse(box: list[float], height: int, width: int) -> np.ndarray:
    """The pixels whose centers are in the ellipse that touches the sides of a box, bool [height, width]."""
    left, top, right, bottom = box
    rows, columns = np.mgrid[:height, :width] + 0.5
    x, y = (2 * columns - left - right) / (right - left), (2 * rows - top - bottom) / (bottom - top)
    return x**2 + y**2 <= 1


def rectangle(box: list[float], height: int, width: int) -> np.ndarray:
    """The pixels whose centers are in a box, bool [height, width]."""
    left, top, right, bottom = box
    rows, columns = np.mgrid[:height, :width] + 0.5
    return (left < columns) & (columns < right) & (top < rows) & (rows < bottom)


def drawn(seed: int, height: int = 32, width: int = 48) -> tuple[np.ndarray, list[list[float]], list[np.ndarray]]:
    """Pixels, boxes and masks; the labels are 0 and 1."""
    pixels, boxes, _ = boxed.drawn(seed, height, width)
    masks = [outline(box, height, width) for outline, box in zip((ellipse, rectangle), boxes, strict=True)]
    pixels[:] = GROUND
    for mask, color in zip(masks, COLORS, strict=True):
        pixels[mask] = color
    return pixels, boxes, masks


def row(seed: int, **size: int) -> dict[str, Any]:
    pixels, boxes, masks = drawn(seed, **size)
    return {"image": png(pixels), "boxes": boxes, "labels": [0, 1], "masks": [png(mask) for mask in masks]}


def coco(path: Path, images: Path, segmentations: list[Any]) -> None:
    """Write the JSON of COCO and one image, whose objects have these segmentations."""
    document = boxed.coco(path, images, [0])
    for entry, segmentation in zip(document["annotations"], segmentations, strict=True):
        entry["segmentation"] = segmentation
    path.write_text(json.dumps(document))
