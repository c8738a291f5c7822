"""Train a classifier or a language model from names: a recipe, data and a folder become a `Job`."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from softless.data import open_splits
from softless.data.images import Images, summary, what_changed
from softless.data.reading import Batch, OnBadImage
from softless.data.sequences import TokenizedText
from softless.data.text import Text, open_texts
from softless.data.tokens import digest_of
from softless.errors import ArgumentError, FileError
from softless.io import checkpoint
from softless.io.files import write_text
from softless.train.devices import Devices, Sharing
from softless.train.language_recipe import LanguageRecipe
from softless.train.loop import Job, Watcher, fit, seed_all
from softless.train.recipe import PROSE, Recipe, recipe_of
from softless.train.run import Outcome, Run, must_agree
from softless.train.settings import Settings
from softless.train.tasks.classify import Classification, build, image_loader, start_from, teacher_of
from softless.train.tasks.language import Language, make_tokenizer, tokenizer_of
from softless.train.tasks.language import build as build_language


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Where and how a training runs. This does not change what is learned, up to rounding and random numbers.

    device         "auto" (default: CUDA if there is one), "cpu" or "cuda"
    sharing        "ddp" (default) or "fsdp": how several ranks share a model
    workers        int, default 0: processes that read images
    on_bad_image   "fail" (default) or "skip": what to do about an image that cannot be decoded
    graph          bool, default False: record a small model's updates as CUDA graphs, if the host is too slow for it
    """

    device: str = "auto"
    sharing: Sharing = "ddp"
    workers: int = 0
    on_bad_image: OnBadImage = "fail"
    graph: bool = False


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
    """Train a classifier, from the beginning or from where the run in this folder was.

    folder    Path: where the run is saved
    recipe    Recipe: how to train (`read_recipe`)
    data      str: a folder of images, a parquet file, or "digits"; None is "digits" too
    watch     Watcher: called while the training runs
    runtime   Runtime: device, workers and the like
    seed      int, default 0
    resume    bool, default False: go on with the run in the folder
    teacher   Path, default None: a run whose best model to learn from, besides the labels
    init      Path, default None: a file of weights, or a run, to begin with
    splits    (train, test), default None: the images of `data`, if they were opened before
    decoded   (train, test), default None: both parts as `cached` returns them, if they were decoded before
    tick      called with how many more images are decoded, if the recipe caches them

    Several ranks stay in their process group for the next training; `devices.leave` ends the group.
    """
    recipe.check_ranks(int(os.environ.get("WORLD_SIZE", "1")))
    splits = splits or open_splits(data, recipe.hold_out)
    classes = splits[0].classes
    guide = None if teacher is None else teacher_of(teacher, recipe, classes)
    run, about = Run(folder), describe(recipe, data, *splits, seed, teacher, init, guide)
    if resume:
        agree(run.read(), about, f"the run in {folder}")
    devices = claim(run, recipe, runtime, resume)
    seed_all(seed, -1, 0)
    model = build(recipe.model, recipe.image_size, len(classes))
    if init is not None and not (resume and checkpoint.places(run.last)):
        start_from(model, init)
    batches, test_batches = (
        image_loader(
            images, recipe, seed, devices, train=images is splits[0], workers=runtime.workers,
            on_bad_image=runtime.on_bad_image, decoded=part, tick=tick,
        )
        for images, part in zip(splits, decoded or (None, None), strict=True)
    )  # fmt: skip
    begin(run, about, devices, resume)
    task = Classification(model, splits, batches, test_batches, recipe, guide)
    return start(
        Job(
            task=task, recipe=recipe, folder=folder, devices=devices, watch=watch, about=about, seed=seed, resume=resume
        )
    )


def train_language(
    folder: Path,
    recipe: LanguageRecipe,
    data: str,
    watch: Watcher,
    *,
    runtime: Runtime,
    seed: int = 0,
    resume: bool = False,
    texts: tuple[Text, Text] | None = None,
) -> Outcome:
    """Train a language model, from the beginning or from where the run in this folder was.

    folder    Path: where the run is saved
    recipe    LanguageRecipe: how to train
    data      str: a text file, a folder of text files, or a parquet file with a column `text`
    watch     Watcher: called while the training runs
    runtime   Runtime: device and the like; nothing reads images
    seed      int, default 0
    resume    bool, default False: go on with the run in the folder, with the tokens that it learned
    texts     (train, test), default None: the texts of `data`, if they were read before
    """
    recipe.check_ranks(int(os.environ.get("WORLD_SIZE", "1")))
    texts = texts or open_texts(data, recipe.hold_out)
    run, about = Run(folder), describe_texts(recipe, data, *texts, seed)
    if resume:
        before = run.read()
        agree_on_parts(before, about, f"the run in {folder}", "another text", "text", "bytes")
        about["tokenizer"] = before.get("tokenizer")
    devices = claim(run, recipe, runtime, resume)
    tokenizer = tokenizer_of(run, recipe, about) if resume else make_tokenizer(recipe, texts[0])
    cut = [TokenizedText(text, tokenizer, recipe.length, train=text is texts[0]) for text in texts]
    seed_all(seed, -1, 0)
    task = Language(build_language(recipe), (cut[0], cut[1]), recipe, tokenizer.sizes, devices, seed)
    about["tokenizer"] = digest_of(tokenizer)
    if devices.main and not resume and tokenizer.file is not None:
        write_text(run.tokenizer, tokenizer.file)
    begin(run, about, devices, resume)
    return start(
        Job(
            task=task, recipe=recipe, folder=folder, devices=devices, watch=watch, about=about, seed=seed, resume=resume
        )
    )


