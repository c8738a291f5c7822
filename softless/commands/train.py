"""softless train: train a model on images, masks, boxes or text, to be killed at any moment and resumed.

A recipe (recipes/*.toml) says how to train, and `--set` changes any of its keys. softless/train/run.py lists the files
of the folder RUN.

JSON (schema softless.train/1):

    {"schema", "out", "recipe": its name, "model", "parameters", "steps", "best_step", "best_top1",
     "last": {"top1", "top5", "ece", "test_loss"}, "seconds", "skipped": images that could not be decoded}

A segmentation has "best_miou", and "last" has "miou", "pixel_accuracy" and "test_loss". A detection has "best_ap", and
"last" has "ap", "ap50", "ap75" and "test_loss". A language model has "best_loss_per_byte" instead of "best_top1", and
"last" has "loss_per_byte", "bits_per_byte", "perplexity" and "test_loss".

Exit status: 0 trained, 1 a loss or gradient was not finite, 2 usage, 3 bad input, 130 interrupted and saved.
"""

import os
import shlex
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from softless.commands.arguments import MOST_PROCESSES, OnBad, Where, key_value
from softless.commands.common import (
    CHECK_FAILED,
    complain,
    emit_json,
    importing,
    prepare_folder,
    refuse,
    reports_errors,
    warnings_in_one_line,
)
from softless.commands.ctrl_c import WATCH
from softless.commands.progress import say
from softless.commands.train_display import (
    DenseStart,
    ImageStart,
    Start,
    TextStart,
    TrainingDisplay,
    is_first_rank,
)
from softless.errors import ArgumentError

if TYPE_CHECKING:
    from softless.train.assemble import Runtime
    from softless.train.dense_recipe import AnyDense
    from softless.train.language_recipe import LanguageRecipe

SCHEMA = "softless.train/1"
LARGEST_SEED = 10**15 - 1
NOTHING_SAVED = "stopped before the first update; nothing was saved"
MUCH = 4  # softless warns if a recipe makes the sides of images this many times smaller
SUMMARY = "Train on images, with masks or boxes, or text; resumable."
HELP = """Train a model: from a recipe, with a log, checkpoints and TensorBoard.

\b
$ softless train                                   # the embedded digits
$ softless train --data flowers/ --out runs/f      # chooses a recipe
$ softless train --recipe cifar10 --data cifar10-train.parquet --out runs/a
$ softless train inline_swin_tiny --recipe imagenette --data imagenette/
$ softless train --set model.mechanism=softmax --set model.local=false
$ softless train --recipe segment-camvid --data camvid/ --init runs/f  # masks
$ softless train --recipe detect-bccd --data cells.parquet  # with boxes
$ softless train --recipe text-small --data book.txt   # a language model
$ softless train --out runs/a --resume             # after Ctrl-C or a crash
$ torchrun --nproc-per-node 8 -m softless train --recipe inline_deit_tiny ...
"""


