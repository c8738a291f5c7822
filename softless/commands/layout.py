"""How an explanation is laid out: what it is about, facts, a table, a verdict, notes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from softless.commands.common import console

if TYPE_CHECKING:
    from rich.table import Table


def page(
    name: str, about: str, facts: Sequence[tuple[str, str]], table: "Table", verdict: str, notes: Sequence[str]
) -> None:
    """Printed from top to bottom."""
    from rich.table import Table
    from rich.text import Text

    out, grid = console(), Table.grid(padding=(0, 2, 0, 0))
    for fact in facts:
        grid.add_row(*fact)
    out.print(Text.assemble((name, "bold"), about))
    if facts:
        out.print(grid)
    out.print()
    out.print(table)
    out.print()
    out.print(Text(verdict, style="bold"))
    for note in notes:
        out.print(Text(note, style="dim"))


def plain_table(*headings: str, gap: int = 3) -> "Table":
    """No lines; the first column to the left, the others to the right."""
    from rich.table import Table

    table = Table(box=None, padding=(0, gap, 0, 0), header_style="bold")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    return table
