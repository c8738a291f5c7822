"""One run of a grid: train a twin from one seed, and write a JSON record of it (schema softless.twin/2).

All runs of a grid share the images, which are decoded once and stored as a checkpoint:

    OUT/images/step-SIZE/   train.safetensors, test.safetensors: pixels, labels, ids, as `cached` returns them
                            state.json: fingerprints, and the skipped images of both splits as {name: reason}
"""

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from torch import nn

from softless.data import open_splits
from softless.data.images import Images
from softless.data.loading import cached
from softless.data.reading import Batch, Damage
from softless.errors import FileError, NonFiniteError
from softless.io import checkpoint
from softless.io.files import write_json
from softless.machine import Machine, circumstances
from softless.study.schema import CurvePoint
from softless.study.twins import Twin
from softless.train.assemble import Runtime, train
from softless.train.loop import Interrupted, Job
from softless.train.recipe import Recipe, from_document
from softless.train.run import Run
from softless.train.tasks.classify import build

SCHEMA = "softless.twin/2"

Progress = Callable[[str, float], None]  # name of a run, share of its updates that are done
Splits = tuple[Images, Images]


class RunRecord(TypedDict):
    """The JSON of a run. Accuracy, loss and answers are those of the last epoch, never of the best one.

    A run that diverged met a loss or gradient that is not finite, which is a result. A run that failed, for example
    because memory ran out, is no result: the next call tries it again.
    """

    schema: str
    twin: dict[str, Any]  # the fields of `Twin`
    seed: int
    status: str  # done | diverged | failed
    reason: str | None
    accuracy: float | None
    loss: float | None
    seconds: float | None  # of training, in all calls; what a kill lost is not counted
    skipped: int | None  # images that could not be decoded
    answers: dict[str, Any] | None  # one bit per test image (`metrics.Answers`), to compare twins image by image
    curve: list[CurvePoint]
    parameters: int
    wall_seconds: float  # like `seconds`, but also counts the start and the end of the last call
    together: int  # runs at once on the device
    recipe: dict[str, Any]
    data: str | None
    images: dict[str, int] | None
    fingerprint: dict[str, str] | None
    versions: dict[str, str]
    machine: Machine


