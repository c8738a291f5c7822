"""The part of `softless data check` for images with masks: every mask is decoded, and its classes are counted."""

from functools import partial
from typing import TYPE_CHECKING, TypedDict

import typer

from softless.commands.common import CHECK_FAILED, console, emit_json, plain, plain_table
from softless.commands.progress import progress
from softless.report import units

if TYPE_CHECKING:
    from softless.data.mask_check import CheckedMasks
    from softless.data.masks import MaskValues

SCHEMA = "softless.data-check-masks/1"


class MaskCheck(TypedDict):
    """The JSON document."""

    schema: str
    source: str
    images: int
    ok: bool  # nothing is damaged, and every mask fits its image
    parts: "list[CheckedMasks]"


def check_set_with_masks(source: str, values: "MaskValues", workers: int | None, json: bool) -> None:
    """Open the set, decode it, and show the result."""
    from softless.data.mask_check import check_masked_part, open_masked_parts
    from softless.io.pictures import BadImage

    opened = open_masked_parts(source, values)
    total = sum(0 if isinstance(part, BadImage) else len(part) for part in opened.values())
    with progress(total, not json) as advance:
        parts = [
            check_masked_part(name, part, workers=workers, tick=partial(advance, f"decoding {name}"))
            for name, part in opened.items()
        ]
    document: MaskCheck = {
        "schema": SCHEMA,
        "source": source,
        "images": sum(part["images"] for part in parts),
        "ok": not any(part["damaged"] for part in parts),
        "parts": parts,
    }
    if json:
        emit_json(document)
    else:
        _show(document)
    if not document["ok"]:
        raise typer.Exit(CHECK_FAILED)


def _show(document: MaskCheck) -> None:
    from rich.text import Text

    out = console()
    out.print(Text(plain(document["source"]), style="bold"))
    for part in document["parts"]:
        sizes = [units.picture(size) if size else "-" for size in (part["smallest"], part["largest"])]
        pixels = sum(label["pixels"] for label in part["classes"]) + part["void"]
        out.print(
            f"{part['part']}: {units.counted(part['images'], 'image')} of {' to '.join(dict.fromkeys(sizes))}, "
            f"{len(part['damaged']):,} bad, {part['void'] / max(pixels, 1):.1%} void",
            soft_wrap=True,
        )
        table = plain_table("class", "images", "pixels")
        for label in part["classes"]:
            table.add_row(plain(label["name"]), f"{label['images']:,}", f"{label['pixels'] / max(pixels, 1):.1%}")
        out.print(table)
        out.print()
    for bad in (bad for part in document["parts"] for bad in part["damaged"]):
        out.print(Text(plain(f"{bad['name']}: {bad['why']}")), soft_wrap=True)
    images, count = units.counted(document["images"], "image"), sum(len(part["damaged"]) for part in document["parts"])
    out.print(Text(f"{count:,} bad among {images}." if count else f"All {images} fit their masks.", style="bold"))
