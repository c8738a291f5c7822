"""What every rank of a group runs (R20).

    python -m tests.train.ranks FOLDER RANKS compare:COUNT    updates of this group against updates of one process
    python -m tests.train.ranks FOLDER RANKS uneven           evaluations of as many images as do not divide
    python -m tests.train.ranks FOLDER RANKS train            whole trainings, in FOLDER/ddp and FOLDER/fsdp
    python -m tests.train.ranks FOLDER RANKS resume           go on with those
    python -m tests.train.ranks FOLDER RANKS apart            the same, where rank 1 sees an older checkpoint, or none
    python -m tests.train.ranks FOLDER RANKS again            a training as the command makes one, and another
    python -m tests.train.ranks FOLDER RANKS language         language models on FOLDER/book.txt
    python -m tests.train.ranks FOLDER RANKS segment          segmentations on FOLDER/data
    python -m tests.train.ranks FOLDER RANKS detect           detections on FOLDER/boxes
    python -m tests.train.ranks FOLDER RANKS masks            the masks that are found in the images of FOLDER/masks
    python -m tests.train.ranks FOLDER RANKS die              rank 1 is killed during a training

Several words make several acts. Each act of rank 0 writes FOLDER/ACT.json.
"""

import itertools
import json
import os
import shutil
import signal
import sys
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn

from softless.data.annotated_sources import open_annotated
from softless.data.reading import Damage
from softless.errors import FileError
from softless.models.blocks import Stage
from softless.train import assemble, snapshot
from softless.train.assemble import Runtime, train
from softless.train.assemble_dense import train_dense
from softless.train.dense_recipe import DetectModel, DetectRecipe, SegmentModel, SegmentRecipe
from softless.train.devices import Devices
from softless.train.engine import Engine
from softless.train.language_recipe import LanguageModel, LanguageRecipe
from softless.train.loop import fit
from softless.train.metrics import ClassCounts
from softless.train.recipe import Recipe, read_recipe
from softless.train.tasks import all_skipped, evaluate
from softless.train.tasks import detect as detecting
from softless.train.tasks import segment as segmenting
from softless.train.tasks.classify import ClassificationLoss, image_loader
from softless.train.tasks.detect_heads import build_detector
from softless.train.tasks.language import build as build_language
from softless.train.tasks.segment_heads import build_network
from tests.ranks import fork
from tests.train.jobs import IMPORTED_LATE, RECIPE, SMALL, Pictures, Quiet, job

EXACT = {"mixup": 0.0, "cutmix": 0.0, "checkpoint_every": 5}
WAYS = ("ddp", "fsdp")


class Blocks(nn.Module):
    """In float64, with blocks to shard."""

    def __init__(self, width: int = 8, depth: int = 2, seed: int = 5):
        super().__init__()
        torch.manual_seed(seed)
        self.stem = nn.Linear(48, width)
        self.blocks = Stage(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))
        self.head = nn.Linear(width, 3)
        self.double()

    def forward(self, x):
        x = self.stem(x.flatten(1).double())
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def update(model, devices, images, labels, **changes):
    """Two updates on this rank's share; the weights and the norm of the last gradient."""
    recipe = Recipe(batch=len(labels), warmup_epochs=0, lr=1e-2, ema=0.5, clip=0.1, **changes)
    engine = Engine(model, recipe, devices, ClassificationLoss(recipe, 3), 5)
    for _ in range(2):
        engine.update((images[devices.rank :: devices.ranks], labels[devices.rank :: devices.ranks]))
    parts, _ = snapshot.pack(engine)
    return parts, engine.norms[-1].item(), engine.losses[-1].item()


