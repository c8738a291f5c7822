"""softless convert: make layers of a trained softmax model linear, as many as a budget allows, and prove it.

DIR holds the converted model (model/), the page (index.html), every number (conversion.json) and the steps that are
done (work/), from which the same command continues. The JSON document is softless.conversion.document.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from softless.commands.arguments import Where
from softless.commands.common import (
    CHECK_FAILED,
    command_line,
    console,
    emit_json,
    importing,
    plain_table,
    prepare_folder,
    reports_errors,
)  # fmt: skip
from softless.commands.ctrl_c import continues
from softless.commands.progress import Bar, progress, say
from softless.report.units import duration, short

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


SUMMARY = "Make layers of a trained model linear, as many as a budget allows, and prove it."
HELP = """Make layers of a trained softmax model linear, as many as a budget allows, and prove it on unseen data.

MODEL is hf: and either a folder with config.json and model.safetensors or a name on the Hugging Face hub, the folder of
a run of softless train on images or text, timm:NAME (ViT, DeiT, Swin) with --pretrained or --weights, a name from
softless list --models with --weights, or a model whose weights ship with softless. Without MODEL, a small model is
trained first, in seconds, and converted.

The data are cut into three parts at random: half to fit, a quarter to choose the layers, a quarter to prove the result.
The command prints a verdict, writes a page with figures, and saves the model in DIR/model for softless.load_converted.
If the result breaks the budget, the exit status is 1. A rerun continues.

