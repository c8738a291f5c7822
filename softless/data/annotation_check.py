"""Decode every mask, or read all boxes, of a set once: before a training, or with its images, for `data check`."""

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from softless.data.annotated import AnnotatedImages
from softless.data.check import FEW
from softless.data.reading import Bad, Damage, Draw, SafeReader, read_all
from softless.errors import FileError
from softless.io.pictures import BadImage

AT_ONCE = 16  # images that a worker checks before it answers
SHOWN = 5  # bad ones that an error names


class Counter(SafeReader):
    """A dataset of height, width, and the counts of annotations. Of images, only headers are read unless `whole`."""

    def __init__(self, images: AnnotatedImages, *, whole: bool) -> None:
        super().__init__(images)
        self.images, self.whole = images, whole

    def read(self, draw: Draw) -> tuple[Tensor]:
        size, counts = self.images.counts(draw.image, whole=self.whole)
        return (torch.cat([torch.tensor(size), torch.as_tensor(counts)]),)

    def stacked(self, sound: Sequence[tuple[Tensor]]) -> Tensor:
        return torch.stack([row for (row,) in sound]) if sound else torch.zeros(0, 2, dtype=torch.int64)


def count_annotations(
    images: AnnotatedImages, *, whole: bool, workers: int | None, tick: Callable[[int], None]
) -> tuple[Tensor, Tensor, list[Bad]]:
    """Return height and width, int64 [N, 2], and the counts, int64 [N, ...], of sound images; and the bad ones."""
    if workers is None:
        workers = 0 if len(images) < FEW else min(os.cpu_count() or 1, 8)
    every, rows, damaged = range(len(images)), list[Tensor](), list[Bad]()
    draws = ([Draw(index) for index in every[start : start + AT_ONCE]] for start in every[::AT_ONCE])
    for counted, bad in read_all(Counter(images, whole=whole), draws, workers):
        rows += counted
        damaged += bad
        tick(len(counted) + len(bad))
    table = torch.stack(rows) if rows else torch.zeros(0, 2, dtype=torch.int64)
    return table[:, :2], table[:, 2:], damaged


def check_annotations(
    images: AnnotatedImages, damage: Damage, *, workers: int = 0, tick: Callable[[int], None] = lambda _images: None
) -> None:
    """Decode every mask of a set, or read all of its boxes, before a training.

    Bad ones raise one error that names them, or are skipped as `damage` says. A set with nothing to learn raises an
    error.
    """
    _, counts, bad_ones = count_annotations(images, whole=False, workers=workers, tick=tick)
    if damage.on_bad_image == "fail" and len(bad_ones) > 1:
        first = "; ".join(f"{bad.name}: {bad.why}" for bad in bad_ones[:SHOWN])
        more = f"; and {len(bad_ones) - SHOWN} more" if len(bad_ones) > SHOWN else ""
        raise FileError(f"{len(bad_ones)} of {len(images)} {images.noun} are bad: {first}{more}")
    for bad in bad_ones:
        damage.met(*bad)
    images.must_teach(counts)


def check_annotated_part(
    name: str, part: AnnotatedImages | BadImage, *, workers: int | None, tick: Callable[[int], None]
) -> dict[str, Any]:
    """Decode every image and its annotations, and call `tick` with how many more are done.

    Returns JSON: the name of the part, images, fingerprint, smallest and largest ([height, width] of the images with
    the fewest and the most pixels), what the annotations count, and damaged (name and why, of each image that is bad or
    has bad annotations, or of a damaged parquet file). A number is None if there is none.
    """
    if isinstance(part, BadImage):
        bad_file = {"name": part.name, "why": part.why}
        nothing: dict[str, Any] = {"images": 0, "fingerprint": None, "smallest": None, "largest": None, "classes": []}
        return {"part": name, **nothing, "damaged": [bad_file]}
    shapes, counts, damaged = count_annotations(part, whole=True, workers=workers, tick=tick)
    sizes = shapes.tolist()
    return {
        "part": name,
        "images": len(part),
        "fingerprint": part.fingerprint,
        "smallest": min(sizes, key=math.prod, default=None),
        "largest": max(sizes, key=math.prod, default=None),
        **part.tally(counts),
        "damaged": [bad._asdict() for bad in damaged],
    }
