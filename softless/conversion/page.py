"""The page of a conversion: the verdict, the damage of each layer, orders compared, the promise, and the cost."""

from collections.abc import Mapping, Sequence
from html import escape
from math import floor, log10
from pathlib import Path
from typing import Any

from softless.conversion.choosing import MEASURED
from softless.conversion.maps import table_of
from softless.io.files import write_text
from softless.report.page import COLORS, GRAYS, INK, Chapter, Trace, plot, write_chapters
from softless.report.units import counted, listed

Points = Sequence[Mapping[str, Any]]
ORDER_COLORS = {
    "first": COLORS[1],
    "last": COLORS[2],
    "every second": COLORS[3],
    "probe": COLORS[4],
    "random": GRAYS[1],
}
LOSSES = {"perplexity": "growth of the perplexity, %", "masked": "growth of the perplexity of masked tokens, %"}
LOSSES |= {"cosine": "1 - cosine, %", "accuracy": "loss of accuracy, points"}


def write_page(folder: Path, document: Mapping[str, Any]) -> Path:
    """Write folder/index.html; an old page is replaced in one step."""
    chapters = (
        damages(document), frontier(document), promise(document), recalled(document), seconds(document),
        sizes(document), texts(document), looks(document),
    )  # fmt: skip
    parts = document["samples"]
    model = f"{document['name']}, {counted(len(document['layers']), 'layer')}, on {document['machine']['processor']}."
    shares = f"{parts['fit']} samples fitted, {parts['choose']} chose and {parts['prove']} proved"
    about = model, f"{shares}, from {document['data']}. Candidates: {listed(document['candidates'])}."
    path = folder / "index.html"
    write_text(path, write_chapters(document["verdict"], about, [chapter for chapter in chapters if chapter], document))
    return path


def damages(document: Mapping[str, Any]) -> Chapter:
    """Draw the harm of each layer alone, layers that are linear now in blue."""
    traces: list[Trace] = []
    for converted, color, name in ((True, COLORS[0], "linear now"), (False, INK, "still softmax")):
        rows = [(at, layer) for at, layer in enumerate(document["layers"]) if layer["converted"] is converted]
        rows = [(at, layer) for at, layer in rows if layer["damage"] is not None]
        if rows:
            harms = [layer["damage"] for _, layer in rows]
            traces.append({
                "x": [at for at, _ in rows], "y": [100 * harm["mean"] for harm in harms], "mode": "markers",
                "error_y": whiskers(harms), "name": name, "marker": {"color": color, "size": 9},
                "customdata": [[layer["name"], layer["mechanism"]] for _, layer in rows],
                "hovertemplate": "%{customdata[0]}<br>%{customdata[1]}: %{y:.2f}<extra></extra>",
            })  # fmt: skip
    x, y = {"title": "layer", "tickformat": "d", "showgrid": False}, {"title": LOSSES[document["metric"]]}
    return Chapter(
        "What each layer costs alone",
        "A mark is the model with only this layer converted, compared with the original sample by sample. Bars are "
        "95 % intervals. Layers are converted in the order of this damage, the least first.",
        plot(traces, x=x, y=y, height=360, showlegend=True, legend=LEGEND),
    )


LEGEND = {"orientation": "h", "y": 1.12, "x": 0}


def frontier(document: Mapping[str, Any]) -> Chapter:
    """Draw the harm against the number of layers, one line per order."""
    lines: dict[str, Points] = {MEASURED: document["frontier"][MEASURED]}
    others = {name: points for name, points in document["frontier"].items() if name != MEASURED}
    lines |= {name: points for name, points in others.items() if not name.startswith("random")}
    traces = [_line(name, points, ORDER_COLORS.get(name, COLORS[0])) for name, points in lines.items()]
    randoms = [points for name, points in others.items() if name.startswith("random")]
    for at, points in enumerate(randoms):
        traces.append(_line("random", points, ORDER_COLORS["random"]) | {"showlegend": not at, "line": THIN})
    most = len(document["layers"])
    traces.append(_budget([0, most], 100 * document["budget"]))
    x = {"title": "layers converted", "tickformat": "d"}
    y: dict[str, Any] = {"title": LOSSES[document["metric"]]}
    harms = [point["harm"]["mean"] for points in document["frontier"].values() for point in points if point["harm"]]
    if max(harms, default=0) > 20 * document["budget"]:
        y |= {"range": [_least(harms), 100 * 20 * document["budget"]]}
    caption = "The thick line converts layers in the order of their measured damage. "
    if others:
        caption += (
            "The others convert as many in another order: from the first layer, from the last, every second, by the "
            "range of scores that softless probe measures, at random. "
        )
    caption += "The dashed line is the budget."
    return Chapter(
        "More layers, more harm",
        caption + (" Lines that leave the figure are over 20 times above it." if "range" in y else ""),
        plot(traces, x=x, y=y, height=420, showlegend=True, legend=LEGEND),
    )


