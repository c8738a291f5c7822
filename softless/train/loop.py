"""The training loop: it logs, evaluates and saves, and can be killed at any moment.

    for each batch   seed by (seed, update, rank), then update
    every log_every  read losses back from the device, and write a line of log
    every epoch      evaluate, save the best weights, save

An interrupted run goes on from its newest intact checkpoint. It ends with the same bits as an uninterrupted run:
weights, optimizer, averaged weights and log. No state of a random generator is saved, because (seed, update, rank) seed
everything that an update draws, whatever evaluations and data workers drew before it.
"""

import math
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from softless.data.sampler import update_key
from softless.errors import ArgumentError, FileError, NonFiniteError
from softless.io import checkpoint
from softless.io.files import write_json
from softless.machine import circumstances
from softless.train import snapshot
from softless.train.devices import Devices, by_blas
from softless.train.engine import Engine
from softless.train.run import Ledger, Outcome, Run
from softless.train.settings import Settings
from softless.train.tasks import Task, all_skipped, evaluate


def seed_all(seed: int, step: int, rank: int) -> None:
    """Seed every generator that a model, a mixup or a transform may draw from, for one update on one rank."""
    number = update_key(seed, step, rank)
    random.seed(number)
    np.random.seed(number % 2**32)  # noqa: NPY002, timm draws from the global one
    torch.manual_seed(number)


class Interrupted(KeyboardInterrupt):
    """A training was interrupted, and its state is saved."""


class Stop:
    """A context in which Ctrl-C and SIGTERM ask the loop to save and stop. A second Ctrl-C stops at once.

    A second SIGTERM does nothing, because a process may get two: one from the scheduler and one from torchrun.

    requested   whether to stop after this update
    saving      whether the state is being saved before stopping
    """

    def __init__(self) -> None:
        self.requested = self.saving = False
        self.before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def agreed(self, devices: Devices, step: int, every: int) -> bool:
        """Return whether to stop now. Ranks decide together, every few updates: none may stop while others go on."""
        if devices.ranks == 1:
            return self.requested
        return step % every == 0 and any(devices.gather(self.requested))

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True


class Watcher(Protocol):
    """An object that the loop calls while a training runs."""

    def begin(self, job: "Job", parameters: int) -> None:
        """Note that the training begins, and how many parameters its model has."""

    def tick(self, step: int) -> None:
        """Note that an update was sent to the device."""

    def logged(self, step: int, numbers: Mapping[str, float]) -> None:
        """Note a new line of the log: loss, gradient_norm, lr and speed, or the numbers of an evaluation."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that a training needs. A watcher can stop it, as Ctrl-C does, with `job.stop.requested = True`.

    about    JSON that is saved with the best weights, to build the model again
    resume   whether to go on from the newest checkpoint
    """

    task: Task
    recipe: Settings
    folder: Path
    devices: Devices
    watch: Watcher
    about: Mapping[str, Any]
    seed: int = 0
    resume: bool = False
    stop: Stop = field(default_factory=Stop)


def fit(job: Job) -> Outcome:
    """Train to the end of the recipe, from the beginning or from the newest checkpoint."""
    loop = Loop(job)
    with loop.ledger or nullcontext(), job.stop, by_blas(job.recipe.precision):
        loop.run_on()
    return loop.outcome()


