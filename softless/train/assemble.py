"""From names to a training: a recipe, a set of images and a folder become a `Job`."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from softless.data import open_splits
from softless.data.changes import summary, what_changed
from softless.data.damage import Damage, OnBadImage
from softless.data.device_loading import DeviceLoader
from softless.data.images import Images
from softless.data.loading import cached, loader
from softless.data.reading import Batch
from softless.data.sampler import ResumableSampler
from softless.errors import ArgumentError, FileError
from softless.io import checkpoint
from softless.io.weights import load_weights
from softless.mechanisms import mechanism
from softless.models import create_model
from softless.train.devices import Devices, Sharing
from softless.train.feed import Feed
from softless.train.loop import Job, Outcome, Watcher, fit
from softless.train.randomness import seed_all
from softless.train.recipe import Architecture, Recipe
from softless.train.recipe_file import from_document, to_document
from softless.train.run import Run, must_agree

PROSE = ("command", "cost", "expected")


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """What a training is done with: no part of what is learned, though another device rounds and draws differently."""

    device: str = "auto"
    sharing: Sharing = "ddp"
    workers: int = 0
    on_bad_image: OnBadImage = "fail"
    graph: bool = False  # record a small model's passes on one CUDA device: the host would hold it back


def train(
    folder: Path,
    recipe: Recipe,
    data: str | None,
    watch: Watcher,
    *,
    runtime: Runtime,
    seed: int = 0,
    resume: bool = False,
    teacher: Path | None = None,
    init: Path | None = None,
    splits: tuple[Images, Images] | None = None,
    decoded: tuple[Batch, Batch] | None = None,
    tick: Callable[[int], None] = lambda _images: None,
) -> Outcome:
    """Train in this folder, from the beginning or, with `resume`, from where its run was.

    splits    the images of `data` to train and to test on, where they were opened before
    decoded   the same as `cached` gives them, where that was done before
    tick      told how many more images are decoded, where a recipe keeps them so

    The group of processes that several ranks form stays, for the next training: `devices.leave` ends it.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if recipe.batch % (ranks * recipe.accumulate):
        parts = f"{ranks} ranks times accumulate {recipe.accumulate}"
        raise ArgumentError(f"recipe: batch {recipe.batch} is not a multiple of {parts}")
    if (recipe.mixup or recipe.cutmix) and (part := recipe.batch // (ranks * recipe.accumulate)) % 2:
        raise ArgumentError(f"recipe: mixup and cutmix mix pairs, and a rank of {ranks} has {part} images at a time")
    images, test = splits or open_splits(data)
    knows = None if teacher is None else taught(teacher, recipe, images.classes)
    run, about = Run(folder), describe(recipe, data, images, test, seed, teacher, init, knows)
    if resume:
        agree(run.read(), about, f"the run in {folder}")
    else:
        run.must_be_new()
    devices = Devices(runtime.device, recipe.precision, runtime.sharing, runtime.graph)
    devices.wait()  # every rank has looked for a run before the first one begins it; making a group need not wait
    seed_all(seed, -1, 0)
    model = build(recipe.model, recipe.image_size, len(images.classes))
    if init is not None and not (resume and checkpoint.any_in(run.last)):
        start_from(model, init)
    feeds = [
        feed(part, recipe, seed, devices, runtime, train=part is images, kept=kept, tick=tick)
        for part, kept in zip((images, test), decoded or (None, None), strict=True)
    ]
    if devices.main and not resume:
        run.begin(about)
    devices.wait()
    job = Job(
        model=model,
        train=feeds[0],
        test=feeds[1],
        recipe=recipe,
        folder=folder,
        devices=devices,
        watch=watch,
        about=about,
        seed=seed,
        resume=resume,
        teacher=knows,
    )
    watch.begin(job, sum(parameter.numel() for parameter in job.model.parameters()))
    return fit(job)


def describe(
    recipe: Recipe,
    data: str | None,
    images: Images,
    test: Images,
    seed: int,
    teacher: Path | None,
    init: Path | None,
    knows: nn.Module | None = None,
) -> dict[str, Any]:
    """What run.json holds: all that decides what is learned."""
    return {
        "recipe": to_document(recipe),
        "data": data,
        "images": {"train": len(images), "test": len(test)},
        "fingerprint": {"train": images.fingerprint, "test": test.fingerprint},
        "set": summary(data, images, test),
        "classes": list(images.classes),
        "seed": seed,
        "teacher": None if teacher is None else str(teacher),
        "teacher_weights": None if knows is None else digest(knows),
        "init": None if init is None else str(init),
    }


def digest(model: nn.Module) -> str:
    """sha256 over names and bytes of its weights."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def meaning(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What a recipe's document asks for, as JSON has it: without prose, and a later key has its default."""
    found = to_document(from_document(recipe))
    return _plain({key: value for key, value in found.items() if key not in PROSE})


def agree(before: Mapping[str, Any], now: Mapping[str, Any], what: str) -> None:
    """The set and the teacher may have moved and the prose may have changed; nothing else may."""

    def matters(about: Mapping[str, Any]) -> dict[str, Any]:
        recipe = meaning(about["recipe"])
        same = {key: about[key] for key in ("fingerprint", "classes", "seed")}
        return {**same, "init": about.get("init"), "recipe": recipe}

    try:
        old, new = (matters(about) for about in (before, now))
        changed = [part for part, known in now["fingerprint"].items() if before["fingerprint"][part] != known]
        why = what_changed(before["set"], now["set"]) if "set" in before else None  # older runs have none
    except (LookupError, AttributeError, TypeError) as error:
        raise FileError(f"{what}: its run.json lacks {error}") from None
    if changed:
        why = why or f"names, sizes or labels of those to {' and '.join(changed)} on have changed"
        raise ArgumentError(f"{what} was begun with other images: {why}; give it those, or another folder with --out")
    if before.get("teacher_weights") != now["teacher_weights"]:
        raise ArgumentError(
            f"{what} was begun with teacher {before.get('teacher')}, and the best weights of {now['teacher']} are not "
            "those that it had then"
        )
    must_agree(old, new, what)


def build(model: Architecture, image_size: int, classes: int) -> nn.Module:
    """The model a recipe asks for."""
    return create_model(model.name, num_classes=classes, img_size=image_size, **model_options(model))


def model_options(model: Architecture) -> dict[str, Any]:
    """What `create_model` is asked for beside the name."""
    given = {key: value for key, value in vars(model).items() if value is not None and key != "name"}
    if isinstance(model.mechanism, dict):
        options = dict(model.mechanism)
        if not isinstance(options.get("name"), str):
            raise ArgumentError(f"recipe: model.mechanism is {model.mechanism!r} and must have a name")
        given["mechanism"] = mechanism(options.pop("name"), **options)
    return given


def start_from(model: nn.Module, place: Path) -> None:
    """Weights of a file, or of a run's best model; tables of positions are resampled to the model's size.

    The rest of a file must fit. Of a run, a head for another number of classes is left.
    """
    from softless.timm import fit_tables

    if not place.is_dir():
        load_weights(model, place, fit=partial(fit_tables, model=model))
        return
    own, weights = model.state_dict(), fit_tables(trained(place)[0].state_dict(), model)
    if weights["head.bias"].shape != own["head.bias"].shape:
        weights |= {name: own[name] for name in own if name.startswith("head.")}
    names = [name for name in {**own, **weights} if name not in own or name not in weights]
    names += [name for name in own if name in weights and own[name].shape != weights[name].shape]
    if names:
        raise FileError(f"the model of {place} does not fit this one: {', '.join(names)}")
    model.load_state_dict(weights)


def feed(
    images: Images,
    recipe: Recipe,
    seed: int,
    devices: Devices,
    runtime: Runtime,
    *,
    train: bool,
    kept: Batch | None = None,
    tick: Callable[[int], None] = lambda _images: None,
) -> Feed:
    """One part of a set on its way to the devices; `kept` is the part decoded, if a recipe that caches has it."""
    size, batch = recipe.image_size, recipe.batch // devices.ranks
    if not batch:
        raise ArgumentError(
            f"a batch of {recipe.batch} is too small: it needs at least one image for each of {devices.ranks} processes"
        )
    place = {"rank": devices.rank, "ranks": devices.ranks}
    if recipe.cache:
        damage = Damage(runtime.on_bad_image, len(images))
        if kept is None:
            kept = cached(images, size=size, workers=runtime.workers, damage=damage, tick=tick)
        there = Batch(*(part.to(devices.device) for part in kept))
        sampler = ResumableSampler(len(there.ids), seed=seed, shuffle=train, **place)
        return Feed(
            images,
            DeviceLoader(there, batch=batch, sampler=sampler, train=train, augment=recipe.augment),
            recipe.augment,
            devices.device,
            damage,
            size=size,
            train=train,
        )
    reading = loader(
        images,
        size=size,
        batch=batch,
        sampler=ResumableSampler(len(images), seed=seed, shuffle=train, **place),
        train_transform=train,
        augment=recipe.augment,
        workers=runtime.workers,
        on_bad_image=runtime.on_bad_image,
    )
    return Feed(images, reading, recipe.augment, devices.device, reading.damage, size=size, train=train)


def trained(folder: Path, classes: tuple[str, ...] | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """The best model of a run, and what the run was, with the update it is of; it must know these classes."""
    found = checkpoint.newest(Run(folder).best)
    if found is None:
        raise FileError(f"{folder} holds no trained model: there is no checkpoint in {Run(folder).best}")
    about = {**found.state["about"], "step": found.step}
    recipe = from_document(about["recipe"])
    if classes is not None and tuple(about["classes"]) != classes:
        raise ArgumentError(
            f"{folder} was trained on {len(about['classes'])} classes ({', '.join(about['classes'][:3])}, ...), and "
            f"the images have {len(classes)} ({', '.join(classes[:3])}, ...)"
        )
    model = build(recipe.model, recipe.image_size, len(about["classes"]))
    try:
        model.load_state_dict(found.parts["model"])
    except (RuntimeError, LookupError) as error:
        raise FileError(f"{found.path} does not fit the model of its run ({error})") from error
    return model, about


def taught(folder: Path, recipe: Recipe, classes: tuple[str, ...]) -> nn.Module:
    """The best model of a run as a teacher: it sees the student's pixels, so they must be what it was trained on."""
    model, about = trained(folder, classes)
    before = from_document(about["recipe"])
    for key, theirs, ours in (
        ("image_size", before.image_size, recipe.image_size),
        ("augment.mean", before.augment.mean, recipe.augment.mean),
        ("augment.std", before.augment.std, recipe.augment.std),
    ):
        if theirs != ours:
            raise ArgumentError(f"the teacher in {folder} was trained with {key} {theirs}, and the recipe has {ours}")
    return model


def _plain(value: Any) -> Any:
    """As JSON gives it back: tuples are lists."""
    return json.loads(json.dumps(value))
