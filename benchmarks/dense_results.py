"""Train and time backbones that differ in attention, in heads of segmentation and detection: docs/results-dense.md.

    python benchmarks/dense_results.py pretrain --data imagenette128-webp-train.parquet --out runs/dense --minutes 9
    python benchmarks/dense_results.py train --set camvid --data camvid11-webp-train.parquet --out runs/dense
    python benchmarks/dense_results.py train --set bccd --data bccd-detection.parquet --out runs/dense
    python benchmarks/dense_results.py speed --out runs/dense --minutes 9
    python benchmarks/dense_results.py keep runs/dense    # writes benchmarks/results/results-dense-*.json
    python benchmarks/dense_results.py page               # fills the page from the records

Every step can be stopped, stops after --minutes, and continues where it was; its last line says how much is left.
--pack processes share the device, and --only BACKBONE,... takes some of them. `train` tests the best weights of a run
on the test images once (`evaluate`), and skips runs that are kept already. No step needs a network or an installation.
--small runs a step at the size of a toy on a CPU, in OUT/small, which `keep` does not read.

benchmarks/dense_page.py says what is compared, packed_runs.py how runs are stopped and kept, and dense_speed.py what is
timed.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from dense_page import BACKBONES, METRICS, MISSED, PAGE, PAIRS, RESULTS, SCHEMA, bars, fill, kept, shares, stored
from dense_runs import SEEDS, Training, run_packed, trainings
from dense_speed import speed
from packed_runs import records_of, write

from softless.errors import ArgumentError, FileError, SoftlessError
from softless.machine import pick_device
from softless.report.units import listed

RECIPES = {"pretrain": "imagenette", "camvid": "segment-camvid", "bccd": "detect-bccd"}
# A tenth of the images chooses the weights. A change of hue would take more than half of the time of reading an image.
CHANGES = {"pretrain": {"hold_out": 0.1}, "camvid": {"augment.hue": 0.0}, "bccd": {"augment.hue": 0.0}}
TINY = {"epochs": 1, "warmup_epochs": 0, "model.dims": "[16, 32]", "model.depths": "[1, 1]", "model.heads": "[1, 2]",
        "precision": "fp32"}  # fmt: skip
TOY = {
    "pretrain": {**TINY, "image_size": 32, "batch": 16, "compile": "false"},
    "camvid": {**TINY, "height": 48, "width": 64, "batch": 2, "model.channels": 16},
    "bccd": {**TINY, "height": 48, "width": 64, "batch": 2, "model.channels": 16},
}
ROWS = {"pretrain": 120, "camvid": 6, "bccd": 6}  # images of each part of a toy
PARTS = ("train", "val", "test")
SOFTLESS = (sys.executable, "-m", "softless")


def pretrain(args: argparse.Namespace) -> int:
    """Train the classifiers. Their weights are needed where the next step runs, so kept records do not count."""
    return work(args, "pretrain", [0], lambda training: training_words(training, args))


def train(args: argparse.Namespace) -> int:
    """Train every backbone in its head, from its classifier, and test it."""
    test = test_images(args.part, args.data, args.out)
    device = ["--device", args.device, "--workers", str(args.workers)]

    def words(training: Training) -> list[str]:
        if training.run.result.exists():
            return [sys.executable, __file__, "evaluate", str(training.run.folder), "--data", str(test), *device]
        return training_words(training, args)

    return work(args, args.part, SEEDS[:1] if args.small else SEEDS, words)


def work(args: argparse.Namespace, part: str, seeds: Sequence[int], words: Callable[[Training], list[str]]) -> int:
    """Work on the runs of a part that are asked for; return how many are left."""
    if unknown := set(args.only or ()) - set(BACKBONES):
        raise ArgumentError(f"--only has {listed(sorted(unknown))}, and the backbones are {listed([*BACKBONES])}")
    known = {} if args.small or part == "pretrain" else kept(part)
    wanted = [
        training
        for training in trainings(args.out, part, seeds)
        if training.name not in known and training.backbone in (args.only or BACKBONES)
    ]
    return run_packed(wanted, words, pack=args.pack, minutes=args.minutes)


def training_words(training: Training, args: argparse.Namespace) -> list[str]:
    """Return the command that begins a run, or goes on with it."""
    words = [*SOFTLESS, "train", "--out", str(training.run.folder), "--device", args.device]
    words += ["--workers", str(args.workers)]
    words += ["--graph"] if training.classifier is None and args.device == "cuda" else []
    if training.run.about.exists():
        return [*words, "--resume"]
    _, model, changed = BACKBONES[training.backbone]
    head = {"model.head": training.head} if training.head else {}
    toy = TOY[training.part] if args.small else {}
    changes = {"model.name": model, **changed, **head, **CHANGES[training.part], **toy}
    words += ["--recipe", RECIPES[training.part], "--data", str(args.data), "--seed", str(training.seed)]
    words += [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    return words if training.classifier is None else [*words, "--init", str(training.classifier.folder)]


def test_images(part: str, data: Path, out: Path) -> Path:
    """Return the file of the test images, which training must not see: it chooses on the part val."""
    import pyarrow.parquet as pq

    if part == "camvid":
        if not data.stem.endswith("-train"):
            raise ArgumentError(f"--data is {data}, and the file of the training images is needed: NAME-train.parquet")
        others = {word: data.with_name(f"{data.stem.removesuffix('train')}{word}.parquet") for word in PARTS}
        if missing := [str(path) for path in others.values() if not path.is_file()]:
            raise FileError(f"{' and '.join(missing)}: no such file, and train, val and test are needed")
        return others["test"]
    known = "split" in pq.read_schema(data).names
    words = pq.read_table(data, columns=["split"])["split"].to_pylist() if known else []
    if lacking := set(PARTS) - set(words):
        raise FileError(f"{data}: its column split lacks {' and '.join(sorted(lacking))}")
    return cut(data, out / "data" / "bccd-test.parquet", [row for row, word in enumerate(words) if word == "test"])


def few(data: Path, out: Path, part: str) -> Path:
    """Write a few images of each part of a set, and return the file of the part to train on."""
    import pyarrow.parquet as pq

    files = {data, *(data.with_name(data.name.replace("-train", f"-{word}")) for word in PARTS)}
    for file in [file for file in files if file.is_file()]:
        table = pq.read_table(file)
        words = table["split"].to_pylist() if "split" in table.column_names else [""] * len(table)
        rows = [[row for row, own in enumerate(words) if own == word] for word in dict.fromkeys(words)]
        cut(file, out / "data" / file.name, [row for own in rows for row in own[:: max(1, len(own) // ROWS[part])]])
    return out / "data" / data.name


def cut(data: Path, target: Path, rows: Sequence[int]) -> Path:
    """Write some rows of a parquet file to another one."""
    import pyarrow.parquet as pq

    target.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pq.read_table(data).take(list(rows)), target)
    return target


def tested(folder: Path, data: Path, device: str, workers: int) -> dict[str, Any]:
    """Return what `softless evaluate` measures, and for a segmentation each image's share of the mIoU in percent."""
    from softless.data.annotated_sources import open_annotated
    from softless.data.reading import Damage
    from softless.train.assemble_dense import task_for, trained
    from softless.train.devices import Devices, runnable
    from softless.train.tasks import evaluate as run_on_all
    from softless.train.tasks.segment import PixelCounts

    model, recipe, _ = trained(folder)
    images, task = open_annotated(data, "test", recipe.values), task_for(recipe)
    devices = Devices(device, runnable(recipe.precision, device))
    batches = task.loader(images, recipe, 0, devices, Damage("fail", len(images)), train=False, workers=workers)
    counts = task.counts(images, devices.device)
    confusions: list[torch.Tensor] = []
    if isinstance(counts, PixelCounts):
        add = counts.count

        def count(logits: torch.Tensor, masks: torch.Tensor) -> None:
            before = counts.confusion.clone()
            add(logits, masks)
            confusions.append(counts.confusion - before)

        counts.count = count  # type: ignore[method-assign]
    numbers = run_on_all(model.to(devices.device), batches, lambda: counts, devices).evaluation().numbers
    by_image = [round(100 * share, 3) for share in shares(torch.stack(confusions).cpu().numpy())] if confusions else []
    return {"numbers": numbers, "images": by_image, "tested": len(images),
            "parameters": sum(weight.numel() for weight in model.parameters())}  # fmt: skip


