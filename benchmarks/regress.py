"""The experiment of docs/regress.md: choose the options of regress on held-out images, then test once.

    python benchmarks/regress.py run choose-2/cifar10 claim/pets --data FOLDER --out runs --graph --pack 16 --minutes 9
    python benchmarks/regress.py chosen runs      # the held-out accuracies, and which options won
    python benchmarks/regress.py keep runs        # writes benchmarks/results/regress.json
    python benchmarks/regress.py restore runs     # the kept runs as a folder, to go on from there
    python benchmarks/regress.py page             # writes the tables of docs/regress.md

A step is a part of the protocol and a set: choose-1, choose-2, choose-3, claim or rest, and cifar10, imagenette or
pets. claim/pets/softmax,inline takes only the twins that have one of these words in their names. `run` prints one line
per run, can be stopped, and continues where it was (softless/study/grid.py). Twins that regress wait until the options
are chosen.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from gpu import fill
from twins import Lines

from softless.errors import ArgumentError, SoftlessError
from softless.io.files import write_json
from softless.study.grid import GridWatcher, finished, plan_grid, read_record, train_all
from softless.study.tables import Group, groups, interval, shared_spread
from softless.study.twin_run import RunRecord, TwinRun
from softless.study.twins import TWINS, Twin
from softless.train.assemble import Runtime
from softless.train.recipe import Recipe, read_recipe

PAGE = Path(__file__).parents[1] / "docs" / "regress.md"
RESULTS = Path(__file__).parent / "results" / "regress.json"
SCHEMA = "softless.regress/1"
MARKS = ("<!-- results: python benchmarks/regress.py page -->", "<!-- end of results -->")
DATA = {
    "cifar10": "cifar10-jpeg-train.parquet",
    "imagenette": "imagenette128-webp-train.parquet",
    "pets": "oxford-pets128-webp.parquet",
}
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
FIRST: tuple[dict[str, Any], ...] = (
    *({"ridge": ridge, "gain": gain} for ridge in RIDGES for gain in GAINS),
    *({"ridge": ridge, "gain": "one"} for ridge in (0.1, 1.0)),
)
CHANGES = ({"center": False}, {"weighting": "query"}, {"phi": "relu"}, {"phi": "elu"}, {"phi": "softmax"})
DEFAULTS = {"ridge": 0.1, "gain": "dim"}
CHOSEN_ON = ("cifar10", "imagenette")
HELPS, AHEAD = 0.3, 0.2  # points: of a change that is worth combining, and over a candidate with fewer options

Options = dict[str, Any]
Held = list[tuple[Options, tuple[float, ...]]]  # candidates, and their held-out accuracy on each set in percent


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


def stages(held: Held) -> list[list[Options]]:
    """Return the candidates of each step of the protocol, as far as the steps before it are trained."""
    steps: list[list[Options]] = [list(FIRST)]
    means = {key(options): fmean(shares) for options, shares in held}
    if all(key(options) in means for options in FIRST):
        base = winner([each for each in held if each[0] in FIRST])
        steps.append([base | change for change in CHANGES])
        if all(key(options) in means for options in steps[1]):
            gains = [(means[key(base | change)] - means[key(base)], change) for change in CHANGES]
            steps.append(combined(base, [(gain, change) for gain, change in gains if gain >= HELPS]))
    return steps


def combined(base: Options, helpful: Sequence[tuple[float, Options]]) -> list[Options]:
    """Return the helpful changes together, the best of each kind; and the best two, if they are more than two."""
    best: dict[str, Options] = {}
    for _, change in sorted(helpful, key=lambda pair: -pair[0]):
        best.setdefault(next(iter(change)), change)
    changes = list(best.values())
    return [
        {name: value for change in (base, *changes[:count]) for name, value in change.items()}
        for count in sorted({2, len(changes)})
        if 2 <= count <= len(changes)
    ]


def winner(held: Held) -> Options:
    """Return the best candidate, or one with fewer options of its own that is less than AHEAD points behind it."""
    options, shares = max(held, key=lambda each: fmean(each[1]))
    simpler = [each for each in held if own(each[0]) < own(options) and fmean(shares) - fmean(each[1]) < AHEAD]
    return winner(simpler) if simpler else options


def own(options: Options) -> int:
    """Return the number of options that differ from the defaults."""
    return sum(DEFAULTS.get(name) != value for name, value in options.items())


def key(options: Options) -> str:
    return json.dumps(options, sort_keys=True)


def held_out(runs: Mapping[str, Sequence[RunRecord]]) -> Held:
    """Return the candidates that were trained on both sets, from the runs by set."""
    by_set = [
        {key(run["twin"]["options"]): run for run in runs[name] if run["status"] != "failed"} for name in CHOSEN_ON
    ]
    both = [each for each in by_set[0] if all(each in by_key for by_key in by_set)]
    return [
        (by_set[0][each]["twin"]["options"], tuple(100 * (by_key[each]["accuracy"] or 0.0) for by_key in by_set))
        for each in both
    ]


def records_in(folder: Path) -> list[RunRecord]:
    return [read_record(path) for path in sorted((folder / "runs").glob("*.json"))]


def held_in(out: Path) -> Held:
    return held_out({name: records_in(out / f"choose-{name}") for name in CHOSEN_ON})


def decided(held: Held) -> Options | None:
    """Return the chosen options; None while a step is not trained."""
    steps = stages(held)
    wanted = {key(options) for step in steps for options in step}
    return winner(held) if len(steps) == 3 and wanted <= {key(options) for options, _ in held} else None


Plan = tuple[list[TwinRun], Callable[[GridWatcher], None]]


def plan(step: str, args: argparse.Namespace, ends: float | None) -> Plan:
    """Return the runs of a step, and what prepares them."""
    part, name, words = [*step.split("/"), "", ""][:3]
    if name not in BASES or part not in ("choose-1", "choose-2", "choose-3", "claim", "rest"):
        raise ArgumentError(f"step {step!r} is not PART/SET, such as choose-2/cifar10, claim/pets or rest/imagenette")
    held = held_in(args.out)
    recipe, seeds = base_of(name), CLAIMED if part == "claim" else OTHERS
    if part.startswith("choose"):
        recipe = read_recipe(BASES[name][0], [*BASES[name][1], ("hold_out", str(HELD_OUT))])
        number, steps = int(part[-1]), stages(held)
        if number > len(steps):
            raise ArgumentError(f"{step} depends on choose-{number - 1} of {' and '.join(CHOSEN_ON)}: run them first")
        twins, seeds = [candidate(options) for options in steps[number - 1]], range(CHOOSING_SEED, CHOOSING_SEED + 1)
    else:
        options, ids = decided(held), CLAIM if part == "claim" else REST
        twins = [with_options(id_, options or {}) for id_ in ids]
        twins = [twin for twin in twins if options is not None or twin.mechanism != "regress"]
    twins = [twin for twin in twins if any(word in twin.id for word in words.split(","))]
    folder = args.out / f"{'choose' if part.startswith('choose') else 'test'}-{name}"
    return grid(folder, recipe, twins, seeds, name, args, ends)


def grid(
    folder: Path, recipe: Recipe, twins: Sequence[Twin], seeds: Sequence[int], name: str, args: argparse.Namespace,
    ends: float | None,
) -> Plan:  # fmt: skip
    runtime = Runtime(device=args.device, workers=args.workers, graph=args.graph)
    return plan_grid(folder, recipe, twins, data=str(args.data / DATA[name]), seeds=seeds, runtime=runtime, ends=ends)


def run(args: argparse.Namespace) -> None:
    ends = None if args.minutes is None else time.time() + 60 * args.minutes
    train([plan(step, args, ends) for step in args.steps], args, ends)


def train(plans: Sequence[Plan], args: argparse.Namespace, ends: float | None) -> None:
    """Train the runs of all plans, packed on one device."""
    lines = Lines()

    def prepare() -> None:
        for runs, images in plans:
            if not all(map(finished, runs)):
                images(lines)

    runs = [run for runs, _ in plans for run in runs]
    result = train_all(runs, lines, prepare, ends=ends, pack=args.pack)
    print(f"{len(result.records)} records, {result.left} runs left")


def add_training(verb: argparse.ArgumentParser) -> None:
    """Add the options of a verb that trains."""
    verb.add_argument("--data", type=Path, required=True, help="the folder of the parquet files")
    verb.add_argument("--out", type=Path, required=True)
    verb.add_argument("--minutes", type=float, help="start no run that would end later")
    verb.add_argument("--pack", type=int, default=8)
    verb.add_argument("--workers", type=int, default=max((os.cpu_count() or 1) - 1, 0))
    verb.add_argument("--graph", action="store_true")
    verb.add_argument("--device", default="auto")


def verdict(held: Held) -> str:
    """Return the sentence that says which options won."""
    options = decided(held)
    if options is None:
        return f"Nothing is chosen yet: {len(held)} candidates were trained on {' and '.join(CHOSEN_ON)}"
    return f"Chosen: {candidate(options).label}"


def rows_of(held: Held) -> list[str]:
    """Return a row for each candidate, best mean first."""
    return [
        f"| {candidate(options).label} | {' | '.join(f'{share:.2f}' for share in shares)} | {fmean(shares):.2f} |"
        for options, shares in sorted(held, key=lambda each: -fmean(each[1]))
    ]


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
    held = held_out({name: document.get(f"choose-{name}", {"runs": []})["runs"] for name in CHOSEN_ON})
    if held:
        parts += ["### Held-out accuracies", "", f"| regress + local | {' | '.join(CHOSEN_ON)} | mean |"]
        parts += ["|---" * (len(CHOSEN_ON) + 2) + "|", *rows_of(held), "", f"{verdict(held)}.", ""]
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
    verb = verbs.add_parser("run")
    verb.add_argument("steps", nargs="+", metavar="STEP", help="choose-2/cifar10, claim/pets, rest/imagenette")
    add_training(verb)
    for name in ("chosen", "keep", "restore"):
        verbs.add_parser(name).add_argument("folder", type=Path)
    verbs.add_parser("page")
    args = parser.parse_args()
    try:
        if args.verb == "chosen":
            held = held_in(args.folder)
            print("\n".join([*rows_of(held), verdict(held)]))
        elif args.verb == "page":
            PAGE.write_text(fill(PAGE.read_text(), page(json.loads(RESULTS.read_text())), MARKS))
        else:
            {"run": run, "keep": keep, "restore": restore}[args.verb](args if args.verb == "run" else args.folder)
    except SoftlessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
