"""Train whole models with softmax, InLine and regress for equal GPU seconds: "Whole models" of docs/regress.md.

    python benchmarks/regress_whole.py time --data imagenette128-webp-train.parquet --out runs/whole --minutes 9
    python benchmarks/regress_whole.py train --data imagenette128-webp-train.parquet --out runs/whole --minutes 9
    python benchmarks/regress_whole.py keep runs/whole    # writes benchmarks/results/regress-whole.json
    python benchmarks/regress_whole.py page               # fills the page from the records

`time` trains each model alone on the device for a few epochs. Its seconds per update are the median over all epochs but
the first, which contains compiling. They are seconds of the clock between two moments at which the device has finished
all work. So they contain everything that repeats with every update: taking a batch from the images on the device,
augmenting and mixing it, and the update. They do not contain decoding, compiling, evaluating and saving.

`train` gives each model as many whole epochs as fit into --seconds at this speed. Runs may then share the device,
because their epochs do not depend on how fast they run together.

Both steps can be stopped, stop after --minutes, and continue where they were (packed_runs.py); the last line says how
much is left. They leave out what is kept already. `measure` is the process that `time` starts for each model. --small
runs a step at the size of a toy on a CPU, with the embedded digits, in OUT/small, which `keep` does not read.
"""

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import regress
from gpu import fill
from packed_runs import PackedRun, Record, records_of, run_packed, write
from regress_whole_page import MARKS, MODELS, PAGE, PARTS, RESULTS, SCHEMA, changes_of, kept, page

from softless.errors import ArgumentError, FileError, SoftlessError
from softless.machine import pick_device
from softless.report.units import counted, listed
from softless.train.assemble import Runtime
from softless.train.assemble import train as train_once
from softless.train.loop import Job
from softless.train.recipe import parse_change, read_recipe

RECIPE = "imagenette"
SEEDS, SECONDS, TOY_SECONDS = (0, 1, 2), 150.0, 3.0
TIMED_EPOCHS = 6  # the warm-up of the recipe is not longer
TOY = {"image_size": 32, "batch": 256, "warmup_epochs": 0, "log_every": 3, "precision": "fp32", "compile": "false"}
PYRAMID = {"model.dims": "[16, 32]", "model.depths": "[1, 1]", "model.heads": "[2, 2]"}
TOY_SIZES = {"deit": {"model.dims": 16, "model.depths": 1, "model.heads": 2}, "swin": PYRAMID, "cswin": PYRAMID}


@dataclass(frozen=True, kw_only=True)
class Timing(PackedRun):
    """The measurement of one model's seconds per update."""

    model: str

    @property
    def name(self) -> str:
        return self.model

    @property
    def measured(self) -> Path:
        return self.run.folder / "timing.json"

    def about(self) -> Record:
        return {"name": self.name, "model": self.model}

    def outcome(self, together: int) -> Record:
        return json.loads(self.measured.read_bytes())

    def told(self, record: Record) -> str:
        return f"{1000 * record['update_seconds']:.1f} ms per update"


@dataclass(frozen=True, kw_only=True)
class Training(PackedRun):
    """A training of one model for the epochs that fit into the budget of seconds."""

    model: str
    seed: int
    epochs: int
    budget: float

    @property
    def name(self) -> str:
        return f"{self.model}-{self.seed}"

    def about(self) -> Record:
        return {"name": self.name, "model": self.model, "seed": self.seed, "epochs": self.epochs, "budget": self.budget}

    def outcome(self, together: int) -> Record:
        result, begun = json.loads(self.run.result.read_bytes()), self.run.read()
        return {
            "top1": result["last"]["top1"], "together": together, "images": begun["images"],
            "recipe": {key: begun["recipe"][key] for key in ("batch", "precision", "image_size")},
            "mechanism": begun["recipe"]["model"]["mechanism"],
            **{key: result[key] for key in ("answers", "steps", "seconds", "versions", "machine")},
        }  # fmt: skip

    def told(self, record: Record) -> str:
        return f"{record['top1']:.2%} after {counted(self.epochs, 'epoch')}, {record['seconds']:.0f} s"


