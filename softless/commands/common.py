"""How every verb behaves: exit codes, one-line errors, clean JSON, and no half-written file."""

import errno
import logging
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import typer

from softless.commands.ctrl_c import INTERRUPTED
from softless.errors import ArgumentError, SoftlessError
from softless.io.files import to_json

if TYPE_CHECKING:
    from rich.console import Console

CHECK_FAILED, USAGE, BAD_INPUT, CLOSED_PIPE = 1, 2, 3, 141

LONGEST_NUMBER = 15  # digits: no product of a few of them is mistaken for infinity

P = ParamSpec("P")


def reports_errors(verb: Callable[P, None]) -> Callable[P, None]:
    """Answer what a user can cause with one sentence and an exit code, never with a traceback."""

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
    """A file's name as this terminal can show it: no control characters, nothing it has no letters for."""
    name = name if name.isprintable() else ascii(name)[1:-1]
    encoding = sys.stdout.encoding or "ascii"
    return name.encode(encoding, "backslashreplace").decode(encoding)


@contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Show what softless itself warns of, such as a damaged checkpoint, at once."""
    with warnings.catch_warnings():
        warnings.filterwarnings("always", category=RuntimeWarning, module=r"softless\.")
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], filename: str, *rest: Any, **more: Any) -> None:
            if _library(filename) == "softless":
                _warn(str(message))
            else:
                others(message, category, filename, *rest, **more)

        warnings.showwarning = show
        yield


@contextmanager
def warnings_afterwards() -> Iterator[None]:
    """Warnings and log lines of other libraries wait for the end, one line each, so that none runs through a table."""
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
            _warn(line)


def _library(filename: str) -> str:
    """The package that a file belongs to: torch for .../site-packages/torch/nn/x.py."""
    parts = Path(filename).parts
    known = [at for at, part in enumerate(parts) if part in ("site-packages", "softless")]
    if not known:
        return Path(filename).stem
    return parts[known[-1]] if parts[known[-1]] == "softless" else Path(parts[known[-1] + 1]).stem


def _warn(sentence: str) -> None:
    color = False if "NO_COLOR" in os.environ else None
    typer.secho(f"warning: {' '.join(sentence.split())}", fg="yellow", err=True, color=color)


def complain(sentence: str) -> None:
    """One line on stderr, red on a terminal."""
    color = False if "NO_COLOR" in os.environ else None
    typer.secho(f"error: {' '.join(sentence.split())}", fg="red", err=True, color=color)


def whole_number(text: str, least: int = 1) -> int:
    """A number of something, from a command line."""
    digits = text.strip()
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= LONGEST_NUMBER and int(digits) >= least):
        raise typer.BadParameter(f"{text!r} is not a whole number from {least} to {10**LONGEST_NUMBER - 1}")
    return int(digits)


def refuse(given: dict[str, object], because: str) -> None:
    """Say why words that were given mean nothing here; None, False and nothing at all were not given."""
    if words := [word for word, value in given.items() if value]:
        raise ArgumentError(f"{' and '.join(words)}: {because}")


def console() -> "Console":
    """stdout as rich shows it: plain text where it is not a terminal."""
    from rich.console import Console

    return Console(highlight=False, emoji=False, markup=False)


def emit_json(document: Mapping[str, Any]) -> None:
    """The document and nothing else on stdout."""
    print(to_json(document))


def prepare_folder(folder: Path) -> None:
    """Be sure that files can be written there, before any work; it is not made yet, so a refused start leaves none."""
    try:
        there = folder.absolute()
        while not _exists(there):
            there = there.parent
        with tempfile.TemporaryFile(dir=there):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ArgumentError(f"cannot write in the folder {str(folder)!r}: {reason}") from None


def _exists(path: Path) -> bool:
    """Unlike `Path.exists`, a path through a file or a name that no disk can hold raises."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    return True


@contextmanager
def importing() -> Iterator[None]:
    """Importing torch and what it needs swallows a KeyboardInterrupt now and then: inside, Ctrl-C exits."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _drop_stdout() -> None:
    """Python flushes stdout once more as it exits, and would complain about it again."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):
        sys.stdout = None
