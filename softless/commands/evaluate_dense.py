"""The part of `softless evaluate` for segmentations and detections."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from softless.commands.arguments import OnBad
from softless.commands.common import must_be_finite, plain, warnings_in_one_line
from softless.commands.progress import progress
from softless.errors import ArgumentError
from softless.report import units


@dataclass(frozen=True)
class DenseResult:
    """A model that was run on every image of a set once.

    scores   PixelScores or BoxScores
    rate     images per second, with decoding
    """

    target: str
    step: int
    data: str
    device: str
    images: int
    classes: tuple[str, ...]
    scores: Any
    rate: float
    skipped: dict[str, str]

    def lines(self) -> list[str]:
        """Return what all results begin with, to show."""
        return [
            f"{units.counted(self.images, 'image')} of {plain(self.data)}, {self.device}",
            *(f"skipped {plain(name)}: {plain(why)}" for name, why in self.skipped.items()),
        ]


def evaluate_dense(
    target: str, data: str | None, batch: int, device: str, workers: int, on_bad_image: OnBad, quiet: bool
) -> DenseResult | None:
    """Run the best model of a run on every image once; None on all ranks but the first."""
    from softless.data.annotated_sources import open_annotated, open_annotated_test
    from softless.data.reading import Damage
    from softless.train.assemble_dense import task_for, trained
    from softless.train.devices import Devices, runnable
    from softless.train.tasks import all_skipped, evaluate

    with warnings_in_one_line():
        model, recipe, about = trained(Path(target))
    source = about["data"] if data is None else data
    if data is None:
        images = open_annotated_test(source, recipe.values, recipe.hold_out)
    else:
        images = open_annotated(source, "test", recipe.values)
    if [*images.classes] != about["classes"]:
        theirs, ours = (", ".join(names) for names in (about["classes"], images.classes))
        raise ArgumentError(f"{target} was trained on classes {theirs}, and the {images.noun} have {ours}")
    devices = Devices(device, runnable(recipe.precision, device))
    damage, start, task = Damage(on_bad_image, len(images)), time.monotonic(), task_for(recipe)
    recipe = replace(recipe, batch=min(batch, recipe.batch), accumulate=1)
    batches = task.loader(images, recipe, 0, devices, damage, train=False, workers=workers)
    with progress(len(images), not quiet and devices.main) as advance:

        def begin() -> Any:
            return watched(task.counts(images, devices.device), lambda count: advance("evaluating", count))

        scores = evaluate(model.to(devices.device), batches, begin, devices).scores()
    must_be_finite(scores.loss, target, f"the images of {source}")
    skipped = all_skipped(batches, devices)
    count = len(images) - len(skipped)
    rate = count / max(time.monotonic() - start, 1e-9)
    if not devices.main:
        return None
    return DenseResult(target, about["step"], source, str(devices.device), count, images.classes, scores, rate, skipped)


def watched(counts: Any, tick: Callable[[int], None]) -> Any:
    """Return the counts, which call `tick` with how many more images they have."""
    add = counts.add

    def add_and_tell(model: Any, batch: Any) -> None:
        add(model, batch)
        tick(len(batch.ids))

    counts.add = add_and_tell
    return counts


def share(number: float | None) -> str:
    """Write a share, or that there was nothing to divide by."""
    return "-" if number is None else f"{number:.2%}"
