"""The interface of a set of labeled images, the checks every set must pass, and a summary to compare two sets.

A set is a Python sequence of `Sample`, and each image is decoded when it is read. A set holds arrays instead of
objects, so that forked worker processes share its memory.

A training saves a `Summary` of its set. Two sets with equal fingerprints are the same set, wherever they lie. The rest
of a summary says how two sets differ.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypedDict, get_args

import numpy as np

from softless.errors import FileError

if TYPE_CHECKING:
    from PIL.Image import Image

DIGEST_LENGTH = 16  # hexadecimal digits of a class's sha256
NAMED = 3  # classes that a sentence names

Split = Literal["train", "test"]


class MissingPartError(FileError):
    """One of the two parts of a set is missing."""


class Sample(NamedTuple):
    """One picture in RGB, its class, and where it lies."""

    image: "Image"
    label: int
    name: str  # the file, or "digits.parquet[row 17]"


class Images(Protocol):
    """A set of labeled images.

    classes      names of the classes, in the order of the labels
    labels       int64 [N]
    sizes        int64 [N]: bytes of each encoded image
    fingerprint  sha256 over names, sizes and labels: equal for equal sets
    """

    classes: tuple[str, ...]
    labels: np.ndarray
    sizes: np.ndarray
    fingerprint: str

    def names(self, index: int) -> str:
        """Return where an image lies."""

    def size(self, index: int) -> tuple[int, int]:
        """Return the width and height of an image without decoding it; raise `BadImage` if it has none."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample:
        """Decode an image; raise `BadImage` if that fails."""


class PartSummary(TypedDict):
    """One part of a set."""

    images: int
    fingerprint: str
    classes: dict[str, list[int | str]]  # name -> [images, sha256 over their sizes in bytes]


class Summary(TypedDict):
    """A set of images, as run.json keeps it."""

    source: str
    train: PartSummary
    test: PartSummary


def check_labels(where: str, labels: np.ndarray, classes: tuple[str, ...], *, needed: Iterable[str]) -> None:
    """Raise an error for a set without images, with one class, a label without a class, or an empty `needed` class."""
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
    used = {classes[label] for label in np.unique(labels)}
    if empty := [name for name in needed if name not in used]:
        shown = ", ".join(map(repr, empty[:5])) + (", ..." if len(empty) > 5 else "")
        raise FileError(f"{where}: {len(empty)} of its {len(classes)} classes without images: {shown}")


def counted_classes(names: Sequence[str]) -> str:
    """Return how many classes there are, and the first of them: "2 classes (a, b)"."""
    shown = [*names[:NAMED], *["..."] * (len(names) > NAMED)]
    return f"{len(names):,} class{'es' if len(names) > 1 else ''} ({', '.join(shown)})"


def fingerprint(*parts: bytes | np.ndarray) -> str:
    """Return the sha256 over names and whole numbers."""
    flat = (part if isinstance(part, bytes) else part.astype("<i8").tobytes() for part in parts)
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in flat)).hexdigest()


def summary(source: str | None, train: Images, test: Images) -> Summary:
    """Summarize a set, to compare it with a later one."""
    return {"source": source or "digits", "train": _part(train), "test": _part(test)}


def what_changed(before: Summary, now: Summary) -> str | None:
    """Describe the first difference between two sets in half a sentence; return None if their images are the same."""
    splits: tuple[Split, ...] = get_args(Split)
    part = next((split for split in splits if before[split]["fingerprint"] != now[split]["fingerprint"]), None)
    if part is None:
        return None
    if before["source"] != now["source"]:
        return f"{_size(before)}, and {_size(now)}"
    old, new, source = before[part]["classes"], now[part]["classes"], now["source"]
    gone, added = ([name for name in one if name not in other] for one, other in ((old, new), (new, old)))
    if gone or added:
        news = [f"{_names(names)} {verb}" for names, verb in ((added, "new"), (gone, "gone")) if names]
        return f"{source} has other classes since: {' and '.join(news)}"
    counts = {name: (old[name][0], new[name][0]) for name in new if old[name][0] != new[name][0]}
    if counts:
        name, (then, today) = next(iter(counts.items()))
        rest = len(counts) - 1
        more = f", and {rest} more {'class has' if rest == 1 else 'classes have'} changed" if rest else ""
        return f"class {name!r} of {source} had {_images(int(then))} to {part} on, and has {today:,} now{more}"
    others = [name for name in new if old[name] != new[name]]
    where, what = (f"{_names(others)} of ", "sizes in bytes") if others else ("", "names or their order")
    return f"the images of {where}{source} to {part} on are as many as before, and their {what} differ"


def _part(images: Images) -> PartSummary:
    order = np.argsort(images.labels, kind="stable")
    counts = np.bincount(images.labels, minlength=len(images.classes))
    sizes = np.split(images.sizes[order].astype("<i8"), np.cumsum(counts)[:-1])
    by_class: dict[str, list[int | str]] = {
        name: [len(part), hashlib.sha256(part.tobytes()).hexdigest()[:DIGEST_LENGTH]]
        for name, part in zip(images.classes, sizes, strict=True)
    }
    return {"images": len(images), "fingerprint": images.fingerprint, "classes": by_class}


def _size(images: Summary) -> str:
    part = images["train"]
    return f"{images['source']} has {_images(part['images'])} in {len(part['classes'])} classes to train on"


def _images(count: int) -> str:
    return "1 image" if count == 1 else f"{count:,} images"


def _names(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:NAMED])) + (", ..." if len(names) > NAMED else "")
    return f"{'class' if len(names) == 1 else 'classes'} {shown}"