def compare(devices, alone, count):
    """The largest difference between a group's weights, moments and averages and one process's, over many cases."""
    worst = 0.0
    for case in range(count):
        torch.manual_seed(case)
        width, depth, each = (int(torch.randint(low, high, ())) for low, high in ((1, 9), (0, 4), (1, 5)))
        parts = 1 + case % 2
        images = torch.randn(each * parts * devices.ranks, 3, 4, 4)
        labels = torch.randint(0, 3, (len(images),))
        ours, *numbers = update(Blocks(width, depth, case), devices, images, labels, accumulate=parts)
        theirs, *expected = update(Blocks(width, depth, case), alone, images, labels)
        gaps = [abs(a - b) for a, b in zip(numbers, expected, strict=True)]
        if devices.main:
            gaps += [
                (ours[part][name] - tensor).abs().max().item()
                for part in ("model", "optimizer", "ema")
                for name, tensor in theirs[part].items()
            ]
        worst = max(worst, *gaps)
    return worst


def uneven(devices, alone):
    """(images, top-1, loss) of this group and of one process: of sets that a rank has a batch fewer of, or nothing.

    And what all of its ranks skipped, which differs by rank.
    """
    shared, whole, found = Blocks(), Blocks(), []
    devices.share(shared)
    signal.alarm(60)  # a rank that waits for another is ended
    for count, cache in itertools.product((1, 25), (True, False)):
        scores = []
        for model, where in ((shared, devices), (whole, alone)):
            images = image_loader(Pictures(count, 1), replace(RECIPE, cache=cache), 0, where, train=False)
            counts = evaluate(model, images, partial(ClassCounts, 3, count, where.device), where)
            scores.append((counts.scores(), counts.answers()))
        found.append([(each.images, each.top1, each.loss, asdict(answers)) for each, answers in scores])
    images = image_loader(Pictures(9, 1), RECIPE, 0, devices, train=False)
    images.skipped[f"picture {8 - devices.rank}"] = "it is empty"
    skipped = all_skipped(images, devices)
    signal.alarm(0)
    return {"scores": found, "skipped": skipped}


def apart(devices, place):
    """What each rank says to going on where the second one sees another folder than the first."""
    devices.wait()
    if devices.rank == 1:
        theirs = place.parent / "apart" / place.name
        if devices.sharing == "ddp":
            shutil.copytree(place / "last/step-00000005", theirs / "last/step-00000005")
        place = theirs
    signal.alarm(60)
    try:
        fit(job(place, model=Blocks(), devices=devices, resume=True, **EXACT))
        said = ""
    except FileError as error:
        said = str(error)
    found = devices.gather(said)
    signal.alarm(0)
    return found


def one_process(devices):
    """The same machine as a group of one: ranks do not wait for each other in it."""
    alone = object.__new__(Devices)
    vars(alone).update(vars(devices) | {"rank": 0, "ranks": 1, "sharing": None})
    return alone


class Doomed(Quiet):
    """Kills its own process after a few updates."""

    def tick(self, step):
        super().tick(step)
        if step == 4:
            os.kill(os.getpid(), signal.SIGKILL)


def language(place, way="ddp"):
    """A training of a language model in float64; its last scores. Its norms and rotations round to float32."""
    recipe = LanguageRecipe(
        model=LanguageModel(dim=8, depth=2, heads=2), length=8, batch=6, epochs=1, lr=1e-2, ema=0.5, log_every=1,
        tokens="bpe", vocabulary=270,
    )  # fmt: skip
    runtime = Runtime(device="cpu", sharing=way)
    with patch.object(assemble, "build_language", lambda recipe: build_language(recipe).double()):
        outcome = assemble.train_language(place, recipe, str(place.parent / "book.txt"), Quiet(), runtime=runtime)
    return {"last": outcome.last, "answers": outcome.answers}


def segment(place, way="ddp"):
    """A training of a segmentation in float64; its last scores."""

    def in_double(*args):
        network = build_network(*args).double()
        network.register_forward_pre_hook(lambda _module, inputs: (inputs[0].double(),))
        return network

    model = SegmentModel(name="inline_pvt_tiny", dims=[16, 32], depths=[1, 1], heads=[1, 2], channels=16, auxiliary=0.4)
    recipe = SegmentRecipe(model=model, height=16, width=24, batch=4, epochs=2, warmup_epochs=0, lr=1e-3, ema=0.5)
    data, runtime = str(place.parent / "data/x-train.parquet"), Runtime(device="cpu", sharing=way)
    with patch.object(segmenting, "build_network", in_double):
        return train_dense(place, recipe, data, Quiet(), runtime=runtime).last


