"""Which image comes next: a pure function of seed and epoch, cut among ranks, that can go on from anywhere.

    order      a permutation of the images, each `repeats` times in a row
    rank r     the places r, r + ranks, r + 2 ranks, ... of what is left of it
    position   how many places all ranks together have passed

Ranks that have passed equally many have passed the first `position` places, whatever their number: from a position that
2 ranks kept, 3 can go on.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from softless.errors import ArgumentError


def key(*numbers: int) -> int:
    """A 63-bit seed from several numbers: equal for equal numbers, unrelated otherwise."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


class ResumableSampler(torch.utils.data.Sampler[int]):
    """Indices of images. `advance` says which were used; iterating alone moves nothing, since loaders read ahead.

    >>> from softless.data.sampler import ResumableSampler
    >>> whole = ResumableSampler(10, seed=0)
    >>> first = list(whole)[:4]
    >>> whole.advance(4)
    >>> later = ResumableSampler(10, seed=0)
    >>> later.load_state_dict(whole.state_dict())
    >>> sorted(first + list(later))
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(
        self, length: int, *, seed: int, shuffle: bool = True, rank: int = 0, ranks: int = 1, repeats: int = 1
    ) -> None:
        for name, value, least in (("length", length, 1), ("seed", seed, 0), ("repeats", repeats, 1)):
            if value < least:
                raise ArgumentError(f"{name} is {value} and must be at least {least}")
        if not 0 <= rank < ranks:
            raise ArgumentError(f"rank {rank} is not one of {ranks} ranks, counted from 0")
        self.length, self.seed, self.shuffle = length, seed, shuffle
        self.rank, self.ranks, self.repeats = rank, ranks, repeats
        self.epoch = self.position = 0

    @property
    def total(self) -> int:
        """Places of an epoch, of all ranks together."""
        return self.length * self.repeats

    @property
    def shared(self) -> int:
        """Indices left that every rank has: some may have one more."""
        return (self.total - self.position) // self.ranks

    def order(self) -> np.ndarray:
        """The whole epoch, int64 [total]. Sorted by raw bits, since numpy's shuffle may differ by version."""
        images = np.arange(self.length)
        if self.shuffle:
            bits = np.random.PCG64(key(self.seed, self.epoch)).random_raw(self.length)
            images = np.argsort(bits, kind="stable")
        return images.repeat(self.repeats)

    def places(self) -> np.ndarray:
        """This rank's places in what is left of the order."""
        return np.arange(self.position + self.rank, self.total, self.ranks)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order()[self.places()].tolist())

    def __len__(self) -> int:
        return len(self.places())

    def batches(self, batch: int, *, whole: bool) -> int:
        """How many are left: every rank has as many whole ones, and a rest is dropped."""
        return self.shared // batch if whole else -(-len(self) // batch)

    def check(self, images: int, batch: int, *, whole: bool) -> None:
        """Refuse a set of another size, and a batch that no epoch fills."""
        if self.length != images:
            raise ArgumentError(f"the sampler is made for {self.length} images, and the set has {images}")
        if batch < 1:
            raise ArgumentError(f"a batch of {batch} has no image: it must be at least 1 on each rank")
        if whole and (needed := batch * self.ranks) > self.total:
            each = f" on each of {self.ranks} ranks" if self.ranks > 1 else ""
            raise ArgumentError(f"a batch of {batch}{each} needs {needed} images, and an epoch has {self.total}")

    def advance(self, count: int) -> None:
        """Each rank has used `count` more."""
        self.position = min(self.position + count * self.ranks, self.total)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; the present one goes on where it is."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        epoch, position = state["epoch"], state["position"]
        if not (epoch >= 0 and 0 <= position <= self.total):
            raise ArgumentError(
                f"epoch {epoch}, position {position} is no place in epochs of {self.total}: another set's?"
            )
        self.epoch, self.position = epoch, position
