"""The zip file that `torch.save` writes: one record for the pickle, one for the bytes of each storage.

    NAME/data.pkl       the structure: names, shapes, strides, and which storage holds what
    NAME/data/0, 1...   the numbers, as they lie in memory
    NAME/byteorder      little or big

torch compresses nothing, so a compressed record is refused, and with it every zip bomb; records that overlap are
refused by their sum. What is read is thus never larger than the file, and zip's checksums say whether it is intact.
"""

import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zipfile import ZIP_STORED, BadZipFile, ZipFile

from softless.errors import FileError

_DAMAGE = (BadZipFile, EOFError, OSError, ValueError, LookupError, ArithmeticError, RuntimeError, struct.error)


class Archive:
    """The records of a file of `size` bytes, each read when it is asked for."""

    def __init__(self, file: ZipFile, size: int) -> None:
        self.file = file
        self.records = {record.filename: record for record in file.infolist()}
        if len(self.records) < len(file.infolist()):
            raise FileError("two of its records have the same name")
        if sum(record.file_size for record in self.records.values()) > size:
            raise FileError("its records claim more bytes than the file has")
        folders = [name.removesuffix("data.pkl") for name in self.records if name.endswith("/data.pkl")]
        if len(folders) != 1:
            raise FileError("it is a zip file, but not one that torch.save wrote: it has no single data.pkl")
        self.folder = folders[0]
        order = (
            self.read("byteorder").decode(errors="replace") if self.folder + "byteorder" in self.records else "little"
        )
        if order != sys.byteorder:
            raise FileError(f"its numbers are in {order!a} byte order, and this machine's are in {sys.byteorder!a}")

    def read(self, name: str) -> bytearray:
        """A record's bytes, checked against its checksum."""
        record = self.records.get(self.folder + name)
        if record is None:
            raise FileError(f"its record {name!a} is missing")
        if record.compress_type != ZIP_STORED or record.compress_size != record.file_size:
            raise FileError(f"its record {name!a} is compressed, and torch compresses nothing")
        try:
            with self.file.open(record) as stream:
                return bytearray(stream.read())
        except _DAMAGE as error:
            raise FileError(f"its record {name!a} is damaged") from error


@contextmanager
def open_archive(path: Path) -> Iterator[Archive]:
    try:
        file = ZipFile(path)
    except _DAMAGE as error:
        raise FileError("it begins as a zip file and does not end as one: it is cut short or damaged") from error
    with file:
        yield Archive(file, path.stat().st_size)