THIN = {"color": GRAYS[1], "width": 1}


def _least(harms: Sequence[float]) -> float:
    return 110 * min(0.0, *harms) if len(harms) > 1 else 0.0


def _line(name: str, points: Points, color: str) -> Trace:
    shown = [point for point in points if point["harm"] is not None]
    wide = name == MEASURED
    bars = {"error_y": whiskers([point["harm"] for point in shown])} if wide else {}
    return {
        "x": [0, *(point["layers"] for point in shown)], "y": [0, *(100 * point["harm"]["mean"] for point in shown)],
        "mode": "lines+markers", "name": name, "line": {"color": color, "width": 3 if wide else 1.6},
        "marker": {"color": color, "size": 7 if wide else 5}, **_shifted(bars),
        "hovertemplate": f"{name}, %{{x}} layers: %{{y:.2f}}<extra></extra>",
    }  # fmt: skip


def _shifted(bars: dict[str, Any]) -> dict[str, Any]:
    """Let the point at zero layers have no bar."""
    for bar in bars.values():
        bar["array"], bar["arrayminus"] = [0.0, *bar["array"]], [0.0, *bar["arrayminus"]]
    return bars


def _budget(x: Sequence[Any], level: float) -> Trace:
    line = {"color": GRAYS[0], "width": 1.2, "dash": "dash"}
    return {"x": list(x), "y": [level] * len(x), "mode": "lines", "name": "budget", "line": line, "hoverinfo": "skip"}


def promise(document: Mapping[str, Any]) -> Chapter | None:
    """Draw what was predicted beside what was delivered."""
    pairs = [(name, document[name]) for name in ("predicted", "delivered") if document[name] is not None]
    if not pairs:
        return None
    return Chapter(
        "Predicted and delivered",
        "Predicted is measured on the samples that chose the layers, delivered on samples that took no part in "
        f"anything before. The dashed line is the budget, {100 * document['budget']:g} %.{_unhealed(document)}",
        _side_by_side(pairs, [COLORS[0]] * 2, LOSSES[document["metric"]], 100 * document["budget"]),
    )


def _side_by_side(
    pairs: Sequence[tuple[str, Mapping[str, Any]]], colors: Sequence[str], title: str, level: float | None = None
) -> Any:
    """Draw a line for each number and its interval, one above the other; dashed where the level is."""
    names, harms, lines = [name for name, _ in pairs], [harm for _, harm in pairs], list(range(len(pairs)))
    traces: list[Trace] = [
        {
            "y": lines, "x": [100 * harm["mean"] for harm in harms], "mode": "markers", "showlegend": False,
            "error_x": whiskers(harms), "marker": {"color": list(colors), "size": 11}, "text": names,
            "hovertemplate": "%{text}: %{x:.2f}<extra></extra>",
        }
    ]  # fmt: skip
    ends = [len(names) - 0.5, -0.5]
    if level is not None:
        traces.append(_budget((), level) | {"y": ends, "x": [level] * 2, "showlegend": False})
    y = {"showgrid": False, "zeroline": False, "range": ends, "tickvals": lines, "ticktext": names}
    return plot(traces, x={"title": title, "rangemode": "tozero"}, y=y, height=170)


def _unhealed(document: Mapping[str, Any]) -> str:
    healing = document["healing"]
    if healing is None or healing["delivered_before"] is None:
        return ""
    before = f"{100 * healing['delivered_before']['mean']:+.2f} %"
    if not healing["kept"]:
        return f" Healing for {healing['minutes']:g} minutes did harm on the samples that chose, and was undone."
    return f" Both are measured after healing for {healing['minutes']:g} minutes; without it, {before} were delivered."


