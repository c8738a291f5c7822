"""Image classification: the model of a recipe, loaders of images, the loss, and the metrics.

    loss = (1 - w) CE(student, target) + w T^2 KL(softmax(teacher / T) || softmax(student / T))

w is 0 without a teacher (Hinton et al. 2015). Mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019) are timm's: each
draws once per batch, and mixes the batch with itself in reverse order.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softless.data.images import Images, counted_classes
from softless.data.loading import DeviceLoader, ImageLoader, cached, loader
from softless.data.reading import Batch, Damage, OnBadImage
from softless.data.sampler import ResumableSampler, share_of
from softless.errors import ArgumentError, FileError
from softless.io.weights import load_weights, mismatches
from softless.mechanisms import mechanism
from softless.models import create_model
from softless.train.architecture import Architecture
from softless.train.devices import Devices
from softless.train.metrics import ClassCounts
from softless.train.recipe import Recipe, from_document
from softless.train.run import best_of, load_best
from softless.train.tasks import Batches, Loss, Tensors


class Classification:
    """A `Task`: learn the classes of images.

    model          nn.Module: pixels [B, 3, H, W] -> logits [B, classes]
    splits         (train, test): the images
    train, test    their loaders (`image_loader`)
    recipe         Recipe: mixing, label smoothing and distillation
    teacher        nn.Module, default None: a model to learn from, besides the labels
    """

    unit, metric, higher_is_better = "images", "top1", True
    speed_unit = "images", 1

    def __init__(
        self, model: nn.Module, splits: tuple[Images, Images], train: ImageLoader, test: ImageLoader, recipe: Recipe,
        teacher: nn.Module | None = None,
    ):  # fmt: skip
        self.model, self.images = model, splits[0]
        if recipe.channels_last:
            self.model.to(memory_format=torch.channels_last)
        self.train: Batches = train
        self.test: Batches = test
        self.loss: Loss = ClassificationLoss(recipe, len(self.images.classes), teacher, train.device)
        self.metrics = partial(ClassCounts, len(self.images.classes), len(splits[1]), test.device)

    def names(self, ids: list[int]) -> list[str]:
        return [self.images.names(index) for index in ids]


class ClassificationLoss:
    """Cross-entropy with mixed and smoothed targets, and the distance to a teacher's answers."""

    def __init__(
        self, recipe: Recipe, classes: int, teacher: nn.Module | None = None, device: str | torch.device = "cpu"
    ):
        self.smoothing, self.temperature = recipe.label_smoothing, recipe.temperature
        self.channels_last, self.weight = recipe.channels_last, recipe.distill
        self.teacher = None if teacher is None else teacher.to(device).eval().requires_grad_(False)
        self.mixup = None
        if recipe.mixup or recipe.cutmix:
            from timm.data import Mixup

            self.mixup = Mixup(
                recipe.mixup, recipe.cutmix, prob=recipe.mix_prob, switch_prob=recipe.mix_switch,
                label_smoothing=recipe.label_smoothing, num_classes=classes,
            )  # fmt: skip

    def parts(self, batch: Batch, count: int) -> list[Tensors]:
        """Return (pixels, targets) of each part; targets are [B, classes] and smoothed where images are mixed."""
        pixels, labels = batch[:2]
        if self.channels_last:
            pixels = pixels.contiguous(memory_format=torch.channels_last)
        parts: list[Tensors] = list(zip(pixels.chunk(count), labels.chunk(count), strict=True))
        return parts if self.mixup is None else [self.mixup(part.clone(), targets) for part, targets in parts]

    def __call__(self, model: nn.Module, part: Tensors) -> Tensor:
        pixels, targets = part
        logits = _at_least_single(model(pixels))
        if targets.is_floating_point():
            loss = F.cross_entropy(logits, targets.to(logits.dtype))
        else:
            loss = F.cross_entropy(logits, targets, label_smoothing=self.smoothing)
        if self.teacher is None:
            return loss
        with torch.no_grad():
            teacher = F.log_softmax(_at_least_single(self.teacher(pixels)) / self.temperature, 1)
        student = F.log_softmax(logits / self.temperature, 1)
        distance = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
        return (1 - self.weight) * loss + self.weight * (self.temperature**2 * distance)