def claim(run: Run, recipe: Settings, runtime: Runtime, resume: bool) -> Devices:
    """Check that the folder holds no run, unless it is resumed, and return the devices."""
    if not resume:
        run.must_be_new()
    devices = Devices(runtime.device, recipe.precision, runtime.sharing, runtime.graph)
    devices.wait()  # every rank must look for an old run before the first rank begins a new one
    return devices


def begin(run: Run, about: Mapping[str, Any], devices: Devices, resume: bool) -> None:
    """Write run.json, unless the run is resumed; no rank goes on before."""
    if devices.main and not resume:
        run.begin(about)
    devices.wait()


def start(job: Job) -> Outcome:
    """Announce a training, and train."""
    job.watch.begin(job, sum(parameter.numel() for parameter in job.task.model.parameters()))
    return fit(job)


def describe(
    recipe: Recipe,
    data: str | None,
    images: Images,
    test: Images,
    seed: int,
    teacher: Path | None,
    init: Path | None,
    guide: nn.Module | None = None,
) -> dict[str, Any]:
    """Return the content of run.json: everything that decides what is learned. `guide` is the model of the teacher."""
    return {
        "recipe": asdict(recipe),
        "data": data,
        "images": {"train": len(images), "test": len(test)},
        "fingerprint": {"train": images.fingerprint, "test": test.fingerprint},
        "set": summary(data, images, test),
        "classes": list(images.classes),
        "seed": seed,
        "teacher": None if teacher is None else str(teacher),
        "teacher_weights": None if guide is None else digest(guide),
        "init": None if init is None else str(init),
    }


def describe_texts(recipe: LanguageRecipe, data: str, train: Text, test: Text, seed: int) -> dict[str, Any]:
    """Return the content of run.json of a language model, without the sha256 of its tokens."""
    return {
        "recipe": asdict(recipe),
        "data": data,
        "bytes": {"train": len(train.data), "test": len(test.data)},
        "fingerprint": {"train": train.fingerprint, "test": test.fingerprint},
        "seed": seed,
    }


def digest(model: nn.Module) -> str:
    """Return the sha256 over the names and bytes of a model's weights."""
    total = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        total.update(name.encode())
        total.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def meaning(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's document as JSON has it, without its prose, and with defaults for keys that it lacks."""
    document = asdict(recipe_of(recipe))
    return json.loads(json.dumps({key: value for key, value in document.items() if key not in PROSE}))


def agree(before: Mapping[str, Any], now: Mapping[str, Any], what: str) -> None:
    """Raise an error if a run would go on with other settings; data and teacher may move, and prose may change."""
    try:
        old, new = (
            {"recipe": meaning(about["recipe"]), "init": about.get("init")}
            | {key: about[key] for key in ("fingerprint", "classes", "seed")}
            for about in (before, now)
        )
        changed = changed_parts(before, now)
        why = what_changed(before["set"], now["set"]) if "set" in before else None  # older runs have none
    except (LookupError, AttributeError, TypeError) as error:
        raise FileError(f"{what}: its run.json lacks {error}") from None
    if changed:
        why = why or f"names, sizes or labels of the images to {' and '.join(changed)} on have changed"
        raise ArgumentError(
            f"{what} was begun with other images: {why}; give the same images, or another folder with --out"
        )
    if before.get("teacher_weights") != now["teacher_weights"]:
        raise ArgumentError(
            f"{what} was begun with teacher {before.get('teacher')}, and the best weights of {now['teacher']} are "
            "other weights"
        )
    must_agree(old, new, what)


def agree_on_parts(
    before: Mapping[str, Any], now: Mapping[str, Any], what: str, others: str, data: str, unit: str
) -> None:
    """Raise an error if a run would go on with other settings; its data may move.

    others, data   the words for other data than before, and for the data
    unit           what the data are counted in: both documents have these counts of both parts
    """
    try:
        old, new = (
            {"recipe": meaning(about["recipe"]), "seed": about["seed"]}
            | {key: about.get(key) for key in ("init", "classes")}
            for about in (before, now)
        )
        changed = changed_parts(before, now)
        sizes = [f"{before[unit][part]:,} {unit} then and {now[unit][part]:,} now" for part in changed]
    except (LookupError, AttributeError, TypeError, ValueError) as error:
        raise FileError(f"{what}: its run.json lacks {error}") from None
    must_agree(old, new, what)
    if changed:
        raise ArgumentError(
            f"{what} was begun with {others} to {changed[0]} on ({sizes[0]}); give the same {data}, or another folder "
            "with --out"
        )


def changed_parts(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return which parts of the data, train and test, are not as they were."""
    return [part for part, known in now["fingerprint"].items() if before["fingerprint"][part] != known]
