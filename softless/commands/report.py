"""softless report: read DIR/report.json, and draw the page DIR/index.html again."""

from pathlib import Path
from typing import Annotated

import typer

from softless.commands.common import console, emit_json, reports_errors

SCHEMA = "softless.report/1"
SUMMARY = "Draw the page of a study again."
HELP = """Draw the page of a study again: DIR/index.html, from DIR/report.json.

softless study writes both files. Run this after an update of softless, which may draw the page better. The page is one
file that needs no network.

\b
$ softless report report
"""


@reports_errors
def run(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder that softless study wrote.", show_default=False)
    ],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout.")] = False,
) -> None:
    """Draw the page, and print the answer and the path of the page."""
    from rich.text import Text

    from softless.study.page import write_page
    from softless.study.schema import NAME, load
    from softless.study.text.page import write_text_page
    from softless.study.text.schema import TEXT_SCHEMA

    document, schema = load(folder)
    page = (write_text_page if schema == TEXT_SCHEMA else write_page)(folder)
    verdict = document["verdict"]
    if json:
        size = page.stat().st_size
        emit_json({"schema": SCHEMA, "study": str(folder / NAME), "page": str(page), "bytes": size, "verdict": verdict})
        return
    out = console()
    for first in verdict[:1]:
        out.print(Text(first["says"]), soft_wrap=True)
    out.print(Text(f"The page is {page}", style="bold"), soft_wrap=True)
