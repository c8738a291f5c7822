"""Open images with boxes, from parquet files or from COCO's JSON.

    x-train.parquet                            columns image, boxes and labels; x-val.parquet or x-test.parquet beside
                                               it, or a column split
    DATA/annotations/instances_train2017.json  images in DATA/train2017/; and the same with val or test
    DATA/train/_annotations.coco.json          images beside it; and the same in DATA/valid/ or DATA/test/
    DATA/train.json                            images in DATA/train/ or DATA/images/; and the same with val or test
    FILE.json                                  one part, with images in the places that the lines above say

An optional column `crowd` of a parquet file says which boxes surround many objects, as `iscrowd` does in COCO's JSON.
If masks are needed, the column `masks` has a picture for each box, and COCO's JSON a `segmentation`.
"""

import json
import re
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from softless.data.boxes import BoxedImages, BoxTable, BoxValues, stacked
from softless.data.images import MissingPartError, Split
from softless.data.object_masks import ObjectMasks, from_coco, from_picture
from softless.data.parquet import (
    ParquetPictures,
    as_lists,
    bytes_of_lists,
    columns_of,
    find_file,
    names_of,
    read_column,
    read_picture_lists,
    rows_of,
)
from softless.errors import FileError
from softless.io.pictures import read

IMAGES = "images"
CROWD, MASKS = "crowd", "masks"
PARTS: dict[Split, tuple[str, ...]] = {"train": ("train",), "test": ("val", "valid", "validation", "test")}


class ListedFiles:
    """Image files, some of which may be missing.

    sizes   int64 [rows]: bytes of each, -1 for a missing one
    """

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self.sizes = np.array([path.stat().st_size if path.is_file() else -1 for path in paths], np.int64)

    def name(self, row: int) -> str:
        return str(self.paths[row])

    def image(self, row: int) -> bytes:
        return read(self.paths[row], self.name(row))


def open_boxed(source: str | Path, split: Split, values: BoxValues) -> BoxedImages:
    """Open the training images or the test images of a set, with their boxes.

    source   str or path: a parquet file, a folder with the JSON of COCO, or such a JSON file
    split    "train" or "test"; a source that has only one part is that part for both
    values   BoxValues: what the boxes mean
    """
    path = Path(source)
    if path.is_dir() or path.suffix == ".json":
        return _open_coco(_part_of_folder(path, split) if path.is_dir() else path, values)
    if not path.is_file():
        raise FileError(f"{path}: there is no such parquet file, JSON file or folder of images and boxes")
    file = find_file(path, split)
    if file is None:
        raise MissingPartError(f"{path}: there is no -val.parquet or -test.parquet beside it to {split} on")
    pictures = ParquetPictures(file)
    classes = values.classes or names_of(file, pictures.file)
    if not classes:
        beside = path.with_name("NAME-classes.json")
        raise FileError(f"{path}: its classes have no names: list them in {beside}, or in the recipe as boxes.classes")
    rows = rows_of(file, pictures.file, split, len(pictures.sizes))
    if len(rows) == 0:
        raise FileError(f"{file}: it holds no images")
    table = _table_of(pictures, values)
    if values.masked:
        encoded = read_picture_lists(file, pictures.file, MASKS)
        table = table._replace(masks=ObjectMasks(encoded, from_picture, measures=True))
    return _boxed(pictures, table, rows, values, classes)


def has_boxes(source: str | Path | None, column: str) -> bool:
    """Return whether a source looks like images with boxes: a column of this name, or the JSON of COCO."""
    if source is None or not Path(source).exists():
        return False
    path = Path(source)
    if path.is_dir():
        return any(_files_of(path, split) for split in PARTS)
    return path.suffix == ".json" or column in columns_of(path)


