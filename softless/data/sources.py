"""Where labeled images come from.

None, "digits"    the embedded set: scikit-learn's 1,797 handwritten digits
a folder          train/CLASS/*.jpg and val/ or test/ likewise, or CLASS/*.jpg
a parquet file    columns image (encoded bytes) and label (0, 1, ...)
"""

from pathlib import Path

from softless.data.images import Images, Split
from softless.errors import ArgumentError, FileError

DIGITS = "digits"


def open_images(source: str | Path | None, split: Split) -> Images:
    """The images to train on, or those to test on; what is wrong with their names and labels is said here.

    >>> from softless.data import open_images
    >>> digits = open_images("digits", "test")
    >>> len(digits), digits.classes[:3], digits[0].image.size
    (360, ('0', '1', '2'), (8, 8))

    A source of one part, class folders alone or a parquet file that is not half of a pair, is that part for both words.
    """
    if split not in ("train", "test"):
        raise ArgumentError(f"split is {split!r} and must be 'train' or 'test'")
    if source == DIGITS and Path(source).exists():
        raise FileError(f"{DIGITS!r} is the embedded set, and there is one of that name here: say ./{DIGITS} for it")
    if source is None or source == DIGITS:
        from softless.data.digits import DigitImages

        return DigitImages(split)
    path = Path(source)
    if files := parquet_files(source):
        raise FileError(
            f"{path}: it holds parquet files and no folders of images: give one of them, such as {files[0]}"
        )
    if path.is_dir():
        from softless.data.folder import open_folder

        return open_folder(path, split)
    if path.is_file():
        from softless.data.parquet import open_parquet

        return open_parquet(path, split)
    raise FileError(f"{path}: there is no such folder of images or parquet file")


def parquet_files(source: str | Path | None) -> list[Path]:
    """Those of a folder that holds nothing else to read images from; none for any other source."""
    if source is None or source == DIGITS or not Path(source).is_dir():
        return []
    inside = sorted(path for path in Path(source).iterdir() if not path.name.startswith("."))
    return [] if any(path.is_dir() for path in inside) else [path for path in inside if path.suffix == ".parquet"]


def the_same(train: Images, test: Images) -> bool:
    """Whether a source has one part: equal names, sizes and labels may also be those of two folders."""
    return train.fingerprint == test.fingerprint and train.names(0) == test.names(0)


def open_splits(source: str | Path | None) -> tuple[Images, Images]:
    """(train, test), if they are not the same images, and of the same classes."""
    train, test = open_images(source, "train"), open_images(source, "test")
    if the_same(train, test):
        raise FileError(
            f"{source}: it has one part, and images to test on are needed beside those to train on: "
            "train/ and val/ in a folder, NAME-train.parquet and NAME-val.parquet, or a column 'split'"
        )
    if train.classes != test.classes:
        here, there = (f"{len(part.classes)} ({', '.join(part.classes[:3])}, ...)" for part in (train, test))
        raise FileError(f"{source}: the images to train on have classes {here}, and those to test on {there}")
    return train, test
