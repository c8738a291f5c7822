"""Images in a parquet file: column `image` holds encoded pictures, and column `label` whole numbers from 0.

    flowers-train.parquet    flowers-val.parquet       two parts; -val is preferred to -test
    flowers.parquet                                    one part, or two if a column `split` says train, val or test
    flowers-classes.json                               the names of the classes: a list, or a dictionary

Names that Hugging Face's datasets wrote into the file are read too, and so are its {bytes, path} pairs. Without names,
classes are called by their numbers. The encoded images stay in memory, which forked worker processes share.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from softless.data.images import MissingPartError, Sample, Split, check_labels, fingerprint
from softless.errors import FileError, needs_extra
from softless.io.pictures import BadImage, decode, picture_size

with needs_extra("parquet files are read by pyarrow", "train"):
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

WORDS: dict[Split, tuple[str, ...]] = {"train": ("train", "trainval"), "test": ("val", "valid", "validation", "test")}
MOST_CLASSES = 1_000_000  # a higher label is damage, not a class

_HALF = re.compile(rf"(?P<set>.+)-(?P<word>{'|'.join((*WORDS['train'], *WORDS['test']))})")
_DAMAGE = (OSError, ValueError, LookupError, TypeError, NotImplementedError, MemoryError, pa.ArrowException)


class ParquetImages:
    """The rows of one part of a file."""

    def __init__(self, path: Path, images: pa.ChunkedArray, labels: np.ndarray, rows: np.ndarray) -> None:
        self.path, self.images, self.rows, self.labels = path, images, rows, labels[rows]
        self.classes: tuple[str, ...] = ()
        self.sizes = bytes_of(images)[rows]
        self.fingerprint = fingerprint(path.name.encode(), self.sizes, rows, self.labels)

    def names(self, index: int) -> str:
        return f"{self.path}[row {self.rows[index]}]"

    def size(self, index: int) -> tuple[int, int]:
        return picture_size(self._data(index), self.names(index))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        name = self.names(index)
        return Sample(decode(self._data(index), name), int(self.labels[index]), name)

    def _data(self, index: int) -> bytes:
        return self.images[int(self.rows[index])].as_py() or b""


def open_parquet(path: Path, split: Split) -> ParquetImages:
    """Open one part of a file or of a pair of files."""
    part = find_file(path, split)
    if part is None:
        words = " or ".join(f"-{word}.parquet" for word in WORDS[split] if word != "trainval")
        raise MissingPartError(f"{path}: there is no {words} beside it to {split} on")
    file = open_table(part)
    images, labels = read_pictures(part, file), _labels(part, read_column(part, file, "label"))
    opened = ParquetImages(part, images, labels, rows_of(part, file, split, len(labels)))
    opened.classes = names_of(part, file) or tuple(map(str, range(_count(part, labels))))
    check_labels(str(part), opened.labels, opened.classes, needed=opened.classes if split == "train" else ())
    return opened


def find_file(path: Path, split: Split) -> Path | None:
    """Return the file that holds this part: `path`, or the other half of the pair."""
    half = _HALF.fullmatch(path.stem)
    if half is None or half["word"] in WORDS[split]:
        return path
    others = (path.with_name(f"{half['set']}-{word}{path.suffix}") for word in WORDS[split])
    return next((other for other in others if other.is_file()), None)


def open_table(path: Path) -> pq.ParquetFile:
    """Open a parquet file of images or texts."""
    try:
        with path.open("rb") as file:
            begins = file.read(4)
        if begins == b"PAR1":
            return pq.ParquetFile(path)
    except _DAMAGE as error:
        raise BadImage(str(path), f"it is no intact parquet file ({_reason(error)})") from error
    if path.suffix == ".parquet":
        raise BadImage(str(path), f"it is no intact parquet file (it begins with {begins!r})")
    raise FileError(f"{path}: it is neither a folder of images nor a parquet file")


def read_column(path: Path, file: pq.ParquetFile, name: str) -> pa.ChunkedArray:
    """Read one column."""
    if name not in file.schema_arrow.names:
        raise FileError(f"{path}: it has columns {', '.join(file.schema_arrow.names)}, and {name} is needed")
    try:
        return file.read(columns=[name])[name]
    except _DAMAGE as error:
        raise BadImage(str(path), f"its column {name} is damaged ({_reason(error)})") from error


def read_pictures(path: Path, file: pq.ParquetFile, name: str = "image") -> pa.ChunkedArray:
    """Read a column of encoded pictures."""
    column = read_column(path, file, name)
    if pa.types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0:
        column = pc.struct_field(column, "bytes")
    if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        raise FileError(f"{path}: its column {name} is {column.type}, and the bytes of pictures are needed")
    return column


def read_picture_lists(path: Path, file: pq.ParquetFile, name: str) -> pa.ChunkedArray:
    """Read a column that has a list of encoded pictures in each row."""
    column = read_column(path, file, name)
    kind = getattr(column.type, "value_type", column.type)
    if kind == column.type or not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        raise FileError(f"{path}: its column {name} is {column.type}, and lists of the bytes of pictures are needed")
    return column


class ParquetPictures:
    """The encoded images of a file, by row.

    sizes   int64 [rows]: bytes of each image
    """

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, open_table(path)
        self.images = read_pictures(path, self.file)
        self.sizes = bytes_of(self.images)

    def name(self, row: int) -> str:
        return f"{self.path}[row {row}]"

    def image(self, row: int) -> bytes:
        return self.images[int(row)].as_py() or b""


def columns_of(path: Path) -> list[str]:
    """Return the names of a parquet file's columns; any other or damaged file has none."""
    try:
        return open_table(path).schema_arrow.names if path.suffix == ".parquet" else []
    except FileError:  # whatever opens the file next says what is wrong with it
        return []


