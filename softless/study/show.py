"""The speaking half of `softless study`: what happens while it runs, then the verdict, a table, and the page."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from softless.commands.common import plain_table
from softless.commands.progress import Bar
from softless.report import units
from softless.study.statistics import instead

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


DECODING = 0.3  # of the length of a run, for the bar


class Showing:
    """A `GridWatcher` that prints a line for each run and moves the bar in between.

    images   that will be decoded; 0 where the bar has no room for that
    """

    def __init__(self, out: "Console | None", advance: Bar, images: int = 0):
        self.out, self.advance, self.images = out, advance, images
        self.decoded, self.shares = 0, dict[str, float]()

    def say(self, sentence: str) -> None:
        if self.out is not None:
            self.out.print(sentence, soft_wrap=True)

    def begin(self, runs: int, finished: int) -> None:
        if finished:
            self.say(f"going on: {finished} of {units.counted(runs, 'run')} trained before")
        self.advance.skip(finished)

    def decoding(self, images: int) -> None:
        self.decoded += images
        of, step = (f" of {self.images:,}", DECODING / self.images) if self.images else ("", 0.0)
        self.advance(f"decoding images, {self.decoded:,}{of}", step * images)

    def tick(self, name: str, share: float) -> None:
        if self.decoded < self.images:  # they were decoded before
            self.advance.skip(DECODING * (1 - self.decoded / self.images))
            self.decoded = self.images
        self.advance(f"training {name}", share - self.shares.get(name, 0.0))
        self.shares[name] = share

    def ran(self, record: dict[str, Any]) -> None:
        twin, seed = record["twin"], record["seed"]
        self.tick(f"{twin['id']}-{seed}", 1.0)
        if record["status"] == "done":
            result = f"{record['accuracy']:7.2%}   {units.seconds(record['seconds'])}"
        else:
            result = f"{record['status']}: {record['reason']}"
        self.say(f"{twin['label']:<24} seed {seed}   {result}")


def show(document: dict[str, Any], path: Path, out: "Console") -> None:
    """Verdict first, then the twins."""
    from rich.table import Table
    from rich.text import Text

    machine, versions = document["machine"], document["versions"]
    out.print()
    out.print(Text(f"{machine['processor']}, {machine['device']}, torch {versions['torch']}", "dim"))
    out.print(Text(images_in_words(document["data"]), "dim"), soft_wrap=False)
    out.print()
    lines = Table.grid(padding=(0, 2, 0, 0))
    for row in document["verdict"]:
        lines.add_row(Text(row["about"], style="bold"), row["says"])
        if table := row.get("table"):
            lines.add_row("", small_table(table))
    out.print(lines)
    out.print()
    if pairs := document["decision"]["pairs"]:
        out.print(decision_table(pairs))
        out.print()
    out.print(twins_table(document["twins"]))
    out.print()
    out.print(Text(f"The report: {printable(path)}"), soft_wrap=True)


def images_in_words(data: dict[str, Any]) -> str:
    """What was done to the images, in a sentence or two."""
    came = data["came"]
    sizes = []
    if came is not None:
        smallest, largest = (units.picture(came[which]) for which in ("smallest", "largest"))
        sizes = [f"came in {smallest}" + ("" if smallest == largest else f" to {largest}") + " pixels"]
    side, classes = data["image_size"], len(data["classes"])
    said = [
        f"{data['name']}: {data['train']:,} images to train on, {data['test']:,} to test on, {classes} classes",
        *sizes,
        f"trained at {side} x {side}, patches of {data['patch']} x {data['patch']}, {data['tokens']} tokens",
        f"recipe {data['recipe']}, {data['epochs']} {'epoch' if data['epochs'] == 1 else 'epochs'}",
    ]
    return "; ".join(said) + "." + (f" {data['split']}" if data["split"] else "")


def decision_table(pairs: list[dict[str, Any]]) -> "Table":
    """Each fair pair: the accuracy of the first twin less that of the second, its interval, the answer."""
    table = plain_table("fair pair", "points", "95 % interval", "softmax needed?", gap=2)
    for pair in pairs:
        difference = "-" if pair["difference"] is None else f"{pair['difference']:+.1f}"
        inside = "-" if pair["low"] is None else f"{pair['low']:+.1f} to {pair['high']:+.1f}"
        table.add_row(f"{pair['labels'][1]}, {pair['labels'][0]}", difference, inside, pair["answer"])
    return table


def small_table(given: dict[str, Any]) -> "Table":
    """Of a row of the verdict."""
    table = plain_table(*given["columns"], gap=2)
    for row in given["rows"]:
        table.add_row(*(f"{value:.1f}" if isinstance(value, float) else str(value) for value in row))
    return table


def twins_table(twins: list[dict[str, Any]]) -> "Table":
    """Accuracy and cost of each twin."""
    rows = [
        [
            twin["label"],
            _top1(twin),
            interval(twin["accuracy"]),
            "-" if twin["seconds_per_epoch"] is None else units.seconds(twin["seconds_per_epoch"]),
            units.macs(twin["macs"]),
            units.count(twin["parameters"] or 0),
        ]
        for twin in twins
    ]
    table = plain_table("twin", "top-1", "95 % interval", "an epoch", "an image", "size", gap=2)
    for row in rows:
        table.add_row(*row)
    return table


def interval(accuracy: dict[str, Any]) -> str:
    if accuracy["mean"] is None:
        return "-"
    return "one seed" if accuracy["low"] is None else f"{accuracy['low']:.1%} to {accuracy['high']:.1%}"


def _top1(twin: dict[str, Any]) -> str:
    mean = twin["accuracy"]["mean"]
    return instead(seed["status"] for seed in twin["seeds"]) if mean is None else f"{mean:.1%}"


def printable(path: Path) -> str:
    return str(path).encode("utf-8", "replace").decode("utf-8")
