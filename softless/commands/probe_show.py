"""What `softless probe` says: a table, a row a layer; the verdict; how to read both."""

import csv
import io
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softless.commands import units
from softless.commands.manners import console

if TYPE_CHECKING:
    from rich.table import Table

    from softless.probes.findings import Examination

ESTIMATES: tuple[str, ...] = (
    "confusions",
    "collinear_collisions",
    "collinear_pairs",
    "local_mass",
    "attention_distance",
)
ESTIMATES += ("residual_share", "score_range", "score_deviation", "entropy", "score_volume")
ESTIMATES += ("first_order_error", "uniform_error", "bound", "effective_rank", "smallest_singular_value")
FACTS = ("name", "mechanism", "heads", "tokens", "local_baseline", "distance_baseline", "rank", "full_rank")

COSTS = {
    "little": "cost little",
    "something": "cost something",
    "much": "cost much",
    "too much": "lose more than looking at no score at all",
}
READ = {
    "confused": "pairs of queries that get the same weights, an image and head",
    "3 x 3": "weight on a patch and its neighbors (if all weighed the same)",
    "span": "of a query's scores: the wider, the more the softmax does",
    "error": "of first-order weights, 1 + s in place of e^s, against softmax's",
    "equal": "the same for equal weights, which look at no score at all",
    "linear": "what a linear kernel in place of the softmax would cost here",
}


def document(about: dict[str, Any], examination: "Examination") -> dict[str, Any]:
    """All of it, for a file; a number that is not finite is null."""
    found = _plain(asdict(examination))
    histogram = found["confusion_histogram"]
    return {**about, "verdict": verdict(examination), "layers": found["layers"], "confusion_histogram": histogram}


def verdict(examination: "Examination") -> str:
    """Of all layers together: what leaving the softmax would cost those that have one, what the others confuse."""
    from softless.probes.score_range import cost

    layers = examination.layers
    costs = [cost(x.first_order_error.mean, x.uniform_error.mean) for x in layers if x.mechanism == "softmax"]
    counts = [(says, costs.count(word)) for word, says in COSTS.items() if word in costs]
    says = ""
    if counts:
        parts = " and ".join(f"{word} in {some}" for word, some in counts)
        of = f" of {len(costs)} layers" if len(costs) > 1 else " layer"
        says = f"In place of the softmax, a linear kernel would {parts}{of}. "
    for name in dict.fromkeys(layer.mechanism for layer in layers if layer.mechanism != "softmax"):
        confused = [layer.confusions.mean for layer in layers if layer.mechanism == name]
        mean, count = units.short(sum(confused) / len(confused)), len(confused)
        runs = "layers run" if count > 1 else "layer runs"
        says += f"{count} {runs} {name}, and confuse {mean} pairs of queries an image and head. "
    return says.strip()


