"""softless bench: time and peak memory of one attention call, computed in every possible way on this machine.

Ours against SDPA, the plain formulas (eager and compiled) and other libraries that are installed, beside the floor: the
time this machine takes to copy the bytes of q, k, v and o. softless.bench.contest defines the numbers, and
softless.bench.call_document the JSON.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from softless.commands.arguments import MOST, Backend, Dtype, Where, four_numbers, key_value, lengths, make_mechanism
from softless.commands.common import (
    command_line,
    console,
    emit_json,
    plain_table,
    prepare_folder,
    print_dim,
    reports_errors,
)
from softless.commands.progress import progress
from softless.errors import ArgumentError
from softless.io.files import write_text
from softless.report import units

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from softless.bench.call_document import CallPlan, CallResult, CallsDocument

SUMMARY = "Time and memory of a call against SDPA, plain formulas and others."
HELP = """Time one attention call in every way it can be computed: ours, SDPA, plain PyTorch, other libraries.

Prints milliseconds, the ratio to SDPA, the share of this machine's own copy rate, and memory.
`softless bench-model` times whole models.

\b
$ softless bench --quick
$ softless bench inline --shape 1,16,65536,64 --backward
$ softless bench linear --causal --tokens 1024,4096,16384 --plot bench.html
"""
DEFAULT = ["linear", "inline"]
FULL, QUICK = (1, 8, 4096, 64), (1, 4, 1024, 64)
REPEATS, QUICK_REPEATS = 10, 3


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
            help="Shape of q: batch, heads, tokens, dim; repeatable.",
            show_default=",".join(map(str, FULL)),
        ),
    ] = None,
    tokens: Annotated[
        Any, typer.Option(parser=lengths, metavar="N,N,...", help="Lengths to time instead of N.", show_default=False)
    ] = None,
    keys: Annotated[
        int | None, typer.Option(min=1, max=MOST, metavar="M", help="Tokens of k and v. Default: N.")
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, max=MOST, metavar="G", help="Heads of k and v. Default: H.")
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Time the causal form.")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="Also time forward and backward together.")] = False,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Dtype of q, k and v.", show_default="bfloat16 on cuda, float32 on a CPU")
    ] = None,
    device: Annotated[Where, typer.Option(help="auto is cuda if there is one.")] = "auto",
    backend: Annotated[Backend, typer.Option(help="Backend of our own calls.")] = "auto",
    option: Annotated[
        list[Any] | None,
        typer.Option(parser=key_value, metavar="NAME=VALUE", help="An option of the mechanisms; repeatable."),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, max=MOST, metavar="NUMBER", help="Runs of each call.", show_default=str(REPEATS)),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A short call, few repeats, no torch.compile.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Also draw time against N.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Measure calls; draw and show the result."""
    check_plot(plot)
    from softless.bench import call_document, figures

    options, shapes = dict(option or []), [tuple(size) for size in shape or [QUICK if quick else FULL]]
    names = list(dict.fromkeys(mechanisms or DEFAULT))
    plan = call_document.plan_calls(
        {name: make_mechanism(name, options) for name in names},
        shapes=shapes,
        tokens=tokens,
        keys=keys,
        kv_heads=kv_heads,
        causal=causal,
        backward=backward,
        dtype=dtype,
        device=device,
        backend=backend,
        repeats=repeats or (QUICK_REPEATS if quick else REPEATS),
        quick=quick,
    )
    command = command_line("softless bench", names, _options(plan, shapes, tokens, keys, kv_heads, options))
    with progress(1.0, not json) as advance:
        document = call_document.measure_calls(plan, command=command, advance=advance)
    if plot is not None:
        write_text(plot, figures.calls_page(document))
    if json:
        emit_json(document)
    else:
        show(document, plot, console())


def check_plot(plot: Path | None) -> None:
    """Refuse a page that cannot be drawn or written, before any work."""
    from softless.report import page

    if plot is None:
        return
    page.require_plotly()
    prepare_folder(plot.parent)
    if plot.is_dir():
        raise ArgumentError(f"--plot {str(plot)!r} is a folder and must be a file to write")


def _options(
    plan: "CallPlan",
    shapes: list[tuple[int, ...]],
    tokens: tuple[int, ...] | None,
    keys: int | None,
    kv_heads: int | None,
    options: dict[str, str],
) -> dict[str, object]:
    terms = plan.terms[0]
    return {
        "--shape": [",".join(map(str, shape)) for shape in shapes],
        "--tokens": tokens and ",".join(map(str, tokens)),
        "--keys": keys,
        "--kv-heads": kv_heads,
        "--causal": terms.is_causal,
        "--backward": len(plan.passes) > 1,
        "--option": [f"{name}={text}" for name, text in options.items()],
        "--dtype": str(terms.dtype).removeprefix("torch."),
        "--device": terms.device,
        "--backend": terms.backend,
        "--repeats": plan.repeats,
        "--quick": plan.quick,
    }


