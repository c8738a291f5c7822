"""softless bench: time and peak memory of a call, every way to compute it, on this machine.

Ours against SDPA, the plain formulas (eager and compiled) and other libraries where they are installed, beside the
floor: the time this machine takes to copy the bytes of q, k, v and o. softless.bench.contest defines the numbers.
With --model, a whole model: see softless/commands/bench_model.py.

JSON (schema softless.bench/1); numbers are null where they could not be measured, and "skipped" says why:

    {"schema", "command", "date",
     "versions": {"softless", "torch", "python"},
     "machine":  {"system", "processor", "cores", "threads", "device", "load_average"},
     "mechanisms": [{"name", "options": {option: value}, "backend", "backend_reason"}],
     "causal", "dtype", "device", "backend", "threads", "quick",
     "copy_bytes_per_second",
     "results": [{"shape": {"batch", "heads", "queries", "head_dim", "keys", "kv_heads"},
                  "pass": "forward" | "forward+backward", "floor_bytes", "floor_ms",
                  "rows": [{"label", "role": "ours" | "sdpa" | "plain" | "compiled" | "rival", "mechanism" | null,
                            "ms", "fastest_ms", "repeats", "timing": "graph" | "events" | "clock",
                            "eager_ms" | null            CUDA: wall clock of an ordinary call, launches included
                            "ratio",                     SDPA's ms / own ms
                            "share",                     floor_ms / ms
                            "extra_bytes", "extra_share" peak memory beyond what the call gives, and its share of that
                            "skipped" | null}]}]}
"""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from softless.commands.arguments import Where, four_numbers, image_sizes, key_value, lengths, windows
from softless.commands.common import (
    console,
    emit_json,
    prepare_folder,
    refuse,
    reports_errors,
    whole_number,
)
from softless.commands.explain import Dtype
from softless.errors import ArgumentError
from softless.io.files import write_text

SCHEMA = "softless.bench/1"
SUMMARY = "Time and memory against SDPA, plain formulas and others."
HELP = """Time a call every way it can be computed: ours, SDPA, plain PyTorch, other libraries.

Prints milliseconds, the ratio to SDPA, the share of this machine's own copy rate, and memory. With
--model, a whole model against its softmax twin, its plain formulas and timm's: images a second and memory.

\b
$ softless bench --quick
$ softless bench inline --shape 1,16,65536,64 --backward
$ softless bench linear --causal --tokens 1024,4096,16384 --plot bench.html
$ softless bench --model inline_deit_tiny --image-size 224,448,896 --compile
$ softless bench --model inline_swin_tiny --window 7,14,28 --plot swin.html
"""
DEFAULT = ("linear", "inline")
FULL, QUICK = (1, 8, 4096, 64), (1, 4, 1024, 64)
REPEATS, QUICK_REPEATS = 10, 3


class Backend(StrEnum):
    """Backends of `attention`."""

    auto = "auto"
    reference = "reference"
    torch = "torch"
    triton = "triton"


