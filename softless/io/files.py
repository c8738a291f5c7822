"""Files that survive a crash: written completely or not at all, and on the disk when the call returns.

`write_text` and `write_json` replace a file in one step. `Journal` is a log of JSON lines that can be cut back: a
checkpoint records how long the log was, and a resumed run cuts off the later lines. So the log of a resumed run has the
same bytes as the log of a run that was never interrupted.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from softless.errors import FileError


def write(path: Path, data: bytes | memoryview) -> None:
    """Write and sync a new file. Call `sync_folder` afterwards, so that its name is on the disk too."""
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
        write_all(file, data)
        os.fsync(file)


def write_text(path: Path, text: str) -> None:
    """Replace `path` by a file with this text in one step; its folder is created if it is missing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.unlink(missing_ok=True)
        try:
            write(partial, text.encode())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise FileError(f"cannot write {str(path)!r}: {error.strerror or error}") from error


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Replace `path` by this document in one step."""
    write_text(path, to_json(document) + "\n")


def to_json(document: Mapping[str, Any]) -> str:
    """Return indented JSON. NaN and infinity raise, because JSON does not have them."""
    return json.dumps(document, indent=2, allow_nan=False)


def write_all(file: int, data: bytes | memoryview) -> None:
    """Write all bytes, although the system may take fewer at a time."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that new, renamed and removed names in it are on the disk."""
    with _opened(folder, os.O_RDONLY | os.O_DIRECTORY) as file:
        os.fsync(file)


@contextmanager
def written_or_explained(what: str) -> Iterator[None]:
    """Turn an OSError (a full, failing or read-only disk) into a FileError of one sentence."""
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


class Journal:
    """A log of JSON lines that can be cut back to an earlier length."""

    def __init__(self, path: Path, length: int = 0):
        """Open the log and keep its first `length` bytes."""
        self.path = path
        with written_or_explained(f"the log {path}"):
            self.file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            size = os.fstat(self.file).st_size
            if size < length:
                os.close(self.file)
                raise FileError(f"the log {path} has {size:,} bytes, and the checkpoint was saved after {length:,}")
            os.ftruncate(self.file, length)
            os.lseek(self.file, 0, os.SEEK_END)

    def add(self, record: Mapping[str, Any]) -> None:
        with written_or_explained(f"the log {self.path}"):
            write_all(self.file, json.dumps(record, allow_nan=False).encode() + b"\n")

    def sync(self) -> int:
        """Put all lines on the disk, and return the length of the log in bytes."""
        with written_or_explained(f"the log {self.path}"):
            os.fsync(self.file)
            return os.fstat(self.file).st_size

    def close(self) -> None:
        with written_or_explained(f"the log {self.path}"):
            os.close(self.file)
