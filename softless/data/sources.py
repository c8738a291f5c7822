"""Open a set of labeled images.

None, "digits"    the embedded set: scikit-learn's 1,797 handwritten digits
a folder          train/CLASS/*.jpg and val/ or test/ likewise, or CLASS/*.jpg
a parquet file    columns image (encoded bytes) and label (0, 1, ...)
"""

from pathlib import Path

import numpy as np

from softless.data.images import Images, Sample, Split, counted_classes, fingerprint
from softless.errors import ArgumentError, FileError, needs_extra

DIGITS = "digits"
TEST_DIGITS = 360


def open_images(source: str | Path | None, split: Split) -> Images:
    """Open the training images or the test images of a set, and check their names and labels.

    >>> from softless.data import open_images
    >>> digits = open_images("digits", "test")
    >>> len(digits), digits.classes[:3], digits[0].image.size
    (360, ('0', '1', '2'), (8, 8))

    source   str or path: a folder, a parquet file, or "digits"; None is "digits" too
    split    "train" or "test"; a source that has only one part is that part for both
    """
    if split not in ("train", "test"):
        raise ArgumentError(f"split is {split!r} and must be 'train' or 'test'")
    if source == DIGITS and Path(source).exists():
        raise FileError(f"{DIGITS!r} is the embedded set, and a file here has that name: say ./{DIGITS} for the file")
    if source is None or source == DIGITS:
        return DigitImages(split)
    path = Path(source)
    if files := parquet_files(source):
        raise FileError(
            f"{path}: it holds parquet files and no folders of images: give one of the files, such as {files[0]}"
        )
    if path.is_dir():
        from softless.data.folder import open_folder

        return open_folder(path, split)
    if path.is_file():
        from softless.data.parquet import open_parquet

        return open_parquet(path, split)
    raise FileError(f"{path}: there is no such file or folder")


def parquet_files(source: str | Path | None) -> list[Path]:
    """List the parquet files of a folder without class folders; any other source has none."""
    if source is None or source == DIGITS or not Path(source).is_dir():
        return []
    inside = sorted(path for path in Path(source).iterdir() if not path.name.startswith("."))
    return [] if any(path.is_dir() for path in inside) else [path for path in inside if path.suffix == ".parquet"]


def the_same(train: Images, test: Images) -> bool:
    """Return whether two parts are the same images; equal fingerprints are not enough, if two folders look alike."""
    return train.fingerprint == test.fingerprint and train.names(0) == test.names(0)


def open_splits(source: str | Path | None, hold_out: float = 0.0) -> tuple[Images, Images]:
    """Open the training images and the test images of a set; they must differ, and have the same classes.

    With `hold_out`, this share of the training images of each class takes the place of the test images, which are not
    opened. Options of a model are chosen on these, so that the test images can judge the choice.

    >>> from softless.data import open_splits
    >>> [len(part) for part in open_splits("digits", hold_out=0.1)]
    [1295, 142]
    """
    return splits_of(source, open_images(source, "train"), hold_out)


def splits_of(source: str | Path | None, train: Images, hold_out: float) -> tuple[Images, Images]:
    """Return what `open_splits` does, from training images that are open."""
    if hold_out:
        return held_out(source, train, hold_out)
    test = open_images(source, "test")
    if the_same(train, test):
        raise FileError(
            f"{source}: it has one part, and images to test on are needed besides those to train on: "
            "train/ and val/ in a folder, NAME-train.parquet and NAME-val.parquet, or a column 'split'; "
            "a recipe with hold_out = 0.1 takes a tenth of those to train on"
        )
    if train.classes != test.classes:
        here, there = (counted_classes(part.classes) for part in (train, test))
        raise FileError(f"{source}: the images to train on have {here}, and those to test on have {there}")
    return train, test


def held_out(source: str | Path | None, images: Images, share: float) -> tuple["PartOfImages", "PartOfImages"]:
    """Split images in two, always alike: all but a share of each class, and that share, rounded."""
    if not 0 < share < 1:
        raise ArgumentError(f"hold_out is {share} and must be at least 0 and below 1")
    order = np.random.default_rng(0).permutation(len(images))
    held = np.zeros(len(images), bool)
    for label in range(len(images.classes)):
        rows = order[images.labels[order] == label]
        held[rows[: round(share * len(rows))]] = True
    if not held.any() or held.all():
        raise FileError(f"{source or DIGITS}: hold_out {share} of {len(images)} images leaves one of two parts empty")
    return PartOfImages(images, np.flatnonzero(~held)), PartOfImages(images, np.flatnonzero(held))


class PartOfImages:
    """Some rows of a set of images."""

    def __init__(self, whole: Images, rows: np.ndarray) -> None:
        self.whole, self.rows, self.classes = whole, rows, whole.classes
        self.labels, self.sizes = whole.labels[rows], whole.sizes[rows]
        self.fingerprint = fingerprint(whole.fingerprint.encode(), rows)

    def names(self, index: int) -> str:
        return self.whole.names(self.rows[index])

    def size(self, index: int) -> tuple[int, int]:
        return self.whole.size(self.rows[index])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        return self.whole[self.rows[index]]


class DigitImages:
    """The embedded digits: 8 x 8 pixels in 17 grays, as RGB from 0 to 255.

    1,437 are to train on and 360 to test on. The split never changes, and both parts have equal shares of each digit.
    """

    classes = tuple("0123456789")

    def __init__(self, split: Split) -> None:
        with needs_extra("the embedded digits come with scikit-learn", "train"):
            from sklearn.datasets import load_digits
            from sklearn.model_selection import train_test_split
        grays, labels = load_digits(return_X_y=True)
        parts = train_test_split(np.arange(len(labels)), test_size=TEST_DIGITS, random_state=0, stratify=labels)
        self.rows = np.sort(parts[split == "test"])
        self.pixels = (grays[self.rows] * (255 / 16)).round().astype(np.uint8).reshape(-1, 8, 8)
        self.labels = labels[self.rows].astype(np.int64)
        self.sizes = np.full(len(self.rows), self.pixels[0].size, np.int64)
        self.fingerprint = fingerprint(b"digits", self.rows, self.labels)

    def names(self, index: int) -> str:
        return f"digits[{self.rows[index]}]"

    def size(self, index: int) -> tuple[int, int]:
        return 8, 8

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        from PIL import Image

        image = Image.fromarray(self.pixels[index]).convert("RGB")
        return Sample(image, int(self.labels[index]), self.names(index))
