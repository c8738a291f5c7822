"""Train a segmentation from names: a recipe, images with masks and a folder become a `Job`."""

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from softless.data.mask_check import check_masks
from softless.data.masked_sources import open_masked_splits
from softless.data.masks import MaskedImages
from softless.data.reading import Damage
from softless.io import checkpoint
from softless.train.assemble import Runtime, agree_on_parts, begin, claim, start
from softless.train.loop import Job, Watcher, seed_all
from softless.train.run import Outcome, Run
from softless.train.segment_recipe import SegmentRecipe
from softless.train.tasks.features import start_backbone
from softless.train.tasks.segment import Segmentation, segment_loader
from softless.train.tasks.segment_heads import build_network


def train_segment(
    folder: Path,
    recipe: SegmentRecipe,
    data: str,
    watch: Watcher,
    *,
    runtime: Runtime,
    seed: int = 0,
    resume: bool = False,
    init: Path | None = None,
    splits: tuple[MaskedImages, MaskedImages] | None = None,
    tick: Callable[[int], None] = lambda _images: None,
) -> Outcome:
    """Train a segmentation, from the beginning or from where the run in this folder was.

    folder    Path: where the run is saved
    recipe    SegmentRecipe: how to train
    data      str: a parquet file, or a folder of images and masks
    watch     Watcher: called while the training runs
    runtime   Runtime: device, workers and the like
    seed      int, default 0
    resume    bool, default False: go on with the run in the folder
    init      Path, default None: a file of weights of the backbone, or a run whose backbone to begin with
    splits    (train, test), default None: the images of `data`, if they were opened before
    tick      called with how many more masks are checked

    Every mask is decoded before the first update, so that a bad one is found at once.
    """
    recipe.check_ranks(int(os.environ.get("WORLD_SIZE", "1")))
    splits = splits or open_masked_splits(data, recipe.masks, recipe.hold_out)
    run, about = Run(folder), describe_masked(recipe, data, *splits, seed, init)
    if resume:
        agree_on_parts(run.read(), about, f"the run in {folder}", "other images", "images", "images")
    devices = claim(run, recipe, runtime, resume)
    damages = [Damage(runtime.on_bad_image, len(images)) for images in splits]
    for images, damage in zip(splits, damages, strict=True):
        check_masks(images, damage, workers=runtime.workers, tick=tick)
    seed_all(seed, -1, 0)
    model = build_network(recipe.model, recipe.size, len(splits[0].classes))
    if init is not None and not (resume and checkpoint.places(run.last)):
        start_backbone(model.features, init)
    batches, test_batches = (
        segment_loader(images, recipe, seed, devices, damage, train=images is splits[0], workers=runtime.workers)
        for images, damage in zip(splits, damages, strict=True)
    )
    begin(run, about, devices, resume)
    task = Segmentation(model, splits, batches, test_batches, recipe)
    return start(
        Job(
            task=task, recipe=recipe, folder=folder, devices=devices, watch=watch, about=about, seed=seed, resume=resume
        )
    )


def describe_masked(
    recipe: SegmentRecipe, data: str, train: MaskedImages, test: MaskedImages, seed: int, init: Path | None
) -> dict[str, Any]:
    """Return the content of run.json: everything that decides what is learned."""
    return {
        "recipe": asdict(recipe),
        "data": data,
        "images": {"train": len(train), "test": len(test)},
        "fingerprint": {"train": train.fingerprint, "test": test.fingerprint},
        "classes": list(train.classes),
        "seed": seed,
        "init": None if init is None else str(init),
    }