def bytes_of(pictures: pa.ChunkedArray) -> np.ndarray:
    """Return the size of each encoded picture in bytes, 0 for a missing one."""
    return pc.binary_length(pictures).fill_null(0).to_numpy()


def as_lists(rows: list[list[bytes | None]]) -> pa.Array:
    """Return lists of bytes in the memory that forked worker processes share."""
    return pa.array(rows, pa.list_(pa.large_binary()))


def bytes_of_lists(lists: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Return the sizes in bytes of what each list holds, added up."""
    rows, sizes = pc.list_parent_indices(lists).to_numpy(), bytes_of(pc.list_flatten(lists))
    return np.bincount(rows, sizes, minlength=len(lists)).astype(np.int64)


def _labels(path: Path, column: pa.ChunkedArray) -> np.ndarray:
    if not pa.types.is_integer(column.type):
        raise FileError(f"{path}: its column label is {column.type}, and whole numbers from 0 are needed")
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy())[0])
        raise FileError(f"{path}: row {row} has no label")
    return column.to_numpy().astype(np.int64)


def rows_of(path: Path, file: pq.ParquetFile, split: Split, count: int) -> np.ndarray:
    """Return the rows of a part: all rows, or the rows whose column `split` has the first word in use for the part."""
    if "split" not in file.schema_arrow.names:
        return np.arange(count)
    splits = np.array(read_column(path, file, "split").to_pylist(), dtype=object)
    for word in WORDS[split]:
        if (splits == word).any():
            return np.flatnonzero(splits == word)
    raise MissingPartError(f"{path}: its column split has none of {', '.join(WORDS[split])} in any row")


def _count(part: Path, labels: np.ndarray) -> int:
    """Return how many classes there are if nothing names them: the highest label to train on, plus 1."""
    learned = find_file(part, "train")
    if learned is not None and learned != part:
        labels = _labels(learned, read_column(learned, open_table(learned), "label"))
    return min(int(labels.max(initial=0)) + 1, MOST_CLASSES)


def names_of(path: Path, file: pq.ParquetFile) -> tuple[str, ...]:
    """Read the names from NAME-classes.json, for the longest NAME that begins the file's name, or from the file."""
    beside = [
        other
        for other in path.parent.glob("*-classes.json")
        if re.match(re.escape(other.name.removesuffix("-classes.json")) + r"(?![a-zA-Z])", path.name)
    ]
    if not beside:
        return _embedded_names(file)
    source = max(beside, key=lambda other: len(other.name))
    return read_names(source)


def read_names(source: Path) -> tuple[str, ...]:
    """Read the names of classes from a JSON file: a list, or a dictionary."""
    try:
        content = json.loads(source.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"{source}: the names of the classes cannot be read ({_reason(error)})") from error
    names = _by_label(content, source) if isinstance(content, dict) else content
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise FileError(f"{source}: a list of the classes' names is needed, or a dictionary that has them as values")
    return _distinct(names)


def _by_label(content: dict[str, Any], source: Path) -> list[Any]:
    """Return the values in the order of the keys if the keys are labels, and otherwise in the order of the file."""
    if not all(key.isdecimal() for key in content):
        return list(content.values())
    numbers = {int(key): name for key, name in content.items()}
    if sorted(numbers) != list(range(len(content))):
        raise FileError(f"{source}: its {len(content)} keys are labels, and they are not 0 to {len(content) - 1}")
    return [numbers[label] for label in range(len(content))]


def _distinct(names: list[str]) -> tuple[str, ...]:
    """Add the label to a name that several classes have: two classes of ImageNet are called crane."""
    often = Counter(names)
    return tuple(f"{name} ({label})" if often[name] > 1 else name for label, name in enumerate(names))


def _embedded_names(file: pq.ParquetFile) -> tuple[str, ...]:
    try:
        metadata = json.loads((file.schema_arrow.metadata or {}).get(b"huggingface", b"null"))
        return _distinct([str(name) for name in metadata["info"]["features"]["label"]["names"]])
    except (ValueError, LookupError, TypeError, RecursionError):
        return ()


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
