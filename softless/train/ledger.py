"""A run's numbers on the disk: the log, whose bytes a resumed run repeats, and TensorBoard's curves with the speed."""

from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Self

from softless.errors import FileError
from softless.io.files import Journal
from softless.train.board import Board
from softless.train.run import Run


class Ledger:
    """Open until the end of a training; of an error on its way and one of closing, the first is told."""

    def __init__(self, run: Run, step: int, length: int):
        """The first `length` bytes of the log, curves up to update `step`, and then what is added."""
        self.journal, self.board = Journal(run.log, length), Board(run.board, step)

    def add(self, step: int, group: str, numbers: Mapping[str, float], speed: Mapping[str, float]) -> None:
        self.journal.add({"step": step, **numbers})
        self.board.add(group, {**numbers, **speed}, step)

    def sync(self) -> int:
        """The log is on the disk; returns its length."""
        return self.journal.sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with suppress(*(() if error is None else (FileError,))):
            self.journal.close()
            self.board.close()
