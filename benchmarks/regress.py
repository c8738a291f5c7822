"""The experiment of docs/regress.md: choose the options of regress on held-out images, then test once.

    python benchmarks/regress.py choose cifar10 --stage 1 --data cifar10-jpeg-train.parquet --out runs --graph
    python benchmarks/regress.py chosen runs                        # the held-out accuracies, and which options won
    python benchmarks/regress.py test cifar10 --options 'ridge = 0.1' --data ... --out runs --graph
    python benchmarks/regress.py keep runs                          # writes benchmarks/results/regress.json
    python benchmarks/regress.py restore runs                       # the kept runs as a folder, to go on from there
    python benchmarks/regress.py page                               # writes the tables of docs/regress.md

Sets are cifar10, imagenette and pets. `choose` and `test` print one line per run, can be stopped, and continue where
they were (softless/study/grid.py). A later stage of `choose` begins with the options that won before (--options).
"""

import argparse
import json
import os
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu import fill
from twins import Lines

from softless.errors import ArgumentError, SoftlessError
from softless.io.files import write_json
from softless.study.grid import read_record, run_grid
from softless.study.tables import Group, groups, interval, shared_spread
from softless.study.twin_run import RunRecord
from softless.study.twins import TWINS, Twin
from softless.train.assemble import Runtime
from softless.train.recipe import Recipe, read_recipe

PAGE = Path(__file__).parents[1] / "docs" / "regress.md"
RESULTS = Path(__file__).parent / "results" / "regress.json"
SCHEMA = "softless.regress/1"
MARKS = ("<!-- results: python benchmarks/regress.py page -->", "<!-- end of results -->")
# Pets have no recipe of their own: Imagenette's, with as many updates (100 epochs of 3,680 images).
BASES = {
    "cifar10": ("twins-cifar10", ()),
    "imagenette": ("twins-imagenette", ()),
    "pets": ("twins-imagenette", (("epochs", "100"),)),
}
HELD_OUT, CHOOSING_SEED = 0.1, 900
CLAIMED, OTHERS = range(100, 108), range(100, 103)  # seeds that no run was looked at before
CLAIM = ("softmax-local", "inline-local", "regress-local")
REST = (
    "softmax", "inline", "linear-relu", "linear-relu-local", "regress", "blend", "blend-local", "softmax-conv",
    "softmax-conv-local", "inline-conv", "inline-conv-local", "regress-conv", "regress-conv-local",
)  # fmt: skip
RIDGES, GAINS = (0.03, 0.1, 0.3, 1.0, "learned"), ("dim", "learned")
STAGES: dict[int, tuple[dict[str, Any], ...]] = {
    1: (
        *({"ridge": ridge, "gain": gain} for ridge in RIDGES for gain in GAINS),
        *({"ridge": ridge, "gain": "one"} for ridge in (0.1, 1.0)),
    ),
    2: ({"center": False}, {"weighting": "query"}, {"phi": "relu"}, {"phi": "elu"}, {"phi": "softmax"}),
}


def base_of(name: str) -> Recipe:
    recipe, changes = BASES[name]
    return read_recipe(recipe, changes)


def candidate(options: Mapping[str, Any]) -> Twin:
    """Return regress + local with these options."""
    words = "-".join(f"{key}-{value}" for key, value in options.items()) or "default"
    clean = "".join(c if c.isalnum() else "-" for c in words.lower())
    label = ", ".join(f"{key} {value}" for key, value in options.items()) or "default"
    return Twin(id=f"regress-{clean}", label=label, mechanism="regress", options=dict(options), local=True)


def with_options(id_: str, options: Mapping[str, Any]) -> Twin:
    """Return a twin of the test; those that regress have the chosen options."""
    twin = next(twin for twin in TWINS if twin.id == id_)
    if twin.mechanism != "regress":
        return twin
    return Twin(id=twin.id, label=twin.label, mechanism="regress", options=dict(options), local=twin.local,
                qk_conv=twin.qk_conv)  # fmt: skip


def choose(given: argparse.Namespace) -> None:
    recipe = read_recipe(BASES[given.set][0], [*BASES[given.set][1], ("hold_out", str(HELD_OUT))])
    fixed = tomllib.loads(given.options)
    twins = [candidate({**fixed, **options}) for options in STAGES[given.stage]]
    train(given, given.out / f"choose-{given.set}", recipe, twins, [CHOOSING_SEED])


def test(given: argparse.Namespace) -> None:
    options, recipe = tomllib.loads(given.options), base_of(given.set)
    out = given.out / f"test-{given.set}"
    for ids, seeds in ((CLAIM, CLAIMED), (REST, OTHERS)):
        twins = [with_options(id_, options) for id_ in ids if not given.twins or id_ in given.twins.split(",")]
        if twins:
            train(given, out, recipe, twins, seeds)


def train(given: argparse.Namespace, out: Path, recipe: Recipe, twins: Sequence[Twin], seeds: Iterable[int]) -> None:
    found = run_grid(
        out, recipe, twins, data=given.data, seeds=list(seeds), minutes=given.minutes, pack=given.pack,
        runtime=Runtime(device=given.device, workers=given.workers, graph=given.graph), watch=Lines(),
    )  # fmt: skip
    print(f"{len(found.records)} records, {found.left} runs left")


def records_in(folder: Path) -> list[RunRecord]:
    return [read_record(path) for path in sorted((folder / "runs").glob("*.json"))]