def detect(place, way="ddp"):
    """A training of a detection in float64; its last scores. The head draws nothing, so ranks draw nothing apart."""

    def in_double(*args):
        network = build_detector(*args).double()
        network.register_forward_pre_hook(lambda _module, inputs: tuple(map(doubled, inputs)))
        return network

    model = DetectModel(
        name="inline_pvt_tiny", head="retinanet", dims=[16, 32], depths=[1, 1], heads=[1, 2], channels=16
    )
    recipe = DetectRecipe(model=model, height=32, width=48, batch=4, epochs=2, warmup_epochs=0, lr=1e-3, ema=0.5)
    data, runtime = str(place.parent / "boxes/x-train.parquet"), Runtime(device="cpu", sharing=way)
    with patch.object(detecting, "build_detector", in_double):
        return train_dense(place, recipe, data, Quiet(), runtime=runtime).last


def masks(devices, alone, source):
    """Index of an image -> the masks that an untrained network finds in it: of this group, and of one process."""
    torch.manual_seed(0)
    model = DetectModel(
        name="inline_pvt_tiny", head="mask_rcnn", dims=[16, 32], depths=[1, 1], heads=[1, 2], channels=16
    )
    network, found = build_detector(model, (32, 48), 2), []
    for where in (devices, alone):
        recipe = DetectRecipe(model=model, height=32, width=48, batch=where.ranks)
        images = open_annotated(source, "test", recipe.values)
        damage = Damage("fail", len(images))
        batches = detecting.Detection.loader(images, recipe, 0, where, damage, train=False, workers=0)
        counted = evaluate(network, batches, partial(detecting.BoxCounts, images, where.device), where)
        found.append({index: [code["counts"].decode() for code in codes] for index, codes in counted.kept.items()})
    return found


def doubled(x):
    """The same, with float64 for float32."""
    if isinstance(x, torch.Tensor):
        return x.double() if x.dtype == torch.float32 else x
    if isinstance(x, dict):
        return {key: doubled(each) for key, each in x.items()}
    return [doubled(each) for each in x] if isinstance(x, list) else x


def perform(folder, way, act, *words):
    """What an act finds with one way of sharing."""
    if act in ("language", "segment", "detect"):
        return {"language": language, "segment": segment, "detect": detect}[act](folder / f"{act}-{way}", way)
    if act == "again":
        runtime = Runtime(device="cpu", sharing=way)
        return train(folder / f"again-{way}", read_recipe("digits", SMALL), None, Quiet(), runtime=runtime).steps
    devices = Devices("cpu", sharing=way)
    if act in ("compare", "uneven", "masks"):
        more = {"compare": map(int, words), "uneven": (), "masks": [folder / "masks/x-train.parquet"]}[act]
        return {"compare": compare, "uneven": uneven, "masks": masks}[act](devices, one_process(devices), *more)
    if act == "apart":
        return apart(devices, folder / way)
    doomed = act == "die" and devices.rank == 1
    place = folder / (way if act != "die" else "dead")
    watch = Doomed() if doomed else Quiet()
    return fit(job(place, model=Blocks(), devices=devices, watch=watch, resume=act == "resume", **EXACT)).last


def main(folder, acts):
    for act, *words in acts:
        found = {way: perform(folder, way, act, *words) for way in (WAYS if act != "die" else WAYS[:1])}
        if int(os.environ["RANK"]) == 0:
            (folder / f"{act}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    where, ranks = Path(sys.argv[1]), int(sys.argv[2])
    for late in (*IMPORTED_LATE, "sklearn.datasets"):
        import_module(late)
    rank = str(fork(where, ranks))
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
    main(where, [word.split(":") for word in sys.argv[3:]])
