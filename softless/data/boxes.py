"""Images with boxes: a picture, and for each object in it a rectangle and a class.

A box is (left, top, right, bottom) in pixels of its image, from the outer edge of the first pixel to that of the last.
An object may have a mask too (`object_masks`), which is read if it is needed.
`BoxValues` says which class a number stands for. `BoxedImages` are read from parquet files and COCO's JSON by
`boxed_sources`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from softless.data.annotated import SLACK, AnnotatedImages, Pictures
from softless.errors import ArgumentError, FileError
from softless.io.pictures import BadImage, decode

if TYPE_CHECKING:
    from PIL.Image import Image

    from softless.data.object_masks import ObjectMasks

MOST_CLASSES = 10_000
SMALL, LARGE = 32**2, 96**2  # square pixels: objects below and above are small and large, as COCO has it

Form = Literal["xyxy", "xywh"]
Empty = Literal["refuse", "drop"]


@dataclass(frozen=True, kw_only=True)
class BoxValues:
    """The meaning of boxes.

    column    str, default "boxes": the column of a parquet file that has the boxes of each image
    labels    str, default "labels": the column that has their classes, as numbers
    form      "xyxy" (default): left, top, right, bottom; or "xywh": left, top, width, height. COCO's JSON has xywh
    classes   names of the classes; () takes them from COCO's JSON, or from NAME-classes.json beside a parquet file
    values    the number of each class; () is 0, 1, 2, ..., or what COCO's JSON says
    empty     "refuse" (default) or "drop": what to do about a box without width or height
    """

    column: str = "boxes"
    labels: str = "labels"
    form: Form = "xyxy"
    classes: tuple[str, ...] = ()
    values: tuple[int, ...] = ()
    empty: Empty = "refuse"

    masked: ClassVar[bool] = False  # whether every object needs a mask

    def __post_init__(self) -> None:
        for name in ("column", "labels"):
            if not isinstance(getattr(self, name), str):
                raise ArgumentError(f"boxes.{name} is {getattr(self, name)!r} and must be the name of a column")
        for name, kind in (("form", Form), ("empty", Empty)):
            if getattr(self, name) not in get_args(kind):
                raise ArgumentError(
                    f"boxes.{name} is {getattr(self, name)!r} and must be one of {', '.join(get_args(kind))}"
                )
        if not isinstance(self.classes, tuple) or not all(isinstance(name, str) for name in self.classes):
            raise ArgumentError(f"boxes.classes is {self.classes!r} and must be a list of names")
        values = self.values
        if not isinstance(values, tuple) or not all(type(x) is int for x in values) or len({*values}) < len(values):
            raise ArgumentError(f"boxes.values is {values!r} and must be different whole numbers")
        if self.classes:
            self.numbers(self.classes)

    def numbers(self, classes: tuple[str, ...]) -> tuple[int, ...]:
        """Return the number of each class."""
        if not 1 <= len(classes) <= MOST_CLASSES or len({*classes}) < len(classes):
            raise ArgumentError(f"boxes.classes has {len(classes)} names, and 1 to {MOST_CLASSES} different are needed")
        if self.values and len(self.values) != len(classes):
            raise ArgumentError(
                f"boxes.values has {len(self.values)} numbers, and there are {len(classes)} classes: "
                f"{', '.join(classes)}"
            )
        return self.values or tuple(range(len(classes)))


@dataclass(frozen=True, kw_only=True)
class MaskedBoxValues(BoxValues):
    """The meaning of boxes of objects that have masks: in the column `masks`, or as `segmentation` in COCO's JSON."""

    masked: ClassVar[bool] = True


class Boxes(NamedTuple):
    """Some boxes.

    corners   float32 [N, 4]: left, top, right, bottom
    labels    int64 [N]
    crowd     bool [N]: whether a box surrounds many objects; such boxes are not learned, and what is found in them is
              no mistake
    areas     float32 [N]: square pixels of each object
    masks     object [N]: the `object_masks.Code` of each object; None if masks are not needed
    """

    corners: np.ndarray
    labels: np.ndarray
    crowd: np.ndarray
    areas: np.ndarray
    masks: np.ndarray | None = None

    def at(self, places: Any) -> "Boxes":
        corners, labels, crowd, areas = (part[places] for part in self[:4])
        return Boxes(corners, labels, crowd, areas, None if self.masks is None else self.masks[places])


class BoxedSample(NamedTuple):
    """One picture in RGB, its boxes, and where it lies."""

    image: "Image"
    boxes: Boxes
    name: str


class BoxTable(NamedTuple):
    """The boxes of many images, as they were read. Those of row i lie from ends[i] to ends[i + 1].

    ends    int64 [rows + 1]
    boxes   Boxes: with the numbers of the classes as labels, and without masks
    masks   ObjectMasks; None if they are not needed
    """

    ends: np.ndarray
    boxes: Boxes
    masks: "ObjectMasks | None" = None

    def row(self, row: int) -> Boxes:
        return self.boxes.at(slice(self.ends[row], self.ends[row + 1]))


