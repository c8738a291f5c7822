"""The speaking half of `softless bench --model`: a table a setting and pass, one sentence, and who is missing."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from softless.commands.bench_show import closing
from softless.commands.layout import plain_table
from softless.report import units

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def show(document: dict[str, Any], plot: Path | None, out: "Console") -> None:
    """Where, what, how fast, and what was not measured."""
    from rich.text import Text

    machine, versions = document["machine"], document["versions"]
    place = units.counted(document["threads"], "thread") if document["device"] == "cpu" else "cuda"
    out.print(Text(f"{machine['processor']}, {place}, {document['dtype']}, torch {versions['torch']}", "dim"))
    for result in document["results"]:
        out.print()
        out.print(Text(setting(result), style="bold"))
        out.print(_table(result))
    out.print()
    out.print(Text(verdict(document), style="bold"))
    eager = "eager: ordinary calls, launches included; " if document["device"] == "cuda" else ""
    out.print(Text(f"x twin: against the softmax twin, compiled or not; {eager}memory: with the weights", "dim"))
    closing(document["results"], plot, out)


def verdict(document: dict[str, Any]) -> str:
    """The model on the largest images, against each of the others computed the same way."""
    result = max(document["results"], key=lambda result: result["image_size"][0] * result["image_size"][1])
    timed = [row for row in result["rows"] if row["images_per_second"] is not None]
    mine = [row for row in timed if row["role"] == "ours"]
    if not mine:
        return f"{setting(result)}: {document['model']} could not be timed."
    best = max(mine, key=lambda row: row["images_per_second"])
    others = [row for row in timed if row["role"] != "ours" and row["compiled"] == best["compiled"]]
    says = f"{setting(result)}: {best['label']} does {units.short(best['images_per_second'])} images/s"
    ratios = [
        f"{units.short(best['images_per_second'] / row['images_per_second'])}x {row['label'].partition(',')[0]}"
        for row in others
    ]
    return f"{says}: {', '.join(ratios)}." if ratios else f"{says}."


def setting(result: dict[str, Any]) -> str:
    """forward, 16 images of 1024 x 1024, windows 7 x 7."""
    window = "" if result["window"] is None else f", windows {result['window']} x {result['window']}"
    images = units.counted(result["batch"], "image")
    return f"{result['pass']}, {images} of {units.picture(result['image_size'])}{window}"


def _table(result: dict[str, Any]) -> "Table":
    rows = [row for row in result["rows"] if row["images_per_second"] is not None]
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
