"""Several small trainings on one device: worker processes that train one run after the other.

A worker loads its imports, its kernels and the decoded images once. It reports the progress of its run and returns the
record. A worker that dies, or whose run failed, is replaced, because a broken CUDA context fails every later run.
"""

import multiprocessing as mp
import signal
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from softless.io.files import write_json
from softless.study.twin_run import Progress, RunRecord, TwinRun, execute, record_of

PATIENCE = 0.5  # seconds between two reports of progress
GRACE = 60  # seconds in which a run is saved after Ctrl-C


class Worker:
    """A process, and the run that it trains."""

    def __init__(self) -> None:
        spawn = mp.get_context("spawn")  # CUDA cannot be forked
        self.end, theirs = spawn.Pipe()
        self.run: TwinRun | None = None
        self.process: BaseProcess = spawn.Process(target=work, args=(theirs,), daemon=True)
        self.process.start()
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

    def start(self, run: TwinRun) -> None:
        idle = next((worker for worker in self.workers if worker.run is None), None)
        if idle is None:
            idle = Worker()
            self.workers.append(idle)
        idle.run = run
        idle.end.send(run)

    def wait(self, progress: Progress) -> list[RunRecord]:
        """Wait until a run ends, and return the records of the runs that ended; a run that was stopped has none."""
        records: list[RunRecord] = []
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
            record = record_of(worker.run, {"status": "failed", "reason": reason})
            write_json(worker.run.record, record)
            return "over", record


def work(end: Connection) -> None:
    """Train one run after the other, inside the worker.

    A message that arrives during a training stops it: there are no more runs, or the parent has died.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer notes Ctrl-C itself and saves the run
    torch.set_num_threads(1)
    reported, decoded, known = 0.0, None, None

    def progress(name: str, share: float) -> None:
        nonlocal reported
        if share == 1 or time.monotonic() - reported > PATIENCE:
            reported = time.monotonic()
            with suppress(OSError):
                end.send(("share", name, share))

    with suppress(EOFError, OSError, KeyboardInterrupt):
        while (run := end.recv()) is not None:
            if known != (run.out, run.data):
                decoded, known = run.images(), (run.out, run.data)
            end.send(("over", execute(run, decoded, progress, end.poll)))