def _table_of(pictures: ParquetPictures, values: BoxValues) -> BoxTable:
    """Read the boxes of a parquet file: for each image a list of lists of four numbers, and a list of labels."""
    path, file = pictures.path, pictures.file
    boxes, labels = (read_column(path, file, name).to_pylist() for name in (values.column, values.labels))
    crowds = read_column(path, file, CROWD).to_pylist() if CROWD in file.schema_arrow.names else [None] * len(boxes)
    for row, (corners, numbers, crowd) in enumerate(zip(boxes, labels, crowds, strict=True)):
        counts = [len(part) for part in (corners or [], numbers or [], crowd or numbers or [])]
        if len({*counts}) > 1:
            raise FileError(
                f"{pictures.name(row)}: it has {counts[0]} boxes, {counts[1]} labels and {counts[2]} crowds"
            )
        if flaw := next((box for box in corners or [] if box is None or len(box) != 4 or None in box), None):
            raise FileError(f"{pictures.name(row)}: one of its boxes is {flaw}, and four numbers are needed")
    try:
        flat = stacked(
            np.array([box for row in boxes for box in row or []], np.float64),
            np.array([number for row in labels for number in row or []], np.int64),
            np.array([part for row, own in zip(crowds, labels, strict=True) for part in row or [0] * len(own or [])]),
            None, values.form,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise FileError(f"{path}: its columns {values.column} and {values.labels} hold no boxes ({error})") from error
    return BoxTable(_ends(len(row or []) for row in boxes), flat)


def _ends(counts: Any) -> np.ndarray:
    return np.array([0, *accumulate(counts)], np.int64)


def _open_coco(path: Path, values: BoxValues) -> BoxedImages:
    """Read a JSON file of COCO: images, annotations, and categories with their ids."""
    try:
        document = json.loads(path.read_bytes())
        images = sorted(document["images"], key=lambda image: image["id"])
        files = [str(image["file_name"]) for image in images]
        row_of = {image["id"]: row for row, image in enumerate(images)}
        entries = [entry for entry in document["annotations"] if "bbox" in entry]
        categories = sorted(document["categories"], key=lambda category: category["id"])
        classes, numbers = (tuple(category[key] for category in categories) for key in ("name", "id"))
        if lost := [entry["image_id"] for entry in entries if entry["image_id"] not in row_of]:
            raise FileError(f"{path}: {len(lost)} of its boxes are of images that it does not list, such as {lost[0]}")
        entries.sort(key=lambda entry: row_of[entry["image_id"]])
        boxes = stacked(
            np.array([entry["bbox"] for entry in entries], np.float64),
            np.array([entry["category_id"] for entry in entries], np.int64),
            np.array([entry.get("iscrowd", 0) for entry in entries]),
            np.array([entry.get("area", entry["bbox"][2] * entry["bbox"][3]) for entry in entries], np.float64), "xywh",
        )  # fmt: skip
    except OSError as error:
        raise FileError(f"{path}: it cannot be read ({error.strerror})") from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise FileError(f"{path}: it is no JSON file of COCO ({why})") from error
    if not images:
        raise FileError(f"{path}: it holds no images")
    counts = np.bincount([row_of[entry["image_id"]] for entry in entries], minlength=len(images))
    folder = _folder_of(path, files[0])
    if not values.values:
        values = replace(values, classes=values.classes or classes, values=numbers)
    ends = _ends(counts.tolist())
    masks = ObjectMasks(_segmentations(entries, ends), from_coco, measures=False) if values.masked else None
    return _boxed(
        ListedFiles([folder / file for file in files]), BoxTable(ends, boxes, masks), np.arange(len(images)), values,
        values.classes or classes,
    )  # fmt: skip


def _segmentations(entries: list[dict[str, Any]], ends: np.ndarray) -> Any:
    """Return the JSON of COCO's `segmentation` of the boxes of each image."""
    outlines = [entry.get("segmentation") for entry in entries]
    encoded = [json.dumps(outline).encode() if outline else None for outline in outlines]
    return as_lists([encoded[start:end] for start, end in pairwise(ends.tolist())])


def _boxed(
    pictures: ParquetPictures | ListedFiles, table: BoxTable, rows: np.ndarray, values: BoxValues,
    classes: tuple[str, ...],
) -> BoxedImages:  # fmt: skip
    """Return the images of these rows; the bytes of their masks count in the fingerprint."""
    if table.masks is not None:
        pictures.sizes = np.stack([pictures.sizes, bytes_of_lists(table.masks.encoded)], 1)
    return BoxedImages(pictures, table, rows, values, classes)


def _folder_of(path: Path, first: str) -> Path:
    """Return the folder that has the images of a JSON file: the first of the usual ones with the first image."""
    word, here = path.stem.rpartition("_")[2], path.parent
    places = [here, here / path.stem, here / word, here / IMAGES, *(here.parent / name for name in (word, IMAGES))]
    places += [here / IMAGES / word, here.parent / IMAGES / word]
    return next((place for place in places if (place / first).is_file()), here)


def _part_of_folder(folder: Path, split: Split) -> Path:
    files = {part: _files_of(folder, part) for part in PARTS}
    if files[split]:
        return files[split][0]
    if any(files.values()):
        raise MissingPartError(f"{folder}: it has no JSON file of COCO to {split} on, such as {PARTS[split][0]}.json")
    raise FileError(
        f"{folder}: it has no JSON file of COCO, such as annotations/instances_train2017.json or "
        "train/_annotations.coco.json"
    )


def _files_of(folder: Path, split: Split) -> list[Path]:
    """List the JSON files of a part, the preferred first."""
    files = []
    for word in PARTS[split]:
        files += [
            path for path in [folder / word / "_annotations.coco.json", folder / f"{word}.json"] if path.is_file()
        ]
        named = re.compile(rf"(instances_)?{word}(\d+)?\.json")
        files += [path for path in sorted((folder / "annotations").glob("*.json")) if named.fullmatch(path.name)]
    return files
