"""Cases whose tests wait for `make slow`, because a case that works alike runs at every change.

A case says so itself, by its attribute `waits`: ALWAYS, or WITH_EXAMPLES for the tests that hypothesis repeats. Where
cases are known by their names, the name is a `Variant`.
"""

from typing import Self

ALWAYS, WITH_EXAMPLES = "always", "with examples"


class Variant(str):
    """The name of a case that waits."""

    __slots__ = ("waits",)

    def __new__(cls, name: str, waits: str = ALWAYS) -> Self:
        self = super().__new__(cls, name)
        self.waits = waits
        return self