@reports_errors
def run(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Instead of the recipe's model.")] = None,
    data: Annotated[
        str | None, typer.Option(metavar="PATH", help="Folder, parquet or text file; default: digits.")
    ] = None,
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
    with importing():
        from softless.errors import NonFiniteError
        from softless.train.assemble import Runtime, train, train_language
        from softless.train.assemble_dense import train_dense
        from softless.train.devices import leave

    options = {"data": data, "seed": seed, "teacher": teacher, "init": init}
    runtime = Runtime(device=device, sharing=sharing, workers=workers, on_bad_image=on_bad_image, graph=graph)
    command = resume_command(out, runtime)
    with says_how_to_go_on(out, command, resume):
        start = choose_start(out, recipe, model, list(changes or []), options, resume, device)
        if isinstance(start, TextStart):
            refuse({"--workers": workers, "--on-bad-image": on_bad_image == "skip"}, "a language model reads no images")
        prepare_folder(out)
        with warnings_in_one_line(), closing(TrainingDisplay(not json, start, command)) as display:
            settings: dict[str, Any] = {"watch": display, "runtime": runtime, "resume": resume, **start.options}
            try:
                if isinstance(start, TextStart):
                    outcome = train_language(out, start.recipe, texts=start.texts, **settings)
                elif isinstance(start, DenseStart):
                    outcome = train_dense(out, start.recipe, splits=start.splits, tick=display.decoding, **settings)
                else:
                    if display.main:
                        warn_of_misfits(start, recipe)
                    outcome = train(out, start.recipe, splits=start.splits, tick=display.decoding, **settings)
            except NonFiniteError as error:
                complain(str(error))
                leave()
                raise typer.Exit(CHECK_FAILED) from None
    leave()
    if json and display.main:
        result = outcome.document()
        del result["answers"]  # a number for every example
        facts = {"out": str(out), "recipe": start.name, "model": start.recipe.model.name}
        emit_json({"schema": SCHEMA, **facts, "parameters": display.parameters, **result})
    else:
        display.conclude(outcome, out)


@contextmanager
def says_how_to_go_on(out: Path, command: str, resume: bool) -> Iterator[None]:
    """Say on Ctrl-C how to go on with the run in `out`, or that nothing was saved."""
    from softless.io.checkpoint import places
    from softless.train.devices import leave
    from softless.train.loop import Interrupted
    from softless.train.run import Run

    run = Run(out)
    other = run.about.is_file() and not resume  # this command refuses to go on with it
    WATCH.says = f"stopped; to go on: {command}" if resume else NOTHING_SAVED
    try:
        yield
    except KeyboardInterrupt as stopped:
        sentence = NOTHING_SAVED
        if isinstance(stopped, Interrupted):
            sentence = f"{stopped}; to go on: {command}"
        elif run.about.is_file() and not other:
            where = "" if places(run.last) else ", from the start, because no checkpoint was saved yet"
            sentence = f"stopped; to go on{where}: {command}"
        if is_first_rank():
            say(sentence, err=True)
        if isinstance(stopped, Interrupted):  # all ranks stopped together
            leave()
        raise


def resume_command(out: Path, runtime: "Runtime") -> str:
    """Return the command that resumes a run, with the options that its folder does not hold."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    start = "softless train" if ranks == "1" else f"torchrun --nproc-per-node {ranks} -m softless train"
    values = {option.name: (getattr(runtime, option.name), option.default) for option in fields(runtime)}
    changed = {name: value for name, (value, default) in values.items() if value != default}
    flags = [f" --{name.replace('_', '-')}{'' if value is True else f' {value}'}" for name, value in changed.items()]
    return f"{start} --out {shlex.quote(str(out))} --resume{''.join(flags)}"


def choose_start(
    out: Path,
    name: str | None,
    model: str | None,
    changes: list[tuple[str, str]],
    options: Mapping[str, Any],
    resume: bool,
    device: str,
) -> Start:
    """Read the recipe and open its data. A resumed run keeps its own options; without a name, a recipe is chosen."""
    import torch

    from softless.data import open_images
    from softless.data.annotated_sources import values_of
    from softless.data.boxes import BoxValues
    from softless.data.sources import splits_of
    from softless.data.text import is_text
    from softless.train.choose import fitting, fitting_text, typical_size
    from softless.train.dense_recipe import DenseRecipe
    from softless.train.language_recipe import LanguageRecipe
    from softless.train.recipe import changed, document_of, for_images
    from softless.train.run import Run

    before = Run(out).read() if resume else {}
    options = {key: before.get(key) if value is None else value for key, value in options.items()}
    options["seed"] = options["seed"] or 0
    for key in ("teacher", "init"):
        options[key] = None if options[key] is None else Path(options[key])
    changes = [*changes, *([("model.name", f'"{model}"')] if model else [])]
    document, because = None if name is None else document_of(name), ""
    cuda = device != "cpu" and torch.cuda.is_available()
    another = "--recipe NAME takes another"
    if document is None and resume:
        name, document, because = "of the run", before["recipe"], f"as {out} was begun"
    elif document is None and is_text(options["data"]):
        name, reason = fitting_text(cuda)
        document, because = document_of(name), f"chosen {reason}; {another}"
    if document is not None:
        recipe = changed(document, changes)
        if isinstance(recipe, LanguageRecipe):
            return text_start(str(name), because, recipe, options)
        if isinstance(recipe, DenseRecipe):
            return dense_start(str(name), because, recipe, options)
    elif (values := values_of(options["data"])) is not None:
        held, such = ("boxes", "detect-bccd") if isinstance(values, BoxValues) else ("masks", "segment-camvid")
        raise ArgumentError(f"{options['data']} holds {held}: give a recipe for them, such as {such}, with --recipe")
    train = open_images(options["data"], "train")
    size = typical_size(train)
    if document is None:
        name, reason, fitted = fitting(options["data"], train, size, cuda)
        document, because = document_of(name), f"chosen {reason}; {another}"
        changes = [*fitted.items(), *changes]
    images = for_images(changed(document, changes), f"recipe {name!r}")
    splits = splits_of(options["data"], train, images.hold_out)
    return ImageStart(str(name), because, options, images, splits, size)


def text_start(name: str, because: str, recipe: "LanguageRecipe", options: dict[str, Any]) -> TextStart:
    """Read the texts of a language model."""
    from softless.data.text import open_texts

    refuse({"--teacher": options.pop("teacher"), "--init": options.pop("init")}, "a language model begins on its own")
    if options["data"] is None:
        raise ArgumentError(f"recipe {name!r} trains a language model, and needs a text: give it with --data")
    return TextStart(name, because, options, recipe, open_texts(options["data"], recipe.hold_out))


def dense_start(name: str, because: str, recipe: "AnyDense", options: dict[str, Any]) -> DenseStart:
    """Open the images of a segmentation or a detection, with their masks or boxes."""
    from softless.data.annotated_sources import open_annotated_splits
    from softless.train.recipe import SEGMENT

    what, needed = ("segmentation", "masks") if recipe.task == SEGMENT else ("detection", "boxes")
    refuse({"--teacher": options.pop("teacher")}, f"a {what} learns from {needed} alone")
    if options["data"] is None:
        raise ArgumentError(f"recipe {name!r} trains a {what}, and needs images with {needed}: give it with --data")
    splits = open_annotated_splits(options["data"], recipe.values, recipe.hold_out)
    return DenseStart(name, because, options, recipe, splits)


def warn_of_misfits(start: ImageStart, recipe: str | None) -> None:
    """Warn if the named recipe is not for these images: it loses most of their pixels, or they are the digits."""
    seen, size = start.recipe.image_size, start.size
    if recipe is None or size is None:
        return
    if start.options["data"] is None and seen != size.height:
        warnings.warn("no --data: training on the embedded digits", RuntimeWarning, stacklevel=2)
    if min(size.height, size.width) >= MUCH * seen:
        warnings.warn(
            f"recipe {recipe!r} shrinks these images from {size.height} x {size.width} to {seen} x {seen} pixels; "
            "leave --recipe out to have one chosen that fits them",
            RuntimeWarning,
            stacklevel=2,
        )
