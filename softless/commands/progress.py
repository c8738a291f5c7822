"""Show progress on stderr: the share that is done, the time so far and the time left. The bar vanishes at the end."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from softless.report import units

if TYPE_CHECKING:
    from rich.progress import Progress


class Bar:
    """Moves a progress bar when called with a label and an amount; without a `Progress` nothing is drawn."""

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


@contextmanager
def progress(total: float, wanted: bool) -> Iterator[Bar]:
    """Give a `Bar` of length `total`; nothing is drawn if it is not `wanted` or stderr is not a terminal."""
    if not (wanted and sys.stderr.isatty()):
        yield Bar()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4) as shown:
        yield Bar(shown, total)
