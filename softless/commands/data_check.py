"""softless data check: decode every image of a set, and list the damaged ones.

The exit status is 1 if an image is damaged. A problem of the set as a whole, such as a class without images or a label
without a class, is an error of its own with exit status 3.

JSON (schema softless.data-check/1); sizes are null if no image could be decoded:

    {"schema", "source", "images", "ok", "skippable",
     "parts": [{"part", "images", "fingerprint", "smallest": [height, width], "largest": [height, width],
                "classes": [{"name", "images"}],
                "damaged": [{"name", "why"}]}]}

`ok` says that nothing is damaged. `skippable` says that `--on-bad-image skip` would go on, because at most 0.1% of each
part are damaged.
"""

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from softless.commands.arguments import MOST_PROCESSES
from softless.commands.common import CHECK_FAILED, console, emit_json, plain, reports_errors
from softless.report import units

if TYPE_CHECKING:
    from softless.data.check import CheckedPart

SCHEMA = "softless.data-check/1"
SUMMARY = "Decode every image of a set, and list the damaged ones."
HELP = """Decode every image of a set, and list each damaged one with the reason.

PATH is a folder of class folders, a folder with train/ and val/ or test/, a parquet file with columns image and label,
a folder of such files, or digits, the embedded set.

\b
$ softless data check flowers
$ softless data check flowers-train.parquet --json
$ softless data check parquet-files/
"""


@reports_errors
def run(
    source: Annotated[str, typer.Argument(metavar="PATH", help="The set.", show_default=False)],
    workers: Annotated[
        int | None, typer.Option(min=0, max=MOST_PROCESSES, help="Processes that decode; default: one per core.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Open the set, decode it, and show the result."""
    parts = _check(source, workers, show_progress=not json)
    if json:
        emit_json(_document(source, parts))
    else:
        _show(source, parts)
    if any(part.damaged for part in parts):
        raise typer.Exit(CHECK_FAILED)


def _check(source: str, workers: int | None, *, show_progress: bool) -> "list[CheckedPart]":
    from softless.commands.progress import progress
    from softless.data.check import check_part, open_parts
    from softless.io.pictures import BadImage

    with progress(1, show_progress) as advance:
        advance(f"looking for images in {source}", 0)
        opened = open_parts(source)
    total = sum(0 if isinstance(part, BadImage) else len(part) for part in opened.values())
    with progress(total, show_progress) as advance:
        return [
            check_part(name, part, workers=workers, tick=partial(advance, f"decoding {name}"))
            for name, part in opened.items()
        ]


def _skippable(part: "CheckedPart") -> bool:
    from softless.data.reading import LIMIT

    return len(part.damaged) <= LIMIT * part.images


def _document(source: str, parts: "list[CheckedPart]") -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "source": source,
        "images": sum(part.images for part in parts),
        "ok": not any(part.damaged for part in parts),
        "skippable": all(map(_skippable, parts)),
        "parts": [
            {
                "part": part.name,
                "images": part.images,
                "fingerprint": part.fingerprint,
                "smallest": part.smallest and list(part.smallest),
                "largest": part.largest and list(part.largest),
                "classes": [{"name": name, "images": images} for name, images in part.classes],
                "damaged": [bad._asdict() for bad in part.damaged],
            }
            for part in parts
        ],
    }


def _show(source: str, parts: "list[CheckedPart]") -> None:
    from rich.text import Text

    from softless.commands.common import plain_table

    out = console()
    table = plain_table("part", "images", "classes", "per class", "smallest", "largest", "damaged")
    for part in parts:
        table.add_row(
            part.name,
            f"{part.images:,}",
            f"{len(part.classes):,}",
            _range(part),
            _picture(part.smallest),
            _picture(part.largest),
            f"{len(part.damaged):,}",
        )
    out.print(Text(plain(source), style="bold"))
    out.print(table)
    out.print()
    for bad in (bad for part in parts for bad in part.damaged):
        out.print(Text(plain(f"{bad.name}: {bad.why}")), soft_wrap=True)
    out.print(Text(_verdict(parts), style="bold"))


def _verdict(parts: "list[CheckedPart]") -> str:
    images, damaged = sum(part.images for part in parts), sum(len(part.damaged) for part in parts)
    if not damaged:
        return f"All {units.counted(images, 'image')} can be decoded."
    if not images:
        return "Nothing could be read."
    share = f"{damaged:,} damaged among {units.counted(images, 'image')}."
    if all(map(_skippable, parts)):
        return f"{share} --on-bad-image skip leaves them out."
    return f"{share} That is more than the 0.1% that --on-bad-image skip leaves out."


def _range(part: "CheckedPart") -> str:
    counts = [images for _, images in part.classes]
    if not counts:
        return "-"
    return f"{min(counts):,}" if min(counts) == max(counts) else f"{min(counts):,} to {max(counts):,}"


def _picture(size: tuple[int, int] | None) -> str:
    return units.picture(size) if size else "-"
