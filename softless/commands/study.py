"""softless study: measure, on this machine, what dropping the softmax costs and saves.

Three questions to every mechanism: how fast and how large (against PyTorch's SDPA), how far from softmax (against
the range of the scores), and which queries it confuses. No training yet. Writes DIR/study.json and prints a verdict.

JSON (schema softless.study/1); numbers are null where they could not be measured:

    {"schema", "command", "date",
     "versions": {"softless", "torch", "python"},
     "machine":  {"system", "processor", "cores", "threads", "device", "load_average"},
     "seed", "quick",
     "verdict":  [{"about", "says"}],
     "speed":    {"dtype", "threads", "heads", "head_dim", "tokens": [N],
                  "laps":   [{"label", "tokens", "head_dim", "seconds", "fastest", "repeats", "speedup",
                              "peak_bytes", "skipped"}],         speedup = SDPA's seconds / own seconds
                  "trends": [{"label", "head_dim", "seconds_growth", "bytes_growth", "crossover",
                              "faster_everywhere"}]},
     "approximation": {"tokens", "heads", "head_dim", "deviations": [sd], "tolerance",
                  "curves": [{"label", "approximates_softmax", "safe_range",
                              "points": [{"deviation", "range", "error", "worst", "bound", "within_bound"}]}]},
     "injectivity":   {"head_dim", "keys",
                  "pairs": [{"label", "pairs", "collisions", "smallest", "median", "factor", "tolerance", "key_rank"}]}}

The curve labeled "uniform" is the baseline 1/n. Everything but seconds, date and load repeats exactly from the
seed, on as many threads. On a busy machine speed is measured on one: "threads" under "speed" says so.
"""

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from softless.commands.manners import (
    console,
    emit_json,
    polite,
    prepare_folder,
    to_json,
    whole_number,
    write_atomically,
)
from softless.commands.study_plan import FULL, QUICK
from softless.commands.words import lengths

SCHEMA = "softless.study/1"
SUMMARY = "Time, memory, distance from softmax, confused queries."
HELP = """Study every mechanism on this machine: speed, memory, distance from softmax, confused queries.

Prints a verdict, then the numbers; writes DIR/study.json. No training.

\b
$ softless study --quick
$ softless study --tokens 1024,4096,16384 --out report
"""


class Where(StrEnum):
    """Devices to measure on."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def _seed(text: str) -> int:
    return whole_number(text, least=0)


@polite
def run(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for study.json; made if missing.")] = Path("report"),
    quick: Annotated[bool, typer.Option("--quick", help="Shorter sequences and fewer repeats: seconds.")] = False,
    tokens: Annotated[
        Any, typer.Option(parser=lengths, metavar="N,N,...", help="Sequence lengths to time.", show_default=False)
    ] = None,
    seed: Annotated[Any, typer.Option(parser=_seed, metavar="NUMBER", help="Of the random q, k and v.")] = "0",
    device: Annotated[Where, typer.Option(help="auto is cuda where there is one.")] = Where.auto,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Measure, write, show."""
    prepare_folder(out)
    plan = QUICK if quick else FULL
    plan = plan if tokens is None else replace(plan, tokens=tokens)

    from softless.commands import study_measure, study_show

    place = study_measure.pick_device(device.value)
    document = study_measure.measure(plan, seed, place, show_progress=not json)
    command = ["softless study", *["--quick"] * quick, f"--tokens {','.join(map(str, plan.tokens))}"]
    command += [f"--seed {seed}", f"--device {place}"]
    around = study_measure.circumstances(place)
    document = {
        "schema": SCHEMA,
        "command": " ".join(command),
        **around,
        "seed": seed,
        "quick": quick,
        "verdict": study_show.verdict(document, around["machine"]["threads"]),
        **document,
    }
    path = out / "study.json"
    write_atomically(path, to_json(document) + "\n")
    if json:
        emit_json(document)
    else:
        study_show.show(document, path, console())
