"""A set of labeled images, whatever it lies in, and what must be true of one before it is trained on.

    None, "digits"    the embedded set: scikit-learn's 1,797 handwritten digits
    a folder          train/CLASS/*.jpg and val/ or test/ likewise, or CLASS/*.jpg
    a parquet file    columns image (encoded bytes) and label (0, 1, ...)

A set is a Python sequence of `Sample`, decoded when it is asked for. It holds arrays, not objects, so that processes
forked from this one share it.
"""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np

from softless.errors import ArgumentError, FileError

if TYPE_CHECKING:
    from PIL.Image import Image

Split = Literal["train", "test"]

DIGITS = "digits"


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

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample:
        """Raises `BadImage` for one that cannot be decoded."""


def open_images(source: str | Path | None, split: Split) -> Images:
    """The images to train on, or those to test on; what is wrong with their names and labels is said here.

    >>> from softless.data import open_images
    >>> digits = open_images("digits", "test")
    >>> len(digits), digits.classes[:3], digits[0].image.size
    (360, ('0', '1', '2'), (8, 8))

    A source of one part, class folders alone or a parquet file that is not half of a pair, is that part for both words.
    """
    if split not in ("train", "test"):
        raise ArgumentError(f"split is {split!r} and must be 'train' or 'test'")
    if source is None or source == DIGITS:
        from softless.data.digits import DigitImages

        return DigitImages(split)
    path = Path(source)
    if path.is_dir():
        from softless.data.folder import open_folder

        return open_folder(path, split)
    if path.is_file():
        from softless.data.parquet import open_parquet

        return open_parquet(path, split)
    raise FileError(f"{path}: there is no such folder of images or parquet file")


def open_splits(source: str | Path | None) -> tuple[Images, Images]:
    """(train, test), if they are not the same images."""
    train, test = open_images(source, "train"), open_images(source, "test")
    if train.fingerprint == test.fingerprint:
        raise FileError(
            f"{source}: it has one part, and images to test on are needed beside those to train on: "
            "train/ and val/ in a folder, NAME-train.parquet and NAME-val.parquet, or a column 'split'"
        )
    return train, test


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
