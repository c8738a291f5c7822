"""The order of the examples in an epoch. It depends on seed and epoch alone, and can be resumed at any position.

    order      a permutation of the examples, each `repeats` times in a row
    rank r     gets the places r, r + ranks, r + 2 ranks, ... of the rest of the order
    position   how many places all ranks together have passed

If all ranks have passed equally many places, these are the first `position` places, whatever the number of ranks. So 3
ranks can go on from a position that 2 ranks saved.
"""

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from softless.errors import ArgumentError


def key(*numbers: int) -> int:
    """Return a 63-bit seed from several numbers: equal for equal numbers, unrelated otherwise."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def update_key(seed: int, step: int, rank: int) -> int:
    """Return the 63-bit seed of everything random in one update on one rank; step -1 comes before the first."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()[:8]) >> 1


class ResumableSampler(torch.utils.data.Sampler[int]):
    """An order of indices that can be saved and resumed.

    Iterating moves nothing, because loaders read ahead: call `advance` with the number of examples that were used.

    >>> from softless.data.sampler import ResumableSampler
    >>> sampler = ResumableSampler(10, seed=0)
    >>> first = list(sampler)[:4]
    >>> sampler.advance(4)
    >>> later = ResumableSampler(10, seed=0)
    >>> later.load_state_dict(sampler.state_dict())
    >>> sorted(first + list(later))
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]

    length    int: examples in the set, images or sequences of tokens
    seed      int, from 0
    shuffle   bool, default True; False keeps the order of the set
    rank      int, default 0: which of the ranks this process is
    ranks     int, default 1: processes that share the set
    repeats   int, default 1: how often in a row each example comes
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
        """Return the places of an epoch, over all ranks."""
        return self.length * self.repeats

    def order(self) -> np.ndarray:
        """Return the epoch, int64 [total]. It is sorted by raw bits, because numpy's shuffle may differ by version."""
        examples = np.arange(self.length)
        if self.shuffle:
            bits = np.random.PCG64(key(self.seed, self.epoch)).random_raw(self.length)
            examples = np.argsort(bits, kind="stable")
        return examples.repeat(self.repeats)

    def places(self) -> np.ndarray:
        """Return this rank's places in what is left of the order."""
        return np.arange(self.position + self.rank, self.total, self.ranks)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order()[self.places()].tolist())

    def __len__(self) -> int:
        return len(self.places())

    def batches(self, batch: int, *, complete: bool) -> int:
        """Return how many batches are left; with `complete`, how many complete ones every rank has."""
        return (self.total - self.position) // self.ranks // batch if complete else -(-len(self) // batch)

    def check(self, count: int, batch: int, *, complete: bool, unit: str) -> None:
        """Raise an error if the set has another size, or if an epoch cannot fill a batch; `unit` names the examples."""
        if self.length != count:
            raise ArgumentError(f"the sampler is made for {self.length} {unit}, and the set has {count}")
        if batch < 1:
            raise ArgumentError(
                f"a batch of {batch} has no {unit.removesuffix('s')}: it must be at least 1 on each rank"
            )
        if complete and (needed := batch * self.ranks) > self.total:
            ranks = f" on each of {self.ranks} ranks" if self.ranks > 1 else ""
            most = f": set a batch of at most {self.total}{' over all ranks' * (self.ranks > 1)}"
            advice = most if self.total >= self.ranks else ""
            have = f"an epoch has {self.total}{advice}"
            raise ArgumentError(f"a batch of {batch}{ranks} needs {needed} {unit}, and {have}")

    def advance(self, count: int) -> None:
        """Note that each rank has used `count` more examples."""
        self.position = min(self.position + count * self.ranks, self.total)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; if it is the current one, go on in it."""
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


class Loader:
    """The base class of all loaders. Iterating a loader gives one epoch in the order of its sampler.

    sampler     ResumableSampler: the order
    device      torch.device: where the batches go
    batch       int: examples per batch on this rank
    train       bool: True gives complete batches only, as many to every rank; False gives every example once
    per_epoch   int: batches of a complete epoch, on the rank with the most
    skipped     dict: the name of each example that was left out so far, and why
    """

    unit = "examples"

    def __init__(self, count: int, sampler: ResumableSampler, device: torch.device, *, batch: int, train: bool) -> None:
        sampler.check(count, batch, complete=train, unit=self.unit)
        self.sampler, self.device, self.batch, self.train = sampler, device, batch, train
        shared = batch * sampler.ranks
        self.per_epoch = sampler.total // shared if train else -(-sampler.total // shared)
        self.skipped: dict[str, str] = {}

    def __len__(self) -> int:
        """Return how many batches of this epoch are left."""
        return self.sampler.batches(self.batch, complete=self.train)


def share_of(batch: int, ranks: int, unit: str) -> int:
    """Return how many examples of a batch each rank gets; each needs at least one."""
    if batch < ranks:
        one = unit.removesuffix("s")
        raise ArgumentError(
            f"a batch of {batch} is too small: it needs at least one {one} for each of {ranks} processes"
        )
    return batch // ranks
