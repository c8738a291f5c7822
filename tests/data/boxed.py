"""Small sets of images with boxes: colored rectangles on a ground."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from softless.data.boxes import BoxValues
from tests.data.masked import png

Draw = Callable[..., dict[str, Any]]
CLASSES = ("red", "blue")
VALUES = BoxValues(classes=CLASSES)
OPTIONAL = {"crowd": pa.list_(pa.bool_()), "masks": pa.list_(pa.binary())}  # columns
GROUND, COLORS = (40, 90, 40), ((220, 30, 30), (30, 30, 220))


def drawn(seed: int, height: int = 32, width: int = 48) -> tuple[np.ndarray, list[list[float]], list[int]]:
    """Pixels, boxes and labels: a red rectangle on the left and a blue one on the right."""
    rng = np.random.default_rng(seed)
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[:] = GROUND
    boxes = []
    for label, color in enumerate(COLORS):
        left = width // 2 * label + int(rng.integers(0, width // 8))
        top, bottom = int(rng.integers(0, height // 4)), height - int(rng.integers(0, height // 4))
        right = width // 2 * (label + 1) - int(rng.integers(1, width // 8))
        pixels[top:bottom, left:right] = color
        boxes.append([float(left), float(top), float(right), float(bottom)])
    return pixels, boxes, [0, 1]


def row(seed: int, **size: int) -> dict[str, object]:
    pixels, boxes, labels = drawn(seed, **size)
    return {"image": png(pixels), "boxes": boxes, "labels": labels}


def parquet(path: Path, rows: list[dict[str, object]]) -> Path:
    kinds = {"image": pa.binary(), "boxes": pa.list_(pa.list_(pa.float32())), "labels": pa.list_(pa.int8())}
    kinds |= {name: kind for name, kind in OPTIONAL.items() if name in rows[0]}
    pq.write_table(
        pa.table({name: pa.array([each[name] for each in rows], kind) for name, kind in kinds.items()}), path
    )
    return path


def pair_of_files(folder: Path, train: int = 8, test: int = 4, draw: Draw = row, **size: int) -> Path:
    """x-train.parquet and x-test.parquet with the names of the classes beside them; the first of the two."""
    folder.mkdir(exist_ok=True)
    (folder / "x-classes.json").write_text('["red", "blue"]')
    parquet(folder / "x-test.parquet", [draw(100 + seed, **size) for seed in range(test)])
    return parquet(folder / "x-train.parquet", [draw(seed, **size) for seed in range(train)])


def coco(path: Path, images: Path, seeds: list[int], **more: object) -> dict[str, object]:
    """Write the JSON of COCO and the images, and return the document. The ids of the classes are 7 and 3."""
    document = {"images": [], "annotations": [], "categories": [{"id": 7, "name": "blue"}, {"id": 3, "name": "red"}]}
    images.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        pixels, boxes, labels = drawn(seed)
        (images / f"{seed}.png").write_bytes(png(pixels))
        document["images"].append({"id": 10 + seed, "file_name": f"{seed}.png"})
        document["annotations"] += [
            {"image_id": 10 + seed, "category_id": (3, 7)[label], "bbox": [x, y, r - x, b - y]}
            for (x, y, r, b), label in zip(boxes, labels, strict=True)
        ]
    path.write_text(json.dumps(document | more))
    return document
