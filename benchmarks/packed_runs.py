"""Runs that share a device, can be stopped, and leave records.

    OUT/PART/NAME/              a run: the folder of softless train
    OUT/records/PART-NAME.json  what is kept of it
    OUT/logs/PART-NAME.txt      what its processes printed

A run is finished when it has a record. When the time is over, SIGTERM lets the other runs save themselves, and the next
call continues them. A run that fails is reported and does not stop the others.
"""

import json
import math
import os
import shutil
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from softless.io.files import write_json
from softless.report.units import counted
from softless.train.run import Run

ROOT = Path(__file__).parents[1]
NOT_FINITE = 1  # exit status of softless train; a crash of Python has the same
LAST, GRACE, PAUSE = 30.0, 40.0, 0.2  # seconds: in which nothing begins, to save a run, between two looks

Process = subprocess.Popen[bytes]
Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PackedRun(ABC):
    """A run of one process, or of several one after another. A subclass says which, and what is kept of it."""

    out: Path
    part: str

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the run in its part."""

    @abstractmethod
    def about(self) -> Record:
        """Return what the record says even if the run diverged."""

    @abstractmethod
    def outcome(self, together: int) -> Record:
        """Return the rest of the record of a finished run, one of `together` that shared the device."""

    @abstractmethod
    def told(self, record: Record) -> str:
        """Return what the line on a finished run says."""

    @property
    def over(self) -> bool:
        """Whether the run needs no further process, if its last one succeeded."""
        return True

    @property
    def run(self) -> Run:
        return Run(self.out / self.part / self.name)

    @property
    def record(self) -> Path:
        return self.out / "records" / f"{self.part}-{self.name}.json"

    @property
    def log(self) -> Path:
        return self.out / "logs" / f"{self.part}-{self.name}.txt"


R = TypeVar("R", bound=PackedRun)


def run_packed(wanted: Sequence[R], words: Callable[[R], list[str]], *, pack: int, minutes: float | None = None) -> int:
    """Work on the runs that have no record, several at once, and return how many are left when the time is over.

    words   the next command of a run
    """
    todo = [run for run in wanted if not run.record.exists()]
    waiting, busy = [*todo], dict[R, Process]()
    together, ends = min(pack, len(waiting)), time.monotonic() + (60 * minutes if minutes else math.inf)
    print(f"{counted(len(todo), 'run')} without a record", flush=True)
    try:
        while (time.monotonic() < ends and busy) or (time.monotonic() < ends - LAST and waiting):
            while waiting and len(busy) < together and time.monotonic() < ends - LAST:
                run = waiting.pop(0)
                busy[run] = begin(run, words(run))
            time.sleep(PAUSE)
            for run in [each for each, process in busy.items() if process.poll() is not None]:
                if ended(run, busy.pop(run).returncode, together):
                    waiting.insert(0, run)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    finally:
        stop(busy)
    return sum(not run.record.exists() for run in todo)


def begin(run: PackedRun, words: Sequence[str]) -> Process:
    """Start a process that prints to the log of the run, with one thread, and with this checkout on its path."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    run.log.parent.mkdir(parents=True, exist_ok=True)
    with run.log.open("ab") as file:
        file.write(f"\n$ {' '.join(words)}\n".encode())
        file.flush()
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment)


def ended(run: PackedRun, status: int, together: int) -> bool:
    """Note how a process ended; return whether the run needs another one."""
    label = f"{run.part} {run.name:24}"
    if status:
        line = last_line(run.log)
        if status == NOT_FINITE and line.startswith("error: ") and not run.run.result.exists():
            write(run.record, {**run.about(), "status": "diverged", "reason": line})
        print(f"{label} failed with status {status}: {line}", flush=True)
    elif not run.over:
        return True
    else:
        record = {**run.about(), "status": "done", **run.outcome(together)}
        write(run.record, record)
        shutil.rmtree(run.run.last, ignore_errors=True)  # a gigabyte that nothing needs any more
        print(f"{label} {run.told(record)}", flush=True)
    return False


def stop(busy: dict[R, Process]) -> None:
    """Ask the processes to save their runs, and end those that take too long."""
    for process in busy.values():
        process.terminate()
    ends = time.monotonic() + GRACE
    for run, process in busy.items():
        try:
            process.wait(max(ends - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        print(f"{run.part} {run.name:24} stopped", flush=True)


def write(path: Path, document: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, document)


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def records_of(out: Path, part: str) -> dict[str, Record]:
    """Return the records of the finished runs of a part, by name."""
    records = [json.loads(path.read_bytes()) for path in sorted((out / "records").glob(f"{part}-*.json"))]
    return {record["name"]: record for record in records}