class BoxedImages(AnnotatedImages):
    """Images with boxes.

    table    BoxTable: the boxes of each row
    values   BoxValues
    """

    noun = "images with boxes"

    def __init__(
        self, pictures: Pictures, table: BoxTable, rows: np.ndarray, values: BoxValues, classes: tuple[str, ...]
    ) -> None:
        counts = np.diff(table.ends)[rows]
        mine = np.concatenate([np.arange(*table.ends[row : row + 2]) for row in rows] or [rows])
        own = table.boxes.at(mine)
        super().__init__(
            pictures, rows, classes, counts, own.corners.astype("<f4").tobytes(), own.labels, own.crowd.astype(int)
        )
        self.table, self.values = table, values
        self.label_of = {number: label for label, number in enumerate(values.numbers(classes))}

    def part(self, places: np.ndarray) -> "BoxedImages":
        return BoxedImages(self.pictures, self.table, self.rows[places], self.values, self.classes)

    def __getitem__(self, index: int) -> BoxedSample:
        name = self.names(index)
        image = decode(self.pictures.image(self.rows[index]), name)
        return BoxedSample(image, self.boxes(index, image.size), name)

    def boxes(self, index: int, size: tuple[int, int]) -> Boxes:
        """Return the boxes of an image of this width and height; raise `BadImage` if one or its mask is bad."""
        name, raw = self.names(index), self.table.row(self.rows[index])
        for place, (corners, label) in enumerate(zip(raw.corners, raw.labels.tolist(), strict=True)):
            if why := self._flaw(corners, label, size):
                shown = ", ".join(f"{side:g}" for side in corners.tolist())
                raise BadImage(name, f"its box {place} ({shown}) {why}")
        corners = raw.corners.clip(0, np.array([*size, *size], np.float32))
        labels = np.array([self.label_of[label] for label in raw.labels.tolist()], np.int64)
        kept = np.all(corners[:, 2:] > corners[:, :2], axis=1)
        boxes = Boxes(corners, labels, raw.crowd, raw.areas).at(kept)
        if self.table.masks is None:
            return boxes
        masks, areas = self.table.masks.of_row(self.rows[index], size, name, kept)
        return boxes._replace(masks=masks, areas=boxes.areas if areas is None else areas)

    def _flaw(self, corners: np.ndarray, label: int, size: tuple[int, int]) -> str | None:
        """Return what is wrong with a box."""
        if not np.isfinite(corners).all():
            return "has a side that is no number"
        if label not in self.label_of:
            return f"has class {label}, and the classes are {_listed([*self.label_of])}"
        beyond = np.maximum(-corners, corners - [*size, *size]).max()
        if beyond > SLACK:
            return f"reaches {beyond:g} pixels beyond the image, which has {size[0]} x {size[1]}"
        inside = corners.clip(0, [*size, *size])
        if self.values.empty == "refuse" and (inside[2:] <= inside[:2]).any():
            return "is empty: it has no width or no height"
        return None

    def counts(self, index: int, *, whole: bool) -> tuple[tuple[int, int], list[int]]:
        """Return (height, width), and the boxes of each class, small, medium and large ones, crowds and dropped."""
        if whole:
            image, boxes, _ = self[index]
            width, height = image.size
        else:
            width, height = self.size(index)
            boxes = self.boxes(index, (width, height))
        small, large = (boxes.areas < SMALL).sum(), (boxes.areas > LARGE).sum()
        dropped = np.diff(self.table.ends)[self.rows[index]] - len(boxes.labels)
        sizes = [small, len(boxes.labels) - small - large, large, boxes.crowd.sum(), dropped]
        by_class = np.bincount(boxes.labels, minlength=len(self.classes))
        return (height, width), [*map(int, by_class), *map(int, sizes)]

    def tally(self, counts: Tensor) -> dict[str, Any]:
        by_class, rest = counts.reshape(len(counts), len(self.classes) + 5).tensor_split([len(self.classes)], 1)
        classes = [
            {"name": label, "images": int((column > 0).sum()), "boxes": int(column.sum())}
            for label, column in zip(self.classes, by_class.T, strict=True)
        ]
        names = ("small", "medium", "large", "crowds", "dropped")
        without = int((by_class.sum(1) == 0).sum())
        return {"classes": classes, "without": without, **dict(zip(names, rest.sum(0).tolist(), strict=True))}

    def must_teach(self, counts: Tensor) -> None:
        by_class, crowds = counts[:, : len(self.classes)], counts[:, -2:-1]
        if by_class.sum() <= crowds.sum():
            raise FileError(f"{self.names(0)}: none of the {len(self)} images has a box")


def _listed(numbers: list[int]) -> str:
    """Write numbers, a run of them by its ends: 0 to 10."""
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))


def stacked(corners: np.ndarray, labels: np.ndarray, crowd: np.ndarray, areas: np.ndarray | None, form: str) -> Boxes:
    """Return boxes given as "xyxy" or "xywh"; without areas, those of the rectangles."""
    corners = corners.astype(np.float64).reshape(-1, 4)
    if form == "xywh":
        corners = np.concatenate([corners[:, :2], corners[:, :2] + corners[:, 2:]], 1)
    if areas is None:
        areas = (corners[:, 2:] - corners[:, :2]).prod(1)
    return Boxes(corners.astype(np.float32), labels.astype(np.int64), crowd.astype(bool), areas.astype(np.float32))


def to_learn(boxes: Boxes) -> tuple[Tensor, Tensor, list[Any]]:
    """Return the corners, labels and masks of boxes that surround no crowd; no masks if they are not needed."""
    alone = boxes.at(~boxes.crowd)
    masks = [] if alone.masks is None else [*alone.masks]
    return torch.from_numpy(alone.corners), torch.from_numpy(alone.labels), masks
