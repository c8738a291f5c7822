"""Pictures as people have them, as broken disks leave them, and sets of them."""

import io
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

FORMS = {
    "jpeg": ("JPEG", {}),
    "progressive jpeg": ("JPEG", {"progressive": True, "quality": 90}),
    "png": ("PNG", {}),
    "webp": ("WEBP", {}),
    "lossless webp": ("WEBP", {"lossless": True}),
    "gif": ("GIF", {}),
    "bmp": ("BMP", {}),
    "tiff": ("TIFF", {}),
    "lzw tiff": ("TIFF", {"compression": "tiff_lzw"}),
}


def pixels(seed: int, height: int = 24, width: int = 20) -> np.ndarray:
    """Smooth with a little noise, so that every format has something to do."""
    rows, columns = np.mgrid[:height, :width]
    smooth = np.stack([rows * 7 + seed, columns * 9, rows + columns + 3 * seed], -1) % 200
    return (smooth + np.random.default_rng(seed).integers(0, 30, smooth.shape)).astype(np.uint8)


def encoded(seed: int = 0, form: str = "png", mode: str = "RGB", **options: object) -> bytes:
    kind, usual = FORMS[form]
    buffer = io.BytesIO()
    Image.fromarray(pixels(seed)).convert(mode).save(buffer, kind, **usual, **options)
    return buffer.getvalue()


def mutants(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """(form, bytes): flipped, cut, doubled, zeroed and shuffled, a format after the other."""
    draw = random.Random(seed)
    whole = {form: encoded(3, form) for form in FORMS}
    for number in range(count):
        form = list(FORMS)[number % len(FORMS)]
        data = bytearray(whole[form])
        for _ in range(draw.choice((1, 1, 3, 10))):
            place, length = draw.randrange(len(data)), draw.randrange(1, 40)
            match draw.choice(("flip", "head", "noise", "zero", "drop", "double", "cut")):
                case "flip":
                    data[place] ^= 1 << draw.randrange(8)
                case "head":
                    data[draw.randrange(min(64, len(data)))] = draw.randrange(256)
                case "noise":
                    data[place : place + length] = draw.randbytes(length)
                case "zero":
                    data[place : place + length] = bytes(length)
                case "drop":
                    del data[place : place + length]
                case "double":
                    data[place:place] = data[place : place + length]
                case "cut":
                    del data[place:]
            data = data or bytearray(b"\0")
        yield form, bytes(data)


def folder(root: Path, parts: dict[str, dict[str, int]], form: str = "png") -> Path:
    """root/part/class/0.png ...; a part named "" is the root itself."""
    suffix, seed = form.rsplit(maxsplit=1)[-1], 0
    for part, classes in parts.items():
        for name, count in classes.items():
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                seed += 1
                (root / part / name / f"{number}.{suffix}").write_bytes(encoded(seed, form))
    return root


def parquet(path: Path, labels: list[int | None], *, images: list[bytes | None] | None = None, **columns) -> Path:
    images = [encoded(row) for row in range(len(labels))] if images is None else images
    pq.write_table(pa.table({"image": pa.array(images, pa.binary()), "label": labels, **columns}), path)
    return path


def class_names(path: Path, names: object) -> None:
    path.write_text(json.dumps(names))
