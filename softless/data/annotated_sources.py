"""Open the parts of a set of images with masks or boxes: what to train on, and what to test on.

What the numbers in the masks mean (`MaskValues`), or what the boxes mean (`BoxValues`), says which of the two it is.
"""

from pathlib import Path
from typing import Any, get_args

import numpy as np

from softless.data.annotated import AnnotatedImages
from softless.data.boxed_sources import has_boxes, open_boxed
from softless.data.boxes import BoxValues
from softless.data.images import MissingPartError, Split
from softless.data.masked_sources import has_masks, open_masked
from softless.data.masks import MaskValues
from softless.errors import FileError
from softless.io.pictures import BadImage

Values = MaskValues | BoxValues


def open_annotated(source: str | Path, split: Split, values: Values) -> Any:
    """Open the training images or the test images of a set, with their masks or boxes.

    source   str or path: a parquet file, a folder, or the JSON file of COCO
    split    "train" or "test"; a source that has only one part is that part for both
    values   MaskValues or BoxValues: what the annotations mean
    """
    if isinstance(values, BoxValues):
        return open_boxed(source, split, values)
    return open_masked(source, split, values)


def open_annotated_splits(source: str | Path, values: Values, hold_out: float = 0.0) -> tuple[Any, Any]:
    """Open the training images and the test images of a set, which must differ.

    With `hold_out`, this share of the training images takes the place of the test images, always the same ones.
    """
    train: AnnotatedImages = open_annotated(source, "train", values)
    if hold_out:
        order = np.random.default_rng(0).permutation(len(train))
        count = round(hold_out * len(train))
        if not 0 < count < len(train):
            raise FileError(f"{source}: hold_out {hold_out} of {len(train)} images leaves one of two parts empty")
        return train.part(np.sort(order[count:])), train.part(np.sort(order[:count]))
    test = open_annotated(source, "test", values)
    if the_same(train, test):
        raise FileError(
            f"{source}: it has one part, and images to test on are needed besides those to train on; a recipe with "
            "hold_out = 0.1 takes a tenth of those to train on"
        )
    return train, test


def open_annotated_test(source: str | Path, values: Values, hold_out: float) -> Any:
    """Open the test images of a set; of a set with one part, those that `hold_out` kept from training."""
    test = open_annotated(source, "test", values)
    if hold_out and the_same(open_annotated(source, "train", values), test):
        return open_annotated_splits(source, values, hold_out)[1]
    return test


def open_annotated_parts(source: str | Path, values: Values) -> dict[str, AnnotatedImages | BadImage]:
    """Open the parts of a set, by name. A part whose file is damaged is a `BadImage` error instead of images."""
    parts: dict[str, AnnotatedImages | BadImage] = {}
    missing = []
    for split in get_args(Split):
        try:
            parts[split] = open_annotated(source, split, values)
        except BadImage as error:
            parts[split] = error
        except MissingPartError as error:
            missing.append(error)
    if not parts:
        raise missing[0]
    train, test = parts.get("train"), parts.get("test")
    if isinstance(train, AnnotatedImages) and isinstance(test, AnnotatedImages) and the_same(train, test):
        return {"whole": train}
    return parts


def the_same(train: AnnotatedImages, test: AnnotatedImages) -> bool:
    """Return whether two parts are the same images."""
    return train.fingerprint == test.fingerprint and train.names(0) == test.names(0)


def values_of(source: str | Path | None) -> Values | None:
    """Return what annotations mean by default in a source that has masks or boxes; None if it has neither."""
    masks, boxes = MaskValues(), BoxValues()
    if has_masks(source, masks.column):
        return masks
    return boxes if has_boxes(source, boxes.column) else None
