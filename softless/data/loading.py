"""Batches of images as a model sees them: float32, normalized, augmented for training, and on the device.

    loader         worker processes read and augment images during training, for sets of any size
    DeviceLoader   the device holds the decoded set (`cached`) and augments it, for images as small as CIFAR-10's

Iterating a loader gives one epoch, or what is left of it. (seed, epoch, index, repeat) seed the augmentation of an
image, and (seed, update, rank) seed the rectangles that are erased. On the device, (seed, epoch, first image, rank)
seed each group of batches. So neither the number of workers nor an interruption changes a pixel.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from softless.data.augment import Augment, squeeze, transform
from softless.data.device_augment import change, finish
from softless.data.images import Images
from softless.data.reading import Batch, Damage, Draw, OnBadImage, Reader, SafeReader, read_all
from softless.data.sampler import Loader, ResumableSampler, key, update_key
from softless.errors import ArgumentError

MOST_CACHED = 32 * 10**9  # bytes
AT_ONCE = 64  # images a worker decodes and sends
AHEAD = 8  # batches augmented at once on the device: small images take as long as the number of operations


class WorkerLoader(Loader):
    """A loader whose worker processes read examples while the model trains.

    reader    SafeReader: reads an example, or says what is wrong with it
    damage    Damage: what to do about bad examples
    workers   int: processes that read; 0 reads in this one
    """

    unit = "images"

    def __init__(
        self, reader: SafeReader, damage: Damage, workers: int, sampler: ResumableSampler, device: torch.device, *,
        batch: int, train: bool,
    ) -> None:  # fmt: skip
        super().__init__(damage.images, sampler, device, batch=batch, train=train)
        self.reader, self.damage, self.workers, self.skipped = reader, damage, workers, damage.skipped

    def __iter__(self) -> Iterator[Any]:
        """Yield finished batches. The sampler advances with the batches, not with the workers, which read ahead."""
        for sound, bad in read_all(self.reader, self._draws(), self.workers):
            for image in bad:
                self.damage.met(*image)
            update = self.sampler.epoch * self.per_epoch + self.sampler.position // (self.batch * self.sampler.ranks)
            self.sampler.advance(len(sound.ids) + len(bad))
            batch = self._filled(sound) if self.train else sound
            if len(batch.ids):
                yield self._finished(batch, update)

    def blank(self) -> Any:
        """Return a batch of one empty example."""
        raise NotImplementedError

    def _finished(self, batch: Any, update: int) -> Any:
        """Return a batch as a model sees it, on the device."""
        raise NotImplementedError

    def _draws(self) -> Iterator[list[Draw]]:
        order, places = self.sampler.order(), self.sampler.places()
        for start in range(0, len(self) * self.batch, self.batch):
            yield [self._draw(order, place) for place in places[start : start + self.batch].tolist()]

    def _draw(self, order: np.ndarray, place: int) -> Draw:
        sampler, index = self.sampler, int(order[place])
        return Draw(index, (sampler.seed, sampler.epoch, index, place % sampler.repeats))

    def _filled(self, sound: Any) -> Any:
        """Repeat the first images instead of skipped ones, so that all batches have the same size on all ranks."""
        if len(sound.ids) == self.batch:
            return sound
        sound = sound if len(sound.ids) else self._next_sound()
        again = torch.arange(self.batch) % len(sound.ids)
        return sound._make(part[again] for part in sound)

    def _next_sound(self) -> Any:
        """Read on until an image can be decoded; `damage` raises an error if too many cannot."""
        order, place = self.sampler.order(), self.sampler.position + self.sampler.rank
        while True:
            sound, bad = self.reader.gather([self.reader[self._draw(order, place % self.sampler.total)]])
            if not bad:
                return sound
            self.damage.met(*bad[0])
            place += 1


class ReadingLoader(WorkerLoader):
    """A `WorkerLoader` of labeled images; `loader` builds it."""

    def __init__(self, *args: Any, augment: Augment, size: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.augment, self.size = augment, size

    def blank(self) -> Batch:
        return black(self.size, self.device)

    def _finished(self, batch: Batch, update: int) -> Batch:
        pixels, labels, ids = (part.to(self.device, non_blocking=True) for part in batch)
        generator = None
        if self.train:
            seed = update_key(self.sampler.seed, update, self.sampler.rank)
            generator = torch.Generator(self.device).manual_seed(seed)
        return Batch(finish(pixels, self.augment, generator), labels, ids)


class DeviceLoader(Loader):
    """A loader of labeled images for a set that the device holds; the device augments it too.

    data      Batch: the set as `cached` returns it, on the device
    batch     int: images per batch on this rank
    sampler   ResumableSampler: the order
    train     bool: True augments, and gives complete batches only, as many to every rank; False gives every image once
    augment   Augment: how images are augmented and normalized
    """

    unit = "images"

    def __init__(self, data: Batch, *, batch: int, sampler: ResumableSampler, train: bool, augment: Augment) -> None:
        super().__init__(len(data.pixels), sampler, data.pixels.device, batch=batch, train=train)
        self.data, self.augment = data, augment

    def blank(self) -> Batch:
        return black(self.data.pixels.shape[-1], self.device)

    def __iter__(self) -> Iterator[Batch]:
        sampler, group = self.sampler, AHEAD * self.batch
        offset, passed = sampler.position % sampler.ranks, sampler.position // sampler.ranks
        mine = sampler.order()[np.arange(offset + sampler.rank, sampler.total, sampler.ranks)]
        order = torch.from_numpy(mine).to(self.data.pixels.device)
        end = passed + len(self) * self.batch
        for first in range(passed - passed % group, end, group):
            rows = order[first : first + group]
            pixels = self._finished(rows, first)
            for start in range(max(first, passed), min(first + group, end), self.batch):
                here = slice(start - first, start - first + self.batch)
                sampler.advance(len(rows[here]))
                yield Batch(pixels[here], self.data.labels[rows[here]], self.data.ids[rows[here]])

    def _finished(self, rows: Tensor, first: int) -> Tensor:
        pixels, sampler = self.data.pixels[rows], self.sampler
        if not self.train:
            return finish(pixels, self.augment)
        seed = key(sampler.seed, sampler.epoch, first, sampler.rank)
        generator = torch.Generator(pixels.device).manual_seed(seed)
        return finish(change(pixels, self.augment, generator), self.augment, generator)


ImageLoader = ReadingLoader | DeviceLoader


def black(size: int, device: torch.device) -> Batch:
    """Return a batch of one black image."""
    pixels, zero = torch.zeros(1, 3, size, size), torch.zeros(1, dtype=torch.int64)
    return Batch(*(part.to(device) for part in (pixels, zero, zero)))


def loader(
    images: Images,
    *,
    size: int,
    batch: int,
    sampler: ResumableSampler,
    train_transform: bool,
    augment: Augment,
    workers: int,
    on_bad_image: OnBadImage = "fail",
    device: str | torch.device = "cpu",
) -> ReadingLoader:
    """Return a loader whose worker processes read and augment images.

    >>> from softless.data import open_images
    >>> from softless.data.augment import PLAIN
    >>> from softless.data.loading import loader
    >>> from softless.data.sampler import ResumableSampler
    >>> images = open_images("digits", "train")
    >>> sampler = ResumableSampler(len(images), seed=0)
    >>> batches = loader(
    ...     images, size=8, batch=100, sampler=sampler, train_transform=True, augment=PLAIN, workers=0
    ... )
    >>> len(batches), next(iter(batches)).pixels.shape
    (14, torch.Size([100, 3, 8, 8]))

    images            Images: the set
    size              int: height and width in pixels
    batch             int: images per batch on this rank
    sampler           ResumableSampler: the order
    train_transform   bool: True augments, and gives complete batches only, as many to every rank; False resizes as the
                      paper tests, and gives every image once
    augment           Augment: how images are augmented and normalized
    workers           int: processes that read images; 0 reads them in this one
    on_bad_image      "fail" (default) or "skip": what to do about an image that cannot be decoded (`Damage`); in
                      training another image of the batch, or the next intact one, replaces a skipped image
    device            default "cpu": where the batches go
    """
    check_workers(workers)
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ArgumentError(f"device is {device!r} and must be one of torch's, such as 'cpu' or 'cuda'") from error
    reader, damage = Reader(images, transform(augment, size, train=train_transform)), Damage(on_bad_image, len(images))
    return ReadingLoader(
        reader, damage, workers, sampler, place, augment=augment, size=size, batch=batch, train=train_transform
    )


def check_workers(workers: int) -> None:
    """Raise an error for a number of worker processes below 0."""
    if workers < 0:
        raise ArgumentError(f"workers is {workers} and must be at least 0")


def cached(
    images: Images,
    *,
    size: int,
    workers: int = 0,
    damage: Damage | None = None,
    tick: Callable[[int], None] = lambda _images: None,
) -> Batch:
    """Decode a set into one batch of uint8 pixels, each image squeezed to `size` x `size`.

    images    Images: the set
    size      int: height and width in pixels
    workers   int, default 0: processes that read images
    damage    Damage: what to do about bad images; default None stops at the first
    tick      called with how many more images are decoded

    Skipped images are not in the batch: `ids` says which images are.
    """
    needed = len(images) * 3 * size * size
    if needed > MOST_CACHED:
        raise ArgumentError(
            f"{len(images)} images of {size} x {size} pixels take {needed / 1e9:.0f} GB, and at most "
            f"{MOST_CACHED / 1e9:.0f} GB can be decoded at once: set cache to false in the recipe"
        )
    pixels = torch.empty(len(images), 3, size, size, dtype=torch.uint8)
    sound = torch.zeros(len(images), dtype=torch.bool)
    damage, every = damage or Damage("fail", len(images)), range(len(images))
    draws = ([Draw(index) for index in every[i : i + AT_ONCE]] for i in every[::AT_ONCE])
    for batch, bad in read_all(Reader(images, partial(squeeze, size=size)), draws, workers):
        for image in bad:
            damage.met(*image)
        pixels[batch.ids], sound[batch.ids] = batch.pixels, True
        tick(len(batch.ids) + len(bad))
    ids = sound.nonzero().flatten()
    labels = torch.from_numpy(images.labels)
    return Batch(pixels, labels, ids) if sound.all() else Batch(pixels[ids], labels[ids], ids)
