"""Images with annotations: a mask, or boxes. What both have in common.

A set is opened as one or two parts by `annotated_sources`, checked by `annotation_check`, and read by the loaders of
`joint`.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, Self

import numpy as np
from torch import Tensor

from softless.data.images import fingerprint
from softless.io.pictures import picture_size

SLACK = 1.0  # pixels by which an annotation may reach beyond its image, as rounding and counting from 1 do


class Pictures(Protocol):
    """Encoded images, by row.

    sizes   int64 [rows, ...]: bytes of each image, and of what else belongs to it
    """

    sizes: np.ndarray

    def name(self, row: int) -> str:
        """Return where an image lies."""

    def image(self, row: int) -> bytes: ...


class AnnotatedImages:
    """The base class of images with masks and of images with boxes, which are decoded as they are read.

    noun          the word for the annotations: "masks"
    pictures      Pictures: the encoded images
    rows          int64 [N]: the rows of this part
    classes       names of the classes
    fingerprint   sha256 over names, sizes, rows and annotations: equal for equal sets
    """

    noun: ClassVar[str]

    def __init__(
        self, pictures: Pictures, rows: np.ndarray, classes: tuple[str, ...], *annotations: bytes | np.ndarray
    ) -> None:
        self.pictures, self.rows, self.classes = pictures, rows, classes
        names = "\n".join(pictures.name(row).rpartition("/")[2] for row in rows).encode(errors="surrogateescape")
        self.fingerprint = fingerprint(names, rows, pictures.sizes[rows], *annotations)

    def part(self, places: np.ndarray) -> Self:
        """Return the images at these places of the set."""
        raise NotImplementedError

    def names(self, index: int) -> str:
        return self.pictures.name(self.rows[index])

    def size(self, index: int) -> tuple[int, int]:
        """Return the width and height of an image without decoding it."""
        return picture_size(self.pictures.image(self.rows[index]), self.names(index))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        """Decode an image and its annotations; raise `BadImage` if that fails."""
        raise NotImplementedError

    def counts(self, index: int, *, whole: bool) -> tuple[tuple[int, int], Sequence[int] | Tensor]:
        """Return (height, width) of an image, and the counts of its annotations; raise `BadImage` for bad ones.

        whole   bool: whether to decode the image too, instead of its header
        """
        raise NotImplementedError

    def tally(self, counts: Tensor) -> dict[str, Any]:
        """Return what the counts of the images, int64 [N, ...], mean, as JSON."""
        raise NotImplementedError

    def must_teach(self, counts: Tensor) -> None:
        """Raise an error if these counts of all images say that there is nothing to learn."""
        raise NotImplementedError
