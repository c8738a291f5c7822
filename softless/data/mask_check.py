"""Decode every mask of a set once, before a training, or with its image, for `softless data check`."""

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypedDict, get_args

import torch
from torch import Tensor

from softless.data.check import FEW
from softless.data.images import MissingPartError, Split
from softless.data.masked_sources import open_masked, the_same_masked
from softless.data.masks import VOID, MaskedImages, MaskValues
from softless.data.reading import Bad, Damage, Draw, SafeReader, read_all
from softless.errors import FileError
from softless.io.pictures import BadImage

AT_ONCE = 16  # masks that a worker checks before it answers
SHOWN = 5  # bad masks that an error names


class ClassPixels(TypedDict):
    """A class, how many images have it, and how many of their pixels."""

    name: str
    images: int
    pixels: int


class CheckedMasks(TypedDict):
    """One part of a set, after every image and mask was decoded. A size is None if no image could be decoded."""

    part: str  # train, test, or whole for a set of one part
    images: int
    fingerprint: str | None
    smallest: list[int] | None  # [height, width] of the image with the fewest pixels
    largest: list[int] | None
    classes: list[ClassPixels]
    void: int  # pixels
    damaged: list[dict[str, str]]  # name and why, of each image or mask that is bad, or of a damaged parquet file


class MaskChecker(SafeReader):
    """A dataset of height, width, and the pixels of each class. Of images, only headers are read unless `whole`."""

    def __init__(self, images: MaskedImages, *, whole: bool) -> None:
        super().__init__(images)
        self.images, self.whole = images, whole

    def read(self, draw: Draw) -> tuple[Tensor]:
        index = draw.image
        mask = self.images[index].mask if self.whole else self.images.mask(index, self.images.size(index))
        counts = torch.bincount(torch.from_numpy(mask).flatten(), minlength=VOID + 1)
        return (torch.cat([torch.tensor(mask.shape), counts]),)

    def stacked(self, sound: Sequence[tuple[Tensor]]) -> Tensor:
        return torch.stack([row for (row,) in sound]) if sound else torch.zeros(0, 2 + VOID + 1, dtype=torch.int64)


def count_pixels(
    images: MaskedImages, *, whole: bool, workers: int | None, tick: Callable[[int], None]
) -> tuple[Tensor, list[Bad]]:
    """Return height, width and the pixels of each class, int64 [sound masks, 2 + 256], and the bad masks."""
    if workers is None:
        workers = 0 if len(images) < FEW else min(os.cpu_count() or 1, 8)
    every, rows, damaged = range(len(images)), [], list[Bad]()
    draws = ([Draw(index) for index in every[start : start + AT_ONCE]] for start in every[::AT_ONCE])
    for counted, bad in read_all(MaskChecker(images, whole=whole), draws, workers):
        rows.append(counted)
        damaged += bad
        tick(len(counted) + len(bad))
    return torch.cat(rows), damaged


def check_masks(
    images: MaskedImages, damage: Damage, *, workers: int = 0, tick: Callable[[int], None] = lambda _images: None
) -> None:
    """Decode every mask of a set, before a training.

    Bad masks raise one error that names them, or are skipped as `damage` says. A set without a class raises an error.
    """
    counted, bad_ones = count_pixels(images, whole=False, workers=workers, tick=tick)
    if damage.on_bad_image == "fail" and len(bad_ones) > 1:
        first = "; ".join(f"{bad.name}: {bad.why}" for bad in bad_ones[:SHOWN])
        more = f"; and {len(bad_ones) - SHOWN} more" if len(bad_ones) > SHOWN else ""
        raise FileError(f"{len(bad_ones)} of {len(images)} masks are bad: {first}{more}")
    for bad in bad_ones:
        damage.met(*bad)
    if not counted[:, 2 : 2 + len(images.classes)].any():
        raise FileError(f"{images.names(0)}: the masks of all {len(images)} images have only void, and no class")


def open_masked_parts(source: str | Path, values: MaskValues) -> dict[str, MaskedImages | BadImage]:
    """Open the parts of a set, by name. A part whose file is damaged is a `BadImage` error instead of images."""
    parts: dict[str, MaskedImages | BadImage] = {}
    missing = []
    for split in get_args(Split):
        try:
            parts[split] = open_masked(source, split, values)
        except BadImage as error:
            parts[split] = error
        except MissingPartError as error:
            missing.append(error)
    if not parts:
        raise missing[0]
    train, test = parts.get("train"), parts.get("test")
    if isinstance(train, MaskedImages) and isinstance(test, MaskedImages) and the_same_masked(train, test):
        return {"whole": train}
    return parts


def check_masked_part(
    name: str, part: MaskedImages | BadImage, *, workers: int | None, tick: Callable[[int], None]
) -> CheckedMasks:
    """Decode every image and its mask, and call `tick` with how many more are done."""
    if isinstance(part, BadImage):
        bad_file = {"name": part.name, "why": part.why}
        return CheckedMasks(
            part=name, images=0, fingerprint=None, smallest=None, largest=None, classes=[], void=0, damaged=[bad_file]
        )
    counted, damaged = count_pixels(part, whole=True, workers=workers, tick=tick)
    sizes, counts = counted[:, :2].tolist(), counted[:, 2:]
    classes: list[ClassPixels] = [
        {"name": label, "images": int((column > 0).sum()), "pixels": int(column.sum())}
        for label, column in zip(part.classes, counts.T, strict=False)
    ]
    return {
        "part": name,
        "images": len(part),
        "fingerprint": part.fingerprint,
        "smallest": min(sizes, key=math.prod, default=None),
        "largest": max(sizes, key=math.prod, default=None),
        "classes": classes,
        "void": int(counts[:, VOID].sum()),
        "damaged": [bad._asdict() for bad in damaged],
    }