\b
$ softless convert                                  # an example: minutes
$ softless convert hf:SmolLM2 --data wiki.txt --tokens 512 --budget 1%
$ softless convert hf:MiniLM --data book.txt --candidates inline,regress
$ softless convert hf:SmolLM2 --data wiki.txt --heal 10 --budget 8%
$ softless convert runs/a --out runs/a-linear
$ softless convert timm:vit_tiny_patch16_224 --weights vit.pth --data photos/
"""
SAID_AFTER = 0.05  # share of the work after which the time left is said


def _share(text: str) -> float:
    """Read 1% or 0.01."""
    number = text.strip().removesuffix("%").strip()
    try:
        value = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a share such as 1% or 0.01") from None
    return value


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


@reports_errors
def run(
    target: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The model. Default: an example.", show_default=False)
    ] = None,
    data: Annotated[str | None, typer.Option(metavar="PATH", help="Text or images: a file or a folder.")] = None,
    weights: Annotated[Path | None, typer.Option(metavar="FILE", help="Weights of a model of ours or of timm.")] = None,
    pretrained: Annotated[bool, typer.Option("--pretrained", help="Load timm's own weights.")] = False,
    budget: Annotated[
        Any, typer.Option(parser=_share, metavar="SHARE", help="The most the model may lose: 1% or 0.01.")
    ] = "1%",
    candidates: Annotated[
        Any, typer.Option(parser=_names, metavar="A,B,...", help="Mechanisms to try.", show_default=False)
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="perplexity, masked, cosine or accuracy. Default: what fits the model."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the model and the page.")] = Path("converted"),
    samples: Annotated[
        int | None,
        typer.Option(
            min=1, max=1_000_000, metavar="NUMBER", help="Pieces of text, or images. Default: up to 100, or 1000."
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=2, max=2**20, metavar="NUMBER", help="Tokens per piece of text. Default: 128."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=10**6, metavar="NUMBER", help="Steps of the fit.")] = 40,
    layers: Annotated[
        int | None,
        typer.Option(min=1, metavar="NUMBER", help="Convert this many layers. Default: what the budget allows."),
    ] = None,
    heal: Annotated[
        float | None, typer.Option(metavar="MINUTES", help="Let the model learn for so long from the original.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=1, metavar="NUMBER", help="Heal by matrices of this rank. Default: all weights.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare/--no-compare", help="Also measure other orders of layers, and the cost.")
    ] = True,
    device: Annotated[Where, typer.Option(help="Where to run; auto uses a GPU if there is one.")] = "auto",
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, metavar="NUMBER", help="Seed of the three parts and of the fit.")
    ] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout.")] = False,
) -> None:
    """Convert the model, save it, and show the verdict."""
    with importing():
        from softless.commands.convert_subject import load_original
        from softless.conversion.page import write_page
        from softless.conversion.pipeline import check_budget, plan
        from softless.conversion.saving import check_target
        from softless.io.files import write_json
        from softless.machine import pick_device
        from softless.report.page import require

    require("plotly", by="the page of a conversion")
    budget, place = check_budget(budget), pick_device(device)
    prepare_folder(out)
    check_target(out / "model")
    with continues(), progress(1.0, not json) as bar:
        original = load_original(
            target, data, weights=weights, pretrained=pretrained, count=samples, tokens=tokens, seed=seed,
            advance=Announced(bar, "training the example", 1.0, quiet=json),
        )  # fmt: skip
    original.model.to(place)
    chosen = plan(
        original.model, original.samples, budget=budget, candidates=candidates, metric=metric, steps=steps,
        layers=layers, heal=heal, rank=rank, compare=compare, seed=seed, work=out / "work",
    )  # fmt: skip
    chosen.layers.check_saving()
    with continues(), progress(chosen.amount, not json) as bar:
        healing = 60 * chosen.heal.minutes if chosen.heal else 0.0
        conversion = chosen.run(Announced(bar, "converting", chosen.amount, healing, quiet=json))
    command = command_line(
        "softless convert", [target] if target else [],
        {"data": data, "weights": weights, "pretrained": pretrained, "budget": f"{100 * budget:g}%",
         "candidates": candidates, "samples": samples, "tokens": tokens, "steps": steps,
         "layers": layers, "heal": heal, "rank": rank, "seed": seed, "out": out},
    )  # fmt: skip
    texts = [{side: original.decode(tokens) for side, tokens in text.items()} for text in conversion.document["texts"]]
    about = {"command": command, "name": original.name, "data": original.source, "texts": texts}
    document = conversion.document | about
    conversion.document.update(document)
    conversion.save(out / "model", *original.also)
    write_json(out / "conversion.json", document)
    page = write_page(out, document)
    if json:
        emit_json(document)
    else:
        show(document, out, page, console())
    if not conversion.kept_promise:
        raise typer.Exit(CHECK_FAILED)


class Announced:
    """Moves the bar, and says once how long the rest will take: that of `amount`, and `more` seconds."""

    def __init__(self, bar: Bar, what: str, amount: float, more: float = 0.0, *, quiet: bool):
        self.bar, self.what, self.amount, self.more, self.said = bar, what, amount, more, quiet
        self.start: float | None = None
        self.done = 0.0

    def __call__(self, label: str, amount: float) -> None:
        self.bar(label, amount)
        if self.start is None:  # the first amount also loads and warms up
            self.start, self.amount = time.monotonic(), self.amount - amount
            return
        self.done += amount
        if not self.said and self.done >= SAID_AFTER * self.amount:
            self.said = True
            left = (time.monotonic() - self.start) * (self.amount / self.done - 1) + self.more
            say(f"{self.what}: this will take about {duration(left)}", err=True)


def show(document: Mapping[str, Any], folder: Path, page: Path, out: "Console") -> None:
    """Print the layers, the promise and what was delivered, the verdict, and where everything is."""
    from rich.text import Text

    parts = document["samples"]
    out.print(Text.assemble((document["name"], "bold"), f", {document['machine']['device']}"), soft_wrap=True)
    sizes = f"{parts['fit']} samples to fit, {parts['choose']} to choose, {parts['prove']} to prove"
    out.print(f"{sizes}, from {document['data']}", soft_wrap=True)
    out.print()
    table = plain_table("layer", "becomes", "rank", "alone", "95 %", "error", gap=2)
    for number, layer in enumerate(document["layers"]):
        harm, error = layer["damage"], layer["errors"].get(layer["mechanism"])
        table.add_row(
            str(number), layer["mechanism"] if layer["converted"] else "softmax", str(layer["rank"] + 1),
            "-" if harm is None else _percent(harm["mean"]), "-" if harm is None else _interval(harm),
            "-" if error is None else short(error),
        )  # fmt: skip
    _print_numbers_whole(out, table)
    out.print()
    for name in ("predicted", "delivered"):
        if (harm := document[name]) is not None:
            out.print(f"{name:<10} {_percent(harm['mean'])} ({_interval(harm)})", soft_wrap=True)
    if (healing := document["healing"]) is not None:
        before = healing["delivered_before"]
        without = "not a finite number" if before is None else f"{_percent(before['mean'])} ({_interval(before)})"
        undone = "" if healing["kept"] else ", and it did harm, so it is undone"
        out.print(f"{'unhealed':<10} {without}; {healing['steps']} steps of healing{undone}", soft_wrap=True)
    out.print(Text(document["verdict"], style="bold"))
    out.print(f"Written: {folder / 'model'}, {page}", soft_wrap=True)


def _print_numbers_whole(out: "Console", table: "Table") -> None:
    """Print a table whose second column, the mechanism, wraps if the terminal is narrow; no other column is cut."""
    from rich.measure import Measurement

    for column in table.columns:
        column.min_width = max(len(str(cell)) for cell in (column.header, *column.cells))
    mechanism = table.columns[1]
    mechanism.no_wrap, mechanism.min_width, mechanism.justify = False, None, "left"
    width = out.width
    out.width = max(width, Measurement.get(out, out.options.update(max_width=10_000), table).minimum)
    out.print(table)
    out.width = width


def _signed(share: float) -> str:
    """Write a share in percent with its sign, and zero as +0.00."""
    text = f"{100 * share:+.2f}"
    return "+0.00" if text == "-0.00" else text


def _percent(share: float) -> str:
    return f"{_signed(share)}%"


def _interval(harm: Mapping[str, float]) -> str:
    return f"{_signed(harm['low'])} to {_signed(harm['high'])}"
