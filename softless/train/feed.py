"""Batches on their way to a device: read and augmented as they are needed, or kept there and augmented there.

`Cached` copies a set to the device once, as uint8; a batch is then a few indices, and the host has nothing to wait for.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from softless.data.augment import Augment
from softless.data.device_augment import change, finish
from softless.data.images import Images
from softless.data.reading import Batch
from softless.data.sampler import ResumableSampler
from softless.errors import ArgumentError


class Batches(Protocol):
    """One epoch, or what is left of it, each time it is iterated."""

    sampler: ResumableSampler

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Batch]: ...


class Cached:
    """Batches of a set that is on the device. `ids` stay on the CPU, in the order of the sampler."""

    def __init__(self, kept: Batch, sampler: ResumableSampler, device: torch.device, *, batch: int, whole: bool):
        if whole and batch * sampler.ranks > sampler.total:
            raise ArgumentError(
                f"a batch of {batch} on {sampler.ranks} ranks needs {batch * sampler.ranks} images, and an epoch has "
                f"{sampler.total}"
            )
        self.sampler, self.batch, self.whole = sampler, batch, whole
        self.pixels, self.labels, self.ids = kept.pixels.to(device), kept.labels.to(device), kept.ids

    def __len__(self) -> int:
        return self.sampler.shared // self.batch if self.whole else -(-len(self.sampler) // self.batch)

    def __iter__(self) -> Iterator[Batch]:
        order = torch.tensor(list(self.sampler)[: len(self) * self.batch], dtype=torch.int64)
        there = order.to(self.pixels.device, non_blocking=True)
        for start in range(0, len(order), self.batch):
            here = there[start : start + self.batch]
            self.sampler.advance(len(here))
            yield Batch(self.pixels[here], self.labels[here], self.ids[order[start : start + self.batch]])


class Feed:
    """The images of one part of a set, an epoch at a time."""

    def __init__(self, images: Images, batches: Batches, augment: Augment, device: torch.device, *, train: bool):
        self.images, self.batches, self.augment, self.device, self.train = images, batches, augment, device, train
        self.classes = len(images.classes)
        self.per_epoch = len(batches)

    @property
    def sampler(self) -> ResumableSampler:
        return self.batches.sampler

    def begin(self, epoch: int) -> None:
        """To train, an epoch that was begun goes on where it is; to test, all images come again."""
        if self.train:
            self.sampler.set_epoch(epoch)
        else:
            self.sampler.load_state_dict({"epoch": 0, "position": 0})

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def finish(self, batch: Batch, number: int = 0) -> tuple[Tensor, Tensor]:
        """Pixels as a model sees them, and labels, on the device; what is random follows from the number."""
        pixels, labels = (part.to(self.device, non_blocking=True) for part in (batch.pixels, batch.labels))
        if not self.train:
            return finish(pixels, self.augment), labels
        generator = torch.Generator(self.device).manual_seed(number)
        if isinstance(self.batches, Cached):
            pixels = change(pixels, self.augment, generator)
        return finish(pixels, self.augment, generator), labels
