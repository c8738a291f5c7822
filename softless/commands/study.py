"""softless study: do you need the softmax, on these images and on this machine?

Twins are trained: small models of one shape, trained alike, that differ in their attention. They are examined layer by
layer and timed, and mechanisms are timed against the number of tokens. The answer follows from a rule
(study/decision.py). Everything is in DIR, and a rerun with the same DIR goes on where the last one was:

    DIR/index.html     the page                 DIR/report.json    all its numbers        DIR/*.csv   the same as tables
    DIR/twins/         runs and models (softless/study/grid.py)   DIR/parts/         what was examined and timed

JSON (schema softless.study/4); numbers are null where they could not be measured, est is {"mean", "low", "high", "n"}
with a 95 % interval:

    {"schema", "command", "date", "versions", "machine", "seed", "preset": "quick" | "default" | "full",
     "data":      {"name", "train", "test", "classes", "image_size", "patch", "grid": [h, w], "tokens", "recipe",
                   "epochs", "chance", "came": {"smallest", "median", "largest"} as [width, height], "split"},
     "decision":  {"margin", "pairs": [{"softmax", "linear", "labels", "difference", "low", "high", "parameters",
                   "answer": "no" | "yes" | "cannot tell", "because", "would_tell"}], "headline": index of a pair},
     "verdict":   [{"about", "says", "answer" in the first, "table": {"columns", "rows"} in some}],
     "twins":     [{"id", "label", "mechanism", "options", "local", "cut", "tables", "parameters", "macs",
                    "seconds_per_epoch", "accuracy": est, "seeds": [{"seed", "accuracy", "loss", "seconds", "curve",
                    "status": "done" | "diverged" | "failed", "reason"}]}],
     "tables":    [{"id", "title", "says", "columns", "rows", "paper", "setting"}],
     "examined":  {"images", "masked"},                       test images examined, and answered under masks, per twin
     "layers":    [{"twin", ...LayerFindings}],               softless/probes/findings.py
     "mask_out":  [{"twin", "mask", "accuracy": est}],        "induced": [{"twin", "what", "accuracy": est}],
     "collinear": {"twin", "layer", "keys", "p", "q", "rows": [{"label", "p", "q"}]},
     "range":     {"curves", "layers", "threshold", "distributions"},
     "viewer":    {"grid", "images": [{"png", "label", "name"}],
                   "maps": [{"twin", "layer", "image", "weights", "row_max"}]},
     "speed":     {"dtype", "threads", "heads", "head_dim", "tokens", "laps", "trends",
                   "own": {"tokens", "rows": [{"twin", "label", "training_seconds", "inference_seconds",
                           "training_ratio", "inference_ratio", "together"}]}},    seconds per image; > 1 is faster
     "files":     {"twins": "twins.csv", ...}}

Everything but seconds, bytes, date and load repeats exactly from the seed, on one kind of machine.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from softless.commands.arguments import MOST, MOST_PROCESSES, Where, lengths
from softless.commands.common import console, emit_json, importing, prepare_folder, refuse, reports_errors

SUMMARY = "Do you need the softmax? Train twins, examine them, time them: a report."
HELP = """Do you need the softmax? Train twins, small models that differ in attention, examine and time them.

The answer is no, yes or cannot tell, with the difference in accuracy and its interval. It compares inline with
softmax, and inline + local with softmax + local: pairs that differ in attention alone. Ends with a verdict and the
path of a page with pictures. A rerun goes on where the last one was.

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


def _points(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 < found < 100:
        raise typer.BadParameter(f"{text!r} is not a number of points of accuracy between 0 and 100")
    return found


@reports_errors
def run(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the report; made if missing.")] = Path("report"),
    data: Annotated[
        str | None, typer.Option(metavar="PATH", help="Folder or parquet file; digits if absent.", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two fair pairs, one seed: a first look.")] = False,
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
        int | None,
        typer.Option(min=1, max=MOST, metavar="NUMBER", help="Number of seeds for each twin.", show_default=False),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST,
            metavar="NUMBER",
            help="Epochs of training; the recipe's if absent.",
            show_default=False,
        ),
    ] = None,
    margin: Annotated[
        Any, typer.Option(parser=_points, metavar="POINTS", help="Smallest loss of accuracy that matters.")
    ] = "1",
    seed: Annotated[int, typer.Option(min=0, max=MOST, metavar="NUMBER", help="First random seed.")] = 0,
    minutes: Annotated[
        Any, typer.Option(parser=_minutes, metavar="NUMBER", help="Train no longer.", show_default=False)
    ] = None,
    pack: Annotated[
        int | None, typer.Option(min=1, max=MOST, metavar="NUMBER", help="Runs at once.", show_default=False)
    ] = None,
    workers: Annotated[
        int, typer.Option(min=0, max=MOST_PROCESSES, metavar="NUMBER", help="Processes that decode.")
    ] = 0,
    device: Annotated[Where, typer.Option(help="auto is cuda where there is one.")] = Where.auto,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Train, examine, time, write, show."""
    refuse({"--full": quick and full}, "--quick asks for less than the whole")
    prepare_folder(out)

    with importing():
        from softless.study import plan as study_plan
        from softless.study import run as study_run
        from softless.study import show as study_show

    asked = study_plan.Asked(
        out=out, data=data, preset="quick" if quick else "full" if full else "default", recipe=recipe, twins=twins,
        mechanisms=mechanisms, tokens=tokens, seeds=seeds, seed=int(seed), epochs=epochs, margin=float(margin),
        minutes=minutes, pack=pack, workers=int(workers), device=device.value,
    )  # fmt: skip
    document, page = study_run.study(asked, None if json else console())
    if json:
        emit_json(document)
    else:
        study_show.show(document, page, console())
