"""The speaking half of `softless study`: a verdict in plain language, then compact tables."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from softless.commands import units

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

REFERENCE = "SDPA"
ROUGH = 1.5  # median / fastest repeat, beyond which timings say more about the machine than about the call
SHOWN_LENGTHS = 5


def verdict(document: dict[str, Any], threads: int) -> list[dict[str, str]]:
    """What the numbers say, most important first."""
    said = [
        ("Speed", _speed_verdict(document["speed"])),
        ("Memory", _memory_verdict(document["speed"])),
        ("Softmax", _softmax_verdict(document["approximation"])),
        ("Queries", _query_verdict(document["injectivity"])),
        ("Trust", _trust_verdict(document["speed"], threads)),
    ]
    return [{"about": about, "says": says} for about, says in said if says]


def _speed_verdict(part: dict[str, Any]) -> str:
    longest = max(part["tokens"])
    laps = {lap["label"]: lap for lap in _laps(part, longest) if lap["seconds"] is not None}
    reference = laps.pop(REFERENCE)
    laps.pop("softmax", None)
    best = max(laps.values(), key=lambda lap: lap["speedup"])
    times = f"{units.seconds(best['seconds'])} against {units.seconds(reference['seconds'])}"
    if best["speedup"] <= 1:
        return f"at {longest:,} tokens nothing is faster than SDPA; {best['label']} comes closest ({times})."
    says = f"at {longest:,} tokens {best['label']} is fastest, {_times(best['speedup'])}x SDPA ({times})."
    inline = laps.get("inline")
    if inline and inline is not best:
        says += f" inline is {_times(inline['speedup'])}x."
    slower = [label for label, lap in laps.items() if lap["speedup"] < 1]
    return says + (f" Slower than SDPA there: {', '.join(slower)}." if slower else "")


def _memory_verdict(part: dict[str, Any]) -> str:
    longest = max(part["tokens"])
    laps = {lap["label"]: lap["peak_bytes"] for lap in _laps(part, longest) if lap["peak_bytes"]}
    reference = laps.pop(REFERENCE)
    laps.pop("softmax", None)
    least, most = min(laps, key=laps.__getitem__), max(laps, key=laps.__getitem__)
    others = f"from {units.size(laps[least])} ({least}) to {units.size(laps[most])} ({most})"
    return f"at {longest:,} tokens SDPA takes {units.size(reference)}, the others {others}."


def _softmax_verdict(part: dict[str, Any]) -> str:
    curves = {curve["label"]: curve for curve in part["curves"]}
    inline, uniform, tolerance = curves["inline"], curves["uniform"], part["tolerance"]
    safe, last = inline["safe_range"], inline["points"][-1]
    point, even = next(
        (pair for pair in zip(inline["points"], uniform["points"], strict=True) if pair[0]["error"] > tolerance),
        (last, uniform["points"][-1]),
    )
    says = f"first order (inline) is within {tolerance:.0%} of softmax's weights while a row's scores span less than "
    says += f"{safe:.1f}. " if safe is not None else f"{last['range']:.1f}, the widest tried. "
    says += f"At a span of {point['range']:.1f} it is off by {_percent(point['error'])}, "
    says += f"uniform weights by {_percent(even['error'])}."
    named = [label for label in curves if label not in ("uniform", "softmax", "inline")]
    also = [label for label in named if curves[label]["approximates_softmax"]]
    other = [label for label in named if not curves[label]["approximates_softmax"]]
    says += f" Also approximations: {', '.join(also)}." if also else ""
    for label in also:
        worse = _worse_than(uniform["points"], curves[label]["points"])
        says += "" if worse is None else f" {label} is further off than uniform weights at a span of {worse:.1f}."
    return says + (f" Other functions, not approximations: {', '.join(other)}." if other else "")


def _worse_than(uniform: list[dict[str, Any]], points: list[dict[str, Any]]) -> float | None:
    """The first score range at which uniform weights would have been closer."""
    return next((p["range"] for p, even in zip(points, uniform, strict=True) if p["error"] > even["error"]), None)


def _query_verdict(part: dict[str, Any]) -> str:
    always = [row["label"] for row in part["pairs"] if row["collisions"] == row["pairs"]]
    sometimes = [row for row in part["pairs"] if 0 < row["collisions"] < row["pairs"]]
    never = [row["label"] for row in part["pairs"] if not row["collisions"]]
    says = f"{', '.join(always)} give q and 2q the same weights." if always else ""
    for row in sometimes:
        says += f" {row['label']} does for {row['collisions']} of {row['pairs']:,} queries."
    return f"{says} {', '.join(never)} always tell them apart.".strip() if never else says.strip()


def _trust_verdict(part: dict[str, Any], threads: int) -> str:
    says = ""
    if part["threads"] < threads:
        says = f"timed on {part['threads']} thread: with {threads}, calls waited for other programs. "
    spreads = sorted(lap["seconds"] / lap["fastest"] for lap in part["laps"] if lap["seconds"])
    typical = spreads[len(spreads) // 2]
    if typical >= ROUGH:
        says += f"repeats of one call differ by {typical:.1f}x: read the timings as rough."
    return says.strip()


def show(document: dict[str, Any], path: Path, out: "Console") -> None:
    """Verdict first, then the tables it rests on."""
    from rich.table import Table
    from rich.text import Text

    machine, versions = document["machine"], document["versions"]
    out.print(
        Text(
            f"{machine['processor']}, {machine['device']}, {machine['threads']} threads, torch {versions['torch']}",
            "dim",
        )
    )
    out.print()
    lines = Table.grid(padding=(0, 2, 0, 0))
    for sentence in document["verdict"]:
        lines.add_row(Text(sentence["about"], style="bold"), sentence["says"])
    out.print(lines)
    for title, table in (
        _time_table(document["speed"]),
        _memory_table(document["speed"]),
        _softmax_table(document["approximation"]),
        _query_table(document["injectivity"]),
    ):
        out.print()
        out.print(Text(title, style="bold"))
        out.print(table)
    out.print()
    out.print(Text(f"Every number is in {_printable(path)}"), soft_wrap=True)


def _time_table(part: dict[str, Any]) -> "tuple[str, Table]":
    lengths, longest = _shown(part["tokens"]), max(part["tokens"])
    table = _table(["tokens N", *map(str, lengths), "time", "at 2N", "from N"])
    trends = {(trend["label"], trend["head_dim"]): trend for trend in part["trends"]}
    for label, dim in _rows(part):
        laps = {lap["tokens"]: lap for lap in part["laps"] if (lap["label"], lap["head_dim"]) == (label, dim)}
        trend, last = trends[label, dim], laps[longest]
        speedups = [_times(laps[n]["speedup"]) for n in lengths]
        table.add_row(
            _named(label, dim, part),
            *speedups,
            "skipped" if last["seconds"] is None else units.seconds(last["seconds"]),
            _times(trend["seconds_growth"], "x"),
            _crossing(label, trend, min(part["tokens"])),
        )
    _explain_star(table, part)
    return f"Speed relative to SDPA; time at {longest} tokens, its growth at 2N, faster from N", table


def _memory_table(part: dict[str, Any]) -> "tuple[str, Table]":
    lengths = _shown(part["tokens"])
    table = _table(["tokens N", *map(str, lengths), "at 2N"])
    trends = {(trend["label"], trend["head_dim"]): trend for trend in part["trends"]}
    for label, dim in _rows(part):
        laps = {lap["tokens"]: lap for lap in part["laps"] if (lap["label"], lap["head_dim"]) == (label, dim)}
        peaks = [laps[n]["peak_bytes"] for n in lengths]
        growth = _times(trends[label, dim]["bytes_growth"], "x")
        table.add_row(_named(label, dim, part), *["-" if p is None else units.size(p) for p in peaks], growth)
    _explain_star(table, part)
    return f"Peak memory of one call ({part['heads']} heads of {part['head_dim']}, {part['dtype']})", table


def _softmax_table(part: dict[str, Any]) -> "tuple[str, Table]":
    curves = part["curves"]
    table = _table(["score sd", *[f"{sd:g}" for sd in part["deviations"]], "safe to"])
    table.add_row("mean range R", *[f"{point['range']:.2g}" for point in curves[0]["points"]], "")
    table.add_row("bound R^2/2", *[_percent(point["bound"]) for point in curves[0]["points"]], "")
    order = sorted(curves[1:], key=lambda curve: not curve["approximates_softmax"])
    for curve in (curves[0], *order):
        errors = [_percent(point["error"]) for point in curve["points"]]
        if not curve["approximates_softmax"]:
            safe = "-"
        else:
            safe = "any R" if curve["safe_range"] is None else f"R {curve['safe_range']:.2g}"
        table.add_row(curve["label"], *errors, safe)
    return f"Distance from softmax's weights, |w - p|/|p| (safe: {part['tolerance']:.0%}; - no approximation)", table


def _query_table(part: dict[str, Any]) -> "tuple[str, Table]":
    table = _table(["", "collide", "smallest distance", "median distance"])
    for row in sorted(part["pairs"], key=lambda row: -row["collisions"]):
        share = f"{row['collisions']:,} of {row['pairs']:,}"
        table.add_row(row["label"], share, f"{row['smallest']:.2g}", f"{row['median']:.2g}")
    return f"Rows of q and 2q that coincide ({part['keys']} keys of width {part['head_dim']})", table


def _table(headings: list[str]) -> "Table":
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    return table


def _explain_star(table: "Table", part: dict[str, Any]) -> None:
    dims = sorted({dim for _, dim in _rows(part) if dim != part["head_dim"]})
    if dims:
        width = " and ".join(map(str, dims))
        table.caption, table.caption_justify = f"* heads of {width}, compared with SDPA on heads of {width}", "left"


def _laps(part: dict[str, Any], tokens: int) -> list[dict[str, Any]]:
    return [lap for lap in part["laps"] if (lap["tokens"], lap["head_dim"]) == (tokens, part["head_dim"])]


def _rows(part: dict[str, Any]) -> list[tuple[str, int]]:
    """Cases in the order they ran; SDPA once, since each ratio is to the one of its own width."""
    rows = dict.fromkeys((lap["label"], lap["head_dim"]) for lap in part["laps"])
    return [row for row in rows if row[0] != REFERENCE or row[1] == part["head_dim"]]


def _named(label: str, dim: int, part: dict[str, Any]) -> str:
    return label if dim == part["head_dim"] else f"{label} *"


def _shown(lengths: list[int]) -> list[int]:
    return lengths if len(lengths) <= SHOWN_LENGTHS else [lengths[0], *lengths[1 - SHOWN_LENGTHS :]]


def _times(ratio: float | None, unit: str = "") -> str:
    if ratio is None:
        return "-"
    return f"{ratio:.2f}{unit}" if ratio < 1 else f"{ratio:.1f}{unit}" if ratio < 10 else f"{ratio:,.0f}{unit}"


def _crossing(label: str, trend: dict[str, Any], shortest: int) -> str:
    if label in (REFERENCE, "softmax"):
        return ""
    if trend["crossover"] is None:
        return "not yet"
    return f"<= {shortest:,}" if trend["faster_everywhere"] else f"{trend['crossover']:,}"


def _percent(share: float) -> str:
    percent = 100 * share
    if percent > 999:
        return ">999%"
    if 0 < percent < 0.01:
        return "<.01%"
    return f"{percent:.2g}%" if percent < 10 else f"{percent:.0f}%"


def _printable(path: Path) -> str:
    return str(path).encode("utf-8", "replace").decode("utf-8")
