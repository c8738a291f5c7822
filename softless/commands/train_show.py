"""What is seen while it trains: a banner, a bar that moves, a line for each evaluation, and how to go on."""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import typer

from softless.commands.common import console
from softless.commands.ctrl_c import WATCH
from softless.commands.progress import Bar, progress
from softless.report import units

if TYPE_CHECKING:
    from softless.data.images import Images
    from softless.train.choose import Usual
    from softless.train.loop import Job, Outcome
    from softless.train.recipe import Recipe


@dataclass(frozen=True)
class Start:
    """What a training begins with: its recipe by name and why it was chosen, the images and their size in pixels."""

    name: str
    because: str
    recipe: "Recipe"
    parts: "tuple[Images, Images]"
    size: "Usual | None"


class Showing:
    """A `Watcher` that prints. Of several ranks only the first one does."""

    def __init__(self, wanted: bool, start: Start):
        self.main = os.environ.get("RANK", "0") == "0"
        self.wanted, self.start = wanted and self.main, start
        self.open, self.out = ExitStack(), console()
        self.bar, self.announced, self.images = Bar(), False, 0
        self.parameters, self.epochs, self.per_epoch, self.at = 0, 0, 1, -1
        self.label, self.loss = "", "-"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.open.close()

    def decoding(self, images: int) -> None:
        """So many more images of both parts are decoded."""
        every = sum(map(len, self.start.parts))
        if not self.images:
            self.announce()
            self.bar = self.open.enter_context(progress(every, self.wanted))
        self.images += images
        self.bar(f"decoding images, {self.images:,} of {every:,}", images)

    def announce(self) -> None:
        """The recipe and the images."""
        if self.announced or not self.wanted:
            return
        self.announced, start = True, self.start
        train, test = start.parts
        reason = f", {start.because}" if start.because else ""
        self.say(f"recipe   {start.name}{reason}")
        about = "" if start.size is None or start.size.all_same else "about "
        pixels = "" if start.size is None else f"; {about}{units.picture(start.size[:2])} pixels"
        seen = units.picture([start.recipe.image_size] * 2)
        classes = units.counted(len(train.classes), "class", "classes")
        self.say(f"images   {len(train):,} to train on, {len(test):,} to test on, {classes}{pixels}, seen in {seen}")

    def begin(self, job: "Job", parameters: int) -> None:
        self.open.close()
        WATCH.is_saving = lambda: job.stop.saving
        self.parameters, self.epochs, self.per_epoch = parameters, job.recipe.all_epochs, job.train.per_epoch
        total = self.per_epoch * self.epochs
        if self.wanted:
            self.announce()
            device, ranks = job.devices.device, job.devices.ranks
            where = device if ranks == 1 else f"{ranks} x {device.type}"
            self.say(f"model    {job.recipe.model.name}, {units.count(parameters)} parameters, {where}")
            epochs = units.counted(self.epochs, "epoch")
            self.say(f"updates  {total:,}: {epochs} of {self.per_epoch:,}, batch {job.recipe.batch:,}")
        self.bar = self.open.enter_context(progress(total, self.wanted))

    def tick(self, step: int) -> None:
        if self.at < 0:  # a run that goes on has made the updates before this one
            self.at = step - 1
            self.bar.skip(self.at)
        self.bar(f"epoch {-(-step // self.per_epoch)}/{self.epochs}{self.label}", step - self.at)
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

    def say(self, sentence: str) -> None:
        self.out.print(sentence, soft_wrap=True)

    def say_how_to_resume(self, sentence: str) -> None:
        self.open.close()
        if self.main:
            typer.echo(sentence, err=True)

    def conclude(self, outcome: "Outcome", out: Path) -> None:
        from softless.train.run import Run

        if self.wanted:
            if outcome.skipped:
                self.say(f"{units.counted(outcome.skipped, 'image')} skipped: {Run(out).skipped}")
            self.say(
                f"best top-1 {outcome.best_top1:.2%}, after epoch {outcome.best_step // self.per_epoch}, in "
                f"{units.seconds(outcome.seconds)}: softless evaluate {out}"
            )
