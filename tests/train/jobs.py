"""A training of seconds: little pictures whose class shows in their brightness, and a small network.

It leaves nothing out that a checkpoint must remember: dropout, mixup, averaged weights, warm-up, a log between saves.
"""

import hashlib
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from softless.data.augment import Augment
from softless.data.images import Sample
from softless.io import checkpoint
from softless.train.devices import Devices
from softless.train.loop import Job
from softless.train.recipe import Recipe
from softless.train.run import Run
from softless.train.tasks.classify import Classification, image_loader

PLAIN = Augment(
    crop="none", flip=0.0, operations=0, erase=0.0, crop_share=1.0, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)
)
RECIPE = Recipe(
    augment=PLAIN, image_size=4, batch=24, epochs=2, warmup_epochs=1, lr=1e-2, warmup_lr=1e-4, min_lr=1e-3, clip=1.0,
    mixup=0.8, cutmix=1.0, label_smoothing=0.1, ema=0.9, cache=True, checkpoint_every=3, log_every=2,
)  # fmt: skip
SMALL = [("epochs", "1"), ("warmup_epochs", "0"), ("batch", "400"), ("model.depths", "1"), ("checkpoint_every", "2")]

# What a training imports when it first needs it: a program that forks has it before.
IMPORTED_LATE = (
    "accelerate",
    "tensorboard.summary.writer.record_writer",
    "timm.data",
    "timm.optim",
    "timm.scheduler",
    "timm.utils",
)


class Pictures:
    """Images of 4 x 4 pixels in three classes."""

    classes = ("dark", "gray", "bright")

    def __init__(self, count: int, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.labels = np.arange(count) % 3
        noise = rng.integers(0, 60, (count, 4, 4, 3))
        self.pixels = (noise + 80 * self.labels[:, None, None, None]).astype(np.uint8)
        self.sizes = np.full(count, 48)
        self.fingerprint = hashlib.sha256(self.pixels.tobytes()).hexdigest()

    def names(self, index: int) -> str:
        return f"picture {index}"

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        return Sample(Image.fromarray(self.pixels[index]), int(self.labels[index]), self.names(index))


class Quiet:
    """A watcher who remembers and says nothing."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.lines: list[tuple[int, dict[str, float]]] = []

    def begin(self, job: Job, parameters: int) -> None:
        self.parameters = parameters

    def tick(self, step: int) -> None:
        self.steps.append(step)

    def logged(self, step: int, numbers: Any) -> None:
        self.lines.append((step, dict(numbers)))


class Killed(Quiet):
    """Ends the training after an update, as a kill does."""

    def __init__(self, after: int | None = None) -> None:
        super().__init__()
        self.after = after

    def tick(self, step: int) -> None:
        if step == self.after:
            raise KeyboardInterrupt


def network(dropout: float = 0.1, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(7)
    layers = nn.Flatten(), nn.Linear(48, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 3)
    return nn.Sequential(*layers).to(dtype)


def job(folder: Path, *, model: nn.Module | None = None, resume: bool = False, **changes: Any) -> Job:
    """A `Job` of ten updates; `changes` go to the recipe."""
    options = {key: changes.pop(key) for key in ("seed", "teacher", "watch", "devices") if key in changes}
    recipe = replace(RECIPE, **changes)
    devices = options.pop("devices", None) or Devices("cpu", recipe.precision)
    splits = Pictures(130, 0), Pictures(40, 1)
    train, test = (
        image_loader(part, recipe, options.get("seed", 0), devices, train=part is splits[0]) for part in splits
    )
    model = network() if model is None else model
    return Job(
        task=Classification(model, splits, train, test, recipe, options.pop("teacher", None)),
        recipe=recipe,
        folder=folder,
        devices=devices,
        about={"recipe": {}, "classes": list(Pictures.classes)},
        resume=resume,
        **{"watch": Quiet(), **options},
    )


def digest(folder: Path, generators: bool = True) -> str:
    """Of parameters, averaged weights, optimizer, sampler, best weights, log, result, and this process's generators."""
    run, total = Run(folder), hashlib.sha256()
    numbers = [json.loads(run.result.read_text())]
    for shelf in (run.last, run.best):
        found = checkpoint.newest(shelf)
        assert found is not None
        for part in sorted(found.parts):
            for name, tensor in sorted(found.parts[part].items()):
                total.update(f"{part}/{name}/{tensor.dtype}".encode() + tensor.numpy().tobytes())
        numbers += [{"step": found.step}, found.state]
    numbers[0]["machine"].pop("load_average")
    timeless = [{key: value for key, value in each.items() if key != "seconds"} for each in numbers]
    total.update(json.dumps(timeless, sort_keys=True).encode() + run.log.read_bytes())
    if generators:
        total.update(torch.get_rng_state().numpy().tobytes())
        total.update(repr((np.random.get_state()[1].tobytes(), random.getstate())).encode())  # noqa: NPY002
    return total.hexdigest()
