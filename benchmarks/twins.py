"""Train twins on real images for tables 1, 3, 4, 9 and 10 of the paper, store the runs, and write docs/results.md.

    python benchmarks/twins.py run --recipe twins-cifar10 --data ... --out runs/cifar10 --pack 6 --graph --minutes 25
    python benchmarks/twins.py keep runs/cifar10       # writes benchmarks/results/twins-cifar10.json
    python benchmarks/twins.py page                    # writes docs/results.md and its pictures from the stored runs

The grid of recipe twins-NAME is stored in a folder called NAME. `run` prints one line per run. It can be stopped, and
continues where it was if it is called again (softless/study/grid.py).
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from curves_picture import Curves, curves_picture
from trained import changed, section
from twins_picture import picture

from softless.errors import FileError, SoftlessError
from softless.report import units
from softless.study.grid import Silent, read_record, run_grid
from softless.study.schema import PaperTable
from softless.study.tables import PARAMETERS, groups, shared_spread, tables
from softless.study.twin_run import RunRecord
from softless.study.twins import QUESTIONS, Twin, side_of, twins_named, twins_of
from softless.train.assemble import Runtime
from softless.train.recipe import Recipe, parse_change, read_recipe

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "results.md"
SCHEMA = "softless.twins/1"
SEEDS = 3
HEAD = RESULTS / "head.md"  # the part of the page that is written by hand


class Lines(Silent):
    """One line for each run."""

    def begin(self, runs: int, finished: int) -> None:
        print(f"{runs} runs, {finished} of them finished before", flush=True)

    def ran(self, record: RunRecord) -> None:
        name = f"{record['twin']['id']}-{record['seed']}"
        if record["status"] == "done":
            print(f"{name:24} {record['accuracy']:7.2%}  {record['wall_seconds']:6.1f} s", flush=True)
        else:
            print(f"{name:24} {record['status']}: {record['reason']}", flush=True)


def run(args: argparse.Namespace) -> int:
    recipe = read_recipe(args.recipe, map(parse_change, args.set))
    chosen = twins_named(args.twins.split(","), recipe) if args.twins else twins_for(recipe, args.tables)
    result = run_grid(
        args.out, recipe, chosen, data=args.data, seeds=range(args.seeds), minutes=args.minutes, pack=args.pack,
        runtime=Runtime(device=args.device, workers=args.workers, graph=args.graph), watch=Lines(),
    )  # fmt: skip
    print(f"{len(result.records)} records, {result.left} runs left")
    print(markdown(tables(result.records)))
    return 0


def twins_for(recipe: Recipe, chosen: str | None = None) -> tuple[Twin, ...]:
    """Return the twins of some tables. Default: of all tables, or of table 4 if the model can attend in windows."""
    side = side_of(recipe)
    ids = chosen.split(",") if chosen else ["4"] if side else [question.id for question in QUESTIONS]
    return twins_of(ids, side=side)


def keep(folders: list[Path]) -> int:
    """Write the records of each grid to one file. What all records share, such as the recipe, is written once."""
    for folder in folders:
        read_recipe(f"twins-{folder.name}")
        records = [read_record(path) for path in sorted((folder / "runs").glob("*.json"))]
        if not records:
            raise FileError(f"{folder} holds no runs: there is no JSON in {folder / 'runs'}")
        shared = {key: records[0][key] for key in ("data", "images", "fingerprint", "versions", "machine")}
        shared["data"] = None if shared["data"] is None else Path(shared["data"]).name
        recipe = json.loads((folder / "grid.json").read_text())["recipe"]
        runs = [{k: v for k, v in record.items() if k not in (*shared, "recipe", "schema")} for record in records]
        for run in runs:
            run["reason"] = run["reason"] and run["reason"].replace(f"{folder}/", "")
        path = RESULTS / f"twins-{folder.name}.json"
        document = {"schema": SCHEMA, **shared, "recipe": recipe, "runs": runs}
        path.write_text(json.dumps(document, indent=1) + "\n")
        print(path)
    return 0


def page(grids: list[Path], whole: list[Path]) -> str:
    """Return docs/results.md from the stored grids and the stored trainings of whole models."""
    parts = [HEAD.read_text(), *(section(path) for path in whole)]
    for path in grids:
        document, name = json.loads(path.read_text()), path.stem.removeprefix("twins-")
        runs = document["runs"]
        shown = f"![Accuracy of each twin: seeds and mean](pictures/{path.stem}.svg)\n"
        parts += [
            f"## {name}, twins",
            about(document),
            command(name, document),
            shown,
            markdown(tables(runs)),
            curves(f"{path.stem}-curves", runs),
        ]
    return "\n".join(parts)


def markdown(paper_tables: Sequence[PaperTable]) -> str:
    """Write tables for a page: accuracy in percent, plus or minus the deviation over seeds."""
    return "\n\n".join(_table(table) for table in paper_tables) + "\n"


def cell(text: str) -> str:
    """Escape bars, which would end the cell."""
    return text.replace("|", r"\|")


def _table(table: PaperTable) -> str:
    rows = [("twin", "parameters", "top-1", "seeds", "minus softmax", "in the paper")]
    for values in table["rows"]:
        row: dict[str, Any] = dict(zip(table["columns"], values, strict=True))
        mean, spread, against, paper = (row[key] for key in ("accuracy", "spread", "against softmax", "paper"))
        top1 = mean if isinstance(mean, str) else f"{mean:.2f}" + ("" if spread is None else f" ± {spread:.2f}")
        size = units.count(row[PARAMETERS]) if PARAMETERS in row else ""
        versus = "" if against is None else f"{against:+.2f}"
        rows.append((cell(row["twin"]), size, top1, str(row["seeds"]), versus, "" if paper is None else str(paper)))
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    head, *body = (f"| {' | '.join(row)} |" for row in zip(*columns, strict=True))
    lines = [f"### Table {table['id']}: {table['title']}", "", head, "|---" * len(columns) + "|", *body]
    comparisons = [f"- {sentence.rstrip('.')}." for sentence in table["says"].split(". ")]
    return "\n".join([*lines, "", *comparisons, "", f"In the paper ({table['setting']}): {table['paper']}"])


def command(name: str, document: dict[str, Any]) -> str:
    """Return the command that trains the grid again."""
    runs = document["runs"]
    twins, seeds = list(groups(runs)), 1 + max(run["seed"] for run in runs)
    usual = {twin.id for twin in twins_for(read_recipe(f"twins-{name}"))}
    words = [
        f"python benchmarks/twins.py run --recipe twins-{name}",
        "" if document["data"] is None else f"--data {document['data']}",
        f"--out runs/{name}",
        "" if {*twins} == usual else f"--twins {','.join(twins)}",
        "" if seeds == SEEDS else f"--seeds {seeds}",
        f"--pack {max(run['together'] for run in runs)}",
        "--device cpu" if document["machine"]["device"] == "cpu" else "--graph",
    ]
    line = " ".join(word for word in words if word)
    return "\n".join(["```console", f"$ {line}", "```", "", *changed(f"twins-{name}", document["recipe"])])


def about(document: dict[str, Any]) -> str:
    """Describe the images, the model, the seeds and the cost."""
    recipe, runs, machine = document["recipe"], document["runs"], document["machine"]
    seconds = sum(run["wall_seconds"] for run in runs)
    longest = max((run["wall_seconds"] for run in runs if run["status"] == "done"), default=0.0)
    spread = shared_spread(groups(runs)).deviation
    model, together = recipe["model"], {run["together"] for run in runs}
    shape = f"`{model['name']}` with patch {model['patch_size']}, dims {model['dims']}, depths {model['depths']}"
    name = "digits" if document["data"] is None else document["data"]
    said = [
        f"{name}: {document['images']['train']:,} images to train on, {document['images']['test']:,} to test on.",
        f"{shape}; {recipe['epochs']} epochs of batch {recipe['batch']}, {recipe['precision']}.",
        f"{run_count(runs)} on {machine['device']},",
        f"{'up to ' * (len(together) > 1)}{max(together)} at once. They took {seconds / 60:.0f} minutes in total,",
        f"and the longest took {longest:.0f} s.",
        "" if spread is None else f"The standard deviation of a twin's accuracy over seeds is {spread:.2f} points.",
    ]
    return " ".join(part for part in said if part) + "\n"


def run_count(runs: list[dict[str, Any]]) -> str:
    """Say how many runs there are, of how many that were planned, and with how many seeds."""
    seeds = len({run["seed"] for run in runs})
    planned = len(groups(runs)) * seeds
    of = f"of {planned} " if len(runs) < planned else ""
    return f"{len(runs)} {of}runs with {seeds} seed{'s' * (seeds > 1)}"


def learning(runs: list[dict[str, Any]]) -> Curves:
    """Return, for each twin, the mean accuracy in percent after each epoch that was evaluated."""
    learned: dict[str, tuple[str, list[tuple[int, float]]]] = {}
    for id_, group in groups(runs).items():
        points = [point for run in runs if run["twin"]["id"] == id_ for point in run["curve"]]
        epochs = sorted({point["epoch"] for point in points})
        means = [100 * fmean(point["accuracy"] for point in points if point["epoch"] == epoch) for epoch in epochs]
        learned[id_] = group.label, list(zip(epochs, means, strict=True))
    return learned


def curves(name: str, runs: list[dict[str, Any]]) -> str:
    """Return the section on accuracy by epoch: a picture, and a table of at most eight epochs."""
    learned = learning(runs)
    epochs = sorted({epoch for _, curve in learned.values() for epoch, _ in curve})
    shown = [epochs[i * (len(epochs) - 1) // 7] for i in range(8)] if len(epochs) > 8 else epochs
    lines = ["### Accuracy by epoch", "", f"![Mean accuracy of each twin by epoch](pictures/{name}.svg)", ""]
    lines += [f"| twin | {' | '.join(map(str, shown))} |", "|---" * (len(shown) + 1) + "|"]
    for label, curve in learned.values():
        cells = [f"{dict(curve)[epoch]:.1f}" if epoch in dict(curve) else "" for epoch in shown]
        lines.append(f"| {cell(label)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def pictures(name: str, runs: list[dict[str, Any]]) -> dict[str, str]:
    """Return the SVG pictures of a grid by file name: final accuracies, and accuracy by epoch."""
    learned = {id_: (label, curve) for id_, (label, curve) in learning(runs).items() if curve}
    return {name: picture(groups(runs).values()), f"{name}-curves": curves_picture(learned)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    grid = verbs.add_parser("run")
    grid.add_argument("--out", type=Path, required=True)
    grid.add_argument("--data")
    grid.add_argument("--recipe", default="twins-cifar10")
    grid.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    grid.add_argument("--tables", help="tables, such as 1,3; default: all, or 4 if the model can attend in windows")
    grid.add_argument("--twins")
    grid.add_argument("--seeds", type=int, default=SEEDS)
    grid.add_argument("--minutes", type=float)
    grid.add_argument("--pack", type=int, default=1)
    grid.add_argument("--workers", type=int, default=max((os.cpu_count() or 1) - 1, 0))
    grid.add_argument("--graph", action="store_true", help="replay CUDA graphs: several times faster")
    grid.add_argument("--device", default="auto")
    verbs.add_parser("keep").add_argument("folders", type=Path, nargs="+")
    verbs.add_parser("page")
    args = parser.parse_args()
    try:
        if args.verb == "run":
            return run(args)
        if args.verb == "keep":
            return keep(args.folders)
        grids = sorted(RESULTS.glob("twins-*.json"), key=lambda path: path.stem)
        PAGE.write_text(page(grids, sorted(RESULTS.glob("trained-*.json"))))
        for path in grids:
            for name, drawn in pictures(path.stem, json.loads(path.read_text())["runs"]).items():
                (PAGE.parent / "pictures" / f"{name}.svg").write_text(drawn)
    except SoftlessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
