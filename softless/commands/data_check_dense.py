"""The part of `softless data check` for images with masks or boxes: all are read, and their classes are counted."""

from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

import typer

from softless.commands.common import CHECK_FAILED, console, emit_json, plain, plain_table
from softless.commands.progress import progress
from softless.report import units

if TYPE_CHECKING:
    from softless.data.annotated_sources import Values

MASKS, BOXES = "softless.data-check-masks/1", "softless.data-check-boxes/1"


class DenseCheck(TypedDict):
    """The JSON document.

    A part has its name (train, test, or whole for a set of one part), images, fingerprint, smallest and largest
    ([height, width]), classes ([{name, images, pixels}] or [{name, images, boxes}]) and damaged ([{name, why}]). With
    masks, it has the pixels of void. With boxes, it has the images without a box, the small, medium and large boxes, as
    COCO defines them, the crowds, and the dropped boxes.
    """

    schema: str
    source: str
    images: int
    ok: bool  # nothing is damaged, and every mask or box fits its image
    parts: list[dict[str, Any]]


def check_annotated_set(source: str, values: "Values", workers: int | None, json: bool) -> None:
    """Open the set, decode it, and show the result."""
    from softless.data.annotated_sources import open_annotated_parts
    from softless.data.annotation_check import check_annotated_part
    from softless.data.masks import MaskValues
    from softless.io.pictures import BadImage

    opened = open_annotated_parts(source, values)
    total = sum(0 if isinstance(part, BadImage) else len(part) for part in opened.values())
    with progress(total, not json) as advance:
        parts = [
            check_annotated_part(name, part, workers=workers, tick=partial(advance, f"decoding {name}"))
            for name, part in opened.items()
        ]
    if isinstance(values, MaskValues):
        schema, counted, fitting = MASKS, "pixels", "masks"
    else:
        schema, counted, fitting = BOXES, "boxes", "boxes and masks" if values.masked else "boxes"
    document: DenseCheck = {
        "schema": schema,
        "source": source,
        "images": sum(part["images"] for part in parts),
        "ok": not any(part["damaged"] for part in parts),
        "parts": parts,
    }
    if json:
        emit_json(document)
    else:
        _show(document, counted, fitting)
    if not document["ok"]:
        raise typer.Exit(CHECK_FAILED)


def _show(document: DenseCheck, counted: str, fitting: str) -> None:
    from rich.text import Text

    out = console()
    out.print(Text(plain(document["source"]), style="bold"))
    for part in document["parts"]:
        sizes = [units.picture(size) if size else "-" for size in (part["smallest"], part["largest"])]
        total = sum(label[counted] for label in part["classes"])
        if counted == "pixels":
            total += part.get("void", 0)
            more = f"{part.get('void', 0) / max(total, 1):.1%} void"
        else:
            more = _of_boxes(part, total)
        out.print(
            f"{part['part']}: {units.counted(part['images'], 'image')} of {' to '.join(dict.fromkeys(sizes))}, "
            f"{len(part['damaged']):,} bad, {more}",
            soft_wrap=True,
        )
        table = plain_table("class", "images", counted)
        for label in part["classes"]:
            number = label[counted]
            share = f"{number / max(total, 1):.1%}" if counted == "pixels" else f"{number:,}"
            table.add_row(plain(label["name"]), f"{label['images']:,}", share)
        out.print(table)
        out.print()
    for bad in (bad for part in document["parts"] for bad in part["damaged"]):
        out.print(Text(plain(f"{bad['name']}: {bad['why']}")), soft_wrap=True)
    images, count = units.counted(document["images"], "image"), sum(len(part["damaged"]) for part in document["parts"])
    fit = f"All {images} fit their {fitting}."
    out.print(Text(f"{count:,} bad among {images}." if count else fit, style="bold"))


def _of_boxes(part: dict[str, Any], total: int) -> str:
    """Say how many boxes there are, and of which kinds."""
    names = {"crowds": "around crowds", "dropped": "empty and dropped"}
    names = {name: name for name in ("small", "medium", "large")} | names
    kinds = ", ".join(f"{part[name]:,} {word}" for name, word in names.items() if part.get(name))
    without = f"; {part['without']:,} images have none" if part.get("without") else ""
    return f"{total:,} boxes{f' ({kinds})' if kinds else ''}{without}"