def _at_least_single(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def image_loader(
    images: Images,
    recipe: Recipe,
    seed: int,
    devices: Devices,
    *,
    train: bool,
    workers: int = 0,
    on_bad_image: OnBadImage = "fail",
    decoded: Batch | None = None,
    tick: Callable[[int], None] = lambda _images: None,
) -> ImageLoader:
    """Return a loader of one part of a set, as the recipe wants it.

    decoded   the part as `cached` returns it, if it was decoded before; only for a recipe that caches
    tick      called with how many more images are decoded, if the recipe caches them
    """
    size, batch = recipe.image_size, share_of(recipe.batch, devices.ranks, "images")
    sampler = partial(ResumableSampler, seed=seed, shuffle=train, rank=devices.rank, ranks=devices.ranks)
    if not recipe.cache:
        return loader(
            images, size=size, batch=batch, sampler=sampler(len(images)), train_transform=train, workers=workers,
            augment=recipe.augment, on_bad_image=on_bad_image, device=devices.device,
        )  # fmt: skip
    damage = Damage(on_bad_image, len(images))
    if decoded is None:
        decoded = cached(images, size=size, workers=workers, damage=damage, tick=tick)
    data = Batch(*(part.to(devices.device) for part in decoded))
    batches = DeviceLoader(data, batch=batch, sampler=sampler(len(data.ids)), train=train, augment=recipe.augment)
    batches.skipped = damage.skipped
    return batches


def build(model: Architecture, image_size: int, classes: int) -> nn.Module:
    """Build the model of a recipe."""
    return create_model(model.name, num_classes=classes, img_size=image_size, **model_options(model))


def model_options(model: Architecture) -> dict[str, Any]:
    """Return the options of `create_model` that a recipe sets."""
    options = {key: value for key, value in vars(model).items() if value is not None and key != "name"}
    if isinstance(model.mechanism, dict):
        if not isinstance(model.mechanism.get("name"), str):
            raise ArgumentError(f"recipe: model.mechanism is {model.mechanism!r} and must have a name")
        options["mechanism"] = mechanism(**model.mechanism)
    return options


def start_from(model: nn.Module, place: Path) -> None:
    """Load the weights of a file, or of a run's best model, and resample position tables to the model's size.

    A file must fit the rest of the model. The head of a run is left out if it has another number of classes.
    """
    from softless.timm import fit_tables

    if not place.is_dir():
        load_weights(model, place, fit=partial(fit_tables, model=model))
        return
    own, weights = model.state_dict(), fit_tables(trained(place)[0].state_dict(), model)
    if weights["head.bias"].shape != own["head.bias"].shape:
        weights |= {name: own[name] for name in own if name.startswith("head.")}
    if problems := mismatches(weights, own):
        raise FileError(f"the model of {place} does not fit this one: {'; '.join(problems)}")
    model.load_state_dict(weights)


def trained(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """Return the best model of a run, and the run's document with the update of these weights."""
    saved, about = best_of(folder)
    recipe = from_document(about["recipe"])
    model = build(recipe.model, recipe.image_size, len(about["classes"]))
    load_best(model, saved)
    return model, about


def check_classes(folder: Path, about: Mapping[str, Any], classes: tuple[str, ...]) -> None:
    """Raise an error if the run in this folder was trained on other classes than these."""
    if (known := tuple(about["classes"])) != classes:
        theirs, ours = counted_classes(known), counted_classes(classes)
        raise ArgumentError(f"{folder} was trained on {theirs}, and the images have {ours}")


def teacher_of(folder: Path, recipe: Recipe, classes: tuple[str, ...]) -> nn.Module:
    """Return the best model of a run as a teacher; it sees the student's pixels, so both must prepare images alike."""
    model, about = trained(folder)
    check_classes(folder, about, classes)
    before = from_document(about["recipe"])
    for key, theirs, ours in (
        ("image_size", before.image_size, recipe.image_size),
        ("augment.mean", before.augment.mean, recipe.augment.mean),
        ("augment.std", before.augment.std, recipe.augment.std),
    ):
        if theirs != ours:
            raise ArgumentError(f"the teacher in {folder} was trained with {key} {theirs}, and the recipe has {ours}")
    return model
