"""A log of JSON lines that can be taken back to where it was.

A checkpoint records how long the log was; a resumed run cuts off what was written after it, and so ends with the log
of a run that was never interrupted, byte for byte.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from softless.errors import FileError
from softless.io import durable


class Journal:
    """Lines at the end of a file."""

    def __init__(self, path: Path, length: int = 0):
        """The file's first `length` bytes, and then what is added."""
        self.path = path
        with durable.written_or_explained(f"the log {path}"):
            self.file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            there = os.fstat(self.file).st_size
            if there < length:
                os.close(self.file)
                raise FileError(f"the log {path} has {there:,} bytes, and the checkpoint was saved after {length:,}")
            os.ftruncate(self.file, length)
            os.lseek(self.file, 0, os.SEEK_END)
        self.length = length

    def add(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        with durable.written_or_explained(f"the log {self.path}"):
            durable.write_all(self.file, line)
        self.length += len(line)

    def sync(self) -> int:
        """Everything added is on the disk; returns the length."""
        with durable.written_or_explained(f"the log {self.path}"):
            os.fsync(self.file)
        return self.length

    def close(self) -> None:
        with durable.written_or_explained(f"the log {self.path}"):
            os.close(self.file)