@reports_errors
def run(
    mechanisms: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MECHANISM]...", help="Names from `softless list`.", show_default="linear inline"),
    ] = None,
    shape: Annotated[
        list[Any] | None,
        typer.Option(
            parser=four_numbers,
            metavar="B,H,N,D",
            help="Shape of q; repeatable.",
            show_default=",".join(map(str, FULL)),
        ),
    ] = None,
    tokens: Annotated[
        Any, typer.Option(parser=lengths, metavar="N,N,...", help="Lengths in place of N.", show_default=False)
    ] = None,
    keys: Annotated[
        Any, typer.Option(parser=whole_number, metavar="M", help="Tokens of k and v, if not N.", show_default=False)
    ] = None,
    kv_heads: Annotated[
        Any, typer.Option(parser=whole_number, metavar="G", help="Heads of k and v, if fewer.", show_default=False)
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="The causal form.")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="Also forward and backward together.")] = False,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of q, k and v.", show_default="bfloat16 on cuda, float32 on a CPU")
    ] = None,
    device: Annotated[Where, typer.Option(help="auto is cuda where there is one.")] = Where.auto,
    backend: Annotated[Backend, typer.Option(help="Of ours.")] = Backend.auto,
    option: Annotated[
        list[Any] | None,
        typer.Option(parser=key_value, metavar="NAME=VALUE", help="An option of the mechanisms; repeatable."),
    ] = None,
    repeats: Annotated[
        Any, typer.Option(parser=whole_number, metavar="NUMBER", help="Runs of each.", show_default=str(REPEATS))
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A short call, few repeats, no torch.compile.")] = False,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="A whole model, from `softless list --models`.")
    ] = None,
    image_size: Annotated[
        Any, typer.Option(parser=image_sizes, metavar="HxW,...", help="Of its images.", show_default="its own")
    ] = None,
    window: Annotated[
        Any, typer.Option(parser=windows, metavar="W,...", help="Of its mixed blocks; none for no windows.")
    ] = None,
    batch: Annotated[
        Any, typer.Option(parser=whole_number, metavar="B", help="Images.", show_default="by their size")
    ] = None,
    train: Annotated[bool, typer.Option("--train", help="Also forward and backward of the model.")] = False,
    compiled: Annotated[bool, typer.Option("--compile", help="Also each model compiled.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Also draw it, against N or size.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Measure, draw, show."""
    common: dict[str, Any] = {
        "dtype": None if dtype is None else dtype.value,
        "device": device.value,
        "backend": backend.value,
    }
    common |= {"repeats": repeats or (QUICK_REPEATS if quick else REPEATS)}
    calls = {"shape": shape, "tokens": tokens, "keys": keys, "kv_heads": kv_heads}
    calls |= {"causal": causal, "backward": backward}
    models = {"image_sizes": image_size, "windows": window, "batch": batch, "train": train, "compiled": compiled}
    if plot is not None:
        _prepare(plot)
    if model is not None:
        given = {"MECHANISM": mechanisms} | {f"--{word.replace('_', '-')}": value for word, value in calls.items()}
        refuse(given, f"--model {model} is a whole model, which takes --image-size, --window, --batch and --train")
        refuse({"--compile": quick and compiled}, "--quick compiles nothing")
        _bench_model(model, dict(option or []), models | common, plot, json)
    else:
        words = ("--image-size", "--window", "--batch", "--train", "--compile")
        refuse(dict(zip(words, models.values(), strict=True)), "this is about a whole model: give --model NAME")
        calls |= {"shapes": [tuple(each) for each in calls.pop("shape") or [QUICK if quick else FULL]], "quick": quick}
        _bench_calls(mechanisms or list(DEFAULT), dict(option or []), calls | common, plot, json)


def _prepare(plot: Path) -> None:
    """Refuse a page that cannot be drawn or written, before any work."""
    from softless.report.page import require_plotly

    require_plotly()
    prepare_folder(plot.parent)
    if plot.is_dir():
        raise ArgumentError(f"--plot {str(plot)!r} is a folder and must be a file to write")


def _bench_calls(
    names: list[str], options: dict[str, str], words: dict[str, Any], plot: Path | None, json: bool
) -> None:
    from softless.bench import measure as bench_measure
    from softless.bench import page as bench_page
    from softless.commands import bench_show

    plan = bench_measure.plan(names, options, **words)
    document = {"schema": SCHEMA, **bench_measure.measure(plan, show_progress=not json)}
    _answer(document, bench_page.page, bench_show.show, plot, json)


def _bench_model(name: str, options: dict[str, str], words: dict[str, Any], plot: Path | None, json: bool) -> None:
    from softless.bench import model_page
    from softless.commands import bench_model, bench_model_show

    plan = bench_model.plan(name, options, **words)
    document = bench_model.measure(plan, show_progress=not json)
    _answer(document, model_page.page, bench_model_show.show, plot, json)


def _answer(
    document: dict[str, Any],
    page: Callable[[dict[str, Any]], str],
    show: Callable[..., None],
    plot: Path | None,
    json: bool,
) -> None:
    if plot is not None:
        write_text(plot, page(document))
    if json:
        emit_json(document)
    else:
        show(document, plot, console())
