"""What `softless probe` says: a table, a row a layer; the verdict; how to read both."""

import csv
import io
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softless.commands.common import console
from softless.report import units

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
WEIGHTS = {"random": "random weights", "trained": "trained", "pretrained": "pretrained weights"}
READ = {
    "confused": "pairs of queries that get the same weights, per image and head",
    "3 x 3": "weight on a patch and its neighbors (if all weighed the same)",
    "span": "of a query's scores: the wider, the more the softmax does",
    "error": "of first-order weights, 1 + s in place of e^s, against softmax's",
    "equal": "the same for equal weights, which look at no score at all",
    "linear": "what a linear kernel in place of the softmax would cost here",
}


def document(about: dict[str, Any], examination: "Examination") -> dict[str, Any]:
    """All of it, for a file; a number that is not finite is null, and so is a verdict on random weights."""
    found = _plain(asdict(examination))
    judged = about["weights"] != "random"
    layers = found["layers"] if judged else [{**layer, "verdict": None} for layer in found["layers"]]
    says = verdict(examination) if judged else None
    return {**about, "verdict": says, "layers": layers, "confusion_histogram": found["confusion_histogram"]}


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
        runs, confuse = ("layers run", "confuse") if count > 1 else ("layer runs", "confuses")
        says += f"{count} {runs} {name}, and {confuse} {mean} pairs of queries per image and head. "
    return says.strip()


def layers_csv(written: dict[str, Any]) -> str:
    """A row a layer: what it is, then each estimate with its interval."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow([*FACTS, *(f"{name}{end}" for name in ESTIMATES for end in ("", "_low", "_high")), "verdict"])
    for layer in written["layers"]:
        estimates = [layer[name] or {} for name in ESTIMATES]
        numbers = [each.get(end) for each in estimates for end in ("mean", "low", "high")]
        rows.writerow([*(layer[name] for name in FACTS), *numbers, layer["verdict"]])
    return text.getvalue()


def counted(count: int, what: str) -> str:
    """100 images of 32 x 32 pixels, or 1 image of 32 x 32 pixels."""
    if count == 1:
        what = what.replace("layers", "layer").replace("images", "image").replace("pieces", "piece")
    return f"{count:,} {what}"


def show(written: dict[str, Any], folder: Path | None) -> None:
    """What was looked at, layer by layer, and what follows."""
    from rich.measure import Measurement
    from rich.text import Text

    out, layers, judged = console(), written["layers"], written["weights"] != "random"
    if not judged:
        out.print(
            Text("The weights are random, so this is how the model starts out, not what it learns.", style="bold")
        )
    weights = WEIGHTS.get(written["weights"], written["weights"])
    out.print(Text.assemble((written["model"], "bold"), f", {weights}, {written['device']}"), soft_wrap=True)
    out.print(f"{counted(written['images'], written['samples'])} from {written['data']}", soft_wrap=True)
    out.print(_what(layers), soft_wrap=True)
    if missed := written["missed"]:
        more = f" and {counted(len(missed) - 1, 'more layers')}" if len(missed) > 1 else ""
        it = "they are" if len(missed) > 1 else "it is"
        out.print(f"The attention of {missed[0]}{more} cannot be captured: {it} not in the table.", soft_wrap=True)
    out.print()
    table, width = _table(layers, judged), out.width
    out.width = max(width, Measurement.get(out, out.options.update(max_width=10_000), table).maximum)
    out.print(table)  # whole, where it is wider than the terminal
    out.width = width
    out.print()
    if judged:
        out.print(Text(written["verdict"], style="bold"))
        worst = max(layers, key=lambda layer: layer["first_order_error"]["mean"] or 0)
        out.print(f"{'Most in ' if len(layers) > 1 else ''}{worst['name']}: {worst['verdict']}")
    else:
        out.print("Random weights get no verdict: give trained ones with --weights FILE, or --pretrained for timm.")
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
    where = layers[0]["name"] if len(layers) == 1 else f"{before}*{after}"
    head, token = ("" if x == [1] else "s" for x in (heads, tokens))
    return (
        f"{counted(len(layers), 'layers')} of {mechanisms} attention, {spans[0]} head{head}, "
        f"{spans[1]} token{token}: {where}"
    )


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


def _table(layers: list[dict[str, Any]], judged: bool) -> "Table":
    from softless.commands.common import plain_table
    from softless.probes.score_range import cost

    pictures = any(layer["local_mass"] for layer in layers)
    mixed, uneven = (len({layer[word] for layer in layers}) > 1 for word in ("mechanism", "tokens"))
    extra = [*["runs"] * mixed, *["tokens"] * uneven]
    last = ["span", "error", "equal", *["linear"] * judged]
    table = plain_table("layer", *extra, "confused", *["3 x 3"] * pictures, *last, gap=2)
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
            *["-" if error is None or uniform is None else cost(error, uniform)] * judged,
        )
    return table


def _sureness(layers: list[dict[str, Any]]) -> str:
    """How far the errors may be off."""
    errors = [layer["first_order_error"] for layer in layers]
    halves = [each["high"] - each["mean"] for each in errors if each["high"] is not None and each["mean"] is not None]
    if not halves:
        return "Of one sample: only more of them tell how far its numbers are off."
    reach, count = f"{100 * max(halves):.2g}", errors[0]["n"]
    return f"Runtime over {count:,}; the 95 % intervals of the errors reach {reach} points to a side at most."


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
