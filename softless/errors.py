"""The one error family: every failure a user can cause is a `SoftlessError`.

The text repeats what was given and what was needed, in one sentence.
"""

from collections.abc import Iterable
from difflib import get_close_matches

LONGEST = 80


def shown(value: object) -> str:
    """A value as an error quotes it: its repr on one line, cut short where it is long."""
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
    """The mechanism cannot do what was asked, and will not approximate it silently."""


class BackendError(SoftlessError, ValueError):
    """The requested backend cannot run this call."""


class FileError(SoftlessError, ValueError):
    """A file is missing, damaged, hostile, or does not hold what was needed."""


class MissingExtraError(SoftlessError, ImportError):
    """An optional dependency is not installed; the text names its pip command."""


class NonFiniteError(SoftlessError, ArithmeticError):
    """A loss or a gradient is NaN or infinite, and the update was not made."""


def no_such(kind: str, name: object, known: Iterable[str]) -> str:
    """The sentence for a name that does not exist: the nearest one that does, or else all of them.

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


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The question, with the name nearest to this one; empty where none is near."""
    close = get_close_matches(name, list(known), n=1) if isinstance(name, str) else []
    return f"did you mean {close[0]!r}?" if close else ""
