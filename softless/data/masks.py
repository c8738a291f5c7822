"""Images with masks: a picture, and for each of its pixels a class, or `VOID` where there is none to learn.

A mask is a picture of numbers. `MaskValues` says which class a number stands for; a number that stands for nothing is
an error that names the image. `MaskedImages` are read from parquet files and folders by `masked_sources`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from softless.data.annotated import AnnotatedImages, Pictures
from softless.errors import ArgumentError, FileError
from softless.io.pictures import BadImage, decode, decode_mask

if TYPE_CHECKING:
    from PIL.Image import Image

VOID = 255  # the class of a pixel that is neither learned nor tested
UNKNOWN = 254
MOST_CLASSES = UNKNOWN


@dataclass(frozen=True, kw_only=True)
class MaskValues:
    """The meaning of the numbers in masks.

    column    str, default "mask": the column of a parquet file that has the masks
    classes   names of the classes; () takes them from NAME-classes.json beside a parquet file, or from classes.json
              in a folder
    values    the number of each class in the masks; () is 0, 1, 2, ...
    void      numbers of pixels that are neither learned nor tested
    """

    column: str = "mask"
    classes: tuple[str, ...] = ()
    values: tuple[int, ...] = ()
    void: tuple[int, ...] = (VOID,)

    def __post_init__(self) -> None:
        for name in ("values", "void"):
            numbers = getattr(self, name)
            if not _are_numbers(numbers) or len({*numbers}) < len(numbers):
                raise ArgumentError(f"masks.{name} is {numbers!r} and must be different whole numbers from 0 to 255")
        if not isinstance(self.classes, tuple) or not all(isinstance(name, str) for name in self.classes):
            raise ArgumentError(f"masks.classes is {self.classes!r} and must be a list of names")
        if not isinstance(self.column, str):
            raise ArgumentError(f"masks.column is {self.column!r} and must be the name of a column")
        if self.classes:
            self.meaning(self.classes)

    def numbers(self, classes: tuple[str, ...]) -> tuple[int, ...]:
        """Return the number of each class in the masks."""
        return self.values or tuple(range(len(classes)))

    def meaning(self, classes: tuple[str, ...]) -> np.ndarray:
        """Return the class of each number, uint8 [256]: `VOID` for void, `UNKNOWN` for a number without a meaning."""
        numbers = self.numbers(classes)
        if not 2 <= len(classes) <= MOST_CLASSES or len({*classes}) < len(classes):
            raise ArgumentError(f"masks.classes has {len(classes)} names, and 2 to {MOST_CLASSES} different are needed")
        if len(numbers) != len(classes):
            raise ArgumentError(
                f"masks.values has {len(numbers)} numbers, and there are {len(classes)} classes: {', '.join(classes)}"
            )
        if both := {*numbers} & {*self.void}:
            raise ArgumentError(
                f"masks.void has {min(both)}, which is the number of class {_named(both, self, classes)!r}"
            )
        table = np.full(256, UNKNOWN, np.uint8)
        table[list(self.void)] = VOID
        table[list(numbers)] = np.arange(len(classes))
        return table


def _are_numbers(values: object) -> bool:
    return isinstance(values, tuple) and all(type(value) is int and 0 <= value <= 255 for value in values)


def _named(numbers: Iterable[int], values: MaskValues, classes: tuple[str, ...]) -> str:
    return classes[values.numbers(classes).index(min(numbers))]


class MaskedSample(NamedTuple):
    """One picture in RGB, the class of each of its pixels (uint8 [height, width]), and where it lies."""

    image: "Image"
    mask: np.ndarray
    name: str


class Pairs(Pictures, Protocol):
    """Encoded images and masks, by row.

    sizes   int64 [rows, 2]: bytes of each image and of its mask
    """

    def mask(self, row: int) -> bytes: ...


class MaskedImages(AnnotatedImages):
    """Images with masks.

    pairs    Pairs: the encoded images and masks
    values   MaskValues
    """

    noun = "masks"

    def __init__(self, pairs: Pairs, rows: np.ndarray, values: MaskValues, classes: tuple[str, ...]) -> None:
        super().__init__(pairs, rows, classes)
        self.pairs, self.values = pairs, values
        self.table = values.meaning(classes)

    def part(self, places: np.ndarray) -> "MaskedImages":
        return MaskedImages(self.pairs, self.rows[places], self.values, self.classes)

    def __getitem__(self, index: int) -> MaskedSample:
        name = self.names(index)
        image = decode(self.pairs.image(self.rows[index]), name)
        return MaskedSample(image, self.mask(index, image.size), name)

    def counts(self, index: int, *, whole: bool) -> tuple[tuple[int, int], Tensor]:
        """Return (height, width) of an image, and the pixels of each class and of void, int64 [256]."""
        mask = self[index].mask if whole else self.mask(index, self.size(index))
        height, width = mask.shape
        return (height, width), torch.bincount(torch.from_numpy(mask).flatten(), minlength=VOID + 1)

    def tally(self, counts: Tensor) -> dict[str, Any]:
        counts = counts.reshape(len(counts), VOID + 1)
        classes = [
            {"name": label, "images": int((column > 0).sum()), "pixels": int(column.sum())}
            for label, column in zip(self.classes, counts.T, strict=False)
        ]
        return {"classes": classes, "void": int(counts[:, VOID].sum())}

    def must_teach(self, counts: Tensor) -> None:
        if not counts[:, : len(self.classes)].any():
            raise FileError(f"{self.names(0)}: the masks of all {len(self)} images have only void, and no class")

    def mask(self, index: int, size: tuple[int, int]) -> np.ndarray:
        """Return the class of each pixel, of an image of this width and height; raise `BadImage` for a bad mask."""
        name = self.names(index)
        try:
            numbers = decode_mask(self.pairs.mask(self.rows[index]), name)
        except BadImage as error:
            raise BadImage(name, f"its mask: {error.why}") from error
        if numbers.shape[::-1] != size:
            raise BadImage(
                name,
                f"its mask has {numbers.shape[1]} x {numbers.shape[0]} pixels, and the image {size[0]} x {size[1]}",
            )
        mask = self.table[numbers]
        if (mask == UNKNOWN).any():
            row, column = np.argwhere(mask == UNKNOWN)[0]
            raise BadImage(
                name,
                f"its mask has the number {numbers[row, column]} in row {row}, column {column}, and no class has it: "
                f"classes have {_listed(self.values.numbers(self.classes))}, and void has {_listed(self.values.void)}",
            )
        return mask


def _listed(numbers: tuple[int, ...]) -> str:
    """Write numbers, a run of them by its ends: 0 to 10."""
    if len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers)) or "no number"
