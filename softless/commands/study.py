"""softless study: do you need the softmax, on these images and on this machine?

Twins are small models of one shape that are trained alike and differ in their attention. The study trains twins,
examines them layer by layer, times them, and times mechanisms against the number of tokens. The answer follows from a
rule (study/decision.py). The page, report.json (study/schema.py), CSV files, trained twins (study/grid.py) and stored
measurements (study/pipeline.py) are in DIR, and a rerun with the same DIR continues where the last one stopped.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from softless.commands.arguments import Where, lengths
from softless.commands.common import (
    console,
    emit_json,
    importing,
    plain_table,
    prepare_folder,
    print_whole,
    refuse,
    reports_errors,
)
from softless.commands.ctrl_c import continues
from softless.commands.progress import Bar, progress, say
from softless.commands.study_text import show_text
from softless.report import units

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from softless.study.schema import Estimated, FairPair, SmallTable, StudyDocument, TwinResult
    from softless.study.text.schema import TextDocument

SUMMARY = "Do you need the softmax? Train twins, examine them, time them: a report."
HELP = """Do you need the softmax? Train twins, small models that differ only in attention, examine and time them.

The answer is no, yes or cannot tell, with the difference in accuracy and its interval. It compares inline with
softmax, and inline + local with softmax + local: pairs that differ in attention alone. The command prints a verdict
and writes a page with figures. A rerun continues where the last one stopped.

\b
$ softless study                               # the embedded digits: minutes
$ softless study --quick
$ softless study --data flowers/ --out flowers-report
$ softless study --text book.txt --out book    # language models on your text
$ softless study --full --pack 6 --minutes 25  # the paper's tables, on a GPU
"""
LARGEST_SEED = 10**15 - 1


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise typer.BadParameter(f"{text!r} names nothing")
    return names


def _between_zero_and(limit: float, what: str) -> Callable[[str], float]:
    """Return a parser of numbers above 0 and below `limit`: typer's ranges let 0 and nan through."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not 0 < number < limit:
            raise typer.BadParameter(f"{text!r} is not a number of {what} between 0 and {limit:,g}")
        return number

    return parse


def _number(help_text: str, least: int, most: int, *, show_default: bool = False) -> Any:
    return typer.Option(min=least, max=most, metavar="NUMBER", help=help_text, show_default=show_default)


def _list(parser: Callable[[str], Any], metavar: str, help_text: str) -> Any:
    return typer.Option(parser=parser, metavar=metavar, help=help_text, show_default=False)


