"""Why regress wins or loses: what its trained layers do, and which shapes of a model favor it.

    python benchmarks/regress_why.py look cifar10 --out runs --data FOLDER
    python benchmarks/regress_why.py shapes cifar10,imagenette --out runs --data FOLDER --graph --pack 16
    python benchmarks/regress_why.py keep runs          # writes benchmarks/results/regress-why.json
    python benchmarks/regress_why.py page               # writes the tables of docs/regress.md

`look` probes the twins that `benchmarks/regress.py test` trained. `shapes` trains twins whose number of tokens, head
width or architecture differ from those of the experiment. Both can be stopped, and continue where they were.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from gpu import fill
from regress import (
    BASES,
    CLAIM,
    DATA,
    PAGE,
    add_training,
    base_of,
    decided,
    grid,
    held_in,
    records_in,
    train,
    with_options,
)  # fmt: skip
from torch import Tensor, nn
from torch.nn.functional import softplus

from softless.data import open_splits
from softless.errors import ArgumentError, FileError, SoftlessError
from softless.io.files import write_json
from softless.machine import pick_device
from softless.mechanisms.regress import LEARNED, Regress
from softless.probes.examination import capture_batch, examine
from softless.probes.layer import Layer
from softless.probes.score_range import effective_rank
from softless.study.examine import SampleImages
from softless.study.tables import groups
from softless.study.twin_run import RunRecord, fetch, trained_twin
from softless.train.recipe import Recipe, read_recipe

RESULTS = Path(__file__).parent / "results" / "regress-why.json"
SCHEMA = "softless.regress-why/1"
MARKS = ("<!-- why: python benchmarks/regress_why.py page -->", "<!-- end of why -->")
SEED, SHAPE_SEED = 100, 200  # of the twins that are looked at, and of those that are trained for a shape
IMAGES = 240
MEASURES = {  # of a layer, as the page names them
    "rank": "effective rank of the weights",
    "condition": "condition of K",
    "with_ridge": "condition of K + r I",
    "ridge": "ridge",
    "entropy": "entropy of the scores",
    "local_mass": "weight on the 3 x 3",
    "confusions": "confused pairs",
    "residual": "share of the residual",
}


@dataclass(frozen=True)
class Shape:
    """A model of the twins' depth and training with other tokens or heads. `ratio` is tokens / head width."""

    set: str
    label: str
    ratio: float
    changes: tuple[tuple[str, str], ...]
    recipe: str | None = None

    @property
    def folder(self) -> str:
        return "-".join(["shape", self.set, *self.label.replace(",", "").split()])

    def base(self) -> Recipe:
        name, more = BASES[self.set]
        return read_recipe(self.recipe or name, [*more, *self.changes])


