"""One run of a grid: a twin trained from one seed, and the JSON that is left of it.

JSON (schema softless.twin/2); accuracy, loss and answers are those of the last epoch, never of the best one:

    {"schema", "twin": {"id", "label", "mechanism", "options", "local", "cut", "tables"}, "seed",
     "status": "done" | "diverged" | "failed", "reason",
     "accuracy", "loss", "skipped", "answers": {"images", "right"},
     "curve": [{"epoch", "accuracy", "loss"}], "parameters",
     "seconds", "wall_seconds", "together",
     "recipe": {...}, "data", "images": {"train", "test"}, "fingerprint": {"train", "test"}, "versions", "machine"}

    skipped        images that it did without, since they could not be decoded
    answers        which test images it answered right, a bit each (`metrics.Answers`), to compare twins image by image
    seconds        of training, in all calls; what a kill lost is not counted
    wall_seconds   the same with the start and the end of the last call: what the run takes in one
    together       runs at once on the device

A run that diverged met a loss or gradient that is not finite: that is a result. One that failed, for want of memory
say, is none, and is tried again by the next call.
"""

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from softless.data import open_splits
from softless.errors import FileError, NonFiniteError
from softless.io import checkpoint
from softless.io.files import write_json
from softless.machine import circumstances
from softless.study.decoded import Decoded, fetch
from softless.study.twins import Twin
from softless.train.assemble import Runtime, train
from softless.train.loop import Interrupted, Job
from softless.train.recipe import Recipe, from_document, to_document
from softless.train.run import Run
from softless.train.tasks.classify import build

SCHEMA = "softless.twin/2"
SCORES = ("status", "reason", "accuracy", "loss", "seconds", "skipped", "answers")

Progress = Callable[[str, float], None]  # a run's name, and the share of its updates that are made


@dataclass(frozen=True, kw_only=True)
class Task:
    """A twin, a seed, and all it takes to train it in another process."""

    out: Path
    twin: Twin
    seed: int
    base: Recipe
    data: str | None
    runtime: Runtime
    together: int = 1
    ends: float | None = None  # time.time() by which it must have stopped

    @property
    def name(self) -> str:
        return f"{self.twin.id}-{self.seed}"

    @property
    def recipe(self) -> Recipe:
        return self.twin.recipe(self.base)

    @property
    def record(self) -> Path:
        return self.out / "runs" / f"{self.name}.json"

    @property
    def training(self) -> Path:
        """Where it trains; removed once it is done."""
        return self.out / "trainings" / self.name

    @property
    def model(self) -> Path:
        """The shelf of the trained weights."""
        return self.out / "models" / self.name


class Seen:
    """A `Watcher` that tells how far the run is, and ends it when its time is over or it is asked to.

    The images come decoded, so it also tells the run which of them were skipped.
    """

    def __init__(self, task: Task, decoded: Decoded | None, progress: Progress, stopped: Callable[[], bool]):
        self.task, self.decoded, self.progress, self.stopped = task, decoded, progress, stopped
        self.parameters, self.total, self.asked = 0, 1, False

    def begin(self, job: Job, parameters: int) -> None:
        self.job, self.parameters = job, parameters
        self.total = job.task.train.per_epoch * job.recipe.all_epochs
        if self.decoded is not None:
            for batches, skipped in zip((job.task.train, job.task.test), self.decoded.skipped, strict=True):
                batches.skipped.update(skipped)

    def tick(self, step: int) -> None:
        over = self.task.ends is not None and time.time() > self.task.ends
        if step < self.total and (over or self.stopped()):
            self.asked = self.job.stop.asked = True
        self.progress(self.task.name, step / self.total)

    def told(self, step: int, numbers: Mapping[str, float]) -> None:
        """The log has it."""


def execute(
    task: Task,
    decoded: Decoded | None,
    progress: Progress = lambda _name, _share: None,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """Train, from the beginning or from where the run was, and write the record; None if it was asked to stop before.

    Ctrl-C raises `Interrupted`. Both ways the run is saved, and goes on in the next call.
    """
    began, before, seen = time.monotonic(), 0.0, Seen(task, decoded, progress, stopped)
    found = dict.fromkeys(SCORES)
    try:
        before = _trained_before(task)
        outcome = train(
            task.training, task.recipe, task.data, seen, runtime=task.runtime, seed=task.seed,
            resume=Run(task.training).about.exists(), decoded=decoded and decoded[:2],
        )  # fmt: skip
        found |= {"status": "done", "accuracy": outcome.last["top1"], "loss": outcome.last["test_loss"]}
        found |= {"seconds": outcome.seconds, "skipped": outcome.skipped}
        found |= {"answers": outcome.answers}
        _keep(task)
    except Interrupted:
        if seen.asked:
            return None
        raise
    except NonFiniteError as error:
        found |= {"status": "diverged", "reason": str(error)}
    except Exception as error:  # noqa: BLE001 one bad twin does not end a grid: its record says why
        found |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    record = _record(task, found, seen.parameters, before + time.monotonic() - began)
    write_json(task.record, record)
    if found["status"] != "failed":
        shutil.rmtree(task.training, ignore_errors=True)
    return record


def failed_record(task: Task, reason: str) -> dict[str, Any]:
    """Of a run whose process died."""
    found = dict.fromkeys(SCORES) | {"status": "failed", "reason": reason}
    return _record(task, found, 0, 0.0)


def trained_twin(record: Mapping[str, Any], out: Path) -> nn.Module:
    """The model of a finished run, in evaluation mode."""
    shelf = out / "models" / f"{record['twin']['id']}-{record['seed']}"
    found = checkpoint.newest(shelf)
    if found is None:
        raise FileError(f"{shelf} holds no trained model")
    recipe = from_document(record["recipe"])
    model = build(recipe.model, recipe.image_size, found.state["classes"])
    model.load_state_dict(found.parts["model"])
    return model.eval()


def decoded_set(task: Task) -> Decoded | None:
    """The images of a task, from the shelf of its grid."""
    return fetch(task.out / "images", open_splits(task.data), task.base.image_size) if task.base.cache else None


def _trained_before(task: Task) -> float:
    """Seconds, in the calls before this one."""
    saved = checkpoint.newest(Run(task.training).last)
    return 0.0 if saved is None else saved.state["seconds"]


def _keep(task: Task) -> None:
    """The last weights, averaged ones where there are any; a best epoch chosen on the test images would flatter."""
    last = checkpoint.newest(Run(task.training).last)
    assert last is not None
    weights = last.parts.get("ema", last.parts["model"])
    classes = len(Run(task.training).read()["classes"])
    checkpoint.save(task.model, last.step, {"model": weights}, {"classes": classes}, keep=1)


def _curve(run: Run) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in run.log.read_text().splitlines()] if run.log.exists() else []
    return [
        {"epoch": int(line["epoch"]), "accuracy": line["top1"], "loss": line["test_loss"]}
        for line in lines
        if "top1" in line
    ]


def _record(task: Task, found: dict[str, Any], parameters: int, wall: float) -> dict[str, Any]:
    run = Run(task.training)
    about = run.read() if run.about.exists() else {}
    return {
        "schema": SCHEMA,
        "twin": asdict(task.twin),
        "seed": task.seed,
        **found,
        "curve": _curve(run),
        "parameters": parameters,
        "wall_seconds": round(wall, 3),
        "together": task.together,
        "recipe": to_document(task.recipe),
        "data": task.data,
        "images": about.get("images"),
        "fingerprint": about.get("fingerprint"),
        **circumstances(task.runtime.device, "timm"),
    }