class Laps:
    """A watcher of a training that remembers each speed in its log."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def begin(self, job: Job, parameters: int) -> None:
        self.updates_per_epoch, self.parameters = job.task.train.per_epoch, parameters

    def tick(self, step: int) -> None:
        pass

    def logged(self, step: int, numbers: Mapping[str, float]) -> None:
        if "images_per_second" in numbers:
            self.rates.append(numbers["images_per_second"])


def measure(args: argparse.Namespace) -> None:
    """Train a model for a few epochs, and write the seconds of its updates beside the run."""
    shutil.rmtree(args.out, ignore_errors=True)
    recipe, laps = read_recipe(args.recipe, args.set), Laps()
    runtime = Runtime(device=args.device, workers=args.workers, graph=args.graph)
    train_once(args.out, recipe, args.data, laps, runtime=runtime, seed=args.seed)
    seconds = [recipe.batch / rate for rate in laps.rates[1:]]  # the first contains compiling
    about = json.loads((args.out / "result.json").read_bytes())
    document = {
        "update_seconds": median(seconds), "laps": seconds, "updates_per_epoch": laps.updates_per_epoch,
        "parameters": laps.parameters, "versions": about["versions"], "machine": about["machine"],
    }  # fmt: skip
    write(args.out / "timing.json", document)


def chosen() -> regress.Options | None:
    """Return the options that won on the held-out images, from the kept records of the experiment."""
    document = json.loads(regress.RESULTS.read_text())
    runs = {name: document.get(f"choose-{name}", {"runs": []})["runs"] for name in regress.CHOSEN_ON}
    return regress.decided(regress.held_out(runs))


def options_of(small: bool) -> regress.Options:
    options = chosen()
    if options is None and not small:
        raise ArgumentError("the options of regress are not chosen yet: run benchmarks/regress.py and keep its records")
    return options or regress.DEFAULTS


def toy(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return what makes a model small, if that is asked for."""
    return TOY | TOY_SIZES[MODELS[model][0]] if args.small else {}


def command(run: Timing | Training, start: Sequence[str], changes: Mapping[str, Any], args: argparse.Namespace,
            seed: int) -> list[str]:  # fmt: skip
    """Return the command of a training with the recipe; `start` are its first words."""
    words = [*start, "--recipe", RECIPE, "--out", str(run.run.folder), "--data", str(args.data), "--seed", str(seed)]
    words += ["--device", args.device, "--workers", str(args.workers)]
    words += ["--graph"] if args.device == "cuda" else []
    return words + [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]


def time(args: argparse.Namespace) -> int:
    """Time the models one by one, and return how many are left."""
    options, known = options_of(args.small), records_for(args)["time"]
    wanted = [Timing(out=args.out, part="time", model=model) for model in MODELS if model not in known]

    def words(timing: Timing) -> list[str]:
        few = {"epochs": TIMED_EPOCHS, "evaluate_every": TIMED_EPOCHS, "checkpoint_every": 10**6}
        changes = changes_of(timing.model, options) | toy(timing.model, args) | few
        return command(timing, [sys.executable, __file__, "measure"], changes, args, seed=0)

    return run_packed(wanted, words, pack=1, minutes=args.minutes)


def train(args: argparse.Namespace) -> int:
    """Train the models for equal seconds, several at once, and return how many runs are left."""
    options, known = options_of(args.small), records_for(args)
    wanted = [training for training in trainings(args, known) if training.name not in known["train"]]

    def words(training: Training) -> list[str]:
        # One evaluation, after the last update: no number of the test images can choose anything.
        length = {"epochs": training.epochs, "evaluate_every": training.epochs}
        changes = changes_of(training.model, options) | toy(training.model, args) | length
        start = [sys.executable, "-m", "softless", "train", *(["--resume"] if training.run.about.exists() else [])]
        return command(training, start, changes, args, training.seed)

    return run_packed(wanted, words, pack=args.pack, minutes=args.minutes)


def records_for(args: argparse.Namespace) -> dict[str, dict[str, Record]]:
    """Return the records of each part by name: those of the folder and, unless it is a toy, those that are kept."""
    stored: dict[str, dict[str, Record]] = {} if args.small else kept()
    return {part: records_of(args.out, part) | stored.get(part, {}) for part in PARTS}