def chosen(folders: Mapping[str, Sequence[RunRecord]]) -> tuple[list[tuple[str, list[float]]], str]:
    """Return the held-out accuracies of each candidate by set, best mean first, and the sentence that says who won."""
    by_set = {name: groups(records) for name, records in folders.items()}
    ids = set.intersection(*(set(found) for found in by_set.values()))
    rows = [
        (by_set[next(iter(by_set))][id_].label, [found[id_].mean or 0.0 for found in by_set.values()]) for id_ in ids
    ]
    rows.sort(key=lambda row: (-sum(row[1]), row[0]))
    if not rows:
        raise ArgumentError("no candidate was trained on every set: run `choose` on each")
    best = rows[0]
    return rows, f"best: {best[0]} ({sum(best[1]) / len(best[1]):.2f} % on average over {', '.join(by_set)})"


def keep(folder: Path) -> None:
    """Write all runs to one file; what each run repeats, such as the recipe, is left out."""
    document: dict[str, Any] = {"schema": SCHEMA}
    for stage in ("choose", "test"):
        for name in BASES:
            runs = records_in(folder / f"{stage}-{name}")
            if runs:
                document[f"{stage}-{name}"] = {
                    "images": runs[0]["images"], "machine": runs[0]["machine"], "versions": runs[0]["versions"],
                    "runs": [{key: run[key] for key in ("twin", "seed", "status", "reason", "accuracy", "parameters",
                                                        "wall_seconds", "together", "answers") if key in run}
                             for run in runs],
                }  # fmt: skip
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    print(RESULTS)


def restore(folder: Path) -> None:
    """Write the kept runs as a folder of records; `choose` and `test` then skip them."""
    document = json.loads(RESULTS.read_text())
    for stage in document.keys() - {"schema"}:
        shared = {key: document[stage][key] for key in ("images", "machine", "versions")}
        for run in document[stage]["runs"]:
            path = folder / stage / "runs" / f"{run['twin']['id']}-{run['seed']}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, shared | run)


def page(document: Mapping[str, Any]) -> str:
    """Return the tables of docs/regress.md."""
    parts = []
    held = {name: document[f"choose-{name}"]["runs"] for name in BASES if f"choose-{name}" in document}
    if held:
        rows, sentence = chosen(held)
        parts += [
            "### Held-out accuracies",
            "",
            f"| regress + local | {' | '.join(held)} |",
            "|---" * (len(held) + 1) + "|",
        ]
        parts += [f"| {label} | {' | '.join(f'{share:.2f}' for share in shares)} |" for label, shares in rows]
        parts += ["", f"{sentence[0].upper()}{sentence[1:]}.", ""]
    for name in BASES:
        if f"test-{name}" in document:
            parts += [f"### Test: {name}", "", *results(groups(document[f"test-{name}"]["runs"])), ""]
    return "\n".join(parts).rstrip()


def results(twins: Mapping[str, Group]) -> list[str]:
    """Return a table of accuracies, and what the claim says."""
    spread = shared_spread(twins)
    lines = ["| twin | top-1 | seeds | minus softmax + local |", "|---|---|---|---|"]
    rival = twins.get("softmax-local")
    for group in twins.values():
        apart = None if rival is None or group is rival else interval(group, rival, spread)
        versus = "" if apart is None else f"{apart.difference:+.2f}" + (f" ± {apart.half:.2f}" if apart.half else "")
        mean = group.instead if group.mean is None else f"{group.mean:.2f}"
        lines.append(f"| {group.label} | {mean} | {len(group.scores)} | {versus} |")
    ours = twins.get("regress-local")
    for other in ("softmax-local", "inline-local"):
        if ours is not None and other in twins and (apart := interval(ours, twins[other], spread)):
            half = "one seed each" if apart.half is None else f"95 % interval {apart.low:+.2f} to {apart.high:+.2f}"
            lines += ["", f"regress + local minus {twins[other].label}: {apart.difference:+.2f} points, {half}."]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name in ("choose", "test"):
        verb = verbs.add_parser(name)
        verb.add_argument("set", choices=BASES)
        verb.add_argument("--data", required=True)
        verb.add_argument("--out", type=Path, required=True)
        verb.add_argument("--options", default="", help="of regress, as TOML: 'ridge = 0.1'")
        verb.add_argument("--minutes", type=float)
        verb.add_argument("--pack", type=int, default=8)
        verb.add_argument("--workers", type=int, default=max((os.cpu_count() or 1) - 1, 0))
        verb.add_argument("--graph", action="store_true")
        verb.add_argument("--device", default="auto")
    verbs.choices["choose"].add_argument("--stage", type=int, choices=STAGES, required=True)
    verbs.choices["test"].add_argument("--twins", help="only these: softmax-local,inline-local; default: all")
    for name in ("chosen", "keep", "restore"):
        verbs.add_parser(name).add_argument("folder", type=Path)
    verbs.add_parser("page")
    given = parser.parse_args()
    try:
        if given.verb in ("choose", "test"):
            {"choose": choose, "test": test}[given.verb](given)
        elif given.verb == "chosen":
            held = {name: records_in(given.folder / f"choose-{name}") for name in ("cifar10", "imagenette")}
            rows, sentence = chosen(held)
            print("\n".join(f"{' '.join(f'{share:6.2f}' for share in shares)}  {label}" for label, shares in rows))
            print(sentence)
        elif given.verb in ("keep", "restore"):
            {"keep": keep, "restore": restore}[given.verb](given.folder)
        else:
            PAGE.write_text(fill(PAGE.read_text(), page(json.loads(RESULTS.read_text())), MARKS))
    except SoftlessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
