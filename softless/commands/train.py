"""softless train: train a backbone on images, so that the training can be killed at any moment and resumed.

A recipe (recipes/*.toml) says how to train, and `--set` changes any of its keys. softless/train/run.py lists the files
of the folder RUN.

JSON (schema softless.train/1):

    {"schema", "out", "recipe": its name, "model", "parameters", "steps", "best_step", "best_top1",
     "last": {"top1", "top5", "ece", "test_loss"}, "seconds", "skipped": images that could not be decoded}

Exit status: 0 trained, 1 a loss or gradient was not finite, 2 usage, 3 bad input, 130 interrupted and saved.
"""

import os
import shlex
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from softless.commands.arguments import MOST_PROCESSES, OnBad, Where, key_value
from softless.commands.common import (
    CHECK_FAILED,
    complain,
    console,
    emit_json,
    prepare_folder,
    reports_errors,
    warnings_in_one_line,
)
from softless.commands.ctrl_c import WATCH
from softless.commands.progress import Bar, progress
from softless.report import units

if TYPE_CHECKING:
    from softless.data.images import Images
    from softless.train.assemble import Runtime
    from softless.train.choose import TypicalSize
    from softless.train.loop import Job
    from softless.train.recipe import Recipe
    from softless.train.run import Outcome

SCHEMA = "softless.train/1"
LARGEST_SEED = 10**15 - 1
MUCH = 4  # softless warns if a recipe makes the sides of images this many times smaller
SUMMARY = "Train a backbone on images, resumable, on one device or many."
HELP = """Train a backbone on images: from a recipe, with a log, checkpoints and TensorBoard.

\b
$ softless train                                   # the embedded digits
$ softless train --data flowers/ --out runs/f      # chooses a recipe
$ softless train --recipe cifar10 --data cifar10-train.parquet --out runs/a
$ softless train inline_swin_tiny --recipe imagenette --data imagenette/
$ softless train --set model.mechanism=softmax --set model.local=false
$ softless train --out runs/a --resume             # after Ctrl-C or a crash
$ torchrun --nproc-per-node 8 -m softless train --recipe inline_deit_tiny ...
"""


