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
from softless.data.parquet import bytes_of, find_file, names_of, open_table, read_names, read_pictures, rows_of
from softless.errors import FileError
from softless.io.pictures import SUFFIXES, read

IMAGES, MASKS = "images", ("masks", "annotations", "labels")
TRAINS = ("train", "training")
CLASSES = "classes.json"


class ParquetPairs:
    """The rows of a parquet file."""

    def __init__(self, path: Path, column: str) -> None:
        self.path, file = path, open_table(path)
        self.images, self.masks = (read_pictures(path, file, name) for name in ("image", column))
        self.sizes = np.stack([bytes_of(self.images), bytes_of(self.masks)], 1)

    def name(self, row: int) -> str:
        return f"{self.path}[row {row}]"

    def image(self, row: int) -> bytes:
        return self.images[int(row)].as_py() or b""

    def mask(self, row: int) -> bytes:
        return self.masks[int(row)].as_py() or b""


class FolderPairs:
    """The files of a folder of images, and those of the same names in a folder of masks."""

    def __init__(self, images: Path, masks: Path) -> None:
        self.images, found = _pictures(images), _pictures(masks)
        known = {path.relative_to(masks).with_suffix(""): path for path in found}
        names = [path.relative_to(images).with_suffix("") for path in self.images]
        if without := [path for path, name in zip(self.images, names, strict=True) if name not in known]:
            raise FileError(f"{without[0]}: it has no mask in {masks}; {len(without)} of {len(names)} images have none")
        self.masks = [known[name] for name in names]
        both = zip(self.images, self.masks, strict=True)
        self.sizes = np.array([[_size(image), _size(mask)] for image, mask in both], np.int64).reshape(-1, 2)

    def name(self, row: int) -> str:
        return str(self.images[row])

    def image(self, row: int) -> bytes:
        return read(self.images[row], self.name(row))

    def mask(self, row: int) -> bytes:
        return read(self.masks[row], str(self.masks[row]))


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
        pairs, table = ParquetPairs(file, values.column), open_table(file)
        rows, known, where = rows_of(file, table, split, len(pairs.sizes)), names_of(file, table), str(file)
        beside = path.with_name("NAME-classes.json")
    else:
        raise FileError(f"{path}: there is no such parquet file or folder of images and masks")
    classes = values.classes or known
    if not classes:
        raise FileError(f"{path}: its classes have no names: list them in {beside}, or in the recipe as masks.classes")
    if len(rows) == 0:
        raise FileError(f"{where}: it holds no images")
    return MaskedImages(pairs, rows, values, classes)


def open_masked_splits(
    source: str | Path, values: MaskValues, hold_out: float = 0.0
) -> tuple[MaskedImages, MaskedImages]:
    """Open the training images and the test images of a set, which must differ.

    With `hold_out`, this share of the training images takes the place of the test images, always the same ones.
    """
    train = open_masked(source, "train", values)
    if hold_out:
        order = np.random.default_rng(0).permutation(len(train))
        count = round(hold_out * len(train))
        if not 0 < count < len(train):
            raise FileError(f"{source}: hold_out {hold_out} of {len(train)} images leaves one of two parts empty")
        return train.part(np.sort(order[count:])), train.part(np.sort(order[:count]))
    test = open_masked(source, "test", values)
    if the_same_masked(train, test):
        raise FileError(
            f"{source}: it has one part, and images to test on are needed besides those to train on; a recipe with "
            "hold_out = 0.1 takes a tenth of those to train on"
        )
    return train, test


def open_masked_test(source: str | Path, values: MaskValues, hold_out: float) -> MaskedImages:
    """Open the test images of a set; of a set with one part, those that `hold_out` kept from training."""
    test = open_masked(source, "test", values)
    if hold_out and the_same_masked(open_masked(source, "train", values), test):
        return open_masked_splits(source, values, hold_out)[1]
    return test


def the_same_masked(train: MaskedImages, test: MaskedImages) -> bool:
    """Return whether two parts are the same images."""
    return train.fingerprint == test.fingerprint and train.names(0) == test.names(0)


def has_masks(source: str | Path | None, column: str) -> bool:
    """Return whether a source looks like images with masks: a column of this name and no label, or their folders."""
    if source is None or not Path(source).exists():
        return False
    path = Path(source)
    if path.is_dir():
        return any(_folder_pair(path, part) for part in ("", *TRAINS, *TESTS))
    if path.suffix != ".parquet":
        return False
    try:
        columns = open_table(path).schema_arrow.names
    except FileError:  # whatever opens the file next says what is wrong with it
        return False
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
    found = (path for path in folder.rglob("*") if not path.name.startswith("."))
    return sorted(path for path in found if path.suffix.lower() in SUFFIXES and not path.is_dir())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
