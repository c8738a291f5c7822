"""What `softless train` begins with, and what it shows while it trains, for images, masks, boxes and text."""

import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softless.commands.ctrl_c import WATCH
from softless.commands.progress import Bar, progress, say
from softless.report import units

if TYPE_CHECKING:
    from softless.data.annotated import AnnotatedImages
    from softless.data.images import Images
    from softless.data.text import Text
    from softless.train.choose import TypicalSize
    from softless.train.dense_recipe import AnyDense
    from softless.train.language_recipe import LanguageRecipe
    from softless.train.loop import Job
    from softless.train.recipe import Recipe
    from softless.train.run import Outcome


@dataclass(frozen=True)
class ImageStart:
    """Everything that a classifier begins with.

    name, because   the recipe's name, and why it was chosen
    options         data, seed, teacher and init
    splits, size    the images to train and to test on, and their typical size in pixels
    """

    name: str
    because: str
    options: dict[str, Any]
    recipe: "Recipe"
    splits: "tuple[Images, Images]"
    size: "TypicalSize | None"
    reading = "decoding images"

    @property
    def model(self) -> str:
        return self.recipe.model.name

    def data_line(self) -> str:
        train, test = self.splits
        named = "" if self.options["data"] not in (None, "digits") else "digits (embedded): "
        roughly = "" if self.size is None or self.size.all_same else "about "
        pixels = "" if self.size is None else f"; {roughly}{units.picture(self.size[:2])} pixels"
        seen = units.picture([self.recipe.image_size] * 2)
        classes = units.counted(len(train.classes), "class", "classes")
        counts = f"{len(train):,} to train on, {len(test):,} to test on, {classes}"
        return f"images   {named}{counts}{pixels}, seen in {seen}"

    def scores(self, numbers: Mapping[str, float]) -> str:
        return f"top-1 {numbers['top1']:7.2%}   top-5 {numbers['top5']:7.2%}   ECE {numbers['ece']:.3f}"

    def best(self, number: float) -> str:
        return f"top-1 {number:.2%}"


@dataclass(frozen=True)
class TextStart:
    """Everything that a language model begins with.

    name, because   the recipe's name, and why it was chosen
    options         data and seed
    texts           the text to train on and the text to test on
    """

    name: str
    because: str
    options: dict[str, Any]
    recipe: "LanguageRecipe"
    texts: "tuple[Text, Text]"

    @property
    def model(self) -> str:
        return f"{self.recipe.model.name} with {self.recipe.model.attention[0]}"

    def data_line(self) -> str:
        train, test = (units.counted(len(text.data), "byte") for text in self.texts)
        kind = "bytes" if self.recipe.tokens == "bytes" else f"{self.recipe.vocabulary:,} learned tokens"
        return f"text     {train} to train on, {test} to test on; sequences of {self.recipe.length:,}, {kind}"

    def scores(self, numbers: Mapping[str, float]) -> str:
        return f"bits per byte {numbers['bits_per_byte']:.4f}   perplexity {numbers['perplexity']:,.3f}"

    def best(self, number: float) -> str:
        return f"{number / math.log(2):.4f} bits per byte"


@dataclass(frozen=True)
class DenseStart:
    """Everything that a segmentation or a detection begins with.

    name, because   the recipe's name, and why it was chosen
    options         data, seed and init
    splits          the images with masks or boxes, to train and to test on
    """

    name: str
    because: str
    options: dict[str, Any]
    recipe: "AnyDense"
    splits: "tuple[AnnotatedImages, AnnotatedImages]"

    @property
    def annotations(self) -> str:
        return "masks" if self.recipe.task == "segment" else "boxes"

    @property
    def reading(self) -> str:
        return f"checking {self.annotations}"

    @property
    def model(self) -> str:
        return f"{self.recipe.model.name} with {self.recipe.model.head}"

    def data_line(self) -> str:
        train, test = self.splits
        classes, seen = units.counted(len(train.classes), "class", "classes"), units.picture(self.recipe.size)
        return (
            f"images   {len(train):,} with {self.annotations} to train on, {len(test):,} to test on, {classes}, seen "
            f"in {seen}"
        )

    def scores(self, numbers: Mapping[str, float]) -> str:
        if "ap" in numbers:
            names = {"ap": "AP", "ap50": "AP50", "ap75": "AP75", "mask_ap": "mask AP"}
            return "   ".join(f"{name} {numbers[key]:7.2%}" for key, name in names.items() if key in numbers)
        return f"mIoU {numbers['miou']:7.2%}   pixel accuracy {numbers['pixel_accuracy']:7.2%}"

    def best(self, number: float) -> str:
        return f"{'mIoU' if self.recipe.task == 'segment' else 'AP'} {number:.2%}"


