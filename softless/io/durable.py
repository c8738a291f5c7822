"""Bytes that are on the disk when the call returns."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from softless.errors import FileError


def write(path: Path, data: bytes | memoryview) -> None:
    """A new file with these bytes, synced; its name lasts once its folder is synced too."""
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
        write_all(file, data)
        os.fsync(file)


def write_all(file: int, data: bytes | memoryview) -> None:
    """All of the bytes: the system may take fewer at a time."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def sync_folder(folder: Path) -> None:
    """Names that were made, renamed or removed in it last."""
    with _opened(folder, os.O_RDONLY | os.O_DIRECTORY) as file:
        os.fsync(file)


@contextmanager
def written_or_explained(what: str) -> Iterator[None]:
    """What the system refuses (a full disk, a failing or read-only one) becomes one sentence."""
    try:
        yield
    except OSError as error:
        where = error.filename or ""
        raise FileError(f"{what} cannot be written: {error.strerror or error}{where and f' ({where})'}") from error


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags, 0o644)
    try:
        yield file
    finally:
        os.close(file)