class Loop:
    """The state of a training, and the steps of its loop."""

    def __init__(self, job: Job):
        self.job, self.task, self.recipe, self.devices = job, job.task, job.recipe, job.devices
        self.run, self.per_epoch = Run(job.folder), job.task.train.per_epoch
        self.total = self.per_epoch * job.recipe.all_epochs
        seed_all(job.seed, -1, 0)
        self.engine = Engine(job.task.model, job.recipe, job.devices, job.task.loss, self.per_epoch)
        self.best: dict[str, float] = {}
        self.scores: dict[str, float] = {}
        self.answers: Mapping[str, Any] | None = None
        self.skipped: dict[str, dict[str, str]] = {"train": {}, "test": {}}  # name -> why
        self.seconds, self.saved = 0.0, -1
        self.recorded = -1  # the update of the best weights, as the newest checkpoint in last/ has it
        self.recent: deque[tuple[int, Tensor]] = deque(maxlen=job.recipe.log_every + 1)
        length = self._go_back() if job.resume else 0
        self.ledger = Ledger(self.run, self.engine.step, length) if self.devices.main else None
        self.clock, self.counted = time.monotonic(), self.engine.step

    def run_on(self) -> None:
        """Train to the last update. If interrupted, save and raise `Interrupted`."""
        while self.engine.step < self.total:
            self.engine.plain.train()
            self.task.train.sampler.set_epoch(self.engine.step // self.per_epoch)
            for batch in self.task.train:
                seed_all(self.job.seed, self.engine.step, self.devices.rank)
                self.recent.append((self.engine.step, batch.ids))
                self.engine.update(batch)
                self.job.watch.tick(self.engine.step)
                self._after_update()
                if self.job.stop.agreed(self.devices, self.engine.step, self.recipe.log_every):
                    self.job.stop.saving = True
                    self._save()
                    self.devices.wait()  # torchrun kills the other ranks soon after the first rank exits
                    raise Interrupted(f"stopped after update {self.engine.step} of {self.total}")
                if self.engine.step % self.per_epoch == 0:
                    break
        seed_all(self.job.seed, self.total, self.devices.rank)  # draws after the end must not depend on interruptions
        if self.devices.main:
            machine = circumstances(self.devices.device.type, "timm")
            write_json(self.run.result, {**self.outcome().document(), **machine})

    def outcome(self) -> Outcome:
        metric, skipped = self.task.metric, sum(map(len, self.skipped.values()))
        best = int(self.best["step"]), metric, self.best[metric]
        return Outcome(self.engine.step, *best, self.scores, round(self.seconds, 3), skipped, self.answers)

    def _after_update(self) -> None:
        step, every = self.engine.step, self.recipe.checkpoint_every
        epoch, ends = step // self.per_epoch, step % self.per_epoch == 0
        if step % self.recipe.log_every == 0:
            self._log()
        elif self.devices.device.type == "cpu":
            self._check()
        within, often = self.recipe.evaluate_updates, ends and epoch % self.recipe.evaluate_every == 0
        if step == self.total or (step % within == 0 if within else often):
            self._evaluate(epoch if ends else step / self.per_epoch)
        if step == self.total or (step % every == 0 if every else ends):
            self._save()

    def _log(self) -> None:
        self._check()
        losses, norms = (torch.stack(values).tolist() for values in (self.engine.losses, self.engine.norms))
        self.engine.losses, self.engine.norms = [], []
        numbers = {"loss": mean(losses), "lr": self.engine.lr}
        if finite := [norm for norm in norms if math.isfinite(norm)]:  # fp16 skips updates whose norm is infinite
            numbers["gradient_norm"] = mean(finite)
        self._tell("train", numbers, {f"{self.task.speed_unit[0]}_per_second": self._lap()})

    def _evaluate(self, epoch: float) -> None:
        self._check()
        step, model = self.engine.step, self.engine.best_model
        measured = evaluate(model, self.task.test, self.task.metrics, self.devices).evaluation()
        self.engine.plain.train()
        if not math.isfinite(measured.loss):
            raise NonFiniteError(
                f"the loss on the test {self.task.unit} is {measured.loss} after update {step}, and {self._kept()}"
            )
        self.scores, self.answers = measured.numbers, measured.answers
        self._tell("test", {"epoch": epoch, **self.scores})
        metric, sign = self.task.metric, 1 if self.task.higher_is_better else -1
        if metric not in self.best or sign * self.scores[metric] > sign * self.best[metric]:
            self.best = {"step": step, metric: self.scores[metric]}
            weights = snapshot.weights(model)
            about = {"about": dict(self.job.about), "scores": measured.document}
            if self.devices.main:
                checkpoint.save(self.run.best, step, {"model": weights}, about, keep=1, also=self.recorded)

    def _save(self) -> None:
        self._check()
        if self.saved == self.engine.step:
            return
        parts, numbers = snapshot.pack(self.engine)
        self._lap()
        for name, batches in (("train", self.task.train), ("test", self.task.test)):
            self.skipped[name] |= all_skipped(batches, self.devices)
        if self.ledger is not None:
            record = {
                "engine": numbers,
                "sampler": self.task.train.sampler.state_dict(),
                "rng": {"seed": self.job.seed, "step": self.engine.step},
                "best": self.best,
                "scores": self.scores,
                "answers": self.answers,
                "skipped": self.skipped,
                "seconds": self.seconds,
                "log_bytes": self.ledger.journal.sync(),
            }
            if any(self.skipped.values()):
                write_json(self.run.skipped, self.skipped)
            checkpoint.save(self.run.last, self.engine.step, parts, record)
        self.saved, self.recorded = self.engine.step, int(self.best.get("step", -1))

    def _go_back(self) -> int:
        """Load the newest intact checkpoint, and return how long the log was; 0 if there is no checkpoint."""
        saved = checkpoint.newest(self.run.last)
        names = self.devices.gather("none" if saved is None else saved.path.name)
        if len({*names}) > 1:
            newest = ", ".join(f"rank {rank} finds {name}" for rank, name in enumerate(names))
            raise FileError(f"ranks must go on from the same checkpoint, and in {self.run.last} {newest}")
        if saved is None:
            return 0
        if saved.state["rng"]["seed"] != self.job.seed:
            raise ArgumentError(f"the run has seed {saved.state['rng']['seed']}, and seed {self.job.seed} was given")
        snapshot.unpack(self.engine, saved)
        self.task.train.sampler.load_state_dict(saved.state["sampler"])
        self.best, self.scores, self.seconds = saved.state["best"], saved.state["scores"], saved.state["seconds"]
        self.answers = saved.state.get("answers")  # older runs did not save answers and skipped examples
        self.skipped = saved.state.get("skipped", self.skipped)
        self.saved, self.recorded = self.engine.step, int(self.best.get("step", -1))
        if self.devices.main:
            checkpoint.drop_after(self.run.best, self.recorded)
        return saved.state["log_bytes"]

    def _check(self) -> None:
        """Raise an error if an update was not made, and write the examples of its batch to a file."""
        failure = self.engine.failure()
        if failure is None:
            return
        ids = dict(self.recent).get(failure.step)
        indices = [] if ids is None else ids.tolist()
        report = self.run.folder / f"nonfinite-rank{self.devices.rank}.json"
        numbers = {"loss": str(failure.loss), "gradient_norm": str(failure.gradient_norm)}
        before = f", as in the {failure.overflows - 1} updates before it" if failure.overflows > 1 else ""
        write_json(report, {"step": failure.step, **numbers, "ids": indices, "names": self.task.names(indices)})
        raise NonFiniteError(
            f"update {failure.step} was not made: its loss is {failure.loss} and its gradient's norm "
            f"{failure.gradient_norm}{before}; the {self.task.unit} are listed in {report}, and {self._kept()}"
        )

    def _lap(self) -> float:
        """Count the time since the last call, and return the speed in it."""
        now, step = time.monotonic(), self.engine.step
        lap, updates = now - self.clock, step - self.counted
        self.seconds, self.clock, self.counted = self.seconds + lap, now, step
        return updates * self.recipe.batch * self.task.speed_unit[1] / max(lap, 1e-9)

    def _kept(self) -> str:
        return "no checkpoint had been saved" if self.saved < 0 else f"the checkpoint of update {self.saved} is kept"

    def _tell(self, group: str, numbers: Mapping[str, float], speed: Mapping[str, float] | None = None) -> None:
        step, speed = self.engine.step, speed or {}
        if self.ledger is not None:
            self.ledger.add(step, group, numbers, speed)
        self.job.watch.logged(step, {**numbers, **speed})
