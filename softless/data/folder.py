"""Images in folders: each folder is a class and gives it its name, and classes are sorted by name.

    DATA/train/cat/1.jpg    DATA/val/cat/7.jpg        two parts; val/, valid/ or validation/ before test/
    DATA/cat/1.jpg                                    one part

Files are found by their suffix, at any depth below the class and through symbolic links. Names that begin with a dot
are ignored. Names are stored as bytes in one array, because a million Python strings would be copied into every worker,
page by page, as their reference counts change.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from softless.data.images import MissingPartError, Sample, Split, check_labels, fingerprint
from softless.errors import FileError
from softless.io.pictures import SUFFIXES, decode, picture_size, read

TRAIN, TESTS = "train", ("val", "valid", "validation", "test")


class FolderImages:
    """The image files below `folder`/CLASS, for each class."""

    def __init__(self, folder: Path, classes: tuple[str, ...]) -> None:
        self.folder, self.classes = folder, classes
        files = [
            (os.fsencode(path.relative_to(folder)), size, label)
            for label, name in enumerate(classes)
            for path, size in _images(folder / name)
        ]
        names, sizes, labels = zip(*files, strict=True) if files else ((), (), ())
        self.sizes, self.labels = np.array(sizes, np.int64), np.array(labels, np.int64)
        self._text, self._ends = b"".join(names), np.cumsum([len(name) for name in names], dtype=np.int64)
        self.fingerprint = fingerprint(self._text, self._ends, self.sizes, self.labels)

    def names(self, index: int) -> str:
        start = self._ends[index - 1] if index else 0
        return str(self.folder / os.fsdecode(self._text[start : self._ends[index]]))

    def size(self, index: int) -> tuple[int, int]:
        name = self.names(index)
        return picture_size(Path(name), name)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        name = self.names(index)
        return Sample(decode(read(name, name), name), int(self.labels[index]), name)


def open_folder(folder: Path, split: Split) -> FolderImages:
    """Open one part of a folder. The part to train on defines the classes; the part to test on may lack some."""
    learned, part = find_part(folder, "train"), find_part(folder, split)
    classes = _classes(learned)
    if unknown := [name for name in _classes(part) if name not in classes]:
        raise FileError(f"{part}: {unknown[0]!r} is not one of the {len(classes)} classes in {learned}")
    images = FolderImages(part, classes)
    if len(images) == 0 and (flat := sum(entry.name.lower().endswith(SUFFIXES) for entry in _entries(part))):
        count = f"{flat:,} image{'s' if flat > 1 else ''}"
        raise FileError(f"{part} holds {count}, but no folder per class: put them into {part / 'CLASS'}/")
    check_labels(str(part), images.labels, classes, needed=_classes(part))
    return images


def find_part(folder: Path, split: Split) -> Path:
    """Return the folder whose folders are the classes of this part."""
    inside = _classes(folder)
    tests = [name for name in TESTS if name in inside]
    if TRAIN not in inside or not (tests or len(inside) == 1):
        return folder
    if split == "train":
        return folder / TRAIN
    if not tests:
        raise MissingPartError(f"{folder}: it has {TRAIN}/ and no {TESTS[0]}/ or {TESTS[-1]}/ beside it")
    return folder / tests[0]


def _classes(folder: Path) -> tuple[str, ...]:
    return tuple(entry.name for entry in _entries(folder) if _is_folder(entry))


def _images(folder: Path, above: frozenset[tuple[int, int]] = frozenset()) -> Iterator[tuple[Path, int]]:
    """Yield (path, bytes) of the images at any depth; -1 bytes if a file cannot be read."""
    if not folder.is_dir():
        return
    status = folder.stat()
    here = (status.st_dev, status.st_ino)
    if here in above:
        raise FileError(f"{folder}: a symbolic link leads back to a folder above it")
    for entry in _entries(folder):
        if _is_folder(entry):
            yield from _images(folder / entry.name, above | {here})
        elif entry.name.lower().endswith(SUFFIXES):
            try:
                yield folder / entry.name, entry.stat().st_size
            except OSError:
                yield folder / entry.name, -1


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder or a link to one.

    A link that leads nowhere is a damaged image if it has the name of an image, and an error otherwise.
    """
    try:
        return stat.S_ISDIR(entry.stat().st_mode)
    except OSError as error:
        if entry.name.lower().endswith(SUFFIXES):
            return False
        raise FileError(f"{entry.path}: the link leads nowhere ({error.strerror})") from error


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """List a folder, sorted by name."""
    try:
        with os.scandir(folder) as entries:
            return sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
    except OSError as error:
        raise FileError(f"{folder}: the folder cannot be read ({error.strerror})") from error
