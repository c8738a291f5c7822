"""Several small trainings on one device: worker processes that take one run after the other.

A worker pays once for its imports, its kernels and the decoded images. It tells how far its run is and hands back the
record; one that dies, or whose run failed, is replaced, since a broken CUDA context fails every run after it.
"""

import multiprocessing as mp
import signal
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

import torch

from softless.io.files import write_json
from softless.study.twin_run import Progress, Task, decoded_set, execute, failed_record

PATIENCE = 0.5  # seconds between two words on how far a run is
GRACE = 60  # seconds for a run to be saved after Ctrl-C


class Worker:
    """A process and the run it has."""

    def __init__(self) -> None:
        spawn = mp.get_context("spawn")  # CUDA cannot be forked
        self.end, theirs = spawn.Pipe()
        self.task: Task | None = None
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


class Pack:
    """`count` workers, made when they are needed. Leaving it by an exception asks the runs to stop, and waits."""

    def __init__(self, count: int):
        self.count = count
        self.workers: list[Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for worker in self.workers:
            worker.close()

    @property
    def busy(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.task is not None]

    @property
    def free(self) -> bool:
        return len(self.busy) < self.count

    def start(self, task: Task) -> None:
        idle = next((worker for worker in self.workers if worker.task is None), None)
        if idle is None:
            idle = Worker()
            self.workers.append(idle)
        idle.task = task
        idle.end.send(task)

    def wait(self, progress: Progress) -> list[dict[str, Any]]:
        """Until a run is over: the records of those that are, without those that were stopped."""
        records: list[dict[str, Any]] = []
        over = False
        while not over:
            ready = wait([worker.end for worker in self.busy])
            for worker in [worker for worker in self.busy if worker.end in ready]:
                kind, *said = self._heard(worker)
                if kind == "share":
                    progress(*said)
                    continue
                over, worker.task = True, None
                (record,) = said
                if record is not None:
                    records.append(record)
                if record is None or record["status"] == "failed":
                    self.workers.remove(worker)
                    worker.close()
        return records

    def _heard(self, worker: Worker) -> tuple[Any, ...]:
        assert worker.task is not None
        try:
            return worker.end.recv()
        except (EOFError, OSError):
            worker.process.join()
            reason = f"its process ended with status {worker.process.exitcode}"
            record = failed_record(worker.task, reason)
            write_json(worker.task.record, record)
            return "over", record


def work(end: Connection) -> None:
    """In the worker: one run after the other.

    While it trains nothing comes but the end: word that there are no more, or that the process that asked is gone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # while it trains, Ctrl-C is noted, and the run is saved
    torch.set_num_threads(1)
    told, decoded, known = 0.0, None, None

    def progress(name: str, share: float) -> None:
        nonlocal told
        if share == 1 or time.monotonic() - told > PATIENCE:
            told = time.monotonic()
            with suppress(OSError):
                end.send(("share", name, share))

    with suppress(EOFError, OSError, KeyboardInterrupt):
        while (task := end.recv()) is not None:
            if known != (task.out, task.data):
                decoded, known = decoded_set(task), (task.out, task.data)
            end.send(("over", execute(task, decoded, progress, end.poll)))
