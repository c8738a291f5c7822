"""Decode pictures from untrusted bytes: Pillow, six formats, 50 megapixels at most, and one error class.

The format (by the bytes, not the name) and the size are checked before a pixel is decoded. A decoded picture is

    complete  a file that is cut short is damaged, even if it has all its pixels
    upright   pictures are turned as their EXIF data say
    RGB       gray, palette, CMYK and 16-bit pictures are converted (the lower eight bits and transparency are dropped)

Only the first picture of an animation is read. A mask is a picture too: it has a class per pixel, so its numbers stay
as they are in the file, and a palette is left out.
"""

import os
import stat
import struct
import warnings
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import TypeVar

import numpy as np

from softless.errors import FileError, needs_extra

with needs_extra("images are decoded by Pillow", "train"):
    from PIL import Image, ImageOps, UnidentifiedImageError

T = TypeVar("T")

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")

ORIENTATION, TILE_WIDTH, TILE_LENGTH = 0x112, 0x142, 0x143
SIDEWAYS = (5, 6, 7, 8)  # orientations that exchange width and height

MOST_PIXELS = 50_000_000
MOST_BYTES = 8 * MOST_PIXELS  # four channels of 16 bits

_DAMAGE: tuple[type[Exception], ...] = (OSError, SyntaxError, ValueError, EOFError, LookupError, ArithmeticError)
_DAMAGE += (TypeError, AttributeError, RuntimeError, MemoryError, struct.error, Image.DecompressionBombError)


class BadImage(FileError):  # noqa: N818
    """A picture, or a file of pictures, that cannot be decoded; the message has its name and the reason."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")
        self.name, self.why = name, why


def read(path: str | os.PathLike[str], name: str) -> bytes:
    """Return the bytes of a file; raise `BadImage` if it is no file or larger than a picture can be."""
    try:
        status = Path(path).stat()
        if not stat.S_ISREG(status.st_mode):
            raise BadImage(name, "it is not a file")
        if status.st_size > MOST_BYTES:
            raise BadImage(name, f"it has {status.st_size} bytes, more than the {MOST_BYTES} of the largest picture")
        return Path(path).read_bytes()
    except OSError as error:
        raise BadImage(name, f"it cannot be read ({error.strerror})") from error


def decode(data: bytes, name: str) -> Image.Image:
    """Return the picture in RGB, or raise `BadImage` with the name and the reason."""
    return _decoded(data, name, _to_rgb)


def decode_mask(data: bytes, name: str) -> np.ndarray:
    """Return the numbers of a mask, uint8 [height, width], or raise `BadImage` with the name and the reason."""
    return _decoded(data, name, _to_numbers)


def _decoded(data: bytes, name: str, convert: Callable[[Image.Image], T]) -> T:
    if not data:
        raise BadImage(name, "it is empty")
    try:
        with warnings.catch_warnings(action="ignore"):  # of sizes, which are checked here, and of metadata
            return _decode(data, convert)
    except UnidentifiedImageError as error:
        raise BadImage(name, f"it is no intact {', '.join(FORMATS[:-1])} or {FORMATS[-1]} picture") from error
    except FileError as error:
        raise BadImage(name, str(error)) from None
    except _DAMAGE as error:
        raise BadImage(name, f"it is damaged ({' '.join(str(error).split()) or type(error).__name__})") from error


def picture_size(source: bytes | Path, name: str) -> tuple[int, int]:
    """Return width and height of the upright picture, read from its header; raise `BadImage` if that fails."""
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            Image.open(BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS) as image,
        ):
            turned = int(image.getexif().get(ORIENTATION, 1)) in SIDEWAYS
            return image.size[::-1] if turned else image.size
    except _DAMAGE as error:
        raise BadImage(name, f"its size cannot be read ({' '.join(str(error).split())})") from error


def _decode(data: bytes, convert: Callable[[Image.Image], T]) -> T:
    with Image.open(BytesIO(data), formats=FORMATS) as image:
        width, height = image.size
        if width * height > MOST_PIXELS:
            raise FileError(f"it has {width} x {height} pixels, and {MOST_PIXELS} in all are the most")
        if image.format == "TIFF" and _tile(image) > MOST_PIXELS:
            raise FileError(f"its tiles have {_tile(image)} pixels each, and {MOST_PIXELS} are the most")
        image.load()
        if not _has_its_end(data, image.format):
            raise FileError("it is cut short: its last bytes are missing")
        return convert(_upright(image))


def _tile(image: Image.Image) -> int:
    """Return the pixels per tile: a tile is decoded as a whole, even if the picture shows little of it."""
    tags = image.tag_v2  # type: ignore[attr-defined]
    return int(tags.get(TILE_WIDTH, 0)) * int(tags.get(TILE_LENGTH, 0))


def _upright(image: Image.Image) -> Image.Image:
    """Turn a picture as its EXIF data says; ignore EXIF data that are damaged, because the pixels are sound."""
    with suppress(*_DAMAGE):
        ImageOps.exif_transpose(image, in_place=True)
    return image


def _has_its_end(data: bytes, form: str | None) -> bool:
    """Return whether a PNG or GIF has its end. Pillow notices a cut in all other formats."""
    if form == "PNG":
        return b"IEND\xae\x42\x60\x82" in data
    return form != "GIF" or data.rstrip(b"\0\r\n").endswith(b";")


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise FileError("its pixels are floating-point numbers, and the file does not say which value is white")
    if image.mode.startswith("I"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise FileError(f"its pixels run from {values.min()} to {values.max()}, and 16 bits are the most")
        image = Image.fromarray((values >> 8).astype(np.uint8))
    return image.convert("RGB")


def _to_numbers(image: Image.Image) -> np.ndarray:
    if image.mode not in ("1", "L", "P") and not image.mode.startswith("I"):
        raise FileError(f"its pixels are {image.mode}, and a mask has one whole number per pixel")
    values = np.asarray(image)
    if values.min() < 0 or values.max() > 255:
        raise FileError(
            f"its pixels run from {values.min()} to {values.max()}, and the numbers of a mask from 0 to 255"
        )
    return values.astype(np.uint8)
