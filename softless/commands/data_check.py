"""softless data check: decode all images and masks of a set, and list the damaged ones; or read a text, and count it.

The exit status is 1 if an image is damaged. A problem of the set as a whole, such as a class without images or a label
without a class, is an error of its own with exit status 3, and so is a text that is not UTF-8. `--json` prints a
`DataCheck`, a `DenseCheck` or a `TextCheck`.
"""

from functools import partial
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from softless.commands.arguments import MOST_PROCESSES
from softless.commands.common import CHECK_FAILED, console, emit_json, plain, plain_table, reports_errors
from softless.report import units

if TYPE_CHECKING:
    from softless.data.annotated_sources import Values
    from softless.data.check import CheckedPart

SCHEMA, TEXT_SCHEMA = "softless.data-check/1", "softless.data-check-text/1"
SUMMARY = "Decode every image of a set, and list the damaged ones."
HELP = """Decode every image of a set, and list each damaged one with the reason.

PATH is a folder of class folders, a folder with train/ and val/ or test/, a parquet file with columns image and label,
a folder of such files, or digits, the embedded set. It may also be images with masks: a parquet file with columns image
and mask, or folders images/ and masks/. Or images with boxes: columns image, boxes and labels, or a folder with COCO's
JSON. --recipe says what the numbers mean. Or text: a file or folder of .txt, or a parquet file with a column text.

\b
$ softless data check flowers
$ softless data check flowers-train.parquet --json
$ softless data check parquet-files/
$ softless data check camvid-train.parquet --recipe segment-camvid
$ softless data check coco/
$ softless data check book.txt
"""


class DataCheck(TypedDict):
    """The JSON document."""

    schema: str
    source: str
    images: int
    ok: bool  # nothing is damaged
    skippable: bool  # --on-bad-image skip would go on, because at most 0.1% of each part are damaged
    parts: "list[CheckedPart]"


class TextPart(TypedDict):
    """A text to train or to test on, as `softless train` would read it."""

    part: str
    bytes: int
    characters: int
    lines: int
    sequences: int  # of `length` bytes


class TextCheck(TypedDict):
    """The JSON document of a text."""

    schema: str
    source: str
    length: int
    parts: list[TextPart]


@reports_errors
def run(
    source: Annotated[str, typer.Argument(metavar="PATH", help="The set.", show_default=False)],
    recipe: Annotated[str | None, typer.Option(metavar="NAME", help="What masks or boxes mean, in a recipe.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, max=MOST_PROCESSES, help="Processes that decode; default: one per core.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Open the set, decode it, and show the result."""
    from softless.commands.data_check_dense import check_annotated_set
    from softless.commands.progress import progress
    from softless.data.annotated_sources import values_of
    from softless.data.check import check_part, open_parts
    from softless.data.reading import LIMIT
    from softless.data.text import is_text
    from softless.io.pictures import BadImage

    values = values_of(source) if recipe is None else _values(recipe)
    if values is not None:
        check_annotated_set(source, values, workers, json)
        return
    if is_text(source):
        _check_text(source, json)
        return
    with progress(1, not json) as advance:
        advance(f"looking for images in {source}", 0)
        opened = open_parts(source)
    total = sum(0 if isinstance(part, BadImage) else len(part) for part in opened.values())
    with progress(total, not json) as advance:
        parts = [
            check_part(name, part, workers=workers, tick=partial(advance, f"decoding {name}"))
            for name, part in opened.items()
        ]
    document: DataCheck = {
        "schema": SCHEMA,
        "source": source,
        "images": sum(part["images"] for part in parts),
        "ok": not any(part["damaged"] for part in parts),
        "skippable": all(len(part["damaged"]) <= LIMIT * part["images"] for part in parts),
        "parts": parts,
    }
    if json:
        emit_json(document)
    else:
        _show(document)
    if not document["ok"]:
        raise typer.Exit(CHECK_FAILED)


def _values(recipe: str) -> "Values":
    """Return what masks or boxes mean in a recipe."""
    from softless.train.recipe import document_of
    from softless.train.tasks.dense import dense_recipe

    return dense_recipe(document_of(recipe), f"recipe {recipe!r}").values


def _check_text(source: str, json: bool) -> None:
    """Read the texts, count them, and show the result."""
    from rich.text import Text

    from softless.data.text import open_texts
    from softless.train.language_recipe import LanguageRecipe

    length = LanguageRecipe().length
    parts: list[TextPart] = [
        {
            "part": part,
            "bytes": len(text.data),
            "characters": len(text.data.decode()),
            "lines": text.data.count(b"\n"),
            "sequences": max(len(text.data) - 1, 0) // length,
        }
        for part, text in zip(("train", "test"), open_texts(source), strict=True)
    ]
    document: TextCheck = {"schema": TEXT_SCHEMA, "source": source, "length": length, "parts": parts}
    if json:
        emit_json(document)
        return
    table = plain_table("part", "bytes", "characters", "lines", f"sequences of {length} bytes")
    for row in parts:
        counts = (row["bytes"], row["characters"], row["lines"], row["sequences"])
        table.add_row(row["part"], *(f"{count:,}" for count in counts))
    out = console()
    out.print(Text(plain(source), style="bold"))
    out.print(table)
    out.print()
    out.print(Text("All of the text is UTF-8.", style="bold"))


def _show(document: DataCheck) -> None:
    from rich.text import Text

    out = console()
    table = plain_table("part", "images", "classes", "per class", "smallest", "largest", "damaged")
    for part in document["parts"]:
        counts = sorted({label["images"] for label in part["classes"]})
        table.add_row(
            part["part"],
            f"{part['images']:,}",
            f"{len(part['classes']):,}",
            " to ".join(f"{count:,}" for count in (*counts[:1], *counts[1:][-1:])) or "-",
            *(units.picture(size) if size else "-" for size in (part["smallest"], part["largest"])),
            f"{len(part['damaged']):,}",
        )
    out.print(Text(plain(document["source"]), style="bold"))
    out.print(table)
    out.print()
    for bad in (bad for part in document["parts"] for bad in part["damaged"]):
        out.print(Text(plain(f"{bad['name']}: {bad['why']}")), soft_wrap=True)
    out.print(Text(_verdict(document), style="bold"))


def _verdict(document: DataCheck) -> str:
    images = units.counted(document["images"], "image")
    if document["ok"]:
        return f"All {images} can be decoded."
    if not document["images"]:
        return "Nothing could be read."
    damaged = f"{sum(len(part['damaged']) for part in document['parts']):,} damaged among {images}."
    if document["skippable"]:
        return f"{damaged} --on-bad-image skip leaves them out."
    return f"{damaged} That is more than the 0.1% that --on-bad-image skip leaves out."
