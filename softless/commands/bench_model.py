"""softless bench-model: throughput and memory of a model, computed in every possible way on this machine.

The model against its plain formulas, its softmax twin and timm's model. softless.bench.model_contest defines the
numbers, and softless.bench.documents the JSON.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from softless.commands import arguments
from softless.commands.bench import REPEATS, show_results
from softless.commands.common import check_plot, command_line, emit_json, plain_table, reports_errors
from softless.commands.progress import progress
from softless.errors import ArgumentError
from softless.io.files import write_text
from softless.report import units

if TYPE_CHECKING:
    from rich.table import Table

    from softless.bench.documents import ModelDocument, SettingResult

SUMMARY = "Images per second and memory of a model against its softmax twin and timm's."
HELP = """Time a model against its plain formulas, its softmax twin and timm's model of the same family.

Prints images per second, the ratio to the softmax twin, memory and parameters.

\b
$ softless bench-model inline_deit_tiny --image-size 224,448,896 --compile
$ softless bench-model inline_swin_tiny --window 7,14,28 --plot swin.html
$ softless bench-model inline_pvt_tiny --task detect --image-size 512 --bound
"""


@reports_errors
def run(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="A name from `softless list --models`.")],
    image_size: Annotated[
        Any,
        typer.Option(
            parser=arguments.image_sizes, metavar="HxW,...", help="Sizes of the images.", show_default="the model's own"
        ),
    ] = None,
    window: Annotated[
        Any,
        typer.Option(
            parser=arguments.windows, metavar="W,...", help="Windows of the mixed blocks; none for no windows."
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, max=arguments.MOST, metavar="B", help="Images per batch.", show_default="by their size"),
    ] = None,
    task: Annotated[
        Literal["segment", "detect"] | None, typer.Option(help="Time the model in a head; none: the classifier.")
    ] = None,
    head: Annotated[
        Literal["upernet", "fpn", "faster_rcnn", "retinanet", "mask_rcnn"] | None,
        typer.Option(help="Of --task.", show_default="upernet or faster_rcnn"),
    ] = None,
    bound: Annotated[bool, typer.Option("--bound", help="Also time the model without attention.")] = False,
    train: Annotated[bool, typer.Option("--train", help="Also time forward and backward together.")] = False,
    compiled: Annotated[bool, typer.Option("--compile", help="Also time each model under torch.compile.")] = False,
    dtype: arguments.DtypeOption = None,
    device: Annotated[arguments.Where, typer.Option(help="auto is cuda if there is one.")] = "auto",
    backend: Annotated[arguments.Backend, typer.Option(help="Backend of the model's linear attention.")] = "auto",
    option: arguments.NamedOptions = None,
    repeats: Annotated[
        int, typer.Option(min=1, max=arguments.MOST, metavar="NUMBER", help="Runs of each model.")
    ] = REPEATS,
    plot: arguments.PlotOption = None,
    json: arguments.JsonOption = False,
) -> None:
    """Measure a model; draw and show the result."""
    check_plot(plot)
    from softless.bench import documents, figures
    from softless.bench.model_heads import head_of

    texts = dict(option or [])
    options = arguments.model_options(name, texts)
    if window and "window" in options:
        raise ArgumentError(f"--option window={texts['window']} and --window are the same: give one of them")
    plan = documents.plan_model(
        name,
        options,
        image_sizes=image_size,
        windows=window,
        batch=batch,
        train=train,
        compiled=compiled,
        dtype=dtype,
        device=device,
        backend=backend,
        repeats=repeats,
        head=head_of(task, head),
        bound=bound,
    )
    first, sizes = plan.settings[0], dict.fromkeys(setting.image_size for setting in plan.settings)
    recorded: dict[str, Any] = {
        "option": [f"{option}={text}" for option, text in texts.items()],
        "image_size": tuple(f"{height}x{width}" for height, width in sizes),
        "window": window and tuple(side or "none" for side in window),
        "batch": batch,
        "task": task,
        "head": head,
        "bound": bound,
        "train": train,
        "compile": compiled,
        "dtype": str(first.dtype).removeprefix("torch."),
        "device": first.device,
        "backend": backend,
        "repeats": repeats,
    }
    command = command_line("softless bench-model", [name], recorded)
    with progress(1.0, not json) as advance:
        document = documents.measure_model(plan, command=command, option_texts=texts, advance=advance)
    if plot is not None:
        write_text(plot, figures.model_page(document))
    if json:
        emit_json(document)
    else:
        show(document, plot)


def show(document: "ModelDocument", plot: Path | None) -> None:
    """Print one table per setting and pass, a sentence on the largest images, and what was not timed."""
    head = f"with {document['head']}, " if document["head"] else ""
    heading = f"{head}{document['dtype']}, torch {document['versions']['torch']}"
    eager = "eager: ordinary calls, launches included; " if document["device"] == "cuda" else ""
    note = f"x twin: against the softmax twin, compiled or not; {eager}memory: with the weights"
    show_results(document, heading, setting, _table, [verdict(document), note], plot)


def verdict(document: "ModelDocument") -> str:
    """Compare the model with the others on the largest images: compiled with compiled, eager with eager."""
    result = max(document["results"], key=lambda result: result["image_size"][0] * result["image_size"][1])
    timed: list[Any] = [row for row in result["rows"] if row["images_per_second"] is not None]
    mine = [row for row in timed if row["role"] == "ours"]
    if not mine:
        return f"{setting(result)}: {document['model']} could not be timed."
    best = max(mine, key=lambda row: row["images_per_second"])
    own = f"{setting(result)}: {best['label']} does {units.short(best['images_per_second'])} images/s"
    ratios = [
        f"{units.short(best['images_per_second'] / row['images_per_second'])}x {row['label'].partition(',')[0]}"
        for row in timed
        if row["role"] != "ours" and row["compiled"] == best["compiled"]
    ]
    return f"{own}: {', '.join(ratios)}." if ratios else f"{own}."


def setting(result: "SettingResult") -> str:
    """Return a title such as "forward, 16 images of 1024 x 1024, windows 7 x 7"."""
    window = "" if result["window"] is None else f", windows {result['window']} x {result['window']}"
    images = units.counted(result["batch"], "image")
    return f"{result['pass']}, {images} of {units.picture(result['image_size'])}{window}"


def _table(result: "SettingResult") -> "Table":
    rows: list[Any] = [row for row in result["rows"] if row["images_per_second"] is not None]
    eager = any(row["eager_images_per_second"] is not None for row in rows)
    table = plain_table("", "images/s", "x twin", *["eager"] * eager, "time", "memory", "parameters", gap=2)
    for row in rows:
        table.add_row(
            row["label"],
            units.short(row["images_per_second"]),
            "-" if row["ratio"] is None else units.short(row["ratio"]),
            *([units.short(row["eager_images_per_second"])] if eager else []),
            units.seconds(row["ms"] / 1e3),
            units.size(row["memory_bytes"]),
            units.count(row["parameters"]),
        )
    return table
