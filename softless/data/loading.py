"""Batches of images: decoded and augmented by worker processes, or once and for all.

    loader   reads as it goes, for sets of any size
    cached   decodes a set of small images into one tensor, for a device to augment (`device_loading`)

The randomness of a sample is drawn from (seed, epoch, index, repeat) and from nothing else, so neither the number of
workers nor a resumed run changes a pixel. Pixels are uint8: `device_augment.finish` makes them what a model sees.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from softless.data.augment import Augment, squeeze, transform
from softless.data.damage import Damage, OnBadImage
from softless.data.images import Images
from softless.data.reading import Batch, Draw, Reader, gather, read_all
from softless.data.sampler import ResumableSampler
from softless.errors import ArgumentError

MOST_CACHED = 32 * 10**9  # bytes
AT_ONCE = 64  # images a worker decodes and sends


class Loader:
    """One epoch, or what is left of it, each time it is iterated. `damage` knows what was skipped."""

    def __init__(
        self, reader: Reader, sampler: ResumableSampler, damage: Damage, *, batch: int, whole: bool, workers: int
    ) -> None:
        self.reader, self.sampler, self.damage = reader, sampler, damage
        self.batch, self.whole, self.workers = batch, whole, workers

    def __len__(self) -> int:
        """Batches left of this epoch."""
        return self.sampler.batches(self.batch, whole=self.whole)

    def __iter__(self) -> Iterator[Batch]:
        """The sampler has passed a batch's images when the batch is handed out, however far the workers are."""
        for found, bad in read_all(self.reader, self._draws(), self.workers):
            for each in bad:
                self.damage.met(*each)
            self.sampler.advance(len(found.ids) + len(bad))
            if self.whole:
                yield self._filled(found)
            elif len(found.ids):
                yield found

    def _draws(self) -> Iterator[list[Draw]]:
        order, places = self.sampler.order(), self.sampler.places()
        for start in range(0, len(self) * self.batch, self.batch):
            yield [self._draw(order, place) for place in places[start : start + self.batch].tolist()]

    def _draw(self, order: np.ndarray, place: int) -> Draw:
        sampler, index = self.sampler, int(order[place])
        return Draw(index, (sampler.seed, sampler.epoch, index, place % sampler.repeats))

    def _filled(self, found: Batch) -> Batch:
        """Where images were skipped, the first ones again: ranks make as many updates, with batches of one size."""
        if len(found.ids) == self.batch:
            return found
        sound = found if len(found.ids) else self._next_sound()
        again = torch.arange(self.batch) % len(sound.ids)
        return Batch(*(part[again] for part in sound))

    def _next_sound(self) -> Batch:
        """The next image of the order that can be read; `damage` ends the search where there are too few."""
        order, place = self.sampler.order(), self.sampler.position + self.sampler.rank
        while True:
            sound, bad = gather([self.reader[self._draw(order, place % self.sampler.total)]])
            if not bad:
                return sound
            self.damage.met(*bad[0])
            place += 1


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
) -> Loader:
    """Batches of `size` x `size` pixels, in the sampler's order.

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

    train_transform   True: augmented, and whole batches only, as many for every rank; False: as the paper tests, all
    on_bad_image      fail | skip (`damage`); in training a skipped image's place is taken by another of its batch, or
                      where all are skipped by the next one of the order
    """
    sampler.check(len(images), batch, whole=train_transform)
    if workers < 0:
        raise ArgumentError(f"workers is {workers} and must be at least 0")
    reader, damage = Reader(images, transform(augment, size, train=train_transform)), Damage(on_bad_image, len(images))
    return Loader(reader, sampler, damage, batch=batch, whole=train_transform, workers=workers)


def cached(
    images: Images,
    *,
    size: int,
    workers: int = 0,
    damage: Damage | None = None,
    tick: Callable[[int], None] = lambda _images: None,
) -> Batch:
    """The whole set as one batch, squeezed to `size` x `size`; `tick` is told how many more images are done.

    damage   what to do about bad images, and which they were; None stops at the first

    Images that are skipped are not in it: `ids` says which ones are.
    """
    needed = len(images) * 3 * size * size
    if needed > MOST_CACHED:
        raise ArgumentError(
            f"{len(images)} images of {size} x {size} pixels take {needed / 1e9:.0f} GB, and at most "
            f"{MOST_CACHED / 1e9:.0f} GB are decoded at once: read them as you go"
        )
    pixels = torch.empty(len(images), 3, size, size, dtype=torch.uint8)
    sound = torch.zeros(len(images), dtype=torch.bool)
    damage, every = damage or Damage("fail", len(images)), range(len(images))
    draws = ([Draw(index) for index in every[i : i + AT_ONCE]] for i in every[::AT_ONCE])
    for found, bad in read_all(Reader(images, partial(squeeze, size=size)), draws, workers):
        for each in bad:
            damage.met(*each)
        pixels[found.ids], sound[found.ids] = found.pixels, True
        tick(len(found.ids) + len(bad))
    ids = sound.nonzero().flatten()
    labels = torch.from_numpy(images.labels)
    return Batch(pixels, labels, ids) if sound.all() else Batch(pixels[ids], labels[ids], ids)
