"""Read a text to train on and a text to test on.

    book.txt                          one part
    book-train.txt   book-valid.txt   two parts, named as parquet files are: -val, -valid, -validation, -test
    DATA/*.txt                        one part: the files in the order of their names, a line end between two of them
    DATA/train/*.txt   DATA/val/*.txt                  two parts, as of images
    x.parquet, x-train.parquet   x-test.parquet        a column `text`, and perhaps `split`; a line end between two rows

Where there is one part, its end is the text to test on. A text must be UTF-8, and its bytes stay as they are.
"""

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from softless.data.folder import find_part
from softless.data.images import MissingPartError, Split
from softless.errors import ArgumentError, FileError
from softless.io.pictures import SUFFIXES as PICTURES

SUFFIX = ".txt"
OF_IMAGES = (*PICTURES, ".parquet")  # a file that ends so in a folder tells that the folder holds images
HELD_OUT = 0.1  # share of a text of one part that is to test on
MOST_TEXT = 8 * 10**9  # bytes: a text stays in memory


@dataclass(frozen=True)
class Text:
    """A text, and where it lies."""

    name: str
    data: bytes

    @cached_property
    def fingerprint(self) -> str:
        """Return the sha256 of the bytes."""
        return hashlib.sha256(self.data).hexdigest()


def open_texts(source: str | Path, hold_out: float = 0.0) -> tuple[Text, Text]:
    """Read the text to train on and the text to test on.

    source     str or path: a text file, a folder of text files, or a parquet file with a column `text`
    hold_out   float, default 0: the share of the training text, at its end, to test on instead of the test text; 0
               takes the test text, or the last tenth where there is none
    """
    if not 0 <= hold_out < 1:
        raise ArgumentError(f"hold_out is {hold_out} and must be at least 0 and below 1")
    train = open_text(source, "train")
    test = None if hold_out else _test_part(source)
    return (train, test) if test is not None else _cut(train, hold_out or HELD_OUT)


def open_test_text(source: str | Path, hold_out: float = 0.0) -> Text:
    """Read the text to test on: the second part, or the end of the only one that `hold_out` says."""
    test = _test_part(source)
    return _cut(open_text(source, "train"), hold_out or HELD_OUT)[1] if test is None else test


def open_text(source: str | Path, split: Split) -> Text:
    """Read one part of a text; a text of one part is that part for both."""
    path = Path(source)
    if path.is_dir():
        part = find_part(path, split)
        return _joined(str(part), [_read(file) for file in _files(part)])
    if not path.is_file():
        raise FileError(f"{path}: there is no such text file, folder of text files or parquet file")
    file = _half(path, split)
    return _read_parquet(file, split) if file.suffix == ".parquet" else Text(str(file), _read(file))


def is_text(source: str | Path | None) -> bool:
    """Return whether a source is text: files that end in .txt, or a parquet file with a column `text` and no images.

    A folder with images, folders or parquet files in it holds images, and its .txt files are about them.
    """
    if source is None:
        return False
    path = Path(source)
    with suppress(FileError):  # whoever opens a damaged source says so
        if path.is_dir():
            part = find_part(path, "train")
            others = any(inner.is_dir() or inner.name.lower().endswith(OF_IMAGES) for inner in part.iterdir())
            return bool(_listed(part)) and not others
        if path.suffix == ".parquet" and path.is_file():
            from softless.data.parquet import open_table

            names = open_table(path).schema_arrow.names
            return "text" in names and "image" not in names
    return path.suffix == SUFFIX


def _test_part(source: str | Path) -> Text | None:
    """Read the text to test on; None where there is none besides the text to train on."""
    path = Path(source)
    try:
        if path.is_dir():
            return None if find_part(path, "test") == find_part(path, "train") else open_text(source, "test")
        if _half(path, "test") != _half(path, "train") or _has_splits(_half(path, "test")):
            return open_text(source, "test")
    except MissingPartError:
        pass
    return None


def _cut(text: Text, share: float) -> tuple[Text, Text]:
    """Cut a text in two, between two characters."""
    data, place = text.data, round(len(text.data) * (1 - share))
    if not data:
        raise FileError(f"{text.name}: it is empty")
    while place < len(data) and data[place] & 0xC0 == 0x80:  # the inside of a character
        place += 1
    if not 0 < place < len(data):
        raise FileError(f"{text.name}: hold_out {share} of {len(data):,} bytes leaves one of two parts empty")
    return Text(text.name, data[:place]), Text(text.name, data[place:])


def _half(path: Path, split: Split) -> Path:
    from softless.data.parquet import WORDS, find_file

    file = find_file(path, split)
    if file is None:
        words = " or ".join(f"-{word}{path.suffix}" for word in WORDS[split])
        raise MissingPartError(f"{path}: there is no {words} beside it to {split} on")
    return file


def _files(folder: Path) -> list[Path]:
    """List the text files of a part; halves of sets do not belong together."""
    from softless.data.parquet import find_file

    files = _listed(folder)
    if not files:
        raise FileError(f"{folder}: it holds no file that ends in {SUFFIX}")
    for file in files:
        if any(find_file(file, split) != file for split in ("train", "test")):
            raise FileError(
                f"{folder}: {file.name} is one part of a set: give that file, or folders {folder / 'train'} and "
                f"{folder / 'val'}"
            )
    return files


def _listed(folder: Path) -> list[Path]:
    try:
        inside = sorted(folder.iterdir())
    except OSError as error:
        raise FileError(f"{folder}: the folder cannot be read ({error.strerror})") from error
    return [path for path in inside if path.suffix == SUFFIX and not path.name.startswith(".") and path.is_file()]


def _read(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > MOST_TEXT:
            raise FileError(f"{path}: it has {size:,} bytes, and a text may have at most {MOST_TEXT:,}")
        data = path.read_bytes()
        data.decode()
    except OSError as error:
        raise FileError(f"{path}: it cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise FileError(
            f"{path}: it is not UTF-8 text: its byte {error.start:,} is 0x{data[error.start]:02x} ({error.reason})"
        ) from None
    return data


def _has_splits(path: Path) -> bool:
    from softless.data.parquet import open_table

    return path.suffix == ".parquet" and "split" in open_table(path).schema_arrow.names


def _read_parquet(path: Path, split: Split) -> Text:
    import pyarrow as pa

    from softless.data.parquet import open_table, read_column, rows_of

    file = open_table(path)
    column = read_column(path, file, "text")
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        raise FileError(f"{path}: its column text is {column.type}, and strings are needed")
    rows = np.sort(rows_of(path, file, split, len(column)))
    return _joined(str(path), [(column[int(row)].as_py() or "").encode() for row in rows])


def _joined(name: str, parts: list[bytes]) -> Text:
    data = b"\n".join(parts)
    if len(data) > MOST_TEXT:
        raise FileError(f"{name}: it has {len(data):,} bytes, and a text may have at most {MOST_TEXT:,}")
    return Text(name, data)