def recalled(document: Mapping[str, Any]) -> Chapter | None:
    """Draw what both models find again far back."""
    recall = document["recall"]
    if recall is None:
        return None
    sides = [("original", recall["before"]), ("converted", recall["after"])]
    return Chapter(
        "Recall",
        f"The model reads tokens in a random order, then {recall['cue']} of them once more from a place in the first "
        f"half, and writes the next {recall['asked']}. The mark is the share that it gets right, over "
        f"{recall['prompts']} prompts. Bars are 95 % intervals. The original may be bad at this, too.",
        _side_by_side(sides, [INK, COLORS[0]], "right, %"),
    )


def texts(document: Mapping[str, Any]) -> Chapter | None:
    """Show how both models go on writing."""
    if not document["texts"]:
        return None
    rows = [
        f"<p style='margin-top:14px'>{escape(str(text['prompt']))}</p><ul>"
        + "".join(f"<li>{side}: <b>{escape(str(text[side]))}</b></li>" for side in ("original", "converted"))
        + "</ul>"
        for text in document["texts"]
    ]
    return Chapter(
        "Samples",
        "Both models continue texts that took no part in the conversion, always with the likeliest token.",
        "\n".join(rows),
    )


def looks(document: Mapping[str, Any]) -> Chapter | None:
    """Show what a query of both models looks at."""
    maps = document.get("looks")
    if maps is None:
        return None
    return Chapter(
        "Where it looks",
        "The weights of the patch in the middle, of the picture or of the first window, in one picture that took no "
        "part in the conversion: mean over heads, without a local residual. Both maps of a layer share their colors. "
        "Blue is positive, orange is negative, white is 0.",
        table_of(maps),
    )


def seconds(document: Mapping[str, Any]) -> Chapter | None:
    """Draw the seconds of a pass of both models against the number of tokens."""
    rows = [row for row in document["cost"] if row["seconds"] is not None and row["tokens"]]
    if not rows:
        return None
    if len(rows) == 1:
        (tokens, (before, after)) = rows[0]["tokens"], rows[0]["seconds"]
        sentence = (
            f"One pass over {tokens:,} tokens takes {before:.3g} s with the original and {after:.3g} s converted."
        )
        return Chapter("Time", sentence, "")
    return Chapter(
        "Time against length",
        "Seconds of one pass over one input, without a cache. Where the lines cross, the converted model becomes "
        "faster.",
        _against_length(rows, "seconds", "seconds", 1.0),
    )


def sizes(document: Mapping[str, Any]) -> Chapter | None:
    """Draw the bytes of the cache of both models against the number of tokens."""
    rows = [row for row in document["cost"] if row["bytes"] is not None and row["tokens"]]
    if not rows:
        return None
    return Chapter(
        "Memory while it generates",
        "Megabytes of the cache after so many tokens: keys and values in layers of softmax, a state of constant size "
        "in linear ones.",
        _against_length(rows, "bytes", "MB", 1e-6),
    )


def _against_length(rows: Points, key: str, title: str, factor: float) -> Any:
    tokens = [row["tokens"] for row in rows]
    traces = [
        {
            "x": tokens, "y": [factor * row[key][which] for row in rows], "mode": "lines+markers", "name": name,
            "line": {"color": color, "width": 2.5}, "marker": {"color": color, "size": 6},
            "hovertemplate": f"{name}, %{{x}} tokens: %{{y:.3g}}<extra></extra>",
        }
        for which, (name, color) in enumerate((("original", INK), ("converted", COLORS[0])))
    ]  # fmt: skip
    x = {"title": "tokens", "type": "log", "tickvals": tokens, "ticktext": [f"{count:,}" for count in tokens]}
    y = {"title": title, "type": "log", **_ticks([factor * value for row in rows for value in row[key]])}
    return plot(traces, x=x, y=y, height=360, showlegend=True, legend=LEGEND)


def _ticks(values: Sequence[float]) -> dict[str, Any]:
    """Return the ticks of a logarithmic axis: 1, 2 and 5 times the powers of ten, around the values."""
    low, high = (floor(log10(max(end(values), 1e-12))) for end in (min, max))
    ticks = [digit * 10.0**power for power in range(low, high + 2) for digit in (1, 2, 5)]
    return {"tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def whiskers(harms: Points) -> dict[str, Any]:
    """Return 95 % intervals as error bars, in percent."""
    return {
        "type": "data", "symmetric": False, "thickness": 1.2, "width": 3,
        "array": [100 * (harm["high"] - harm["mean"]) for harm in harms],
        "arrayminus": [100 * (harm["mean"] - harm["low"]) for harm in harms],
    }  # fmt: skip