def show(document: "CallsDocument", plot: Path | None, out: "Console") -> None:
    """Print one table per shape and pass, the fastest of our calls in a sentence, and what was not timed."""
    from rich.text import Text

    rate = units.size(document["copy_bytes_per_second"])
    print_dim(f"{machine(document)}, torch {document['versions']['torch']}, copies {rate}/s", out=out)
    for result in document["results"]:
        out.print()
        out.print(Text(_title(document, result), style="bold"))
        out.print(_table(result))
    out.print()
    out.print(Text(verdict(document), style="bold"))
    eager = "eager: an ordinary call, launches included; " if document["device"] == "cuda" else ""
    print_dim(f"of copy: share of the copy rate; {eager}extra: peak memory beyond the output", out=out)
    ran: dict[tuple[str, str], list[str]] = {}
    for mechanism in document["mechanisms"]:
        ran.setdefault((mechanism["backend"], mechanism["backend_reason"]), []).append(mechanism["name"])
    print_dim(*(f"{', '.join(names)} ran on {backend}: {why}" for (backend, why), names in ran.items()), out=out)
    show_missing(document["results"], plot, out)


def machine(document: Any) -> str:
    """Return where a document was measured: the processor, and its threads or cuda."""
    place = units.counted(document["threads"], "thread") if document["device"] == "cpu" else "cuda"
    return f"{document['machine']['processor']}, {place}"


def show_missing(results: Any, plot: Path | None, out: "Console") -> None:
    """Print what was not timed and why, what was timed by events, and where the page is."""
    from rich.text import Text

    rows = [row for result in results for row in result["rows"]]
    skipped = dict.fromkeys((row["label"], row["skipped"]) for row in rows if row["skipped"])
    print_dim(*(f"not timed: {label}: {reason}" for label, reason in skipped), out=out)
    if uncaptured := sorted({row["label"] for row in rows if row["timing"] == "events"}):
        print_dim(f"timed by events, launches included: {', '.join(uncaptured)}", out=out)
    if plot is not None:
        out.print(Text(f"Drawn in {str(plot).encode('utf-8', 'replace').decode('utf-8')}"), soft_wrap=True)


def verdict(document: "CallsDocument") -> str:
    """Return a sentence on the fastest of our mechanisms in the largest call."""
    result = max(document["results"], key=lambda result: result["floor_bytes"])
    timed = [row for row in result["rows"] if row["role"] == "ours" and row["ms"] is not None]
    if not timed:
        return f"{_call(result)}: nothing of ours could be timed."
    best: Any = min(timed, key=lambda row: row["ms"] or 0.0)
    reference = next((row["ms"] for row in result["rows"] if row["role"] == "sdpa"), None)
    says = f"{_call(result)}: {best['label']} takes {_ms(best['ms'])}, {units.percent(best['share'])} of the copy rate"
    if reference is None:
        return f"{says}."
    return f"{says}; SDPA takes {_ms(reference)}, {units.compare(1 / best['ratio'], 'faster', 'longer')}."


def _title(document: "CallsDocument", result: "CallResult") -> str:
    shape, keys = result["shape"], ""
    causal = "causal " if document["causal"] else ""
    if (shape["keys"], shape["kv_heads"]) != (shape["queries"], shape["heads"]):
        keys = f" with {units.counted(shape['keys'], 'key')} in {units.counted(shape['kv_heads'], 'head')}"
    floor = f"floor {_ms(result['floor_ms'])} ({units.size(result['floor_bytes'])})"
    return f"{causal}{_call(result)}{keys}, {document['dtype']}, {floor}"


def _call(result: "CallResult") -> str:
    return f"{result['pass']} {[result['shape'][side] for side in ('batch', 'heads', 'queries', 'head_dim')]}"


def _table(result: "CallResult") -> "Table":
    rows: list[Any] = [row for row in result["rows"] if row["ms"] is not None]
    eager = any(row["eager_ms"] is not None for row in rows)
    headings = ("", "time", "x SDPA", "of copy", *["eager"] * eager, "extra", "of output")
    table = plain_table(*headings, gap=2, style="dim")
    for row in rows:
        table.add_row(
            row["label"],
            _ms(row["ms"]),
            "-" if row["ratio"] is None else units.short(row["ratio"]),
            units.percent(row["share"]),
            *([_ms(row["eager_ms"])] if eager else []),
            units.size(row["extra_bytes"]),
            units.percent(row["extra_share"]),
        )
    return table


def _ms(milliseconds: float) -> str:
    return units.seconds(milliseconds / 1e3)
