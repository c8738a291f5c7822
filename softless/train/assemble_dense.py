"""Segmentations and detections from names: a recipe, images and a folder become a `Job`, and a folder a model."""

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from softless.data.annotated import AnnotatedImages
from softless.data.annotated_sources import open_annotated_splits
from softless.data.annotation_check import check_annotations
from softless.data.reading import Damage
from softless.errors import ArgumentError
from softless.io import checkpoint
from softless.train.assemble import Runtime, agree_on_parts, begin, claim, start
from softless.train.dense_recipe import AnyDense
from softless.train.loop import Job, Watcher, seed_all
from softless.train.run import Outcome, Run, best_of, load_best
from softless.train.tasks.dense import DenseTask, dense_recipe
from softless.train.tasks.features import start_backbone


def task_for(recipe: AnyDense) -> type[DenseTask]:
    """Return the task of a recipe."""
    from softless.train.tasks.detect import Detection
    from softless.train.tasks.segment import Segmentation

    return Segmentation if recipe.task == "segment" else Detection


def trained(folder: Path) -> tuple[Any, Any, dict[str, Any]]:
    """Return the best model of a run, its recipe, and the run's document with the update of these weights."""
    saved, about = best_of(folder)
    recipe = dense_recipe(about["recipe"], f"the recipe of {folder}")
    model = task_for(recipe).build(recipe, len(about["classes"]))
    load_best(model, saved)
    return model, recipe, about


def train_dense(
    folder: Path,
    recipe: AnyDense,
    data: str,
    watch: Watcher,
    *,
    runtime: Runtime,
    seed: int = 0,
    resume: bool = False,
    init: Path | None = None,
    splits: tuple[Any, Any] | None = None,
    tick: Callable[[int], None] = lambda _images: None,
) -> Outcome:
    """Train a segmentation or a detection, from the beginning or from where the run in this folder was.

    folder    Path: where the run is saved
    recipe    SegmentRecipe or DetectRecipe: how to train
    data      str: a parquet file, a folder of images and masks, or images with the JSON of COCO
    watch     Watcher: called while the training runs
    runtime   Runtime: device, workers and the like
    seed      int, default 0
    resume    bool, default False: go on with the run in the folder
    init      Path, default None: a file of weights of the backbone, or a run whose backbone to begin with
    splits    (train, test), default None: the images of `data`, if they were opened before
    tick      called with how many more images are checked

    Every mask is decoded, or every box checked, before the first update, so that a bad one is found at once.
    """
    task = task_for(recipe)
    recipe.check_ranks(int(os.environ.get("WORLD_SIZE", "1")))
    splits = splits or open_annotated_splits(data, recipe.values, recipe.hold_out)
    run, about = Run(folder), describe_annotated(recipe, data, *splits, seed, init)
    if resume:
        agree_on_parts(run.read(), about, f"the run in {folder}", "other images", "images", "images")
    if runtime.graph and not task.graphs:
        raise ArgumentError("a CUDA graph needs updates of one shape, and a detection has any number of boxes")
    devices = claim(run, recipe, runtime, resume)
    damages = [Damage(runtime.on_bad_image, len(images)) for images in splits]
    for images, damage in zip(splits, damages, strict=True):
        check_annotations(images, damage, workers=runtime.workers, tick=tick)
    seed_all(seed, -1, 0)
    model = task.build(recipe, len(splits[0].classes))
    if init is not None and not (resume and checkpoint.places(run.last)):
        start_backbone(model.features, init)
    batches, test_batches = (
        task.loader(images, recipe, seed, devices, damage, train=images is splits[0], workers=runtime.workers)
        for images, damage in zip(splits, damages, strict=True)
    )
    begin(run, about, devices, resume)
    return start(
        Job(
            task=task(model, splits, batches, test_batches, recipe),
            recipe=recipe, folder=folder, devices=devices, watch=watch, about=about, seed=seed, resume=resume,
        )
    )  # fmt: skip


def describe_annotated(
    recipe: AnyDense, data: str, train: AnnotatedImages, test: AnnotatedImages, seed: int, init: Path | None
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