def keep(args: argparse.Namespace) -> None:
    """Add what was measured to the records in the repository."""
    documents = {part: {"schema": SCHEMA, "runs": [*(kept(part) | runs).values()]}
                 for part in PAIRS if (runs := records_of(args.folder, part))}  # fmt: skip
    if (args.folder / "speed.json").exists():
        documents["speed"] = json.loads((args.folder / "speed.json").read_bytes())
    if not documents:
        raise FileError(f"{args.folder}: nothing was measured there")
    for part, document in documents.items():
        path = RESULTS / f"results-dense-{part}.json"
        path.write_text(json.dumps(document) + "\n")
        print(path)


def write_page() -> None:
    """Fill the page, and say which bars are missed."""
    runs, document = stored()
    PAGE.write_text(fill(PAGE.read_text(), runs, document))
    for bar in bars(runs, document):
        if bar.verdict == MISSED:
            print(f"MISSED: {bar.what} is {bar.value:.4g}{bar.unit}, and the bar is {bar.sign} {bar.limit:g}{bar.unit}")


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    for name in ("pretrain", "train", "speed", "evaluate"):
        step = steps.add_parser(name)
        step.add_argument("--device", default="auto")
        step.add_argument("--workers", type=int, help="processes that read images, per run; default: the cores, shared")
        if name == "evaluate":
            step.add_argument("folder", type=Path, help="a run")
        else:
            step.add_argument("--out", type=Path, required=True)
            step.add_argument("--minutes", type=float, help="stop after this time; default: never")
            step.add_argument("--pack", type=int, default=5, help="processes that share the device")
            step.add_argument("--small", action="store_true", help="a toy on a CPU")
        if name != "speed":
            step.add_argument("--data", type=Path, required=True)
        if name in ("pretrain", "train"):
            step.add_argument(
                "--only", type=lambda text: text.split(","), help="some backbones, such as pvt,inline-pvt"
            )
        if name == "train":
            step.add_argument("--set", choices=tuple(METRICS), required=True, dest="part")
    steps.add_parser("keep", help="store the records").add_argument("folder", type=Path)
    steps.add_parser("page", help="fill the page from the records")
    return parser


def main() -> int:
    args = options().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the runs are saved then too
    try:
        if args.step == "keep":
            keep(args)
        elif args.step == "page":
            write_page()
        else:
            return measure(args)
    except SoftlessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    return 0


def measure(args: argparse.Namespace) -> int:
    """Take a step that needs a device."""
    small = getattr(args, "small", False)
    args.device = pick_device("cpu" if small else args.device)
    if args.step != "speed" and not args.data.is_file():
        raise FileError(f"--data is {args.data}, and there is no such file")
    if args.step == "evaluate":
        write(args.folder / "test.json", tested(args.folder, args.data, args.device, args.workers or 0))
        return 0
    if args.pack < 1:
        raise ArgumentError(f"--pack is {args.pack}, and at least one process is needed")
    args.out = (args.out / "small" if small else args.out).resolve()
    if args.workers is None:
        args.workers = 0 if small else max(1, (os.cpu_count() or 1) // args.pack)
    if args.step == "speed":
        left = speed(args.out, args.device, args.minutes, small=small)
    else:
        args.data = few(args.data, args.out, getattr(args, "part", args.step)) if small else args.data.resolve()
        left = {"pretrain": pretrain, "train": train}[args.step](args)
    print(f"{left} left" + (": call again" if left else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