def trainings(args: argparse.Namespace, records: Mapping[str, Mapping[str, Record]]) -> list[Training]:
    """Return all runs, seed by seed, so that a call that is stopped leaves whole seeds."""
    timings, runs = records["time"], records["train"]
    if missing := [model for model in MODELS if model not in timings]:
        raise ArgumentError(f"{listed(missing)} must be timed before models are trained: run the step time")
    if other := {run["budget"] for run in runs.values()} - {args.seconds}:
        raise ArgumentError(f"--seconds is {args.seconds:g}, and there are records of {listed([*map(str, other)])} s")
    epochs = {model: epochs_within(args.seconds, timings[model]) for model in MODELS}
    shortest, warmup = min(MODELS, key=epochs.__getitem__), 0 if args.small else read_recipe(RECIPE).warmup_epochs
    if epochs[shortest] <= warmup:
        raise ArgumentError(
            f"--seconds {args.seconds:g} are enough for {counted(epochs[shortest], 'epoch')} of {shortest}, and more "
            f"than {warmup} of warm-up are needed"
        )
    return [
        Training(out=args.out, part="train", model=model, seed=seed, epochs=epochs[model], budget=args.seconds)
        for seed in (SEEDS[:1] if args.small else SEEDS)
        for model in MODELS
    ]


def epochs_within(seconds: float, timing: Record) -> int:
    """Return how many whole epochs of a model fit into these seconds of its updates."""
    return int(seconds / (timing["update_seconds"] * timing["updates_per_epoch"]))


def keep(folder: Path) -> None:
    """Add the records of a folder to those in the repository."""
    new = {part: records_of(folder, part) for part in PARTS}
    if not any(new.values()):
        raise FileError(f"{folder}: nothing was measured there")
    records = {part: [*(known | new[part]).values()] for part, known in kept().items()}
    if len({run["budget"] for run in records["train"]}) > 1:
        raise ArgumentError(f"{folder} has runs of other seconds than {RESULTS.name}, and they cannot be compared")
    write(RESULTS, {"schema": SCHEMA, **records})
    print(RESULTS)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    for name in (*PARTS, "measure"):
        step = steps.add_parser(name)
        step.add_argument("--device", default="auto")
        step.add_argument("--workers", type=int, help="processes that read images, per run; default: the cores, shared")
        step.add_argument("--data", help="the parquet file of the training images")
        step.add_argument("--out", type=Path, required=True)
        if name == "measure":
            step.add_argument("--recipe", required=True)
            step.add_argument("--seed", type=int, required=True)
            step.add_argument("--graph", action="store_true")
            step.add_argument("--set", type=parse_change, action="append")
            continue
        step.add_argument("--minutes", type=float, help="stop after this time; default: never")
        step.add_argument("--small", action="store_true", help="a toy on a CPU")
        step.set_defaults(pack=1)
    training = steps.choices["train"]
    training.add_argument("--pack", type=int, default=6, help="runs that share the device")
    training.add_argument("--seconds", type=float, help=f"of updates per run; default {SECONDS:g}, of a toy 3")
    steps.add_parser("keep", help="store the records").add_argument("folder", type=Path)
    steps.add_parser("page", help="fill the page from the records")
    return parser


def run_step(args: argparse.Namespace) -> None:
    """Take the step time or train, and say how much is left."""
    if args.pack < 1:
        raise ArgumentError(f"--pack is {args.pack}, and at least one run is needed")
    if not args.small and (args.data is None or not Path(args.data).is_file()):
        raise FileError(f"--data is {args.data}, and the parquet file of the training images is needed")
    args.device = pick_device("cpu" if args.small else args.device)
    args.data = "digits" if args.small else str(Path(args.data).resolve())
    args.out = (args.out / "small" if args.small else args.out).resolve()
    if args.workers is None:
        args.workers = 0 if args.small else max(1, (os.cpu_count() or 1) // args.pack)
    if args.step == "train" and args.seconds is None:
        args.seconds = TOY_SECONDS if args.small else SECONDS
    left = {"time": time, "train": train}[args.step](args)
    print(f"{left} left" + (": call again" if left else ""))


def main() -> int:
    args = arguments().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the runs are saved then too
    try:
        if args.step == "keep":
            keep(args.folder)
        elif args.step == "page":
            PAGE.write_text(fill(PAGE.read_text(), page(kept()), MARKS))
        elif args.step == "measure":
            measure(args)
        else:
            run_step(args)
    except SoftlessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
