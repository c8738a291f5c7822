"""One run of a grid: train a twin from one seed, and write a JSON record of it (schema softless.twin/2).

All runs of a grid share the images, which are decoded once and stored as a checkpoint:

    OUT/images/step-SIZE/   train.safetensors, test.safetensors: pixels, labels, ids, as `cached` returns them
                            state.json: fingerprints, and the skipped images of both splits as {name: reason}
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from torch import nn

from softless.data import open_splits
from softless.data.images import Images
from softless.data.loading import cached
from softless.data.reading import Batch, Damage
from softless.errors import FileError
from softless.io import checkpoint
from softless.machine import Machine, circumstances
from softless.study.schema import CurvePoint
from softless.study.twins import Twin
from softless.study.workers import GridRun, RunWatcher
from softless.train.assemble import Runtime, train
from softless.train.loop import Job
from softless.train.recipe import Recipe, from_document
from softless.train.run import Run
from softless.train.tasks.classify import build

SCHEMA = "softless.twin/2"

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
class TwinRun(GridRun):
    """The training of a twin on images."""

    twin: Twin
    base: Recipe
    data: str | None

    @property
    def recipe(self) -> Recipe:
        return self.twin.recipe(self.base)

    @property
    def model(self) -> Path:
        """The folder of the trained weights."""
        return self.out / "models" / self.name

    def material(self) -> Decoded | None:
        """Load the decoded images of the grid; None where the recipe does not keep images decoded."""
        splits = open_splits(self.data, self.base.hold_out)
        return fetch(self.out / "images", splits, self.base.image_size) if self.base.cache else None

    def train(self, material: Decoded | None, watch: RunWatcher) -> dict[str, Any]:
        outcome = train(
            self.training, self.recipe, self.data, ImageWatcher(watch, material), runtime=self.runtime, seed=self.seed,
            resume=Run(self.training).about.exists(), decoded=material and material[:2],
        )  # fmt: skip
        _save_weights(self)
        scores = {"accuracy": outcome.last["top1"], "loss": outcome.last["test_loss"]}
        return scores | {"seconds": outcome.seconds, "skipped": outcome.skipped, "answers": outcome.answers}

    def record_of(self, scores: Mapping[str, Any], parameters: int = 0, wall: float = 0.0) -> RunRecord:
        training, where = Run(self.training), circumstances(self.runtime.device, "timm")
        about = training.read() if training.about.exists() else {}
        return {
            "schema": SCHEMA, "twin": asdict(self.twin), "seed": self.seed, "status": scores["status"],
            "reason": scores.get("reason"), "accuracy": scores.get("accuracy"), "loss": scores.get("loss"),
            "seconds": scores.get("seconds"), "skipped": scores.get("skipped"), "answers": scores.get("answers"),
            "curve": _curve(training), "parameters": parameters, "wall_seconds": round(wall, 3),
            "together": self.together, "recipe": asdict(self.recipe), "data": self.data, "images": about.get("images"),
            "fingerprint": about.get("fingerprint"), "versions": where["versions"], "machine": where["machine"],
        }  # fmt: skip


class ImageWatcher:
    """The watcher of a run whose images come decoded: it tells the run which images were skipped."""

    def __init__(self, watch: RunWatcher, decoded: Decoded | None):
        self.watch, self.decoded = watch, decoded
        self.tick, self.logged = watch.tick, watch.logged

    def begin(self, job: Job, parameters: int) -> None:
        self.watch.begin(job, parameters)
        if self.decoded is not None:
            for batches, skipped in zip((job.task.train, job.task.test), self.decoded.skipped, strict=True):
                batches.skipped.update(skipped)


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
