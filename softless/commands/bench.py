"""softless bench: time and peak memory of one attention call, computed in every possible way on this machine.

Ours against SDPA, the plain formulas (eager and compiled) and other libraries that are installed, beside the floor: the
time this machine takes to copy the bytes of q, k, v and o. softless.bench.contest defines the numbers, and
softless.bench.documents the JSON.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from softless.commands import arguments
from softless.commands.common import (
    check_plot,
    command_line,
    console,
    emit_json,
    plain_table,
    print_dim,
    reports_errors,
)
from softless.commands.progress import progress
from softless.io.files import write_text
from softless.report import units

if TYPE_CHECKING:
    from rich.table import Table

    from softless.bench.documents import CallResult, CallsDocument

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
        typer.Argument(
            metavar="MECHANISM", help="Names in `softless list`. Default: linear and inline.", show_default=False
        ),
    ] = None,
    shape: Annotated[
        list[Any] | None,
        typer.Option(
            parser=arguments.four_numbers,
            metavar="B,H,N,D",
            help=f"Shape of q: batch, heads, tokens, dim; repeatable. Default: {','.join(map(str, FULL))}.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        Any,
        typer.Option(
            parser=arguments.lengths, metavar="N,N,...", help="Lengths to time instead of N.", show_default=False
        ),
    ] = None,
    keys: arguments.KeysOption = None,
    kv_heads: arguments.KvHeadsOption = None,
    causal: Annotated[bool, typer.Option("--causal", help="Time the causal form.")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="Also time forward and backward together.")] = False,
    dtype: arguments.DtypeOption = None,
    device: Annotated[arguments.Where, typer.Option(help="auto is cuda if there is one.")] = "auto",
    backend: Annotated[arguments.Backend, typer.Option(help="Backend of our own calls.")] = "auto",
    option: arguments.NamedOptions = None,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, max=arguments.MOST, metavar="NUMBER", help=f"Runs of each call. Default: {REPEATS}."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A short call, few repeats, no torch.compile.")] = False,
    plot: arguments.PlotOption = None,
    json: arguments.JsonOption = False,
) -> None:
    """Measure calls; draw and show the result."""
    check_plot(plot)
    from softless.bench import documents, figures

    options, shapes = dict(option or []), [tuple(size) for size in shape or [QUICK if quick else FULL]]
    names = list(dict.fromkeys(mechanisms or DEFAULT))
    repeats = repeats or (QUICK_REPEATS if quick else REPEATS)
    sizes: dict[str, Any] = {"tokens": tokens, "keys": keys, "kv_heads": kv_heads}
    call: dict[str, Any] = sizes | {"causal": causal, "backward": backward}
    effort: dict[str, Any] = {"backend": backend, "repeats": repeats, "quick": quick}
    by_name = {name: arguments.make_mechanism(name, options) for name in names}
    plan = documents.plan_calls(by_name, shapes=shapes, **call, dtype=dtype, device=device, **effort)
    place = {"dtype": str(plan.terms[0].dtype).removeprefix("torch."), "device": plan.terms[0].device}
    texts = [f"{name}={text}" for name, text in options.items()]
    command = command_line("softless bench", names, {"shape": shapes} | call | {"option": texts} | place | effort)
    with progress(1.0, not json) as advance:
        document = documents.measure_calls(plan, command=command, advance=advance)
    if plot is not None:
        write_text(plot, figures.calls_page(document))
    if json:
        emit_json(document)
    else:
        show(document, plot)


def show(document: "CallsDocument", plot: Path | None) -> None:
    """Print one table per shape and pass, the fastest of our calls in a sentence, and what was not timed."""
    heading = f"torch {document['versions']['torch']}, copies {units.size(document['copy_bytes_per_second'])}/s"
    eager = "eager: an ordinary call, launches included; " if document["device"] == "cuda" else ""
    notes = [f"of copy: share of the copy rate; {eager}extra: peak memory beyond the output"]
    ran: dict[tuple[str, str], list[str]] = {}
    for mechanism in document["mechanisms"]:
        ran.setdefault((mechanism["backend"], mechanism["backend_reason"]), []).append(mechanism["name"])
    notes += [f"{', '.join(names)} ran on {backend}: {why}" for (backend, why), names in ran.items()]
    show_results(document, heading, partial(_title, document), _table, [verdict(document), *notes], plot)


def show_results(
    document: Any,
    heading: str,
    title: Callable[[Any], str],
    table: Callable[[Any], "Table"],
    notes: Sequence[str],
    plot: Path | None,
) -> None:
    """Print the machine, every result, the notes (the first in bold), what was not timed, and where the page is."""
    from rich.text import Text

    out, rows = console(), [row for result in document["results"] for row in result["rows"]]
    place = units.counted(document["threads"], "thread") if document["device"] == "cpu" else "cuda"
    print_dim(f"{document['machine']['processor']}, {place}, {heading}", out=out)
    for result in document["results"]:
        out.print()
        out.print(Text(title(result), style="bold"))
        out.print(table(result))
    out.print()
    out.print(Text(notes[0], style="bold"))
    skipped = dict.fromkeys(f"not timed: {row['label']}: {row['skipped']}" for row in rows if row["skipped"])
    print_dim(*notes[1:], *skipped, out=out)
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
    own = f"{_call(result)}: {best['label']} takes {_ms(best['ms'])}, {units.percent(best['share'])} of the copy rate"
    if reference is None:
        return f"{own}."
    return f"{own}; SDPA takes {_ms(reference)}, {units.compare(1 / best['ratio'], 'faster', 'longer')}."


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
