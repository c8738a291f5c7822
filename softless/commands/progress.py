"""A progress bar on stderr that leaves no trace."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[str, float], None]


@contextmanager
def progress(total: float, wanted: bool) -> Iterator[Advance]:
    """Gives a function that moves the bar by an amount; nothing is drawn where stderr is not a terminal."""
    if not (wanted and sys.stderr.isatty()):
        yield lambda _label, _amount: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda label, amount: bar.update(task, advance=amount, description=label)
