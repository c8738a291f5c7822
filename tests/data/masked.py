"""Small sets of images with masks: colored squares on a ground, and the class of each pixel."""

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from softless.data.masks import VOID, MaskValues

CLASSES = ("ground", "red", "blue")
VALUES = MaskValues(classes=CLASSES)
COLORS = np.array([[40, 90, 40], [220, 30, 30], [30, 30, 220]], np.uint8)


def drawn(seed: int, height: int = 24, width: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Pixels and mask: a red and a blue square with corners at multiples of 4, and a border of void on the left."""
    rng = np.random.default_rng(seed)
    mask = np.zeros((height, width), np.uint8)
    for label in (1, 2):
        top, left = 4 * rng.integers(0, (height - 8) // 4 + 1), 4 * rng.integers(1, (width - 12) // 4 + 1)
        mask[top : top + 8, left : left + 12] = label
    pixels = (COLORS[mask] + rng.integers(0, 20, (height, width, 3))).astype(np.uint8)
    mask[:, 0] = VOID
    return pixels, mask


def png(pixels: np.ndarray, *, palette: bool = False) -> bytes:
    buffer, image = io.BytesIO(), Image.fromarray(pixels)
    if palette:
        image.putpalette(bytes(range(255, -1, -1)) * 3)
    image.save(buffer, "PNG")
    return buffer.getvalue()


def encoded(seed: int, **size: int) -> tuple[bytes, bytes]:
    pixels, mask = drawn(seed, **size)
    return png(pixels), png(mask)


def parquet(path: Path, pairs: list[tuple[bytes, bytes]], **columns: list[object]) -> Path:
    images, masks = zip(*pairs, strict=True)
    names = {"image": pa.array(images, pa.binary()), "mask": pa.array(masks, pa.binary())}
    pq.write_table(pa.table({**names, **columns}), path)
    return path


def pair_of_files(folder: Path, train: int = 8, test: int = 4, **size: int) -> Path:
    """x-train.parquet and x-test.parquet with the names of the classes beside them; the first of the two."""
    folder.mkdir(exist_ok=True)
    (folder / "x-classes.json").write_text('["ground", "red", "blue"]')
    parquet(folder / "x-test.parquet", [encoded(100 + seed, **size) for seed in range(test)])
    return parquet(folder / "x-train.parquet", [encoded(seed, **size) for seed in range(train)])


def write(image: Path, mask: Path, pair: tuple[bytes, bytes]) -> None:
    for path, data in zip((image, mask), pair, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
