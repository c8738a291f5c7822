"""softless report: draw the page of a study again, from its numbers alone.

Reads DIR/report.json, writes DIR/index.html: one file that needs no network, no server and no other file.

JSON (schema softless.report/1):

    {"schema", "study", "page", "bytes", "verdict": [{"about", "says"}]}
"""

from pathlib import Path
from typing import Annotated

import typer

from softless.commands.common import console, emit_json, reports_errors

SCHEMA = "softless.report/1"
SUMMARY = "Draw the page of a study again."
HELP = """Draw the page of a study again: DIR/index.html, from DIR/report.json.

The page is one file, and needs no network. Softless study writes both; a newer version may draw them better.

\b
$ softless report report
"""


@reports_errors
def run(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder softless study wrote.", show_default=False)],
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Read, draw, say where."""
    from rich.text import Text

    from softless.study.page import write_page
    from softless.study.schema import NAME, read

    page = write_page(folder)
    verdict = read(folder)["verdict"]
    if json:
        size = page.stat().st_size
        emit_json({"schema": SCHEMA, "study": str(folder / NAME), "page": str(page), "bytes": size, "verdict": verdict})
        return
    out = console()
    for first in verdict[:1]:
        out.print(Text(first["says"]), soft_wrap=True)
    out.print(Text(f"The page is {page}", style="bold"), soft_wrap=True)
