"""The viewer's data: images, and for each twin, layer and image a square of weights, one byte each."""

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from softless.errors import FileError
from softless.study.page.figure import Figure, Section, layer_names
from softless.study.page.style import Look

READING = (
    "Point at a patch of the image, click it to hold it, or move with the arrow keys. In each map, the area of a "
    "square is the weight that this patch gives to that place; a negative weight has no square."
)
PNG = "data:image/png;base64,"


def section(document: dict[str, Any], _: Mapping[str, Look]) -> Section:
    """The page draws it by itself, from checked data."""
    found, test = document.get("viewer"), document["data"].get("test")
    ready = bool(found and found["images"] and found["maps"])
    shown = ""
    if found and ready:
        check(found)
        of = "" if test is None else f" of {test:,.0f}"
        shown = f" Shown: {len(found['images'])}{of} test images."
    return Section(
        "viewer",
        "Where it looks",
        "Where it looks",
        "Attention on real images, averaged over the heads of a layer. A twin's local residual is included.",
        (Figure("attention", "Where each twin looks from a patch", READING + shown, (), "viewer"),) if ready else (),
        "" if ready else "No attention maps: this study kept none.",
    )


def layers(document: dict[str, Any]) -> dict[str, str]:
    """Names of the layers that have maps, each with its number."""
    return layer_names([each["layer"] for each in (document.get("viewer") or {}).get("maps", [])])


def check(viewer: dict[str, Any]) -> None:
    """What the script would stumble over is refused here."""
    if len(viewer["grid"]) != 2 or min(viewer["grid"]) < 1:
        raise FileError(f"viewer.grid is {viewer['grid']}, and rows and columns were needed")
    for index, image in enumerate(viewer["images"]):
        if not image["png"].startswith(PNG) or _decoded(image["png"][len(PNG) :]) is None:
            raise FileError(f"viewer.images[{index}].png is not a PNG as a data address")
    patches = viewer["grid"][0] * viewer["grid"][1]
    for index, each in enumerate(viewer["maps"]):
        tokens, weights = len(each["row_max"]), _decoded(each["weights"])
        if tokens < patches or weights is None or len(weights) != tokens**2:
            size = "no base64" if weights is None else f"{len(weights)} bytes"
            raise FileError(f"viewer.maps[{index}] has {size} for {tokens} tokens and {patches} patches")
        if not 0 <= each["image"] < len(viewer["images"]):
            raise FileError(f"viewer.maps[{index}] is of image {each['image']}, of {len(viewer['images'])}")


def _decoded(text: str) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
