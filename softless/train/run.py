"""The folder of a run: its settings, its log, and two folders of checkpoints.

RUN/
  run.json       model, recipe, data, seed, teacher, init: everything that --resume needs
  tokenizer.json the tokens of a language model that learned them
  log.jsonl      a line every few updates and a line per evaluation; the same bytes however often the run was resumed
  last/          the newest checkpoints, to resume from
  best/          the weights with the best evaluation, and the best weights at the time of the newest checkpoint
  tensorboard/   the same numbers as the log, and the speed
  skipped.json   examples that could not be read, and why: {"train": {name: why}, "test": {name: why}}
  result.json    the outcome, written at the end
"""

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn

from softless.errors import ArgumentError, FileError, needs_extra
from softless.io import checkpoint
from softless.io.checkpoint import Checkpoint
from softless.io.files import Journal, write_all, write_json, written_or_explained

SCHEMA = "softless.run/1"


class Run:
    """The files of a run."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.about, self.log, self.result = folder / "run.json", folder / "log.jsonl", folder / "result.json"
        self.skipped, self.tokenizer = folder / "skipped.json", folder / "tokenizer.json"
        self.last, self.best, self.board = folder / "last", folder / "best", folder / "tensorboard"

    def must_be_new(self) -> None:
        """Raise an error if the folder already holds a run."""
        if self.about.exists():
            raise ArgumentError(
                f"{self.folder} holds a run already: go on with it with --resume, or give another folder with --out"
            )

    def begin(self, about: Mapping[str, Any]) -> None:
        """Write run.json."""
        self.must_be_new()
        write_json(self.about, {"schema": SCHEMA, **about})

    def read(self) -> dict[str, Any]:
        """Return the settings that the run was begun with."""
        try:
            document = json.loads(self.about.read_bytes())
            schema, recipe = document["schema"], document.get("recipe")
        except FileNotFoundError:
            raise FileError(f"{self.folder} holds no run: there is no {self.about.name} in it") from None
        except OSError as error:
            raise FileError(f"{self.about} cannot be read: {error.strerror}") from error
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise FileError(f"{self.about} is damaged ({error})") from error
        if schema != SCHEMA:
            raise FileError(f"{self.about} has schema {schema!r}, and {SCHEMA!r} is needed")
        if not isinstance(recipe, dict):
            raise FileError(f"{self.about} is damaged (its recipe is {recipe!r})")
        return document


def best_of(folder: Path) -> tuple[Checkpoint, dict[str, Any]]:
    """Return the best checkpoint of a run, and the run's document with the update of these weights."""
    saved = checkpoint.newest(Run(folder).best)
    if saved is None:
        raise FileError(f"{folder} holds no trained model: there is no checkpoint in {Run(folder).best}")
    return saved, {**saved.state["about"], "step": saved.step}


def load_best(model: nn.Module, saved: Checkpoint) -> None:
    """Load the weights of a checkpoint into the model of its run."""
    try:
        model.load_state_dict(saved.parts["model"])
    except (RuntimeError, LookupError) as error:
        raise FileError(f"{saved.path} does not fit the model of its run ({error})") from error


def must_agree(before: Mapping[str, Any], now: Mapping[str, Any], what: str, where: str = "") -> None:
    """Raise an error that names the first difference: a run must go on with the settings it began with."""
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            must_agree(old, new, what, f"{where}{key}.")
        elif old != new:
            raise ArgumentError(f"{what} was begun with {where}{key} {old!r}, and it is {new!r} now")


@dataclass(frozen=True)
class Outcome:
    """The result of a finished training.

    steps       updates
    best_step   the update with the best evaluation
    metric      the name of the number that decides which evaluation is best
    best        that number
    last        the numbers of the last evaluation
    seconds     time of training, without the time that interruptions lost
    skipped     examples that could not be read
    answers     results per example of the last evaluation; None in runs from before they were saved
    """

    steps: int
    best_step: int
    metric: str
    best: float
    last: dict[str, float]
    seconds: float
    skipped: int
    answers: Mapping[str, Any] | None

    def document(self) -> dict[str, Any]:
        """Return the outcome as result.json has it."""
        best = {"best_step": self.best_step, f"best_{self.metric}": self.best}
        rest = {"last": self.last, "seconds": self.seconds, "skipped": self.skipped, "answers": self.answers}
        return {"steps": self.steps, **best, **rest}


class Ledger:
    """The log and the curves of a run, open while it trains. An error in training hides an error in closing."""

    def __init__(self, run: Run, step: int, length: int):
        """Cut the log to `length` bytes, and hide curves after update `step`: an interrupted run wrote the rest."""
        self.journal, self.board = Journal(run.log, length), Board(run.board, step)

    def add(self, step: int, group: str, numbers: Mapping[str, float], speed: Mapping[str, float]) -> None:
        self.journal.add({"step": step, **numbers})
        self.board.add(group, {**numbers, **speed}, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with suppress(*(() if error is None else (FileError,))):
            self.journal.close()
            self.board.close()


class Board:
    """Curves for TensorBoard, written immediately; TensorBoard's own writer prints a traceback on a full disk."""

    def __init__(self, folder: Path, step: int):
        with needs_extra("training writes TensorBoard files", "train"):
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.record_writer import RecordWriter
        self.folder, self.event, self.summary, self.framed = folder, Event, Summary, RecordWriter(self)
        with written_or_explained(f"the curves in {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            place = folder / f"events.out.tfevents.{time.time_ns()}.{os.getpid()}"
            self.file = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._append(file_version="brain.Event:2")
        self._append(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def add(self, group: str, numbers: Mapping[str, float], step: int) -> None:
        values = [self.summary.Value(tag=f"{group}/{name}", simple_value=value) for name, value in numbers.items()]
        self._append(step=step, summary=self.summary(value=values))

    def close(self) -> None:
        with written_or_explained(f"the curves in {self.folder}"):
            os.close(self.file)

    def write(self, data: bytes) -> None:
        """Write a framed event; the record writer calls this."""
        with written_or_explained(f"the curves in {self.folder}"):
            write_all(self.file, data)

    def _append(self, **content: Any) -> None:
        self.framed.write(self.event(wall_time=time.time(), **content).SerializeToString())
