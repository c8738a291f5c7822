"""What is seen while it trains: a bar that moves, a line for each evaluation, and how to go on."""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import typer

from softless.commands import units
from softless.commands.manners import console
from softless.commands.progress import Advance, progress

if TYPE_CHECKING:
    from softless.train.loop import Job, Outcome


class Showing:
    """A `Watcher` that prints. Of several ranks only the first one does."""

    def __init__(self, wanted: bool):
        self.main = os.environ.get("RANK", "0") == "0"
        self.wanted = wanted and self.main
        self.open, self.out = ExitStack(), console()
        self.advance: Advance = lambda _label, _amount: None
        self.parameters, self.epochs, self.per_epoch, self.at = 0, 0, 1, 0
        self.label, self.loss = "", "-"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.open.close()

    def begin(self, job: "Job", parameters: int) -> None:
        self.parameters, self.epochs, self.per_epoch = parameters, job.recipe.all_epochs, job.train.per_epoch
        if self.wanted:
            total = self.per_epoch * self.epochs
            images, classes = len(job.train.images), job.train.classes
            device, ranks = job.devices.device, job.devices.ranks
            where = device if ranks == 1 else f"{ranks} x {device.type}"
            self.out.print(
                f"{job.recipe.model.name}, {units.count(parameters)} parameters, {images:,} images in {classes} "
                f"classes, {where}, {total:,} updates",
                soft_wrap=True,
            )
        self.advance = self.open.enter_context(progress(self.per_epoch * self.epochs, self.wanted))

    def tick(self, step: int) -> None:
        self.advance(f"epoch {-(-step // self.per_epoch)}/{self.epochs}{self.label}", step - self.at)
        self.at = step

    def told(self, step: int, numbers: Mapping[str, float]) -> None:
        if "top1" in numbers:
            if self.wanted:
                self.out.print(
                    f"epoch {step // self.per_epoch:>3}/{self.epochs}   loss {self.loss}   "
                    f"top-1 {numbers['top1']:7.2%}   top-5 {numbers['top5']:7.2%}   ECE {numbers['ece']:.3f}"
                )
            self.loss = "-"  # told once: an epoch that reads none back has none to show
            return
        self.loss = f"{numbers['loss']:.4f}"
        rate = units.short(numbers["images_per_second"])
        self.label = f"   loss {numbers['loss']:.3f}   lr {numbers['lr']:.1e}   {rate} images/s"

    def say_how_to_resume(self, sentence: str) -> None:
        self.open.close()
        if self.main:
            typer.echo(sentence, err=True)

    def conclude(self, outcome: "Outcome", out: Path) -> None:
        from softless.train.run import Run

        if self.wanted:
            if outcome.skipped:
                how_many = "1 image" if outcome.skipped == 1 else f"{outcome.skipped:,} images"
                self.out.print(f"{how_many} skipped: {Run(out).skipped}", soft_wrap=True)
            self.out.print(
                f"best top-1 {outcome.best_top1:.2%}, after epoch {outcome.best_step // self.per_epoch}, in "
                f"{units.seconds(outcome.seconds)}: softless evaluate {out}"
            )
