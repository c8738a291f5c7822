"""The speaking half of `softless bench`: one table a shape and pass, the best of ours in a sentence, who is missing."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from softless.report import units

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def show(document: dict[str, Any], plot: Path | None, out: "Console") -> None:
    """Where, what, how fast, and what was not measured."""
    from rich.text import Text

    machine, versions = document["machine"], document["versions"]
    place = units.counted(document["threads"], "thread") if document["device"] == "cpu" else "cuda"
    rate = units.size(document["copy_bytes_per_second"])
    out.print(Text(f"{machine['processor']}, {place}, torch {versions['torch']}, copies {rate}/s", "dim"))
    for result in document["results"]:
        out.print()
        out.print(Text(_title(document, result), style="bold"))
        out.print(_table(result))
    out.print()
    out.print(Text(verdict(document), style="bold"))
    out.print(Text(_legend(document), style="dim"))
    for line in _backends(document):
        out.print(Text(line, style="dim"))
    closing(document["results"], plot, out)


def closing(results: list[dict[str, Any]], plot: Path | None, out: "Console") -> None:
    """Who is missing, what was timed otherwise, and where it is drawn."""
    from rich.text import Text

    rows = [row for result in results for row in result["rows"]]
    missing = dict.fromkeys((row["label"], row["skipped"]) for row in rows if row["skipped"])
    for label, reason in missing:
        out.print(Text(f"not timed: {label}: {reason}", style="dim"))
    if uncaptured := sorted({row["label"] for row in rows if row["timing"] == "events"}):
        out.print(Text(f"timed by events, launches included: {', '.join(uncaptured)}", style="dim"))
    if plot is not None:
        out.print(Text(f"Drawn in {str(plot).encode('utf-8', 'replace').decode('utf-8')}"), soft_wrap=True)


def verdict(document: dict[str, Any]) -> str:
    """The fastest of ours on the largest call, in a sentence."""
    result = max(document["results"], key=lambda result: result["floor_bytes"])
    timed = [row for row in result["rows"] if row["role"] == "ours" and row["ms"] is not None]
    if not timed:
        return f"{_call(result)}: nothing of ours could be timed."
    best = min(timed, key=lambda row: row["ms"])
    reference = next((row["ms"] for row in result["rows"] if row["role"] == "sdpa"), None)
    says = f"{_call(result)}: {best['label']} takes {_ms(best['ms'])}, {units.percent(best['share'])} of the copy rate"
    if reference is None:
        return f"{says}."
    return f"{says}; SDPA takes {_ms(reference)}, {units.compare(1 / best['ratio'], 'faster', 'longer')}."


def _backends(document: dict[str, Any]) -> list[str]:
    """What ran ours, and why: nothing falls back silently."""
    ran: dict[tuple[str, str], list[str]] = {}
    for each in document["mechanisms"]:
        ran.setdefault((each["backend"], each["backend_reason"]), []).append(each["name"])
    return [f"{', '.join(names)} ran on {backend}: {reason}" for (backend, reason), names in ran.items()]


def _legend(document: dict[str, Any]) -> str:
    eager = "eager: an ordinary call, launches included; " if document["device"] == "cuda" else ""
    return f"of copy: share of the copy rate; {eager}extra: peak memory beyond the output"


def _title(document: dict[str, Any], result: dict[str, Any]) -> str:
    shape = result["shape"]
    causal = "causal " if document["causal"] else ""
    keys = "" if (shape["keys"], shape["kv_heads"]) == (shape["queries"], shape["heads"]) else _keys(shape)
    floor = f"floor {_ms(result['floor_ms'])} ({units.size(result['floor_bytes'])})"
    return f"{causal}{_call(result)}{keys}, {document['dtype']}, {floor}"


def _call(result: dict[str, Any]) -> str:
    shape = result["shape"]
    q = [shape["batch"], shape["heads"], shape["queries"], shape["head_dim"]]
    return f"{result['pass']} {q}"


def _keys(shape: dict[str, int]) -> str:
    return f" with {units.counted(shape['keys'], 'key')} in {units.counted(shape['kv_heads'], 'head')}"


def _table(result: dict[str, Any]) -> "Table":
    from rich.table import Table

    rows = [row for row in result["rows"] if row["ms"] is not None]
    eager = any(row["eager_ms"] is not None for row in rows)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("", "time", "x SDPA", "of copy", *["eager"] * eager, "extra", "of output"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
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
