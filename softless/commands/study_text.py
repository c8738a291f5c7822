"""The terminal output of a study of text: the verdict, the twins, and where the page is."""

from pathlib import Path
from typing import TYPE_CHECKING

from softless.commands.common import plain_table, print_whole
from softless.report import units

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from softless.study.text.schema import TextDocument


def show_text(document: "TextDocument", path: Path, out: "Console") -> None:
    """Print the verdict, then the twins, then where the page is."""
    from rich.table import Table
    from rich.text import Text

    from softless.study.text.page import facts

    machine, versions = document["machine"], document["versions"]
    out.print()
    out.print(Text(f"{machine['processor']}, {machine['device']}, torch {versions['torch']}", "dim"))
    out.print(Text(f"{document['data']['name']}: {facts(document)}", "dim"))
    out.print()
    lines = Table.grid(padding=(0, 2, 0, 0))
    for row in document["verdict"]:
        lines.add_row(Text(row["about"], style="bold"), row["says"])
    out.print(lines)
    out.print()
    print_whole(out, text_twins_table(document))
    out.print()
    printable = str(path).encode("utf-8", "replace").decode("utf-8")
    out.print(Text(f"The report: {printable}"), soft_wrap=True)


def text_twins_table(document: "TextDocument") -> "Table":
    """Return a table of the twins: bits per byte, the difference from softmax, and the answer."""
    from softless.study.tables import instead

    decision = document["decision"]
    pairs = {pair["linear"]: pair for pair in (decision["pairs"] if decision else [])}
    table = plain_table("twin", "bits per byte", "more", "interval", "softmax needed?", "training", "size", gap=2)
    for twin in document["twins"]:
        bits, pair, seeds = twin["bits_per_byte"], pairs.get(twin["id"]), twin["seeds"] or []
        mean = bits and bits["mean"]
        difference, low, high = (pair["difference"], pair["low"], pair["high"]) if pair else (None, None, None)
        table.add_row(
            twin["label"],
            instead(seed["status"] or "" for seed in seeds) if mean is None else f"{mean:.3f}",
            "-" if difference is None else f"{difference:+.3f}",
            "-" if low is None or high is None else f"{low:+.3f} to {high:+.3f}",
            pair["answer"] if pair else "-",
            "-" if twin["seconds"] is None else units.seconds(twin["seconds"]),
            units.count(twin["parameters"] or 0),
        )
    return table
