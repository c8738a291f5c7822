"""softless bench-model: throughput and memory of a model, computed in every possible way on this machine.

The model against its plain formulas, its softmax twin and timm's model. softless.bench.model_contest defines the
numbers, and softless.bench.model_document the JSON.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from softless.commands.arguments import MOST, Backend, Dtype, Where, image_sizes, key_value, model_options, windows
from softless.commands.bench import REPEATS, check_plot, machine, show_missing
from softless.commands.common import command_line, console, emit_json, plain_table, print_dim, reports_errors
from softless.commands.progress import progress
from softless.errors import ArgumentError
from softless.io.files import write_text
from softless.report import units

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from softless.bench.model_document import ModelDocument, ModelPlan, SettingResult

SUMMARY = "Images per second and memory of a model against its softmax twin and timm's."
HELP = """Time a model against its plain formulas, its softmax twin and timm's model of the same family.

Prints images per second, the ratio to the softmax twin, memory and parameters.

\b
$ softless bench-model inline_deit_tiny --image-size 224,448,896 --compile
$ softless bench-model inline_swin_tiny --window 7,14,28 --plot swin.html
"""


@reports_errors
def run(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="A name from `softless list --models`.")],
    image_size: Annotated[
        Any,
        typer.Option(
            parser=image_sizes, metavar="HxW,...", help="Sizes of the images.", show_default="the model's own"
        ),
    ] = None,
    window: Annotated[
        Any,
        typer.Option(parser=windows, metavar="W,...", help="Windows of the mixed blocks; none for no windows."),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, max=MOST, metavar="B", help="Images per batch.", show_default="by their size"),
    ] = None,
    train: Annotated[bool, typer.Option("--train", help="Also time forward and backward together.")] = False,
    compiled: Annotated[bool, typer.Option("--compile", help="Also time each model under torch.compile.")] = False,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Dtype of weights and images.", show_default="bfloat16 on cuda, float32 on a CPU"),
    ] = None,
    device: Annotated[Where, typer.Option(help="auto is cuda if there is one.")] = "auto",
    backend: Annotated[Backend, typer.Option(help="Backend of the model's linear attention.")] = "auto",
    option: Annotated[
        list[Any] | None,
        typer.Option(parser=key_value, metavar="NAME=VALUE", help="An option of the model; repeatable."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, max=MOST, metavar="NUMBER", help="Runs of each model.")] = REPEATS,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Also draw images per second.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Measure a model; draw and show the result."""
    check_plot(plot)
    from softless.bench import figures, model_document

    texts = dict(option or [])
    options = model_options(name, texts)
    if window and "window" in options:
        raise ArgumentError(f"--option window={texts['window']} and --window are the same: give one of them")
    plan = model_document.plan_model(
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
    )
    command = command_line("softless bench-model", [name], _options(plan, window, batch, texts))
    with progress(1.0, not json) as advance:
        document = model_document.measure_model(plan, command=command, option_texts=texts, advance=advance)
    if plot is not None:
        write_text(plot, figures.model_page(document))
    if json:
        emit_json(document)
    else:
        show(document, plot, console())


def _options(
    plan: "ModelPlan", windows: tuple[int | None, ...] | None, batch: int | None, texts: dict[str, str]
) -> dict[str, object]:
    setting = plan.settings[0]
    sizes = dict.fromkeys(setting.image_size for setting in plan.settings)
    return {
        "--option": [f"{option}={text}" for option, text in texts.items()],
        "--image-size": ",".join(f"{height}x{width}" for height, width in sizes),
        "--window": windows and ",".join(str(side or "none") for side in windows),
        "--batch": batch,
        "--train": len(plan.passes) > 1,
        "--compile": plan.compiled,
        "--dtype": str(setting.dtype).removeprefix("torch."),
        "--device": setting.device,
        "--backend": setting.backend,
        "--repeats": plan.repeats,
    }


def show(document: "ModelDocument", plot: Path | None, out: "Console") -> None:
    """Print one table per setting and pass, a sentence on the largest images, and what was not timed."""
    from rich.text import Text

    print_dim(f"{machine(document)}, {document['dtype']}, torch {document['versions']['torch']}", out=out)
    for result in document["results"]:
        out.print()
        out.print(Text(setting(result), style="bold"))
        out.print(_table(result))
    out.print()
    out.print(Text(verdict(document), style="bold"))
    eager = "eager: ordinary calls, launches included; " if document["device"] == "cuda" else ""
    print_dim(f"x twin: against the softmax twin, compiled or not; {eager}memory: with the weights", out=out)
    show_missing(document["results"], plot, out)


def verdict(document: "ModelDocument") -> str:
    """Compare the model on the largest images with each of the others, all compiled or all not."""
    result = max(document["results"], key=lambda result: result["image_size"][0] * result["image_size"][1])
    timed: list[Any] = [row for row in result["rows"] if row["images_per_second"] is not None]
    mine = [row for row in timed if row["role"] == "ours"]
    if not mine:
        return f"{setting(result)}: {document['model']} could not be timed."
    best = max(mine, key=lambda row: row["images_per_second"])
    says = f"{setting(result)}: {best['label']} does {units.short(best['images_per_second'])} images/s"
    ratios = [
        f"{units.short(best['images_per_second'] / row['images_per_second'])}x {row['label'].partition(',')[0]}"
        for row in timed
        if row["role"] != "ours" and row["compiled"] == best["compiled"]
    ]
    return f"{says}: {', '.join(ratios)}." if ratios else f"{says}."


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
