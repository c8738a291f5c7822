"""Several small trainings on one device: a run, and worker processes that train one run after the other.

A run is one training, which leaves a JSON record. A subclass of `GridRun` says what is trained: images or a text.

A worker loads its imports, its kernels and the material of the grid once. It reports the progress of its run and
returns the record. A worker that dies, or whose run failed, is replaced, because a broken CUDA context fails every
later run.
"""

import multiprocessing as mp
import shutil
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from softless.errors import NonFiniteError
from softless.io import checkpoint
from softless.io.files import write_json
from softless.train.assemble import Runtime
from softless.train.loop import Interrupted, Job
from softless.train.run import Run

PATIENCE = 0.5  # seconds between two reports of progress
GRACE = 60  # seconds in which a run is saved after Ctrl-C

Progress = Callable[[str, float], None]  # name of a run, share of its updates that are done


@dataclass(frozen=True, kw_only=True)
class GridRun(ABC):
    """A twin, a seed, and everything it takes to train it in another process."""

    out: Path
    twin: Any  # with an id and a label
    seed: int
    runtime: Runtime
    together: int = 1
    ends: float | None = None  # time.time() at which the run must stop

    @property
    def name(self) -> str:
        return f"{self.twin.id}-{self.seed}"

    @property
    def record(self) -> Path:
        return self.out / "runs" / f"{self.name}.json"

    @property
    def training(self) -> Path:
        """The folder of the training, which is removed when the run is done."""
        return self.out / "trainings" / self.name

    def material(self) -> Any:
        """Load what all runs of the grid share; a process does this once."""
        return None

    @abstractmethod
    def train(self, material: Any, watch: "RunWatcher") -> dict[str, Any]:
        """Train from the beginning or from the last checkpoint, save the weights, and return the scores."""

    @abstractmethod
    def record_of(self, scores: Mapping[str, Any], parameters: int = 0, wall: float = 0.0) -> Any:
        """Return the record of this run after it ended with these scores."""


class RunWatcher:
    """A `Watcher` that reports the progress of a run, and stops the run when its time is over or on request."""

    def __init__(self, run: GridRun, progress: Progress, stopped: Callable[[], bool]):
        self.run, self.progress, self.stopped = run, progress, stopped
        self.parameters, self.total, self.requested = 0, 1, False

    def begin(self, job: Job, parameters: int) -> None:
        self.job, self.parameters = job, parameters
        self.total = job.task.train.per_epoch * job.recipe.all_epochs

    def tick(self, step: int) -> None:
        if step < self.total and self.over():
            self.requested = self.job.stop.requested = True
        self.progress(self.run.name, step / self.total)

    def over(self) -> bool:
        """Return whether the run must stop."""
        return (self.run.ends is not None and time.time() > self.run.ends) or self.stopped()

    def logged(self, step: int, numbers: Mapping[str, float]) -> None:
        """Ignore the numbers: the log of the training has them."""


def execute(
    run: GridRun,
    material: Any,
    progress: Progress = lambda _name, _share: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Any:
    """Train from the beginning or from the last checkpoint, and write the record; None if the run was stopped first.

    Ctrl-C raises `Interrupted`. In both cases the run is saved, and the next call continues it.
    """
    began, before, watcher = time.monotonic(), 0.0, RunWatcher(run, progress, stopped)
    scores: dict[str, Any] = {}
    try:
        saved = checkpoint.newest(Run(run.training).last)
        before = 0.0 if saved is None else saved.state["seconds"]
        scores = {"status": "done", **run.train(material, watcher)}
    except Interrupted:
        if watcher.requested:
            return None
        raise
    except NonFiniteError as error:
        scores |= {"status": "diverged", "reason": str(error)}
    except Exception as error:  # noqa: BLE001 one bad twin does not end a grid: its record says why
        scores |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    record = run.record_of(scores, watcher.parameters, before + time.monotonic() - began)
    write_json(run.record, record)
    if record["status"] != "failed":
        shutil.rmtree(run.training, ignore_errors=True)
    return record


class Worker:
    """A process, and the run that it trains."""

    def __init__(self) -> None:
        spawn = mp.get_context("spawn")  # CUDA cannot be forked
        self.end, theirs = spawn.Pipe()
        self.run: GridRun | None = None
        self.process: BaseProcess = spawn.Process(target=work, args=(theirs,), daemon=True)
        resource_tracker.ensure_running()  # starting it later would unblock SIGINT
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # inherited: Ctrl-C must not end its imports
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def close(self) -> None:
        with suppress(OSError):
            self.end.send(None)
        self.end.close()
        self.process.join(GRACE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class Workers:
    """At most `count` worker processes, started when they are needed. On `close` they save their runs and end."""

    def __init__(self, count: int):
        self.count = count
        self.workers: list[Worker] = []

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

    @property
    def busy(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.run is not None]

    @property
    def free(self) -> bool:
        return len(self.busy) < self.count

    def start(self, run: GridRun) -> None:
        idle = next((worker for worker in self.workers if worker.run is None), None)
        if idle is None:
            idle = Worker()
            self.workers.append(idle)
        idle.run = run
        idle.end.send(run)

    def wait(self, progress: Progress) -> list[Any]:
        """Wait until a run ends, and return the records of the runs that ended; a run that was stopped has none."""
        records: list[Any] = []
        over = False
        while not over:
            ready = wait([worker.end for worker in self.busy])
            for worker in [worker for worker in self.busy if worker.end in ready]:
                kind, *message = self._receive(worker)
                if kind == "share":
                    progress(*message)
                    continue
                over, worker.run = True, None
                (record,) = message
                if record is not None:
                    records.append(record)
                if record is None or record["status"] == "failed":
                    self.workers.remove(worker)
                    worker.close()
        return records

    def _receive(self, worker: Worker) -> tuple[Any, ...]:
        assert worker.run is not None
        try:
            return worker.end.recv()
        except (EOFError, OSError):
            worker.process.join()
            reason = f"its process ended with status {worker.process.exitcode}"
            record = worker.run.record_of({"status": "failed", "reason": reason})
            write_json(worker.run.record, record)
            return "over", record


def work(end: Connection) -> None:
    """Train one run after the other, inside the worker.

    A message that arrives during a training stops it: there are no more runs, or the parent has died.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer notes Ctrl-C itself and saves the run
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    torch.set_num_threads(1)
    reported, material, known = 0.0, None, None

    def progress(name: str, share: float) -> None:
        nonlocal reported
        if share == 1 or time.monotonic() - reported > PATIENCE:
            reported = time.monotonic()
            with suppress(OSError):
                end.send(("share", name, share))

    with suppress(EOFError, OSError, KeyboardInterrupt):
        while (run := end.recv()) is not None:
            if known != (type(run), run.out):
                material, known = run.material(), (type(run), run.out)
            end.send(("over", execute(run, material, progress, end.poll)))
