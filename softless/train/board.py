"""The same numbers for TensorBoard, written as soon as they are told.

TensorBoard's own writer leaves that to a thread, which answers a full disk with a traceback.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from softless.errors import MissingExtraError
from softless.io import files


class Board:
    """Curves in a folder; those after `step` are of an interrupted run and are hidden."""

    def __init__(self, folder: Path, step: int):
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ModuleNotFoundError:
            raise MissingExtraError(
                "training writes TensorBoard files, and tensorboard is not installed: pip install 'softless[train]'"
            ) from None
        self.folder, self.event, self.summary, self.framed = folder, Event, Summary, RecordWriter(self)
        with files.written_or_explained(f"the curves in {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            place = folder / f"events.out.tfevents.{time.time_ns()}.{os.getpid()}"
            self.file = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._append(file_version="brain.Event:2")
        self._append(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def add(self, group: str, numbers: Mapping[str, float], step: int) -> None:
        values = [self.summary.Value(tag=f"{group}/{name}", simple_value=value) for name, value in numbers.items()]
        self._append(step=step, summary=self.summary(value=values))

    def close(self) -> None:
        with files.written_or_explained(f"the curves in {self.folder}"):
            os.close(self.file)

    def write(self, data: bytes) -> None:
        """What an event is once it is framed."""
        with files.written_or_explained(f"the curves in {self.folder}"):
            files.write_all(self.file, data)

    def _append(self, **content: Any) -> None:
        self.framed.write(self.event(wall_time=time.time(), **content).SerializeToString())