Start = ImageStart | DenseStart | TextStart


def is_first_rank() -> bool:
    """Return whether this process is the one of its ranks that prints."""
    return os.environ.get("RANK", "0") == "0"


class TrainingDisplay:
    """A `Watcher` that prints a banner, a bar and a line per evaluation. Only the first rank prints.

    resume   the command that resumes the run, for Ctrl-C
    """

    def __init__(self, wanted: bool, start: Start, resume: str):
        self.main = is_first_rank()
        self.wanted, self.start, self.resume = wanted and self.main, start, resume
        self.open = ExitStack()
        self.bar, self.announced, self.images, self.speed = Bar(), False, 0, ""
        self.parameters, self.epochs, self.per_epoch, self.at = 0, 0, 1, -1
        self.label, self.loss = "", ""

    def close(self) -> None:
        self.open.close()

    def decoding(self, images: int) -> None:
        """Move the bar on by the number of images that were just decoded, to train or to test on."""
        assert not isinstance(self.start, TextStart)
        total = sum(map(len, self.start.splits))
        if not self.images:
            self.announce()
            self.bar = self.open.enter_context(progress(total, self.wanted))
        self.images += images
        self.bar(f"{self.start.reading}, {self.images:,} of {total:,}", images)

    def announce(self) -> None:
        """Print the recipe and the data, once."""
        if self.announced:
            return
        self.announced, start = True, self.start
        reason = f", {start.because}" if start.because else ""
        self.say(f"recipe   {start.name}{reason}")
        self.say(start.data_line())

    def begin(self, job: "Job", parameters: int) -> None:
        self.open.close()
        WATCH.is_saving = lambda: job.stop.saving
        WATCH.says = (
            "stopped before the state was saved; to go on from the last checkpoint, or from the start if there is "
            f"none: {self.resume}"
        )
        self.parameters, self.epochs, self.per_epoch = parameters, job.recipe.all_epochs, job.task.train.per_epoch
        self.speed = job.task.speed_unit[0]
        total = self.per_epoch * self.epochs
        self.announce()
        device, ranks = job.devices.device, job.devices.ranks
        where = device if ranks == 1 else f"{ranks} x {device.type}"
        self.say(f"model    {self.start.model}, {units.count(parameters)} parameters, {where}")
        epochs = units.counted(self.epochs, "epoch")
        self.say(f"updates  {total:,}: {epochs} of {self.per_epoch:,}, batch {job.recipe.batch:,}")
        self.bar = self.open.enter_context(progress(total, self.wanted))

    def tick(self, step: int) -> None:
        if self.at < 0:  # a resumed run has made the updates before this one
            self.at = step - 1
            self.bar.skip(self.at)
            if self.at:
                self.say(f"continuing after update {self.at:,} of {self.per_epoch * self.epochs:,}")
        self.bar(f"epoch {-(-step // self.per_epoch)}/{self.epochs}{self.label}", step - self.at)
        self.at = step

    def logged(self, step: int, numbers: Mapping[str, float]) -> None:
        if "epoch" in numbers:
            reached = self.start.scores(numbers)
            self.say(f"epoch {step // self.per_epoch:>3}/{self.epochs}   {self.loss}{reached}")
            self.loss = ""  # an epoch without a line of log has no loss to show
            return
        self.loss = f"loss {numbers['loss']:.4f}   "
        rate = units.short(numbers[f"{self.speed}_per_second"])
        self.label = f"   loss {numbers['loss']:.3f}   {rate} {self.speed}/s   lr {numbers['lr']:.1e}"

    def say(self, sentence: str) -> None:
        if self.wanted:
            say(sentence)

    def conclude(self, outcome: "Outcome", out: Path) -> None:
        if outcome.skipped:
            self.say(f"{units.counted(outcome.skipped, 'image')} skipped: {out / 'skipped.json'}")
        self.say(
            f"best {self.start.best(outcome.best)}, after epoch {outcome.best_step // self.per_epoch}, in "
            f"{units.seconds(outcome.seconds)}: softless evaluate {out}"
        )