def plain(set_: str, side: int, patch: int, heads: int) -> Shape:
    """Return a DeiT of 192 channels with this patch and these heads, on images of `side` pixels."""
    tokens, width = (side // patch) ** 2 + 1, 192 // heads
    changes = (("model.patch_size", str(patch)), ("model.heads", str(heads)))
    return Shape(set_, f"{tokens} tokens, heads of {width}", tokens / width, changes)


SHAPES = (
    plain("cifar10", 32, 8, 6), plain("cifar10", 32, 4, 3), plain("cifar10", 32, 4, 12), plain("cifar10", 32, 2, 6),
    plain("cifar10", 32, 2, 12), plain("imagenette", 128, 8, 12), plain("imagenette", 128, 4, 6),
    plain("imagenette", 128, 4, 12),
    Shape("cifar10", "a pyramid of 256 to 4 tokens", 8, (), "twins-cifar10-windows"),
    Shape("imagenette", "a pyramid of 1,024 to 16 tokens", 32, (), "twins-imagenette-windows"),
)  # fmt: skip


def look(args: argparse.Namespace) -> None:
    """Probe the trained twins of one set, and store what was found beside them."""
    folder, recipe = args.out / f"test-{args.set}", base_of(args.set)
    decoded = fetch(folder / "images", open_splits(str(args.data / DATA[args.set]), recipe.hold_out), recipe.image_size)
    if decoded is None:
        raise FileError(f"{folder / 'images'} does not hold the decoded images of {DATA[args.set]}")
    sample = SampleImages(decoded.test, recipe.augment, pick_device(args.device))
    layers = {}
    for record in records_in(folder):
        if record["status"] == "done" and record["seed"] == SEED and record["twin"]["id"] in CLAIM:
            print(f"{record['twin']['id']}-{SEED}", flush=True)
            layers[record["twin"]["label"]] = layers_of(record, folder, sample)
    write_json(args.out / f"look-{args.set}.json", layers)


def layers_of(record: RunRecord, folder: Path, sample: SampleImages) -> list[dict[str, float | None]]:
    """Return the measures of each layer, averaged over heads and images."""
    model = trained_twin(record, folder).to(sample.device)
    shared = examine(model, sample.batches(IMAGES), tau=(1.0,)).layers
    own = [of_keys(model, pictures) for pictures, _ in sample.batches(IMAGES)]  # [batches][layers]
    measures = []
    for findings, batches in zip(shared, zip(*own, strict=True), strict=True):
        local, residual = findings.local_mass, findings.residual_share
        means = {name: [batch[name] for batch in batches if batch[name] is not None] for name in batches[0]}
        measures.append(
            {name: fmean(values) if values else None for name, values in means.items()}
            | {
                "entropy": findings.entropy.mean,
                "confusions": findings.confusions.mean,
                "local_mass": None if local is None else local.mean,
                "residual": None if residual is None else residual.mean,
            }
        )
    return measures


@torch.no_grad()
def of_keys(model: nn.Module, pictures: Tensor) -> list[dict[str, float | None]]:
    """Return for each layer the rank of its weights, the condition of its keys, and its ridge."""
    return [keys_of(layer) for layer in capture_batch(model, pictures).layers]


def keys_of(layer: Layer) -> dict[str, float | None]:
    k = layer.k.double()
    k = k - k.mean(2, keepdim=True)
    values = torch.linalg.eigvalsh(k.mT @ k / k.shape[2]).clamp(min=0)  # [B, H, d], the smallest first
    least = values[..., -1] * torch.finfo(torch.float32).eps
    condition = values[..., -1] / values[..., 0].maximum(least)
    measures: dict[str, float | None] = {
        "rank": effective_rank(layer.weights().double()).mean().item(),
        "condition": condition.log().mean().exp().item(),
        "with_ridge": None,
        "ridge": None,
    }
    if isinstance(layer.mechanism, Regress):
        ridge = ridge_of(layer, values)  # [H] or a number
        r = ridge * values.mean(-1)  # [B, H]
        measures["with_ridge"] = ((values[..., -1] + r) / (values[..., 0] + r)).log().mean().exp().item()
        measures["ridge"] = ridge.mean().item()
    return measures


def ridge_of(layer: Layer, like: Tensor) -> Tensor:
    assert isinstance(layer.mechanism, Regress)
    if layer.mechanism.ridge == LEARNED:
        return softplus((layer.inputs or {})["ridge"].double())
    return like.new_tensor(float(layer.mechanism.ridge))


def shapes(args: argparse.Namespace) -> None:
    """Train the twins of the claim once per shape, with the chosen options."""
    options, ends = decided(held_in(args.out)), None if args.minutes is None else time.time() + 60 * args.minutes
    if options is None:
        raise ArgumentError("the options of regress are not chosen yet: run benchmarks/regress.py first")
    twins = [with_options(id_, options) for id_ in CLAIM]
    plans = [
        grid(args.out / shape.folder, shape.base(), twins, [SHAPE_SEED], shape.set, args, ends)
        for shape in SHAPES
        if shape.set in args.sets.split(",")
    ]
    train(plans, args, ends)


def keep(folder: Path) -> None:
    """Write what was found, without the answers to each image."""
    document: dict[str, Any] = {"schema": SCHEMA, "look": {}, "shapes": {}}
    for name in BASES:
        if (path := folder / f"look-{name}.json").exists():
            document["look"][name] = json.loads(path.read_text())
    for shape in SHAPES:
        if runs := records_in(folder / shape.folder):
            keys = ("twin", "seed", "status", "reason", "accuracy", "parameters", "wall_seconds", "together", "machine")
            document["shapes"][shape.folder] = [{key: run[key] for key in keys if key in run} for run in runs]
    write_json(RESULTS, document)
    print(RESULTS)


def page(document: Mapping[str, Any]) -> str:
    """Return the tables of the page."""
    lines = []
    rows = [row for shape in SHAPES if (row := shape_row(shape, document["shapes"].get(shape.folder, ())))]
    if rows:
        lines += ["| set | model | tokens / width | softmax + local | inline + local | regress + local |",
                  "|---|---|---|---|---|---|", *rows, ""]  # fmt: skip
    for name, twins in document["look"].items():
        lines += [f"Layers of the twins on {name}, mean over heads and {IMAGES} test images:", ""]
        lines += [f"| twin | layer | {' | '.join(MEASURES.values())} |", "|---" * (len(MEASURES) + 2) + "|"]
        for twin, layers in twins.items():
            for index, layer in enumerate(layers, 1):
                cells = ["" if layer[key] is None else f"{layer[key]:.3g}" for key in MEASURES]
                lines.append(f"| {twin} | {index} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def shape_row(shape: Shape, runs: Any) -> str | None:
    """Return one row: the accuracy of the three twins in this shape."""
    twins = groups(runs)
    if not twins:
        return None
    cells = ["" if id_ not in twins or twins[id_].mean is None else f"{twins[id_].mean:.2f}" for id_ in CLAIM]
    return f"| {shape.set} | {shape.label} | {shape.ratio:.2g} | {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("look")
    verb.add_argument("set", choices=BASES)
    verb.add_argument("--data", type=Path, required=True, help="the folder of the parquet files")
    verb.add_argument("--out", type=Path, required=True, help="the folder of benchmarks/regress.py")
    verb.add_argument("--device", default="auto")
    verb = verbs.add_parser("shapes")
    verb.add_argument("sets", help="cifar10, imagenette, or both with a comma")
    add_training(verb)
    verbs.add_parser("keep").add_argument("folder", type=Path)
    verbs.add_parser("page")
    args = parser.parse_args()
    try:
        if args.verb == "keep":
            keep(args.folder)
        elif args.verb == "page":
            PAGE.write_text(fill(PAGE.read_text(), page(json.loads(RESULTS.read_text())), MARKS))
        else:
            {"look": look, "shapes": shapes}[args.verb](args)
    except SoftlessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
