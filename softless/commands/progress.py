"""Show progress on stderr: the share that is done, the time so far and the time left. The bar vanishes at the end.

Anything else that is printed while a bar is shown goes through `say`, which moves the bar out of the way.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from softless.report import units

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.progress import Progress

WIDEST, NARROWEST = 24, 8  # columns of the bar itself
GAP = "   "  # between the fields of a label


class Bar:
    """Moves a progress bar when called with a label and an amount; without a `Progress` nothing is drawn."""

    on_screen: "Progress | None" = None  # the bar that the terminal shows now

    def __init__(self, shown: "Progress | None" = None, total: float = 0.0):
        self.shown, self.done, self.total = shown, 0.0, total
        self.skipped = 0.0
        if shown is not None:
            self.task = shown.add_task("starting", total=total, left="")

    def __call__(self, label: str, amount: float) -> None:
        self.done += amount
        if self.shown is not None:
            took = self.shown.tasks[self.task].elapsed or 0.0
            self.shown.update(self.task, completed=self.done, description=label, left=self.left(took))

    def skip(self, amount: float) -> None:
        """Skip work that an earlier run did; the estimate of the time left ignores it."""
        self.skipped += amount
        self("starting", amount)

    def left(self, took: float) -> str:
        """Return the time that is left at the pace so far, or nothing before any work is done."""
        worked = self.done - self.skipped
        return f"{units.duration(took / worked * max(self.total - self.done, 0.0))} left" if worked > 0 else ""


def say(sentence: str, *, err: bool = False, color: str | None = None) -> None:
    """Print a line, above the bar if one is shown.

    sentence   str: the line
    err        bool, default False: print on stderr instead of stdout
    color      str, default None: a color, for a terminal
    """
    stream = sys.stderr if err else sys.stdout
    if Bar.on_screen is None or not stream.isatty():  # a line in a file or a pipe does not touch the bar
        plain = False if "NO_COLOR" in os.environ else None
        typer.echo(typer.style(sentence, fg=color) if color else sentence, err=err, color=plain)
        return
    from rich.text import Text

    Bar.on_screen.console.print(Text(sentence, color or ""), soft_wrap=True)


@contextmanager
def progress(total: float, wanted: bool) -> Iterator[Bar]:
    """Give a `Bar` of length `total`; nothing is drawn if it is not `wanted` or stderr is not a terminal."""
    if not (wanted and sys.stderr.isatty()):
        yield Bar()
        return
    from rich.console import Console

    shown = drawn(Console(stderr=True))
    with shown:
        Bar.on_screen = shown
        try:
            yield Bar(shown, total)
        finally:
            Bar.on_screen = None


def drawn(out: "Console") -> "Progress":
    """Return a bar that is as wide as its terminal; the label takes what the rest leaves, and is cut."""
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
    from rich.table import Column

    class LabelColumn(ProgressColumn):
        def render(self, task: Task) -> "Label":
            return Label(task.description)

    columns = (
        BarColumn(bar_width=max(NARROWEST, min(WIDEST, out.width // 8))),
        TextColumn("{task.percentage:3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        LabelColumn(table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
    )
    # Output that a pipe or a file takes must not be redirected to the terminal.
    redirect = sys.stdout.isatty()
    return Progress(*columns, console=out, transient=True, refresh_per_second=4, expand=True, redirect_stdout=redirect)


class Label:
    """The label of a bar, without the last fields that do not fit."""

    def __init__(self, text: str):
        self.text = text

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.text import Text

        yield Text(fitting(self.text, options.max_width), no_wrap=True, overflow="ellipsis")


def fitting(label: str, width: int) -> str:
    """Return the label without its last fields, as many as needed to fit; the first field is always kept."""
    fields = label.split(GAP)
    while len(fields) > 1 and len(GAP.join(fields)) > width:
        fields.pop()
    return GAP.join(fields)
