"""The errors of this library. Every failure that a user can cause is a `SoftlessError`.

Each message is one sentence that repeats what was passed and what was needed.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

LONGEST = 80


def shown(value: object) -> str:
    """Return a value as error messages quote it: its repr on one line, shortened if it is long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001  an int of 4300 digits has no repr, and a user's class may have a broken one
        return f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}... ({len(text)} characters)"


class SoftlessError(Exception):
    """Base of every error this library raises on purpose."""


class ArgumentError(SoftlessError, ValueError):
    """An argument has the wrong type, shape or value."""


class UnsupportedError(SoftlessError, ValueError):
    """The mechanism or module cannot do this, and does not approximate it silently."""


class BackendError(SoftlessError, ValueError):
    """The requested backend cannot run this call."""


class FileError(SoftlessError, ValueError):
    """A file is missing, damaged or hostile, or lacks what was needed."""


class MissingExtraError(SoftlessError, ImportError):
    """An optional dependency is not installed; the text names its pip command."""


class NonFiniteError(SoftlessError, ArithmeticError):
    """A loss or a gradient is NaN or infinite, so the update was skipped."""


@contextmanager
def needs_extra(user: str, extras: str) -> Iterator[None]:
    """Raise a `MissingExtraError` with the pip command if an import in the body fails; `user` says what needs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        install = f"pip install 'softless[{extras}]'"
        raise MissingExtraError(
            f"{user}, and {str(error.name).partition('.')[0]} is not installed: {install}"
        ) from None


def no_such(kind: str, name: object, known: Iterable[str]) -> str:
    """Return the sentence for a name that does not exist: with the nearest name that does, or with all of them.

    >>> from softless.errors import no_such
    >>> no_such("mechanism", "linnear", ["softmax", "linear"])
    "mechanism 'linnear' does not exist: did you mean 'linear'?"
    >>> no_such("mechanism", "magic", ["softmax", "linear"])
    "mechanism 'magic' is not one of softmax, linear"
    """
    names = list(known)
    if close := did_you_mean(name, names):
        return f"{kind} {shown(name)} does not exist: {close}"
    return f"{kind} {shown(name)} is not one of {', '.join(names)}"


def check_choice(option: str, value: object, choices: tuple[str | None, ...]) -> None:
    """Raise if a value is not one of the choices."""
    if not (value is None or isinstance(value, str)) or value not in choices:
        raise ArgumentError(f"{option} {shown(value)} is not one of {', '.join(map(str, choices))}")


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return "did you mean ...?" with the nearest known name, or an empty string if none is near."""
    close = get_close_matches(name, list(known), n=1) if isinstance(name, str) else []
    return f"did you mean {close[0]!r}?" if close else ""
