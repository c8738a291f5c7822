"""Open images with masks, from parquet files or from folders.

    x-train.parquet              columns image and mask; x-val.parquet or x-test.parquet beside it, or a column split
    DATA/train/images/1.jpg      DATA/train/masks/1.png      and the same in val/, valid/, validation/ or test/
    DATA/images/train/1.jpg      DATA/masks/train/1.png      likewise
    DATA/images/1.jpg            DATA/masks/1.png            one part

An image and its mask have the same name without the suffix. `annotations` and `labels` are other names for `masks`, and
`training` for `train`, as ADE20K has them.
"""

from pathlib import Path

import numpy as np

from softless.data.folder import TESTS
from softless.data.images import MissingPartError, Split
from softless.data.masks import MaskedImages, MaskValues
from softless.data.parquet import (
    ParquetPictures,
    bytes_of,
    columns_of,
    find_file,
    names_of,
    read_names,
    read_pictures,
    rows_of,
)
from softless.errors import FileError
from softless.io.pictures import SUFFIXES, BadImage, read

IMAGES, MASKS = "images", ("masks", "annotations", "labels")
TRAINS = ("train", "training")
CLASSES = "classes.json"


class ParquetPairs(ParquetPictures):
    """The rows of a parquet file."""

    def __init__(self, path: Path, column: str) -> None:
        super().__init__(path)
        self.masks = read_pictures(path, self.file, column)
        self.sizes = np.stack([self.sizes, bytes_of(self.masks)], 1)

    def mask(self, row: int) -> bytes:
        return self.masks[int(row)].as_py() or b""


class FolderPairs:
    """The files of a folder of images, and those of the same names in a folder of masks; some masks may be missing."""

    def __init__(self, images: Path, masks: Path) -> None:
        self.images, mask_files = _pictures(images), _pictures(masks)
        known = {path.relative_to(masks).with_suffix(""): path for path in mask_files}
        names = [path.relative_to(images).with_suffix("") for path in self.images]
        self.folder, self.names = masks, names
        self.masks = [known.get(name) for name in names]
        both = zip(self.images, self.masks, strict=True)
        self.sizes = np.array([[_size(image), _size(mask)] for image, mask in both], np.int64).reshape(-1, 2)

    def name(self, row: int) -> str:
        return str(self.images[row])

    def image(self, row: int) -> bytes:
        return read(self.images[row], self.name(row))

    def mask(self, row: int) -> bytes:
        if (path := self.masks[row]) is None:
            raise BadImage(self.name(row), f"there is no picture {str(self.names[row])!r} in {self.folder}")
        return read(path, str(path))


def open_masked(source: str | Path, split: Split, values: MaskValues) -> MaskedImages:
    """Open the training images or the test images of a set, with their masks.

    source   str or path: a parquet file or a folder
    split    "train" or "test"; a source that has only one part is that part for both
    values   MaskValues: what the numbers in the masks mean
    """
    path = Path(source)
    if path.is_dir():
        images, masks, own = _folders(path, split)
        pairs: ParquetPairs | FolderPairs = FolderPairs(images, masks)
        rows, beside = np.arange(len(pairs.sizes)), path / CLASSES
        known, where = (read_names(beside) if beside.is_file() else ()), str(own)
    elif path.is_file():
        file = find_file(path, split)
        if file is None:
            raise MissingPartError(f"{path}: there is no -val.parquet or -test.parquet beside it to {split} on")
        pairs = ParquetPairs(file, values.column)
        rows = rows_of(file, pairs.file, split, len(pairs.sizes))
        known, where = names_of(file, pairs.file), str(file)
        beside = path.with_name("NAME-classes.json")
    else:
        raise FileError(f"{path}: there is no such parquet file or folder of images and masks")
    classes = values.classes or known
    if not classes:
        raise FileError(f"{path}: its classes have no names: list them in {beside}, or in the recipe as masks.classes")
    if len(rows) == 0:
        raise FileError(f"{where}: it holds no images")
    return MaskedImages(pairs, rows, values, classes)


def has_masks(source: str | Path | None, column: str) -> bool:
    """Return whether a source looks like images with masks: a column of this name and no label, or their folders."""
    if source is None or not Path(source).exists():
        return False
    path = Path(source)
    if path.is_dir():
        return any(_folder_pair(path, part) for part in ("", *TRAINS, *TESTS))
    columns = columns_of(path)
    return column in columns and "label" not in columns


def _folders(folder: Path, split: Split) -> tuple[Path, Path, Path]:
    """Return the folders of images and of masks of one part, and the folder to name in errors."""
    words = TRAINS if split == "train" else TESTS
    for word in words:
        if pair := _folder_pair(folder, word):
            return *pair, pair[0]
    others = TESTS if split == "train" else TRAINS
    if any(_folder_pair(folder, word) for word in others):
        raise MissingPartError(f"{folder}: it has no {words[0]}/ with {IMAGES}/ and {MASKS[0]}/ to {split} on")
    if pair := _folder_pair(folder, ""):
        return *pair, pair[0]
    raise FileError(f"{folder}: it has no folders {IMAGES}/ and {MASKS[0]}/, at the top or in {TRAINS[0]}/")


def _folder_pair(folder: Path, part: str) -> tuple[Path, Path] | None:
    for masks in MASKS:
        for pair in ((folder / part / IMAGES, folder / part / masks), (folder / IMAGES / part, folder / masks / part)):
            if all(place.is_dir() for place in pair):
                return pair
    return None


def _pictures(folder: Path) -> list[Path]:
    """List the pictures of a folder and the folders below it, sorted by name."""
    paths = (path for path in folder.rglob("*") if not path.name.startswith("."))
    return sorted(path for path in paths if path.suffix.lower() in SUFFIXES and not path.is_dir())


def _size(path: Path | None) -> int:
    try:
        return -1 if path is None else path.stat().st_size
    except OSError:
        return -1
