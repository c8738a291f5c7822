"""softless probe: measure the attention in each layer of a model, and the cost of a linear kernel there.

Every number is a mean over images (or pieces of text) with its 95 % confidence interval. The JSON document is
softless.probes.findings.ProbeReport. Random weights get no verdict, because they say nothing about a trained model.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, takewhile
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from softless.commands.arguments import Where, layer_choice
from softless.commands.common import console, emit_json, prepare_folder, print_whole, reports_errors
from softless.errors import ArgumentError, SoftlessError
from softless.io.files import write_json, write_text
from softless.report.units import duration, short

if TYPE_CHECKING:
    from rich.table import Table

    from softless.commands.subject import Samples, Subject
    from softless.probes.findings import Examination, LayerFindings, ProbeReport

SCHEMA = "softless.probe/1"
SUMMARY = "Measure the attention in each layer of a model: ours, timm's, Hugging Face's."
HELP = """Look into every attention layer of a model: which queries it confuses, how local it is, how far its
scores spread, and what a linear kernel instead of the softmax would cost there.

MODEL is a name from softless list --models, a model whose weights ship with softless, the folder of a run of softless
train, timm:NAME, or hf: and either a folder with config.json and model.safetensors or a name on the Hugging Face hub.
Without --weights or --pretrained, other names have random weights, and there is no verdict.

