"""A run's folder: what was asked for, the log, and two shelves of checkpoints.

RUN/
  run.json       model, recipe, data, seed, teacher, init: all that --resume needs
  log.jsonl      one line every few updates and one for each evaluation; the same bytes however often it was resumed
  last/          the newest checkpoints, to go on from
  best/          the weights that did best on the test images, and those that last/ knows of, for a run that goes back
  tensorboard/
  skipped.json   images that could not be decoded, and why: {"train": {name: why}, "test": {name: why}}
  result.json    at the end
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from softless.errors import ArgumentError, FileError
from softless.io.files import write_json

SCHEMA = "softless.run/1"


class Run:
    """Places in the folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.about, self.log, self.result = folder / "run.json", folder / "log.jsonl", folder / "result.json"
        self.skipped = folder / "skipped.json"
        self.last, self.best, self.board = folder / "last", folder / "best", folder / "tensorboard"

    def must_be_new(self) -> None:
        """A folder that holds a run already is left alone."""
        if self.about.exists():
            raise ArgumentError(
                f"{self.folder} holds a run already: go on with it with --resume, or give another folder with --out"
            )

    def begin(self, about: Mapping[str, Any]) -> None:
        """A new run."""
        self.must_be_new()
        write_json(self.about, {"schema": SCHEMA, **about})

    def read(self) -> dict[str, Any]:
        """What the run was begun with."""
        try:
            document = json.loads(self.about.read_bytes())
            if document["schema"] != SCHEMA:
                raise FileError(f"{self.about} has schema {document['schema']!r}, and {SCHEMA!r} is read here")
            if not isinstance(document["recipe"], dict):
                raise FileError(f"{self.about} is damaged (its recipe is {document['recipe']!r})")
        except FileNotFoundError:
            raise FileError(f"{self.folder} holds no run: there is no {self.about.name} in it") from None
        except OSError as error:
            raise FileError(f"{self.about} cannot be read: {error.strerror}") from error
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            if isinstance(error, FileError):
                raise
            raise FileError(f"{self.about} is damaged ({error})") from error
        return document


def must_agree(before: Mapping[str, Any], now: Mapping[str, Any], what: str, where: str = "") -> None:
    """A run goes on as it began, or not at all: the first difference is named."""
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            must_agree(old, new, what, f"{where}{key}.")
        elif old != new:
            raise ArgumentError(f"{what} was begun with {where}{key} {old!r}, and it is {new!r} now")