@reports_errors
def run(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the report.")] = Path("report"),
    data: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Images: folder or parquet file. Default: digits.", show_default=False),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Text: study language models instead.", show_default=False),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few twins, one seed: a first look.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Every table of the paper, three seeds.")] = False,
    recipe: Annotated[
        str | None, typer.Option(metavar="NAME", help="Recipe for the twins: a name or a file.", show_default=False)
    ] = None,
    twins: Annotated[Any, _list(_names, "A,B,...", "Twins to train.")] = None,
    mechanisms: Annotated[Any, _list(_names, "A,B,...", "Mechanisms to time, or all.")] = None,
    tokens: Annotated[Any, _list(lengths, "N,N,...", "Sequence lengths to time; of text, tokens seen.")] = None,
    seeds: Annotated[int | None, _number("Number of seeds for each twin.", 1, 1000)] = None,
    epochs: Annotated[int | None, _number("Epochs of training. Default: the recipe's.", 1, 10**6)] = None,
    margin: Annotated[
        Any,
        typer.Option(
            parser=_between_zero_and(100, "points of accuracy, or bits per byte of text,"),
            metavar="POINTS",
            help="Smallest loss that matters: points of accuracy, 1, or bits per byte of text, 0.05.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, _number("First random seed.", 0, LARGEST_SEED, show_default=True)] = 0,
    minutes: Annotated[
        Any, _list(_between_zero_and(1e6, "minutes"), "NUMBER", "Start no training that would end later.")
    ] = None,
    pack: Annotated[int | None, _number("Trainings that run at once.", 1, 256)] = None,
    workers: Annotated[int, _number("Processes that decode images.", 0, 256, show_default=True)] = 0,
    device: Annotated[Where, typer.Option(help="Where to run; auto uses a GPU if there is one.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout.")] = False,
) -> None:
    """Run the study, and show its verdict or print its document."""
    refuse({"--full": quick and full}, "--quick asks for a smaller study: use one of them")
    refuse(
        {"--data": text and data, "--mechanisms": text and mechanisms, "--workers": text and workers},
        "--text studies language models, which read a text: leave out one of them",
    )
    prepare_folder(out)
    shared: dict[str, Any] = {
        "out": out, "preset": "quick" if quick else "full" if full else "default", "recipe": recipe, "twins": twins,
        "tokens": tokens, "seeds": seeds, "seed": seed, "epochs": epochs, "minutes": minutes, "pack": pack,
        "device": device, **({} if margin is None else {"margin": float(margin)}),
    }  # fmt: skip
    if text is not None:
        of_text, page = study_text(text, shared, quiet=json)
        emit_json(of_text) if json else show_text(of_text, page, console())
        return

    with importing():
        from softless.study.pipeline import DECODING, prepare
        from softless.study.plan import StudyOptions

    study = prepare(StudyOptions(data=data, mechanisms=mechanisms, workers=workers, **shared))
    with continues(), progress(study.work, wanted=not json) as bar:
        document, page = study.run(ProgressLines(bar, study.images, DECODING, quiet=json))
    if json:
        emit_json(document)
    else:
        show(document, page, console())


def study_text(text: str, shared: dict[str, Any], *, quiet: bool) -> "tuple[TextDocument, Path]":
    """Study a text; return the document and the path of the page."""
    with importing():
        from softless.study.text.pipeline import prepare_text
        from softless.study.text.plan import TextOptions

    study = prepare_text(TextOptions(text=text, **shared))
    with continues(), progress(study.work, wanted=not quiet) as bar:
        return study.run(ProgressLines(bar, 0, 0.0, quiet=quiet))


class ProgressLines:
    """A `StudyWatcher` that prints a line for each run and moves the bar.

    images     number of images to decode, whose share of the bar is `decoding`
    quiet      whether to print no lines
    """

    def __init__(self, bar: Bar, images: int, decoding: float, *, quiet: bool):
        self.bar, self.images, self.work, self.quiet = bar, images, decoding, quiet
        self.decoded, self.shares = 0, dict[str, float]()

    def advance(self, label: str, amount: float) -> None:
        self.bar(label, amount)

    def say(self, sentence: str) -> None:
        if not self.quiet:
            say(sentence)

    def begin(self, runs: int, finished: int) -> None:
        if self.shares:  # a second grid, whose runs may have the same names; its images are not on the bar
            self.images, self.decoded, self.shares = 0, 0, {}
        if finished:
            self.say(f"continuing: {finished} of {units.counted(runs, 'run')} trained before")
        if runs > finished:
            self.say(f"{units.counted(runs - finished, 'model')} to train; each is listed here when it is trained")
        self.bar.skip(finished)

    def decoding(self, images: int) -> None:
        self.decoded += images
        of, step = (f" of {self.images:,}", self.work / self.images) if self.images else ("", 0.0)
        self.bar(f"decoding images, {self.decoded:,}{of}", step * images)

    def tick(self, name: str, share: float) -> None:
        if self.decoded < self.images:  # they were decoded before
            self.bar.skip(self.work * (1 - self.decoded / self.images))
            self.decoded = self.images
        self.bar(f"training {name}", share - self.shares.get(name, 0.0))
        self.shares[name] = share

    def ran(self, record: "Mapping[str, Any]") -> None:
        twin, seed = record["twin"], record["seed"]
        self.tick(f"{twin['id']}-{seed}", 1.0)
        result = f"{record['status']}: {record['reason']}"
        if record["status"] == "done":
            result = f"{_scores(record)}   {units.seconds(record.get('seconds') or record['wall_seconds'])}"
        self.say(f"{twin['label']:<24} seed {seed}   {result}")


def _scores(record: "Mapping[str, Any]") -> str:
    """Return what a run reached: accuracy, bits per byte, or accuracy at the longest recall of training."""
    if "points" in record:
        inside = [point for point in record["points"] if point["inside"]]
        last = {point["task"]: point["accuracy"] for point in inside}
        return "   ".join(f"{task} {accuracy:.0%}" for task, accuracy in last.items())
    if "bits_per_byte" in record:
        return f"{record['bits_per_byte']:.3f} bits per byte"
    return f"{record['accuracy']:7.2%}"


def show(document: "StudyDocument", path: Path, out: "Console") -> None:
    """Print the verdict, then the twins, then where the page is."""
    from rich.table import Table
    from rich.text import Text

    from softless.study.page.text import facts, images

    machine, versions = document["machine"], document["versions"]
    out.print()
    out.print(Text(f"{machine['processor']}, {machine['device']}, torch {versions['torch']}", "dim"))
    out.print(Text(f"{document['data']['name']}: {facts(document)} {images(document)}", "dim"), soft_wrap=False)
    out.print()
    lines = Table.grid(padding=(0, 2, 0, 0))
    for row in document["verdict"]:
        lines.add_row(Text(row["about"], style="bold"), row["says"])
        if table := row.get("table"):
            lines.add_row("", small_table(table))
    out.print(lines)
    out.print()
    if document["decision"] and (pairs := document["decision"]["pairs"]):
        print_whole(out, decision_table(pairs))
        out.print()
    print_whole(out, twins_table(document["twins"]))
    out.print()
    printable = str(path).encode("utf-8", "replace").decode("utf-8")
    out.print(Text(f"The report: {printable}"), soft_wrap=True)


def decision_table(pairs: "Sequence[FairPair]") -> "Table":
    """Return a table of the fair pairs: accuracy of the linear twin minus that of the softmax twin, and the answer."""
    table = plain_table("fair pair", "points", "95 % interval", "softmax needed?", gap=2)
    for pair in pairs:
        difference = "-" if pair["difference"] is None else f"{pair['difference']:+.1f}"
        inside = "-" if pair["low"] is None else f"{pair['low']:+.1f} to {pair['high']:+.1f}"
        table.add_row(f"{pair['labels'][1]}, {pair['labels'][0]}", difference, inside, pair["answer"])
    return table


def small_table(content: "SmallTable") -> "Table":
    """Return the table of a row of the verdict."""
    table = plain_table(*content["columns"], gap=2)
    for row in content["rows"]:
        table.add_row(*(f"{value:.1f}" if isinstance(value, float) else str(value) for value in row))
    return table


def twins_table(twins: "Sequence[TwinResult]") -> "Table":
    """Return a table of the accuracy and the cost of each twin."""
    from softless.study.tables import instead

    table = plain_table("twin", "top-1", "95 % interval", "per epoch", "per image", "size", gap=2)
    for twin in twins:
        accuracy, seeds = twin["accuracy"], twin["seeds"] or []
        mean = accuracy and accuracy["mean"]
        table.add_row(
            twin["label"],
            instead(seed["status"] or "" for seed in seeds) if mean is None else f"{mean:.1%}",
            interval(accuracy),
            "-" if twin["seconds_per_epoch"] is None else units.seconds(twin["seconds_per_epoch"]),
            units.macs(twin["macs"] or 0),
            units.count(twin["parameters"] or 0),
        )
    return table


def interval(accuracy: "Estimated | None") -> str:
    if accuracy is None or accuracy["mean"] is None:
        return "-"
    return "one seed" if accuracy["low"] is None else f"{accuracy['low']:.1%} to {accuracy['high']:.1%}"
