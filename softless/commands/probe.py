"""softless probe: what attention does in each layer of a model, and what dropping its softmax would cost there.

MODEL is a name of ours, the folder of a run of `softless train`, timm:NAME, or hf: and a folder as transformers saves
it or a name on the hub. Images are made ready as the model was tested, text is cut into pieces. Every number is a mean
over images (or pieces) with its 95 % confidence interval.

JSON (schema softless.probe/1); an estimate is {"mean", "low", "high", "n"}, and null where a layer has no such thing:

    {"schema", "model", "weights", "data", "samples", "images", "device", "seed", "seconds", "verdict",
     "missed": [name], "layers": [softless.probes.findings.LayerFindings], "confusion_histogram"}

`missed` names modules whose attention could not be captured. `verdict`, also that of each layer, is null where the
weights are random: nothing follows from them for a trained model.

`--out DIR` writes it as DIR/probe.json, and DIR/layers.csv with a row a layer.
"""

import time
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from softless.commands.arguments import MOST, Where, layer_choice
from softless.commands.common import emit_json, prepare_folder, reports_errors
from softless.errors import ArgumentError, SoftlessError
from softless.io.files import write_json, write_text

if TYPE_CHECKING:
    from torch import nn

    from softless.commands.probe_input import Samples
    from softless.probes.findings import Examination

SCHEMA = "softless.probe/1"
SUMMARY = "What attention does in each layer of a model: ours, timm's, Hugging Face's."
HELP = """Look into every attention layer of a model: which queries it confuses, how local it is, how far its
scores spread, and what a linear kernel in place of the softmax would cost there.

MODEL is a name from softless list --models, the folder of a run of softless train, timm:NAME, or hf: and either a
folder with config.json and model.safetensors or a name on the Hugging Face hub. Without --weights or --pretrained, the
weights of a name are random, and there is no verdict.

\b
$ softless probe runs/a
$ softless probe timm:deit_tiny_patch16_224 --pretrained --data photos/
$ softless probe timm:deit_tiny_patch16_224 --weights deit.pth --data photos/
$ softless probe hf:sentence-transformers/all-MiniLM-L6-v2 --data book.txt
$ softless probe inline_swin_tiny --images 500 --out probed
"""


class Part(StrEnum):
    """Which part of a set of images."""

    test = "test"
    train = "train"


@reports_errors
def run(
    target: Annotated[str, typer.Argument(metavar="MODEL", help="The model.", show_default=False)],
    data: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="A folder of images, a parquet file, or a text file; by default the run's images, or digits.",
            show_default=False,
        ),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of a model given by its name.", show_default=False)
    ] = None,
    pretrained: Annotated[
        bool,
        typer.Option("--pretrained", help="The weights timm has for its model: from its cache, or downloaded."),
    ] = False,
    images: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST,
            metavar="NUMBER",
            help="Images, or pieces of text; 100 if there are.",
            show_default=False,
        ),
    ] = None,
    split: Annotated[Part, typer.Option(help="The part of the images to look at.")] = Part.test,
    size: Annotated[
        int | None,
        typer.Option(min=1, max=MOST, metavar="PIXELS", help="Of the images; the model's own.", show_default=False),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, max=MOST, metavar="NUMBER", help="In a piece of text.")] = 128,
    batch: Annotated[int, typer.Option(min=1, max=MOST, metavar="NUMBER", help="Images at a time.")] = 16,
    layers: Annotated[
        Any,
        typer.Option(
            parser=layer_choice, metavar="LIST", help="Some layers only: 0,5 or 0-3 or a name.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for probe.json and layers.csv.", show_default=False)
    ] = None,
    device: Annotated[Where, typer.Option(help="auto is cuda where there is one.")] = Where.auto,
    seed: Annotated[int, typer.Option(min=0, max=MOST, metavar="NUMBER", help="Of the choice of images.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Load, look, tell."""
    from softless.commands.probe_input import samples
    from softless.commands.probe_show import document, layers_csv, show
    from softless.commands.probe_subject import subject
    from softless.machine import pick_device

    if out is not None:
        prepare_folder(out)
    place, start = pick_device(device.value), time.monotonic()
    found = subject(target, weights, size, seed, pretrained=pretrained)
    model = found.model.to(place).eval()
    shown = samples(
        found, data, split=split.value, count=images, tokens=int(tokens), batch=int(batch), device=place, seed=seed
    )
    examination, missed = look(target, model, shown, layers, found.weights, quiet=json)
    about = {
        "schema": SCHEMA,
        "model": target,
        "weights": found.weights,
        "data": shown.source,
        "samples": shown.what,
        "images": examination.images,
        "device": place,
        "seed": seed,
        "seconds": round(time.monotonic() - start, 3),
        "missed": missed,
    }
    written = document(about, examination)
    if out is not None:
        write_json(out / "probe.json", written)
        write_text(out / "layers.csv", layers_csv(written))
    if json:
        emit_json(written)
    else:
        show(written, out)


def look(
    target: str, model: "nn.Module", shown: "Samples", layers: Any, weights: str, *, quiet: bool
) -> "tuple[Examination, list[str]]":
    """Every batch through the model, and what was missed; how long it takes is said after the first."""
    from softless.commands.probe_show import counted
    from softless.commands.probe_subject import RANDOM
    from softless.commands.progress import progress
    from softless.probes.examine import examine
    from softless.report.units import duration

    first = next(shown.batches)
    names, missed = found_layers(target, model, shown, first)
    chosen = names if layers is None else [name for at, name in enumerate(names) if layers(at, name)]
    if not chosen:
        raise ArgumentError(f"--layers picks none of the {len(names)} layers of {target}: {names[0]} to {names[-1]}")
    start, done = time.monotonic(), 0
    random = ", random weights" if weights == RANDOM else ""
    with progress(shown.count, not quiet) as advance:

        def tell(images: int) -> None:
            nonlocal done
            done += images
            left = (time.monotonic() - start) / done * (shown.count - done)
            advance(f"{done:,} of {counted(shown.count, shown.what)}", images)
            if done == images and left and not quiet:
                typer.echo(
                    f"{counted(shown.count, shown.what)}{random}: this will take about {duration(left)}", err=True
                )

        examination = examine(
            model,
            chain([first], shown.batches),
            forward=lambda model, batch: forward(target, model, shown, batch),
            advance=tell,
            only=set(chosen).__contains__,
        )
    return examination, missed


def found_layers(target: str, model: "nn.Module", shown: "Samples", batch: Any) -> tuple[list[str], list[str]]:
    """Names of the layers that the model runs, and of those that cannot be captured."""
    import torch

    from softless.probes.capture import capture

    with torch.no_grad(), capture(model) as captured:
        forward(target, model, shown, batch)
    return [layer.name for layer in captured.layers], list(captured.missed)


def forward(target: str, model: "nn.Module", shown: "Samples", batch: Any) -> object:
    """The model on a batch; what it says against it becomes one sentence."""
    try:
        return model(**batch) if isinstance(batch, dict) else model(batch)
    except SoftlessError:
        raise
    except (AssertionError, RuntimeError, ValueError, LookupError, TypeError) as error:
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ArgumentError(f"{target} does not take {shown.what}: {why}") from error
