"""What segmentation and detection have in common as tasks: how they are built and loaded."""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from softless.data.annotated import AnnotatedImages
from softless.data.loading import WorkerLoader
from softless.data.reading import Damage
from softless.data.sampler import ResumableSampler, share_of
from softless.errors import ArgumentError
from softless.train.dense_recipe import AnyDense, DenseRecipe
from softless.train.devices import Devices
from softless.train.recipe import recipe_of
from softless.train.tasks import Batches, Loss


class DenseTask:
    """A `Task` whose images have masks or boxes: the base class.

    model          the network: `features`, a backbone, and a head
    splits         (train, test): the annotated images
    train, test    their loaders (`loader`)
    recipe         the recipe of the task
    """

    unit, metric, higher_is_better = "images", "", True
    speed_unit = "images", 1
    loads: ClassVar[Any]  # makes a loader of annotated images, as `mask_loader` does
    graphs: ClassVar[bool]  # whether all updates have the same shapes, as a CUDA graph needs it

    def __init__(self, model: nn.Module, splits: tuple[Any, Any], train: WorkerLoader, test: WorkerLoader, recipe: Any):
        self.model, self.images = model, splits[0]
        if recipe.channels_last:
            self.model.to(memory_format=torch.channels_last)
        self.train: Batches = train
        self.test: Batches = test
        self.loss: Loss = self.loss_of(recipe)
        self.metrics = partial(self.counts, splits[1], test.device)

    @staticmethod
    def build(recipe: Any, classes: int) -> Any:
        """Build the network of a recipe."""
        raise NotImplementedError

    @staticmethod
    def loss_of(recipe: Any) -> Loss:
        """Return the loss of a recipe."""
        raise NotImplementedError

    @staticmethod
    def counts(images: Any, device: torch.device) -> Any:
        """Begin an evaluation on these images."""
        raise NotImplementedError

    @classmethod
    def loader(
        cls, images: AnnotatedImages, recipe: DenseRecipe, seed: int, devices: Devices, damage: Damage, *, train: bool,
        workers: int,
    ) -> WorkerLoader:  # fmt: skip
        """Return a loader of one part of a set, as the recipe wants it."""
        sampler = ResumableSampler(len(images), seed=seed, shuffle=train, rank=devices.rank, ranks=devices.ranks)
        return cls.loads(
            images, size=recipe.size, batch=share_of(recipe.batch, devices.ranks, "images"), sampler=sampler,
            train=train, augment=recipe.augment, workers=workers, damage=damage, device=devices.device,
        )  # fmt: skip

    def names(self, ids: list[int]) -> list[str]:
        return [self.images.names(index) for index in ids]


def dense_recipe(document: Mapping[str, Any], what: str) -> AnyDense:
    """Return the recipe of a document that trains a segmentation or a detection."""
    recipe = recipe_of(document)
    if not isinstance(recipe, AnyDense):
        raise ArgumentError(
            f"{what} has no masks or boxes to learn, and a recipe with task = 'segment' or task = 'detect' is needed"
        )
    return recipe
