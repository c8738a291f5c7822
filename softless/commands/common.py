"""Code that all verbs share: exit codes, one-line errors, tables, JSON, and checks of folders before any work."""

import errno
import logging
import math
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import typer

from softless.commands.ctrl_c import INTERRUPTED
from softless.commands.progress import say
from softless.errors import ArgumentError, SoftlessError
from softless.io.files import to_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

CHECK_FAILED, USAGE, BAD_INPUT, CLOSED_PIPE = 1, 2, 3, 141

P = ParamSpec("P")


def reports_errors(verb: Callable[P, None]) -> Callable[P, None]:
    """Make a verb report a user's error in one sentence with an exit code, without a traceback."""

    @wraps(verb)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with warnings_afterwards():
                with importing():
                    import torch  # noqa: F401
                verb(*args, **kwargs)
                sys.stdout.flush()
        except SoftlessError as error:
            complain(str(error))
            raise typer.Exit(BAD_INPUT) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except OSError as error:
            _drop_stdout()
            if error.errno == errno.EPIPE:
                raise typer.Exit(CLOSED_PIPE) from None
            complain(f"{error.filename or 'output'}: {error.strerror or error}")
            raise typer.Exit(BAD_INPUT) from None

    return run


def plain(name: str) -> str:
    """Return a file's name with everything escaped that this terminal cannot show."""
    name = name if name.isprintable() else ascii(name)[1:-1]
    encoding = sys.stdout.encoding or "ascii"
    return name.encode(encoding, "backslashreplace").decode(encoding)


@contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Show softless's own warnings at once, for example about a damaged checkpoint."""
    with warnings.catch_warnings():
        warnings.filterwarnings("always", category=RuntimeWarning, module=r"softless\.")
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], filename: str, *rest: Any, **more: Any) -> None:
            if _library(filename) == "softless":
                complain(str(message), "warning")
            else:
                others(message, category, filename, *rest, **more)

        warnings.showwarning = show
        yield


@contextmanager
def warnings_afterwards() -> Iterator[None]:
    """Hold back warnings and log lines until the end, so that they do not break a table. Each becomes one line."""
    lines: dict[str, None] = {}

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines[f"{record.name}: {record.getMessage()}"] = None

    def keep(message: Warning | str, category: type[Warning], filename: str, *_: Any, **__: Any) -> None:  # noqa: ARG001
        lines[f"{_library(filename)}: {message}"] = None

    handler = Keep(logging.WARNING)
    logging.getLogger().addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = keep
            yield
    finally:
        logging.getLogger().removeHandler(handler)
        for line in lines:
            complain(line, "warning")


def _library(filename: str) -> str:
    """Return the package that a file belongs to: torch for .../site-packages/torch/nn/x.py."""
    parts = Path(filename).parts
    known = [at for at, part in enumerate(parts) if part in ("site-packages", "softless")]
    if not known:
        return Path(filename).stem
    return parts[known[-1]] if parts[known[-1]] == "softless" else Path(parts[known[-1] + 1]).stem


def complain(sentence: str, kind: str = "error") -> None:
    """Print an error or a warning in one line on stderr: red or yellow on a terminal."""
    color = {"error": "red", "warning": "yellow"}[kind]
    say(f"{kind}: {' '.join(sentence.split())}", err=True, color=color)


def refuse(arguments: dict[str, object], because: str) -> None:
    """Raise an error that names the arguments that were given: those that are not None, False or empty."""
    if names := [name for name, value in arguments.items() if value]:
        raise ArgumentError(f"{' and '.join(names)}: {because}")


def must_be_finite(loss: float, target: str, what: str) -> None:
    """End with a failed check if the loss of a model is not a number."""
    if not math.isfinite(loss):
        complain(f"the loss of {target} on {what} is {loss}: its answers are not numbers")
        raise typer.Exit(CHECK_FAILED)


def task_of_run(folder: str) -> str | None:
    """Return the task of the run in a folder; None if there is no run."""
    from softless.train.recipe import task_of
    from softless.train.run import Run

    run = Run(Path(folder))
    return task_of(run.read()["recipe"]) if run.about.is_file() else None


def command_line(verb: str, names: Iterable[str], options: dict[str, Any]) -> str:
    """Return a command to type. True is an option without a value, a list repeats an option, None and False omit it."""
    parts = [verb, *names]
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        for item in value if isinstance(value, list) else [] if value is None or value is False else [value]:
            text = ",".join(map(str, item)) if isinstance(item, tuple) else item
            parts.append(option if item is True else f"{option} {text}")
    return " ".join(parts)


def console() -> "Console":
    """Return stdout as rich shows it: plain text if it is not a terminal."""
    from rich.console import Console

    return Console(highlight=False, emoji=False, markup=False)


def print_whole(out: "Console", table: "Table") -> None:
    """Print a table that is wider than the terminal without cutting its cells."""
    from rich.measure import Measurement

    width = out.width
    out.width = max(width, Measurement.get(out, out.options.update(max_width=10_000), table).maximum)
    out.print(table)
    out.width = width


def plain_table(*headings: str, gap: int = 3, style: str = "bold") -> "Table":
    """Return a table without lines; the first column is aligned left, the others right."""
    from rich.table import Table

    table = Table(box=None, padding=(0, gap, 0, 0), header_style=style)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    return table


def print_dim(*lines: str, out: "Console") -> None:
    """Print notes in a fainter color."""
    from rich.text import Text

    for line in lines:
        out.print(Text(line, style="dim"))


def emit_json(document: Mapping[str, object]) -> None:
    """Print the document and nothing else on stdout."""
    print(to_json(document))


def prepare_folder(folder: Path) -> None:
    """Check that files can be written in a folder, before any work. It is not created yet."""
    try:
        places = [folder.absolute(), *folder.absolute().parents]
        existing = next(place for place in places if _exists(place))
        with tempfile.TemporaryFile(dir=existing):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ArgumentError(f"cannot write in the folder {str(folder)!r}: {reason}") from None


def check_plot(plot: Path | None) -> None:
    """Refuse a page that cannot be drawn or written, before any work."""
    from softless.report import page

    if plot is None:
        return
    page.require("plotly", by="--plot")
    prepare_folder(plot.parent)
    if plot.is_dir():
        raise ArgumentError(f"--plot {str(plot)!r} is a folder and must be a file to write")


def _exists(path: Path) -> bool:
    """Return whether a path exists. Unlike `Path.exists`, raise if the path leads through a file or is impossible."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    return True


@contextmanager
def importing() -> Iterator[None]:
    """Make Ctrl-C say so and exit at once: importing torch sometimes swallows a KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        os.write(2, b"stopped before anything was done\n")
        os._exit(INTERRUPTED)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _drop_stdout() -> None:
    """Discard stdout: Python flushes it once more on exit, and would report the same error again."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):
        sys.stdout = None
