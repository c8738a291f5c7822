"""softless study: do you need the softmax, on these images and on this machine?

Twins are trained that differ only in attention, then examined layer by layer; mechanisms are timed against the number
of tokens. Everything is in DIR, and a rerun with the same DIR goes on where the last one was:

    DIR/index.html     the page                 DIR/report.json    all its numbers        DIR/*.csv   the same as tables
    DIR/twins/         runs and models (softless/train/grid.py)   DIR/parts/         what was examined and timed

JSON (schema softless.study/3); numbers are null where they could not be measured, est is {"mean", "low", "high", "n"}
with a 95 % interval:

    {"schema", "command", "date", "versions", "machine", "seed", "preset": "quick" | "default" | "full",
     "data":      {"name", "train", "test", "classes", "image_size", "patch", "grid": [h, w]},
     "verdict":   [{"about", "says"}],                        the first one answers the question
     "twins":     [{"id", "label", "mechanism", "options", "local", "cut", "tables", "parameters", "macs",
                    "seconds_per_epoch", "accuracy": est, "seeds": [{"seed", "accuracy", "loss", "seconds", "curve",
                    "status": "done" | "diverged" | "failed", "reason"}]}],
     "tables":    [{"id", "title", "says", "columns", "rows", "paper"}],
     "layers":    [{"twin", ...LayerFindings}],               softless/probes/findings.py
     "mask_out":  [{"twin", "mask", "accuracy": est}],        "induced": [{"twin", "what", "accuracy": est}],
     "collinear": {"twin", "layer", "keys", "p", "q", "rows": [{"label", "p", "q"}]},
     "range":     {"curves", "layers", "threshold", "distributions"},
     "viewer":    {"grid", "images": [{"png", "label", "name"}],
                   "maps": [{"twin", "layer", "image", "weights", "row_max"}]},
     "speed":     {"dtype", "threads", "heads", "head_dim", "tokens", "laps", "trends"},
     "files":     {"twins": "twins.csv", ...}}

Everything but seconds, bytes, date and load repeats exactly from the seed, on one kind of machine.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from softless.commands.manners import console, emit_json, importing, polite, prepare_folder, refuse, whole_number
from softless.commands.words import Where, from_zero, lengths, processes

SUMMARY = "Do you need the softmax? Train twins, examine them, time them: a report."
HELP = """Do you need the softmax? Train twins that differ only in attention, examine them, time them, and say.

Ends with a verdict and the path of a page with pictures. A rerun goes on where the last one was.

\b
$ softless study                               # the embedded digits: minutes
$ softless study --quick
$ softless study --data flowers/ --out flowers-report
$ softless study --full --pack 6 --minutes 25  # the paper's tables, on a GPU
"""


def _names(text: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if not found:
        raise typer.BadParameter(f"{text!r} names nothing")
    return found


def _minutes(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 < found < 1e6:
        raise typer.BadParameter(f"{text!r} is not a number of minutes")
    return found


@polite
def run(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the report; made if missing.")] = Path("report"),
    data: Annotated[
        str | None, typer.Option(metavar="PATH", help="Folder or parquet file; digits if absent.", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Four twins, one seed: a first look.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Every table of the paper, three seeds.")] = False,
    recipe: Annotated[
        str | None, typer.Option(metavar="NAME", help="A recipe of twins, or its file.", show_default=False)
    ] = None,
    twins: Annotated[
        Any, typer.Option(parser=_names, metavar="A,B,...", help="Twins to train.", show_default=False)
    ] = None,
    mechanisms: Annotated[
        Any, typer.Option(parser=_names, metavar="A,B,...", help="Mechanisms to time, or all.", show_default=False)
    ] = None,
    tokens: Annotated[
        Any, typer.Option(parser=lengths, metavar="N,N,...", help="Sequence lengths to time.", show_default=False)
    ] = None,
    seeds: Annotated[
        Any,
        typer.Option(parser=whole_number, metavar="NUMBER", help="Number of seeds for each twin.", show_default=False),
    ] = None,
    seed: Annotated[Any, typer.Option(parser=from_zero, metavar="NUMBER", help="First random seed.")] = "0",
    minutes: Annotated[
        Any, typer.Option(parser=_minutes, metavar="NUMBER", help="Train no longer.", show_default=False)
    ] = None,
    pack: Annotated[
        Any, typer.Option(parser=whole_number, metavar="NUMBER", help="Runs at once.", show_default=False)
    ] = None,
    workers: Annotated[Any, typer.Option(parser=processes, metavar="NUMBER", help="Processes that decode.")] = "0",
    device: Annotated[Where, typer.Option(help="auto is cuda where there is one.")] = Where.auto,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Train, examine, time, write, show."""
    refuse({"--full": quick and full}, "--quick asks for less than the whole")
    prepare_folder(out)

    with importing():
        from softless.commands import study_run, study_show

    asked = study_run.Asked(
        out=out, data=data, preset="quick" if quick else "full" if full else "default", recipe=recipe, twins=twins,
        mechanisms=mechanisms, tokens=tokens, seeds=seeds, seed=int(seed), minutes=minutes, pack=pack,
        workers=int(workers), device=device.value,
    )  # fmt: skip
    document, page = study_run.study(asked, None if json else console())
    if json:
        emit_json(document)
    else:
        study_show.show(document, page, console())