class Decoded(NamedTuple):
    """The decoded images of both splits, and {name: reason} of the images that were skipped."""

    train: Batch
    test: Batch
    skipped: tuple[dict[str, str], dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class TwinRun:
    """A twin, a seed, and everything it takes to train it in another process."""

    out: Path
    twin: Twin
    seed: int
    base: Recipe
    data: str | None
    runtime: Runtime
    together: int = 1
    ends: float | None = None  # time.time() at which the run must stop

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
        """The folder of the training, which is removed when the run is done."""
        return self.out / "trainings" / self.name

    @property
    def model(self) -> Path:
        """The folder of the trained weights."""
        return self.out / "models" / self.name

    def images(self) -> Decoded | None:
        """Load the decoded images of the grid; None where the recipe does not keep images decoded."""
        splits = open_splits(self.data, self.base.hold_out)
        return fetch(self.out / "images", splits, self.base.image_size) if self.base.cache else None


class RunWatcher:
    """A `Watcher` that reports the progress of a run, and stops the run when its time is over or on request.

    The images come decoded, so the watcher also tells the run which images were skipped.
    """

    def __init__(self, run: TwinRun, decoded: Decoded | None, progress: Progress, stopped: Callable[[], bool]):
        self.run, self.decoded, self.progress, self.stopped = run, decoded, progress, stopped
        self.parameters, self.total, self.requested = 0, 1, False

    def begin(self, job: Job, parameters: int) -> None:
        self.job, self.parameters = job, parameters
        self.total = job.task.train.per_epoch * job.recipe.all_epochs
        if self.decoded is not None:
            for batches, skipped in zip((job.task.train, job.task.test), self.decoded.skipped, strict=True):
                batches.skipped.update(skipped)

    def tick(self, step: int) -> None:
        over = self.run.ends is not None and time.time() > self.run.ends
        if step < self.total and (over or self.stopped()):
            self.requested = self.job.stop.requested = True
        self.progress(self.run.name, step / self.total)

    def logged(self, step: int, numbers: Mapping[str, float]) -> None:
        """Ignore the numbers: the log of the training has them."""


def execute(
    run: TwinRun,
    decoded: Decoded | None,
    progress: Progress = lambda _name, _share: None,
    stopped: Callable[[], bool] = lambda: False,
) -> RunRecord | None:
    """Train from the beginning or from the last checkpoint, and write the record; None if the run was stopped first.

    Ctrl-C raises `Interrupted`. In both cases the run is saved, and the next call continues it.
    """
    began, before, watcher = time.monotonic(), 0.0, RunWatcher(run, decoded, progress, stopped)
    scores: dict[str, Any] = {}
    try:
        saved = checkpoint.newest(Run(run.training).last)
        before = 0.0 if saved is None else saved.state["seconds"]
        outcome = train(
            run.training, run.recipe, run.data, watcher, runtime=run.runtime, seed=run.seed,
            resume=Run(run.training).about.exists(), decoded=decoded and decoded[:2],
        )  # fmt: skip
        scores = {"status": "done", "accuracy": outcome.last["top1"], "loss": outcome.last["test_loss"]}
        scores |= {"seconds": outcome.seconds, "skipped": outcome.skipped, "answers": outcome.answers}
        _save_weights(run)
    except Interrupted:
        if watcher.requested:
            return None
        raise
    except NonFiniteError as error:
        scores |= {"status": "diverged", "reason": str(error)}
    except Exception as error:  # noqa: BLE001 one bad twin does not end a grid: its record says why
        scores |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    record = record_of(run, scores, watcher.parameters, before + time.monotonic() - began)
    write_json(run.record, record)
    if record["status"] != "failed":
        shutil.rmtree(run.training, ignore_errors=True)
    return record


def trained_twin(record: RunRecord, out: Path) -> nn.Module:
    """Load the model of a finished run, in evaluation mode."""
    folder = out / "models" / f"{record['twin']['id']}-{record['seed']}"
    saved = checkpoint.newest(folder)
    if saved is None:
        raise FileError(f"{folder} holds no trained model")
    recipe = from_document(record["recipe"])
    model = build(recipe.model, recipe.image_size, saved.state["classes"])
    model.load_state_dict(saved.parts["model"])
    return model.eval()


def decode(
    folder: Path, splits: Splits, size: int, runtime: Runtime, tick: Callable[[int], None] = lambda _images: None
) -> None:
    """Decode both splits into the folder, unless it holds them already; then only the skipped images are reported."""
    damages = [Damage(runtime.on_bad_image, len(split)) for split in splits]
    stored = fetch(folder, splits, size)
    if stored is not None:
        for damage, skipped in zip(damages, stored.skipped, strict=True):
            for name, reason in skipped.items():
                damage.met(name, reason)
        return
    batches = [
        cached(split, size=size, workers=runtime.workers, damage=damage, tick=tick)
        for split, damage in zip(splits, damages, strict=True)
    ]
    tensors = {name: dict(batch._asdict()) for name, batch in zip(("train", "test"), batches, strict=True)}
    state = {"fingerprints": [split.fingerprint for split in splits], "skipped": [damage.skipped for damage in damages]}
    checkpoint.save(folder, size, tensors, state, keep=1)


def fetch(folder: Path, splits: Splits, size: int) -> Decoded | None:
    """Load the decoded images; None unless the folder holds these images at this size, undamaged."""
    try:
        stored = checkpoint.newest(folder)
    except FileError:
        return None
    wanted = [split.fingerprint for split in splits]
    if stored is None or stored.step != size or stored.state.get("fingerprints") != wanted:
        return None
    train, test = (Batch(**stored.parts[name]) for name in ("train", "test"))
    of_train, of_test = stored.state.get("skipped", ({}, {}))  # older folders do not name them
    return Decoded(train, test, (of_train, of_test))


def _save_weights(run: TwinRun) -> None:
    """Store the last weights (their average, if there is one); the best epoch on the test images would overstate."""
    last = checkpoint.newest(Run(run.training).last)
    assert last is not None
    weights = last.parts.get("ema", last.parts["model"])
    classes = len(Run(run.training).read()["classes"])
    checkpoint.save(run.model, last.step, {"model": weights}, {"classes": classes}, keep=1)


def _curve(training: Run) -> list[CurvePoint]:
    lines = [json.loads(line) for line in training.log.read_text().splitlines()] if training.log.exists() else []
    return [
        {"epoch": int(line["epoch"]), "accuracy": line["top1"], "loss": line["test_loss"]}
        for line in lines
        if "top1" in line
    ]


def record_of(run: TwinRun, scores: Mapping[str, Any], parameters: int = 0, wall: float = 0.0) -> RunRecord:
    """Return the record of a run that ended with these scores."""
    training, where = Run(run.training), circumstances(run.runtime.device, "timm")
    about = training.read() if training.about.exists() else {}
    return {
        "schema": SCHEMA, "twin": asdict(run.twin), "seed": run.seed, "status": scores["status"],
        "reason": scores.get("reason"), "accuracy": scores.get("accuracy"), "loss": scores.get("loss"),
        "seconds": scores.get("seconds"), "skipped": scores.get("skipped"), "answers": scores.get("answers"),
        "curve": _curve(training), "parameters": parameters, "wall_seconds": round(wall, 3), "together": run.together,
        "recipe": asdict(run.recipe), "data": run.data, "images": about.get("images"),
        "fingerprint": about.get("fingerprint"), "versions": where["versions"], "machine": where["machine"],
    }  # fmt: skip
