"""softless train: train a backbone on images, so that it can be killed at any moment and go on.

A recipe (recipes/*.toml) says how; `--set` changes any of its keys. The folder RUN gets run.json, log.jsonl, the newest
checkpoints in last/, the best weights in best/, tensorboard/ and, at the end, result.json (softless/train/run.py).

JSON (schema softless.train/1):

    {"schema", "out", "recipe": its name, "model", "parameters", "steps", "best_step", "best_top1",
     "last": {"top1", "top5", "ece", "test_loss"}, "seconds", "skipped": images that could not be decoded}

Exit status: 0 trained, 1 a loss or gradient was not finite, 2 usage, 3 bad input, 130 interrupted and saved.
"""

import os
import shlex
import warnings
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from softless.commands.arguments import MOST, MOST_PROCESSES, OnBad, Where, key_value
from softless.commands.common import (
    CHECK_FAILED,
    complain,
    emit_json,
    prepare_folder,
    reports_errors,
    warnings_in_one_line,
)
from softless.commands.ctrl_c import WATCH

if TYPE_CHECKING:
    from softless.commands.train_show import Start
    from softless.train.assemble import Runtime

SCHEMA = "softless.train/1"
MUCH = 4  # a recipe that makes images smaller by this much a side is warned of
SUMMARY = "Train a backbone on images, resumable, on one device or many."
HELP = """Train a backbone on images: from a recipe, with a log, checkpoints and TensorBoard.

\b
$ softless train                                   # the embedded digits
$ softless train --data flowers/ --out runs/f      # a recipe that fits them
$ softless train --recipe cifar10 --data cifar10-train.parquet --out runs/a
$ softless train inline_swin_tiny --recipe imagenette --data imagenette/
$ softless train --set model.mechanism=softmax --set model.local=false
$ softless train --out runs/a --resume             # after Ctrl-C or a crash
$ torchrun --nproc-per-node 8 -m softless train --recipe inline_deit_tiny ...
"""


class Share(StrEnum):
    """How several devices share a model."""

    ddp = "ddp"
    fsdp = "fsdp"


