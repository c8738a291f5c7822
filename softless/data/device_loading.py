"""Batches from a set that lies on the device whole, augmented there: for images as small as CIFAR-10's.

The images of several batches are augmented at once, since on small images it is the number of operations that takes the
time, not their size. Their randomness is drawn from (seed, epoch, first image, rank), so that a run that is resumed
within such a group augments it again in the same way.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from softless.data.augment import Augment
from softless.data.device_augment import change, finish
from softless.data.reading import Batch
from softless.data.sampler import ResumableSampler, key

AHEAD = 8  # batches augmented at once


class DeviceLoader:
    """One epoch, or what is left of it, each time it is iterated: float32 pixels, normalized, on the device.

    data      the whole set, as `cached` gives it, on the device
    train     True: augmented, and whole batches only, as many for every rank; False: normalized, whole, all of them
    """

    def __init__(self, data: Batch, *, batch: int, sampler: ResumableSampler, train: bool, augment: Augment) -> None:
        sampler.check(len(data.pixels), batch, whole=train)
        self.data, self.batch, self.sampler, self.train, self.augment = data, batch, sampler, train, augment

    def __len__(self) -> int:
        """Batches left of this epoch."""
        return self.sampler.batches(self.batch, whole=self.train)

    def __iter__(self) -> Iterator[Batch]:
        sampler, group = self.sampler, AHEAD * self.batch
        offset, passed = sampler.position % sampler.ranks, sampler.position // sampler.ranks
        mine = sampler.order()[np.arange(offset + sampler.rank, sampler.total, sampler.ranks)]
        order = torch.from_numpy(mine).to(self.data.pixels.device)
        end = passed + len(self) * self.batch
        for first in range(passed - passed % group, end, group):
            rows = order[first : first + group]
            pixels = self._seen(rows, first)
            for start in range(max(first, passed), min(first + group, end), self.batch):
                here = slice(start - first, start - first + self.batch)
                sampler.advance(len(rows[here]))
                yield Batch(pixels[here], self.data.labels[rows[here]], self.data.ids[rows[here]])

    def _seen(self, rows: Tensor, first: int) -> Tensor:
        pixels, sampler = self.data.pixels[rows], self.sampler
        if not self.train:
            return finish(pixels, self.augment)
        generator = torch.Generator(pixels.device)
        generator.manual_seed(key(sampler.seed, sampler.epoch, first, sampler.rank))
        return finish(change(pixels, self.augment, generator), self.augment, generator)