def layers_csv(examination: "Examination") -> str:
    """A row a layer: what it is, then each estimate with its interval."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow([*FACTS, *(f"{name}{end}" for name in ESTIMATES for end in ("", "_low", "_high")), "verdict"])
    for layer in examination.layers:
        estimates = [getattr(layer, name) for name in ESTIMATES]
        numbers = [x for each in estimates for x in ((each.mean, each.low, each.high) if each else (None,) * 3)]
        rows.writerow([*(getattr(layer, name) for name in FACTS), *numbers, layer.verdict])
    return text.getvalue()


def show(written: dict[str, Any], folder: Path | None) -> None:
    """What was looked at, layer by layer, and what follows."""
    from rich.measure import Measurement
    from rich.text import Text

    out, layers = console(), written["layers"]
    weights = {"random": "random weights", "trained": "trained"}.get(written["weights"], written["weights"])
    out.print(Text.assemble((written["model"], "bold"), f", {weights}, {written['device']}"), soft_wrap=True)
    out.print(f"{written['images']:,} {written['samples']} from {written['data']}", soft_wrap=True)
    out.print(_what(layers), soft_wrap=True)
    if missed := written["missed"]:
        more = f" and {len(missed) - 1} more are" if len(missed) > 1 else " is"
        out.print(f"{missed[0]}{more} called attention, but cannot be captured: not in what follows", soft_wrap=True)
    out.print()
    table, width = _table(layers), out.width
    out.width = max(width, Measurement.get(out, out.options.update(max_width=10_000), table).maximum)
    out.print(table)  # whole, where it is wider than the terminal
    out.width = width
    out.print()
    out.print(Text(written["verdict"], style="bold"))
    worst = max(layers, key=lambda layer: layer["first_order_error"]["mean"] or 0)
    out.print(f"{'Most in ' if len(layers) > 1 else ''}{worst['name']}: {worst['verdict']}")
    if written["weights"] == "random":
        out.print("The weights are random: this is how the model starts out, not what it learns.")
    out.print()
    for heading in (column.header for column in table.columns if column.header in READ):
        out.print(Text(f"{heading!s:<9} {READ[str(heading)]}", style="dim"))
    out.print(Text(_sureness(layers), style="dim"))
    if folder is not None:
        out.print(f"Written: {folder / 'probe.json'}, {folder / 'layers.csv'}", soft_wrap=True)


def _what(layers: list[dict[str, Any]]) -> str:
    """12 layers of softmax attention, 3 heads, 197 tokens: blocks.*.attn."""
    mechanisms = " and ".join(dict.fromkeys(layer["mechanism"] for layer in layers))
    heads, tokens = (sorted({layer[word] for layer in layers}) for word in ("heads", "tokens"))
    spans = [f"{x[0]:,}" if len(x) == 1 else f"{x[0]:,} to {x[-1]:,}" for x in (heads, tokens)]
    before, _, after = _names(layers)
    counted = f"{len(layers)} layers" if len(layers) > 1 else "1 layer"
    head = "head" if heads == [1] else "heads"
    return f"{counted} of {mechanisms} attention, {spans[0]} {head}, {spans[1]} tokens: {before}*{after}"


def _names(layers: list[dict[str, Any]]) -> tuple[str, list[str], str]:
    """What all names begin with, what tells them apart, and what they end with."""
    paths = [layer["name"].split(".") for layer in layers]
    if len(paths) < 2:
        return "", [layer["name"] for layer in layers], ""
    short = min(map(len, paths)) - 1
    front = next((at for at in range(short) if len({path[at] for path in paths}) > 1), short)
    back = next((at for at in range(short - front) if len({path[-1 - at] for path in paths}) > 1), short - front)
    own = [".".join(path[front : len(path) - back]) for path in paths]
    before, after = ".".join([*paths[0][:front], ""]), ".".join(["", *paths[0][len(paths[0]) - back :]])
    return before, own, after


def _table(layers: list[dict[str, Any]]) -> "Table":
    from softless.commands.layout import plain_table
    from softless.probes.score_range import cost

    pictures = any(layer["local_mass"] for layer in layers)
    mixed, uneven = (len({layer[word] for layer in layers}) > 1 for word in ("mechanism", "tokens"))
    extra = [*["runs"] * mixed, *["tokens"] * uneven]
    table = plain_table("layer", *extra, "confused", *["3 x 3"] * pictures, "span", "error", "equal", "linear", gap=2)
    for layer, name in zip(layers, _names(layers)[1], strict=True):
        error, uniform = layer["first_order_error"]["mean"], layer["uniform_error"]["mean"]
        table.add_row(
            name,
            *[layer["mechanism"]] * mixed,
            *[f"{layer['tokens']:,}"] * uneven,
            _number(layer["confusions"]["mean"]),
            *[_beside(layer["local_mass"], layer["local_baseline"])] * pictures,
            _number(layer["score_range"]["mean"]),
            _percent(error),
            _percent(uniform),
            "-" if error is None or uniform is None else cost(error, uniform),
        )
    return table


def _sureness(layers: list[dict[str, Any]]) -> str:
    """How far the errors may be off."""
    errors = [layer["first_order_error"] for layer in layers]
    halves = [each["high"] - each["mean"] for each in errors if each["high"] is not None and each["mean"] is not None]
    if not halves:
        return "Of one sample: only more of them tell how far its numbers are off."
    reach, count = f"{100 * max(halves):.2g}", errors[0]["n"]
    return f"Means over {count:,}; the 95 % intervals of the errors reach {reach} points to a side at most."


def _number(mean: float | None) -> str:
    return "-" if mean is None else units.short(mean)


def _percent(share: float | None) -> str:
    """7.1%, 34%, <0.1%."""
    if share is None:
        return "-"
    return "<0.1%" if 0 < share < 0.001 else f"{share:.{0 if share >= 0.0995 else 1}%}"


def _beside(estimate: dict[str, Any] | None, other: float | None) -> str:
    """9% (4%)."""
    if estimate is None or estimate["mean"] is None:
        return "-"
    return _percent(estimate["mean"]) + (f" ({_percent(other)})" if other is not None else "")


def _plain(value: Any) -> Any:
    """Lists for tuples, null for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
