"""The loop: batches in, updates, a log, evaluations and checkpoints out; it can be killed at any moment.

    for each batch   seed by (seed, update, rank) -> augment -> update
    every log_every  read losses back from the device, write a line of log
    every epoch      evaluate, keep the best weights, save

A run that was interrupted goes on from its newest whole checkpoint, and ends bitwise as if it had not been: weights,
optimizer, averaged weights and log. What it lost is the time since that checkpoint.
"""

import time
from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from statistics import mean
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from softless.errors import ArgumentError, FileError, NonFiniteError
from softless.io import checkpoint
from softless.io.files import write_json
from softless.machine import circumstances
from softless.train import state
from softless.train.blas import by_blas
from softless.train.devices import Devices
from softless.train.engine import Engine
from softless.train.evaluate import evaluate
from softless.train.feed import Feed
from softless.train.ledger import Ledger
from softless.train.metrics import Answers, Scores
from softless.train.objective import Objective
from softless.train.randomness import seed_all
from softless.train.recipe import Recipe
from softless.train.run import Run
from softless.train.stop import Interrupted, Stop


class Watcher(Protocol):
    """Who looks on while it trains."""

    def begin(self, job: "Job", parameters: int) -> None:
        """The model is made, and training begins."""

    def tick(self, step: int) -> None:
        """An update is on its way."""

    def told(self, step: int, numbers: Mapping[str, float]) -> None:
        """loss, gradient_norm, lr, images_per_second; and after an evaluation top1, top5, ece, test_loss."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that a training is made of. `about` goes into the checkpoints, to find the model again.

    A watcher may ask for an end, as Ctrl-C and SIGTERM do: `job.stop.asked = True`.
    """

    model: nn.Module
    train: Feed
    test: Feed
    recipe: Recipe
    folder: Path
    devices: Devices
    watch: Watcher
    about: Mapping[str, Any]
    seed: int = 0
    resume: bool = False
    teacher: nn.Module | None = None
    stop: Stop = field(default_factory=Stop)


@dataclass(frozen=True)
class Outcome:
    """What a finished training leaves: the best evaluation, the last one, what it took, and images it did without.

    answers   of the last evaluation, image by image; None in a run that was evaluated last before they were kept
    """

    steps: int
    best_step: int
    best_top1: float
    last: dict[str, float]
    seconds: float
    skipped: int
    answers: Answers | None


def fit(job: Job) -> Outcome:
    """Train to the end of the recipe, from the beginning or from where the run was."""
    loop = Loop(job)
    with loop.ledger or nullcontext(), job.stop, by_blas(job.recipe.precision):
        loop.run_on(job.stop)
    return loop.outcome()


