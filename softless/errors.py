"""The one error family: every failure a user can cause is a `SoftlessError`.

The text repeats what was given and what was needed, in one sentence.
"""


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
