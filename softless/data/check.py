"""Decode every image of a set once, and report the ones that are damaged."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, get_args

import numpy as np

from softless.data.images import Images, MissingPartError, Split
from softless.data.reading import Bad, Draw, Reader, read_all
from softless.data.sources import open_images, parquet_files, the_same
from softless.errors import FileError
from softless.io.pictures import BadImage

if TYPE_CHECKING:
    from PIL.Image import Image

AT_ONCE = 32  # images a worker decodes before it answers
FEW = 500  # below this number of images, starting workers takes longer than decoding


class ClassCount(TypedDict):
    """A class, and how many images it has, damaged ones included."""

    name: str
    images: int


class CheckedPart(TypedDict):
    """One part of a set, after every image was decoded. A size is None if no image could be decoded."""

    part: str  # train, test, or whole for a set of one part
    images: int
    fingerprint: str | None
    smallest: list[int] | None  # [height, width] of the image with the fewest pixels
    largest: list[int] | None
    classes: list[ClassCount]
    damaged: list[dict[str, str]]  # name and why, of each damaged image or of a damaged parquet file


def open_parts(source: str | Path | None) -> dict[str, Images | BadImage]:
    """Open the parts of a set, by name. A part whose file is damaged is a `BadImage` error instead of images.

    A folder of parquet files gives every set in it: "flowers train", "flowers test", "trees whole".
    """
    files = parquet_files(source)
    if not files:
        return _open_set(source)
    from softless.data.parquet import find_file

    parts: dict[str, Images | BadImage] = {}
    for file in files:
        if find_file(file, "train") not in (None, file):
            continue  # this file is the test half of a pair, which opens with the training half
        name = file.stem.removesuffix("-train").removesuffix("-trainval")
        try:
            parts |= {f"{name} {part}": images for part, images in _open_set(file).items()}
        except FileError as error:
            parts[file.name] = BadImage(str(file), str(error).removeprefix(f"{file}: "))
    return parts


def _open_set(source: str | Path | None) -> dict[str, Images | BadImage]:
    parts: dict[str, Images | BadImage] = {}
    missing = []
    for split in get_args(Split):
        try:
            parts[split] = open_images(source, split)
        except BadImage as error:
            parts[split] = error
        except MissingPartError as error:
            missing.append(error)
    if not parts:
        raise missing[0]
    if missing:
        return parts
    train, test = parts.values()
    if isinstance(train, BadImage) or isinstance(test, BadImage):
        return {"whole": train} if str(train) == str(test) else parts
    return {"whole": train} if the_same(train, test) else parts


def check_part(name: str, part: Images | BadImage, *, workers: int | None, tick: Callable[[int], None]) -> CheckedPart:
    """Decode every image and call `tick` with how many more are done; `workers=None` uses up to eight cores."""
    if isinstance(part, BadImage):
        bad_file = {"name": part.name, "why": part.why}
        return CheckedPart(
            part=name, images=0, fingerprint=None, smallest=None, largest=None, classes=[], damaged=[bad_file]
        )
    if workers is None:
        workers = 0 if len(part) < FEW else min(os.cpu_count() or 1, 8)
    every = range(len(part))
    draws = ([Draw(image) for image in every[start : start + AT_ONCE]] for start in every[::AT_ONCE])
    sizes: list[list[int]] = []
    damaged: list[Bad] = []
    for sound, bad in read_all(Reader(part, _size), draws, workers):
        damaged += bad
        sizes += sound.pixels.tolist() if len(sound.ids) else []
        tick(len(sound.ids) + len(bad))
    counts = np.bincount(part.labels, minlength=len(part.classes)).tolist()
    return {
        "part": name,
        "images": len(part),
        "fingerprint": part.fingerprint,
        "smallest": min(sizes, key=math.prod, default=None),
        "largest": max(sizes, key=math.prod, default=None),
        "classes": [{"name": label, "images": images} for label, images in zip(part.classes, counts, strict=True)],
        "damaged": [bad._asdict() for bad in damaged],
    }


def _size(image: "Image") -> np.ndarray:
    return np.array([image.height, image.width])
