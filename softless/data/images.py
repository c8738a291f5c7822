"""A set of labeled images, whatever it lies in (`sources`), and what must be true of one before it is trained on.

A set is a Python sequence of `Sample`, decoded when it is asked for. It holds arrays, not objects, so that processes
forked from this one share it.
"""

import hashlib
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np

from softless.errors import FileError

if TYPE_CHECKING:
    from PIL.Image import Image

Split = Literal["train", "test"]


class MissingPartError(FileError):
    """The set is there, and one of its two parts is not."""


class Sample(NamedTuple):
    """One picture in RGB, its class, and where it lies."""

    image: "Image"
    label: int
    name: str  # the file, or "digits.parquet[row 17]"


class Images(Protocol):
    """classes      their names, in the order of the labels
    labels       int64 [N]
    fingerprint  sha256 over names, sizes and labels: the same set has the same one
    """

    classes: tuple[str, ...]
    labels: np.ndarray
    fingerprint: str

    def names(self, index: int) -> str:
        """Where an image lies."""

    def size(self, index: int) -> tuple[int, int]:
        """Width and height an image came in, without decoding it; raises `BadImage` where it has none."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample:
        """Raises `BadImage` for one that cannot be decoded."""


def check_labels(where: str, labels: np.ndarray, classes: tuple[str, ...], *, empty: list[str]) -> None:
    """Refuse what cannot be trained or tested on: no image, one class, a label without class, a class without image."""
    if len(labels) == 0:
        raise FileError(f"{where}: it holds no images")
    if labels.min() < 0 or labels.max() >= len(classes):
        place = int(np.flatnonzero((labels < 0) | (labels >= len(classes)))[0])
        raise FileError(
            f"{where}: image {place} has label {labels[place]}, and the labels of {len(classes)} classes run from 0 to "
            f"{len(classes) - 1}"
        )
    if len(classes) < 2:
        raise FileError(f"{where}: it has one class, {classes[0]!r}, and at least two are needed")
    if empty:
        shown = ", ".join(map(repr, empty[:5])) + (", ..." if len(empty) > 5 else "")
        raise FileError(f"{where}: {len(empty)} of its {len(classes)} classes without images: {shown}")


def fingerprint(*parts: bytes | np.ndarray) -> str:
    """sha256 over names and whole numbers."""
    flat = (part if isinstance(part, bytes) else part.astype("<i8").tobytes() for part in parts)
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in flat)).hexdigest()
