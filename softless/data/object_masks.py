"""Masks of objects: the pixels of an image that belong to an object, as a run-length code of pycocotools.

    pictures      a number for each pixel: 0 is not the object, and any other number is
    COCO's JSON   `segmentation`: polygons, or a run-length code, compressed or not

A code of (height, width) counts pixels column by column: those before the object, those of the object, and so on. It
takes a few hundred bytes, where the pixels take as many bytes as the image has. pycocotools trusts what it is given, so
every code and polygon is checked here before it decodes them.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from softless.data.annotated import SLACK
from softless.errors import needs_extra
from softless.io.pictures import BadImage, decode_mask

with needs_extra("masks of objects are read by pycocotools", "train"):
    from pycocotools import mask as codes

Code = dict[str, Any]  # "size": [height, width], "counts": bytes
Size = tuple[int, int]  # width, height

LEAST = 6  # numbers of a polygon: a triangle


class ObjectMasks(NamedTuple):
    """The masks of all objects of a set, as they were read.

    encoded    Arrow array of lists of bytes, by row of the set; null for a mask that is missing
    read       turns the bytes of a mask, the size of its image and the image's name into a code, or raises `BadImage`
    measures   bool: whether the areas of objects are those of their masks; COCO's JSON gives the areas itself
    """

    encoded: Any
    read: Callable[[bytes, Size, str], Code]
    measures: bool

    def of_row(self, row: int, size: Size, name: str, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the codes of the boxes of a row that are `kept`, bool [N], and their areas if masks give them."""
        encoded = self.encoded[int(row)].as_py() or []
        if len(encoded) != len(kept):
            raise BadImage(name, f"it has {len(kept)} boxes and {len(encoded)} masks, and each box needs a mask")
        places = np.flatnonzero(kept).tolist()
        kept_codes = np.empty(len(places), object)
        kept_codes[:] = [self._code(encoded[place], size, name, place) for place in places]
        return kept_codes, np.array([area(code) for code in kept_codes], np.float32) if self.measures else None

    def _code(self, encoded: bytes | None, size: Size, name: str, place: int) -> Code:
        if not encoded:
            raise BadImage(name, f"its box {place} has no mask, and each box needs one")
        try:
            code = self.read(encoded, size, name)
        except BadImage as error:
            raise BadImage(name, f"its mask {place}: {error.why}") from error
        if not area(code):
            raise BadImage(name, f"its mask {place} is empty: none of its pixels belongs to the object")
        return code


def encode(pixels: np.ndarray) -> Code:
    """Return the code of a mask, bool [height, width]."""
    code: Code = codes.encode(np.asfortranarray(pixels, np.uint8))
    return code


def decode(code: Code) -> np.ndarray:
    """Return the pixels of a mask, uint8 [height, width]: 1 where the object is."""
    runs = _decompressed(code["counts"])
    flat = np.repeat(np.arange(len(runs), dtype=np.uint8) % 2, runs)
    return np.ascontiguousarray(flat.reshape(code["size"][::-1]).T)


def area(code: Code) -> float:
    """Return how many pixels belong to the object of a mask."""
    return float(codes.area(code))


def from_picture(data: bytes, size: Size, name: str) -> Code:
    """Read a mask from an encoded picture."""
    numbers = decode_mask(data, name)
    _must_fit(numbers.shape[::-1], size, name)
    return encode(numbers != 0)


def from_coco(data: bytes, size: Size, name: str) -> Code:
    """Read a mask from the JSON of COCO's `segmentation`."""
    try:
        segmentation = json.loads(data)
        if isinstance(segmentation, list):
            return _from_polygons([np.array(polygon, np.float64) for polygon in segmentation], size, name)
        return _from_runs(segmentation["size"], segmentation["counts"], size, name)
    except BadImage:
        raise
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise BadImage(name, "it is neither a list of polygons nor a run-length code of COCO") from error


def _from_polygons(polygons: Sequence[np.ndarray], size: Size, name: str) -> Code:
    for polygon in polygons:
        if polygon.ndim != 1 or polygon.size < LEAST or polygon.size % 2:
            raise BadImage(
                name, f"a polygon of it has {polygon.size} numbers, and an even number from {LEAST} is needed"
            )
        corners = polygon.reshape(-1, 2)
        if not np.isfinite(corners).all():
            raise BadImage(name, "a polygon of it has a corner that is no number")
        if (beyond := np.maximum(-corners, corners - size).max()) > SLACK:
            raise BadImage(
                name, f"a polygon of it reaches {beyond:g} pixels beyond the image, which has {size[0]} x {size[1]}"
            )
    merged: Code = codes.merge(codes.frPyObjects([polygon.tolist() for polygon in polygons], *size[::-1]))
    return merged


def _from_runs(shape: Sequence[int], counts: Any, size: Size, name: str) -> Code:
    height, width = shape
    _must_fit((width, height), size, name)
    runs = _decompressed(counts.encode("ascii")) if isinstance(counts, str) else [int(count) for count in counts]
    if min(runs) < 0:
        raise ValueError("a run has a negative length")
    if sum(runs) != height * width:
        raise BadImage(name, f"its runs have {sum(runs)} pixels in all, and the image {height * width}")
    code: Code = codes.frPyObjects({"size": [height, width], "counts": runs}, height, width)
    return code


def _decompressed(counts: bytes) -> list[int]:
    """Return the runs of a compressed code.

    A character has 5 bits of a number, the lowest come first, and a bit that says whether more follow. The number is a
    run; from the fourth on, it is the difference to the run of the same kind before it.
    """
    runs, number, bits = list[int](), 0, 0
    for character in counts:
        group = character - ord("0")
        number |= (group & 31) << bits
        bits += 5
        if group & 32:
            continue
        signed = number - (1 << bits) if group & 16 else number
        runs.append(signed + (runs[-2] if len(runs) > 2 else 0))
        number, bits = 0, 0
    return runs


def _must_fit(own: tuple[int, ...], size: Size, name: str) -> None:
    if own != size:
        raise BadImage(name, f"it has {own[0]} x {own[1]} pixels, and the image {size[0]} x {size[1]}")