@reports_errors
def run(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Instead of the recipe's model.")] = None,
    data: Annotated[str | None, typer.Option(metavar="PATH", help="Folder or parquet file; default: digits.")] = None,
    recipe: Annotated[str | None, typer.Option(metavar="NAME", help="Name or file; default: one that fits.")] = None,
    changes: Annotated[
        list[Any] | None, typer.Option("--set", parser=key_value, metavar="KEY=VALUE", help="Change the recipe.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="RUN", help="Folder of the run; created if missing.")] = Path("run"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in RUN.")] = False,
    seed: Annotated[int | None, typer.Option(min=0, max=LARGEST_SEED, metavar="NUMBER", help="Default 0.")] = None,
    teacher: Annotated[Path | None, typer.Option(metavar="RUN", help="Learn from this run's model too.")] = None,
    init: Annotated[Path | None, typer.Option(metavar="PATH", help="Begin with weights of a file or run.")] = None,
    device: Annotated[Where, typer.Option(help="auto uses CUDA if there is one.")] = "auto",
    sharing: Annotated[Literal["ddp", "fsdp"], typer.Option(help="How several devices share a model.")] = "ddp",
    workers: Annotated[int, typer.Option(min=0, max=MOST_PROCESSES, help="Processes that decode.")] = 0,
    on_bad_image: Annotated[OnBad, typer.Option(help="skip stops above 0.1 %.")] = "fail",
    graph: Annotated[bool, typer.Option("--graph", help="Record CUDA graphs: small models, one device.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Choose the recipe, train, and show the result."""
    from softless.errors import NonFiniteError
    from softless.train.assemble import Runtime, train
    from softless.train.devices import leave
    from softless.train.loop import Interrupted

    options = {"data": data, "seed": seed, "teacher": teacher, "init": init}
    start = choose_start(out, recipe, model, list(changes or []), options, resume, device)
    prepare_folder(out)
    runtime = Runtime(device=device, sharing=sharing, workers=workers, on_bad_image=on_bad_image, graph=graph)
    command = resume_command(out, runtime)
    WATCH.says = f"stopped before the state was saved; to go on from the last checkpoint: {command}"
    with warnings_in_one_line(), closing(TrainingDisplay(not json, start)) as display:
        if display.main:
            warn_of_shrinking(start, recipe)
        settings: dict[str, Any] = {"runtime": runtime, "resume": resume, "splits": start.splits, **start.options}
        try:
            outcome = train(out, start.recipe, watch=display, tick=display.decoding, **settings)
        except Interrupted as stopped:
            display.say_how_to_resume(f"{stopped}; to go on: {command}")
            leave()
            raise
        except NonFiniteError as error:
            complain(str(error))
            leave()
            raise typer.Exit(CHECK_FAILED) from None
    leave()
    if json and display.main:
        result = outcome.document()
        del result["answers"]  # a bit for every image
        facts = {"out": str(out), "recipe": start.name, "model": start.recipe.model.name}
        emit_json({"schema": SCHEMA, **facts, "parameters": display.parameters, **result})
    else:
        display.conclude(outcome, out)


def resume_command(out: Path, runtime: "Runtime") -> str:
    """Return the command that resumes a run, with the options that its folder does not hold."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    start = "softless train" if ranks == "1" else f"torchrun --nproc-per-node {ranks} -m softless train"
    values = {option.name: (getattr(runtime, option.name), option.default) for option in fields(runtime)}
    changed = {name: value for name, (value, default) in values.items() if value != default}
    flags = [f" --{name.replace('_', '-')}{'' if value is True else f' {value}'}" for name, value in changed.items()]
    return f"{start} --out {shlex.quote(str(out))} --resume{''.join(flags)}"


@dataclass(frozen=True)
class Start:
    """Everything that a training begins with.

    name, because   the recipe's name, and why it was chosen
    splits, size    the images to train and to test on, and their typical size in pixels
    options         data, seed, teacher and init
    """

    name: str
    because: str
    recipe: "Recipe"
    splits: "tuple[Images, Images]"
    size: "TypicalSize | None"
    options: dict[str, Any]


def choose_start(
    out: Path,
    name: str | None,
    model: str | None,
    changes: list[tuple[str, str]],
    options: Mapping[str, Any],
    resume: bool,
    device: str,
) -> Start:
    """Open the images and read the recipe. A resumed run keeps its own options; without a name, a recipe is chosen."""
    import torch

    from softless.data import open_splits
    from softless.train.choose import fitting, typical_size
    from softless.train.recipe import changed, document_of
    from softless.train.run import Run

    before = Run(out).read() if resume else {}
    options = {key: before.get(key) if value is None else value for key, value in options.items()}
    options["seed"] = options["seed"] or 0
    for key in ("teacher", "init"):
        options[key] = None if options[key] is None else Path(options[key])
    changes = [*changes, *([("model.name", f'"{model}"')] if model else [])]
    document, because = None if name is None else document_of(name), ""
    splits = open_splits(options["data"])
    size = typical_size(splits[0])
    if document is None and resume:
        name, document, because = "of the run", before["recipe"], f"as {out} was begun"
    elif document is None:
        cuda = device != "cpu" and torch.cuda.is_available()
        name, reason, fitted = fitting(options["data"], splits[0], size, cuda)
        document, because = document_of(name), f"chosen {reason}; --recipe NAME takes another"
        changes = [*fitted.items(), *changes]
    recipe = changed(document, changes)
    if recipe.hold_out:
        splits = open_splits(options["data"], recipe.hold_out)
    return Start(str(name), because, recipe, splits, size, options)


def warn_of_shrinking(start: Start, recipe: str | None) -> None:
    """Warn if the named recipe shrinks these images so much that most of their pixels are lost."""
    seen, size = start.recipe.image_size, start.size
    if recipe is not None and size is not None and min(size.height, size.width) >= MUCH * seen:
        warnings.warn(
            f"recipe {recipe!r} shrinks these images from {size.height} x {size.width} to {seen} x {seen} pixels; "
            "leave --recipe out to have one chosen that fits them",
            RuntimeWarning,
            stacklevel=2,
        )


class TrainingDisplay:
    """A `Watcher` that prints a banner, a bar and a line per evaluation. Only the first rank prints."""

    def __init__(self, wanted: bool, start: Start):
        self.main = os.environ.get("RANK", "0") == "0"
        self.wanted, self.start = wanted and self.main, start
        self.open, self.out = ExitStack(), console()
        self.bar, self.announced, self.images = Bar(), False, 0
        self.parameters, self.epochs, self.per_epoch, self.at = 0, 0, 1, -1
        self.label, self.loss = "", "-"

    def close(self) -> None:
        self.open.close()

    def decoding(self, images: int) -> None:
        """Move the bar on by the number of images that were just decoded, to train or to test on."""
        total = sum(map(len, self.start.splits))
        if not self.images:
            self.announce()
            self.bar = self.open.enter_context(progress(total, self.wanted))
        self.images += images
        self.bar(f"decoding images, {self.images:,} of {total:,}", images)

    def announce(self) -> None:
        """Print the recipe and the images, once."""
        if self.announced:
            return
        self.announced, start = True, self.start
        train, test = start.splits
        reason = f", {start.because}" if start.because else ""
        self.say(f"recipe   {start.name}{reason}")
        roughly = "" if start.size is None or start.size.all_same else "about "
        pixels = "" if start.size is None else f"; {roughly}{units.picture(start.size[:2])} pixels"
        seen = units.picture([start.recipe.image_size] * 2)
        classes = units.counted(len(train.classes), "class", "classes")
        self.say(f"images   {len(train):,} to train on, {len(test):,} to test on, {classes}{pixels}, seen in {seen}")

    def begin(self, job: "Job", parameters: int) -> None:
        self.open.close()
        WATCH.is_saving = lambda: job.stop.saving
        self.parameters, self.epochs, self.per_epoch = parameters, job.recipe.all_epochs, job.task.train.per_epoch
        total = self.per_epoch * self.epochs
        self.announce()
        device, ranks = job.devices.device, job.devices.ranks
        where = device if ranks == 1 else f"{ranks} x {device.type}"
        self.say(f"model    {job.recipe.model.name}, {units.count(parameters)} parameters, {where}")
        epochs = units.counted(self.epochs, "epoch")
        self.say(f"updates  {total:,}: {epochs} of {self.per_epoch:,}, batch {job.recipe.batch:,}")
        self.bar = self.open.enter_context(progress(total, self.wanted))

    def tick(self, step: int) -> None:
        if self.at < 0:  # a resumed run has made the updates before this one
            self.at = step - 1
            self.bar.skip(self.at)
        self.bar(f"epoch {-(-step // self.per_epoch)}/{self.epochs}{self.label}", step - self.at)
        self.at = step

    def logged(self, step: int, numbers: Mapping[str, float]) -> None:
        if "top1" in numbers:
            self.say(
                f"epoch {step // self.per_epoch:>3}/{self.epochs}   loss {self.loss}   "
                f"top-1 {numbers['top1']:7.2%}   top-5 {numbers['top5']:7.2%}   ECE {numbers['ece']:.3f}"
            )
            self.loss = "-"  # an epoch without a line of log has no loss to show
            return
        self.loss = f"{numbers['loss']:.4f}"
        rate = units.short(numbers["images_per_second"])
        self.label = f"   loss {numbers['loss']:.3f}   lr {numbers['lr']:.1e}   {rate} images/s"

    def say(self, sentence: str) -> None:
        if self.wanted:
            self.out.print(sentence, soft_wrap=True)

    def say_how_to_resume(self, sentence: str) -> None:
        self.close()
        if self.main:
            typer.echo(sentence, err=True)

    def conclude(self, outcome: "Outcome", out: Path) -> None:
        if outcome.skipped:
            self.say(f"{units.counted(outcome.skipped, 'image')} skipped: {out / 'skipped.json'}")
        self.say(
            f"best top-1 {outcome.best:.2%}, after epoch {outcome.best_step // self.per_epoch}, in "
            f"{units.seconds(outcome.seconds)}: softless evaluate {out}"
        )