class Loop:
    """A training between two updates."""

    def __init__(self, job: Job):
        self.job, self.recipe, self.devices, self.run = job, job.recipe, job.devices, Run(job.folder)
        self.per_epoch = job.train.per_epoch
        self.total = self.per_epoch * job.recipe.all_epochs
        seed_all(job.seed, -1, 0)
        objective = Objective(job.recipe, job.train.classes, job.teacher)
        self.engine = Engine(job.model, job.recipe, job.devices, objective, self.per_epoch)
        self.best: dict[str, float] = {}
        self.scores: dict[str, float] = {}
        self.answers: Answers | None = None
        self.skipped: dict[str, dict[str, str]] = {"train": {}, "test": {}}  # name -> why
        self.seconds, self.saved = 0.0, -1
        self.recorded = -1  # update of the best weights that last/ knows of
        self.recent: deque[tuple[int, Tensor]] = deque(maxlen=job.recipe.log_every + 1)
        length = self._go_back() if job.resume else 0
        self.ledger = Ledger(self.run, self.engine.step, length) if self.devices.main else None
        self.clock, self.counted = time.monotonic(), self.engine.step

    def run_on(self, stop: Stop) -> None:
        """Until the last update; an interruption is saved first."""
        while self.engine.step < self.total:
            self.engine.plain.train()
            self.job.train.begin(self.engine.step // self.per_epoch)
            for batch in self.job.train:
                number = seed_all(self.job.seed, self.engine.step, self.devices.rank)
                self.recent.append((self.engine.step, batch.ids))
                self.engine.update(*self.job.train.finish(batch, number))
                self.job.watch.tick(self.engine.step)
                self._after_update()
                if stop.agreed(self.devices, self.engine.step, self.recipe.log_every):
                    stop.saving = True
                    self._save()
                    self.devices.wait()  # torchrun ends the others soon after the first that ends
                    raise Interrupted(self.engine.step, self.total)
                if self.engine.step % self.per_epoch == 0:
                    break
        seed_all(self.job.seed, self.total, self.devices.rank)  # what is drawn after it does not know either
        if self.devices.main:
            write_json(self.run.result, {**asdict(self.outcome()), **circumstances(self.devices.device.type, "timm")})

    def outcome(self) -> Outcome:
        best, skipped = self.best, sum(map(len, self.skipped.values()))
        seconds = round(self.seconds, 3)
        return Outcome(self.engine.step, int(best["step"]), best["top1"], self.scores, seconds, skipped, self.answers)

    def _after_update(self) -> None:
        step, every = self.engine.step, self.recipe.checkpoint_every
        epoch, within = divmod(step, self.per_epoch)
        ends = within == 0
        if step % self.recipe.log_every == 0:
            self._log()
        elif self.devices.device.type == "cpu":
            self._check()
        if ends and (epoch % self.recipe.evaluate_every == 0 or step == self.total):
            self._evaluate(epoch)
        if step == self.total or (step % every == 0 if every else ends):
            self._save()

    def _log(self) -> None:
        self._check()
        losses, norms = (torch.stack(values).tolist() for values in (self.engine.losses, self.engine.norms))
        self.engine.losses, self.engine.norms = [], []
        numbers = {"loss": mean(losses), "lr": self.engine.lr}
        if sound := [norm for norm in norms if isfinite(norm)]:  # in fp16 an update with another is skipped, by design
            numbers["gradient_norm"] = mean(sound)
        self._tell("train", numbers, {"images_per_second": self._lap()})

    def _evaluate(self, epoch: int) -> None:
        self._check()
        tally = evaluate(self.engine.best_model, self.job.test, self.devices)
        scores = tally.scores()
        self.engine.plain.train()
        if not isfinite(scores.loss):
            raise NonFiniteError(
                f"the loss on the test images is {scores.loss} after update {self.engine.step}, and {self._kept()}"
            )
        self.scores, self.answers = _numbers(scores), tally.answers()
        self._tell("test", {"epoch": epoch, **self.scores})
        if scores.top1 > self.best.get("top1", -1.0):
            self.best = {"step": self.engine.step, "top1": scores.top1}
            weights = state.weights(self.engine.best_model)
            about = {"about": dict(self.job.about), "scores": asdict(scores)}
            if self.devices.main:
                checkpoint.save(self.run.best, self.engine.step, {"model": weights}, about, keep=1, also=self.recorded)

    def _save(self) -> None:
        self._check()
        if self.saved == self.engine.step:
            return
        parts, numbers = state.pack(self.engine)
        self._lap()
        for name, feed in (("train", self.job.train), ("test", self.job.test)):
            self.skipped[name] |= feed.skipped(self.devices)
        if self.ledger is not None:
            record = {
                "engine": numbers,
                "sampler": self.job.train.sampler.state_dict(),
                "rng": {"seed": self.job.seed, "step": self.engine.step},
                "best": self.best,
                "scores": self.scores,
                "answers": None if self.answers is None else asdict(self.answers),
                "skipped": self.skipped,
                "seconds": self.seconds,
                "log_bytes": self.ledger.sync(),
            }
            if any(self.skipped.values()):
                write_json(self.run.skipped, self.skipped)
            checkpoint.save(self.run.last, self.engine.step, parts, record)
        self._mark_saved()

    def _go_back(self) -> int:
        """Take up the newest whole checkpoint; returns how long the log was. Without one the run begins anew."""
        found = checkpoint.newest(self.run.last)
        names = self.devices.gather("none" if found is None else found.path.name)
        if len({*names}) > 1:
            each = ", ".join(f"rank {rank} finds {name}" for rank, name in enumerate(names))
            raise FileError(f"ranks must go on from the same checkpoint, and in {self.run.last} {each}")
        if found is None:
            return 0
        if found.state["rng"]["seed"] != self.job.seed:
            raise ArgumentError(f"the run has seed {found.state['rng']['seed']}, and seed {self.job.seed} was given")
        state.unpack(self.engine, found)
        self.job.train.sampler.load_state_dict(found.state["sampler"])
        self.best, self.scores, self.seconds = found.state["best"], found.state["scores"], found.state["seconds"]
        answers = found.state.get("answers")  # runs from before they were kept have none
        self.answers = None if answers is None else Answers(**answers)
        self.skipped = found.state.get("skipped", self.skipped)  # runs from before they were counted have none
        self._mark_saved()
        if self.devices.main:
            checkpoint.drop_after(self.run.best, self.recorded)
        return found.state["log_bytes"]

    def _mark_saved(self) -> None:
        self.saved, self.recorded = self.engine.step, int(self.best.get("step", -1))

    def _check(self) -> None:
        """Stop if an update was left out, and write down which images it was about."""
        failure = self.engine.failure()
        if failure is None:
            return
        ids = dict(self.recent).get(failure.step)
        indices = [] if ids is None else ids.tolist()
        report = self.run.folder / f"nonfinite-rank{self.devices.rank}.json"
        numbers = {"loss": str(failure.loss), "gradient_norm": str(failure.gradient_norm)}
        names = [self.job.train.images.names(index) for index in indices]
        before = f", as in the {failure.overflows - 1} updates before it" if failure.overflows > 1 else ""
        write_json(report, {"step": failure.step, **numbers, "ids": indices, "names": names})
        raise NonFiniteError(
            f"update {failure.step} was not made: its loss is {failure.loss} and its gradient's norm "
            f"{failure.gradient_norm}{before}; the images are listed in {report}, and {self._kept()}"
        )

    def _lap(self) -> float:
        """Count the time since the last lap; returns the images a second of it."""
        now, step = time.monotonic(), self.engine.step
        lap, updates = now - self.clock, step - self.counted
        self.seconds, self.clock, self.counted = self.seconds + lap, now, step
        return updates * self.recipe.batch / max(lap, 1e-9)

    def _kept(self) -> str:
        return "no checkpoint had been saved" if self.saved < 0 else f"the checkpoint of update {self.saved} is kept"

    def _tell(self, group: str, numbers: Mapping[str, float], speed: Mapping[str, float] | None = None) -> None:
        step, speed = self.engine.step, speed or {}
        if self.ledger is not None:
            self.ledger.add(step, group, numbers, speed)
        self.job.watch.told(step, {**numbers, **speed})


def _numbers(scores: Scores) -> dict[str, float]:
    return {"top1": scores.top1, "top5": scores.top5, "ece": scores.ece, "test_loss": scores.loss}