\b
$ softless probe runs/a
$ softless probe timm:deit_tiny_patch16_224 --pretrained --data photos/
$ softless probe timm:deit_tiny_patch16_224 --weights deit.pth --data photos/
$ softless probe hf:sentence-transformers/all-MiniLM-L6-v2 --data book.txt
$ softless probe inline_swin_tiny --images 500 --out probed
"""
WEIGHTS = {"random": "random weights", "trained": "trained", "pretrained": "pretrained weights"}
COLUMNS = {
    "confused": "pairs of queries that get the same weights, per image and head",
    "3 x 3": "weight on a patch and its neighbors (if all weighed the same)",
    "span": "range of a query's scores: the wider, the more the softmax does",
    "error": "distance of first-order weights, 1 + s instead of e^s, from softmax's",
    "equal": "the same distance for equal weights, which look at no score at all",
    "linear": "the cost of a linear kernel instead of the softmax here",
}


@reports_errors
def run(
    target: Annotated[str, typer.Argument(metavar="MODEL", help="The model.", show_default=False)],
    data: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Images or text: a folder or a file. Default: the run's images, or digits."),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Weights for a model of ours or of timm.")
    ] = None,
    pretrained: Annotated[
        bool, typer.Option("--pretrained", help="Use timm's weights, from its cache or downloaded.")
    ] = False,
    images: Annotated[
        int | None,
        typer.Option(min=1, max=1_000_000, metavar="NUMBER", help="Images or pieces of text. Default: up to 100."),
    ] = None,
    split: Annotated[Literal["test", "train"], typer.Option(help="The part of the data set to use.")] = "test",
    size: Annotated[
        int | None,
        typer.Option(min=1, max=2**14, metavar="PIXELS", help="Side of the images. Default: the model's own."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, max=2**20, metavar="NUMBER", help="Tokens per piece of text.")] = 128,
    batch: Annotated[int, typer.Option(min=1, max=2**16, metavar="NUMBER", help="Images per batch.")] = 16,
    layers: Annotated[
        Any,
        typer.Option(parser=layer_choice, metavar="LIST", help="Layers: 0,5 or 0-3 or a name. Default: all."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for probe.json and layers.csv.")] = None,
    device: Annotated[Where, typer.Option(help="Where to run; auto uses a GPU if there is one.")] = "auto",
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, metavar="NUMBER", help="Seed of random weights and drawn images.")
    ] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout.")] = False,
) -> None:
    """Load the model and its data, examine the model, and show the report."""
    from softless.commands.probe_subject import load_samples, load_subject
    from softless.machine import pick_device
    from softless.probes.findings import ProbeReport, overall_verdict

    if out is not None:
        prepare_folder(out)
    place, start = pick_device(device), time.monotonic()
    subject = load_subject(target, weights, size, seed, pretrained=pretrained)
    subject.model.to(place).eval()
    samples = load_samples(subject, data, split, images, tokens=tokens, batch=batch, device=place, seed=seed)
    examination, missed = examined(subject, samples, layers, quiet=json)
    measured = examination.layers
    report = ProbeReport(
        schema=SCHEMA,
        model=target,
        weights=subject.weights,
        data=samples.source,
        samples=samples.kind,
        images=examination.images,
        device=place,
        seed=seed,
        seconds=round(time.monotonic() - start, 3),
        missed=missed,
        verdict=None if subject.is_random else overall_verdict(measured),
        layers=tuple(replace(layer, verdict=None) for layer in measured) if subject.is_random else measured,
        confusion_histogram=examination.confusion_histogram,
    )
    if out is not None:
        write_json(out / "probe.json", report.document())
        write_text(out / "layers.csv", report.table())
    if json:
        emit_json(report.document())
    else:
        show(report, out)


def examined(
    subject: "Subject", samples: "Samples", layers: Any, *, quiet: bool
) -> "tuple[Examination, tuple[str, ...]]":
    """Examine the chosen layers on all batches; also return the names of modules that were missed."""
    from softless.commands.progress import progress, say
    from softless.probes.examination import capture_batch, examine

    def forward(model: Any, batch: Any) -> object:
        try:
            return model(**batch) if isinstance(batch, dict) else model(batch)
        except SoftlessError:
            raise
        except (AssertionError, RuntimeError, ValueError, LookupError, TypeError) as error:
            why = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ArgumentError(f"{subject.name} does not take {samples.kind}: {why}") from error

    first = next(samples.batches)
    captured = capture_batch(subject.model, first, forward)
    names = [layer.name for layer in captured.layers]
    chosen = {name for at, name in enumerate(names) if layers is None or layers(at, name)}
    if not chosen:
        raise ArgumentError(
            f"--layers picks none of the {len(names)} layers of {subject.name}: {names[0]} to {names[-1]}"
        )
    label, start, done = counted(samples.count, samples.kind), time.monotonic(), 0
    with progress(samples.count, not quiet) as bar:

        def advance(images: int) -> None:
            nonlocal done
            done += images
            left = (time.monotonic() - start) / done * (samples.count - done)
            bar(f"{done:,} of {label}", images)
            if done == images and left and not quiet:
                random = ", random weights" if subject.is_random else ""
                say(f"{label}{random}: this will take about {duration(left)}", err=True)

        batches = chain([first], samples.batches)
        examination = examine(subject.model, batches, forward=forward, advance=advance, only=chosen.__contains__)
    return examination, tuple(captured.missed)


def counted(count: int, what: str) -> str:
    """Write a count and its kind: 100 images of 32 x 32 pixels, or 1 image of 32 x 32 pixels."""
    if count == 1:
        what = what.replace("layers", "layer").replace("images", "image").replace("pieces", "piece")
    return f"{count:,} {what}"


def show(report: "ProbeReport", folder: Path | None) -> None:
    """Print the subject, a table with one row per layer, the verdict, and how to read them."""
    from rich.text import Text

    out, layers = console(), report.layers
    if report.verdict is None:
        warning = "The weights are random, so this is how the model starts out, not what it learns."
        out.print(Text(warning, style="bold"))
    weights = WEIGHTS.get(report.weights, report.weights)
    out.print(Text.assemble((report.model, "bold"), f", {weights}, {report.device}"), soft_wrap=True)
    out.print(f"{counted(report.images, report.samples)} from {report.data}", soft_wrap=True)
    out.print(_summary(layers), soft_wrap=True)
    if missed := report.missed:
        more = f" and {counted(len(missed) - 1, 'more layers')}" if len(missed) > 1 else ""
        out.print(f"Not in the table: {missed[0]}{more}, whose attention cannot be captured.", soft_wrap=True)
    out.print()
    table = _table(report)
    print_whole(out, table)
    out.print()
    if report.verdict is None:
        out.print("Random weights get no verdict: give trained ones with --weights FILE, or --pretrained for timm.")
    else:
        out.print(Text(report.verdict, style="bold"))
        worst = max(layers, key=lambda layer: layer.first_order_error.mean)
        out.print(f"{'Most in ' if len(layers) > 1 else ''}{worst.name}: {worst.verdict}")
    out.print()
    for heading in (str(column.header) for column in table.columns):
        if heading in COLUMNS:
            out.print(Text(f"{heading:<9} {COLUMNS[heading]}", style="dim"))
    out.print(Text(_precision(layers), style="dim"))
    if folder is not None:
        out.print(f"Written: {folder / 'probe.json'}, {folder / 'layers.csv'}", soft_wrap=True)


def _summary(layers: "Sequence[LayerFindings]") -> str:
    """Return a line such as "12 layers of softmax attention, 3 heads, 197 tokens: blocks.*.attn"."""
    mechanisms = " and ".join(dict.fromkeys(layer.mechanism for layer in layers))
    counts = []
    for unit, values in (("head", {x.heads for x in layers}), ("token", {x.tokens for x in layers})):
        least, most = min(values), max(values)
        counts.append(f"{least:,}{f' to {most:,}' if most > least else ''} {unit}{'s' * (most > 1)}")
    before, _, after = _names(layers)
    path = layers[0].name if len(layers) == 1 else f"{before}*{after}"
    return f"{counted(len(layers), 'layers')} of {mechanisms} attention, {', '.join(counts)}: {path}"


def _names(layers: "Sequence[LayerFindings]") -> tuple[str, list[str], str]:
    """Split the paths of layers into their common beginning, the parts that differ, and their common end."""
    paths = [layer.name.split(".") for layer in layers]
    most = min(map(len, paths)) - 1 if len(paths) > 1 else 0
    front = min(_shared(paths), most)
    back = min(_shared([path[:front:-1] for path in paths]), most - front)
    own = [".".join(path[front : len(path) - back]) for path in paths]
    return ".".join([*paths[0][:front], ""]), own, ".".join(["", *paths[0][len(paths[0]) - back :]])


def _shared(paths: Sequence[Sequence[str]]) -> int:
    """Count the parts that all paths begin with."""
    return sum(1 for _ in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)))


def _table(report: "ProbeReport") -> "Table":
    from softless.commands.common import plain_table
    from softless.probes.score_range import cost

    layers = report.layers
    columns: dict[str, list[str]] = {"layer": _names(layers)[1]}
    if len({layer.mechanism for layer in layers}) > 1:
        columns["runs"] = [layer.mechanism for layer in layers]
    if len({layer.tokens for layer in layers}) > 1:
        columns["tokens"] = [f"{layer.tokens:,}" for layer in layers]
    columns["confused"] = [short(layer.confusions.mean) for layer in layers]
    if any(layer.local_mass for layer in layers):
        columns["3 x 3"] = [_local(layer) for layer in layers]
    columns["span"] = [short(layer.score_range.mean) for layer in layers]
    columns["error"] = [_percent(layer.first_order_error.mean) for layer in layers]
    columns["equal"] = [_percent(layer.uniform_error.mean) for layer in layers]
    if report.verdict is not None:
        columns["linear"] = [cost(layer.first_order_error.mean, layer.uniform_error.mean) for layer in layers]
    table = plain_table(*columns, gap=2)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return table


def _precision(layers: "Sequence[LayerFindings]") -> str:
    """Say how wide the confidence intervals of the errors are."""
    errors = [layer.first_order_error for layer in layers]
    halves = [x.high - x.mean for x in errors if x.high is not None and isfinite(x.high)]
    if not halves:
        return "One sample has no confidence interval: probe more with --images."
    reach = f"{100 * max(halves):.2g}"
    return f"Means over {errors[0].n:,}; the 95 % intervals of the errors reach {reach} points to a side."


def _percent(share: float) -> str:
    """Write a share: 7.1%, 34%, <0.1%."""
    if not isfinite(share):
        return "-"
    return "<0.1%" if 0 < share < 0.001 else f"{share:.{0 if share >= 0.0995 else 1}%}"


def _local(layer: "LayerFindings") -> str:
    """Write the weight on 3 x 3 patches, and that of equal weights in brackets: 9% (4%)."""
    if layer.local_mass is None or layer.local_baseline is None:
        return "-"
    return f"{_percent(layer.local_mass.mean)} ({_percent(layer.local_baseline)})"