@reports_errors
def run(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Instead of the recipe's.", show_default=False)
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="PATH", help="Folder or parquet file; digits if absent.", show_default=False)
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A recipe, or its file; by default one that fits the images.", show_default=False
        ),
    ] = None,
    changes: Annotated[
        list[Any] | None,
        typer.Option("--set", parser=key_value, metavar="KEY=VALUE", help="Change the recipe.", show_default=False),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="RUN", help="Folder of the run; made if missing.")] = Path("run"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in RUN.")] = False,
    seed: Annotated[
        int | None, typer.Option(min=0, max=MOST, metavar="NUMBER", help="Default 0.", show_default=False)
    ] = None,
    teacher: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Learn from this run's answers too.", show_default=False)
    ] = None,
    init: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Begin with these weights, or a run's.", show_default=False)
    ] = None,
    device: Annotated[Where, typer.Option(help="auto is cuda where there is one.")] = Where.auto,
    sharing: Annotated[Share, typer.Option(help="How several devices share a model.")] = Share.ddp,
    workers: Annotated[
        int, typer.Option(min=0, max=MOST_PROCESSES, metavar="NUMBER", help="Processes that decode.")
    ] = 0,
    on_bad_image: Annotated[OnBad, typer.Option(help="skip stops above 0.1 %.")] = OnBad.fail,
    graph: Annotated[bool, typer.Option("--graph", help="Replay CUDA graphs: small models, one device.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Read the recipe, train, tell."""
    from softless.commands.train_show import Showing
    from softless.errors import NonFiniteError
    from softless.train.assemble import Runtime, train
    from softless.train.devices import leave
    from softless.train.stop import Interrupted

    asked = {"data": data, "seed": seed, "teacher": teacher, "init": init}
    start, asked = settle(out, recipe, model, list(changes or []), asked, resume, device.value)
    prepare_folder(out)
    runtime = Runtime(
        device=device.value, sharing=sharing.value, workers=int(workers), on_bad_image=on_bad_image.value, graph=graph
    )
    WATCH.says = f"stopped before the state was saved; to go on from the last checkpoint: {how_to_go_on(out, runtime)}"
    with warnings_in_one_line(), Showing(not json, start) as showing:
        if showing.main:
            warn_of_shrinking(start, recipe)
        given: dict[str, Any] = {
            "runtime": runtime,
            "resume": resume,
            "splits": start.parts,
            "tick": showing.decoding,
            **asked,
        }
        try:
            outcome = train(out, start.recipe, watch=showing, **given)
        except Interrupted as stopped:
            showing.say_how_to_resume(f"{stopped}; to go on: {how_to_go_on(out, runtime)}")
            leave()
            raise
        except NonFiniteError as error:
            complain(str(error))
            leave()
            raise typer.Exit(CHECK_FAILED) from None
    leave()
    if json and showing.main:
        from dataclasses import asdict

        result = asdict(outcome)
        del result["answers"]  # a bit for every image
        facts = {"out": str(out), "recipe": start.name, "model": start.recipe.model.name}
        emit_json({"schema": SCHEMA, **facts, "parameters": showing.parameters, **result})
    else:
        showing.conclude(outcome, out)


def how_to_go_on(out: Path, runtime: "Runtime") -> str:
    """The command that resumes a run: what its folder does not know is said again."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    start = "softless train" if ranks == "1" else f"torchrun --nproc-per-node {ranks} -m softless train"
    values = {each.name: (getattr(runtime, each.name), each.default) for each in fields(runtime)}
    changed = {name: value for name, (value, default) in values.items() if value != default}
    said = [f" --{name.replace('_', '-')}{'' if value is True else f' {value}'}" for name, value in changed.items()]
    return f"{start} --out {shlex.quote(str(out))} --resume{''.join(said)}"


def settle(
    out: Path,
    name: str | None,
    model: str | None,
    changes: list[tuple[str, str]],
    asked: dict[str, Any],
    resume: bool,
    device: str,
) -> "tuple[Start, dict[str, Any]]":
    """The recipe and the images; and data, seed, teacher and init. What is not given is that of the run to go on with.

    Without a name the recipe is one that fits the images.
    """
    import torch

    from softless.commands.train_show import Start
    from softless.data import open_splits
    from softless.train.choose import fitting, usual_size
    from softless.train.recipe_file import changed, document_of
    from softless.train.run import Run

    before = Run(out).read() if resume else {}
    asked = {key: before.get(key) if value is None else value for key, value in asked.items()}
    asked["seed"] = asked["seed"] or 0
    for key in ("teacher", "init"):
        asked[key] = None if asked[key] is None else Path(asked[key])
    changes = [*changes, *([("model.name", f'"{model}"')] if model else [])]
    document, because = (None, "") if name is None else (document_of(name), "")
    parts = open_splits(asked["data"])
    size = usual_size(parts[0])
    if document is None and resume:
        name, document, because = "of the run", before["recipe"], f"as {out} was begun"
    elif document is None:
        choice = fitting(asked["data"], parts[0], size, device != "cpu" and torch.cuda.is_available())
        name, document = choice.name, document_of(choice.name)
        because, changes = f"chosen {choice.because}; --recipe NAME takes another", [*choice.changes, *changes]
    return Start(str(name), because, changed(document, changes), parts, size), asked


def warn_of_shrinking(start: "Start", recipe: str | None) -> None:
    """A recipe for much smaller images throws most of these away: whoever asked for it is told."""
    seen, size = start.recipe.image_size, start.size
    if recipe is not None and size is not None and min(size.height, size.width) >= MUCH * seen:
        warnings.warn(
            f"recipe {recipe!r} shrinks these images from {size.height} x {size.width} to {seen} x {seen} pixels; "
            "leave --recipe out to have one chosen that fits them",
            RuntimeWarning,
            stacklevel=2,
        )
