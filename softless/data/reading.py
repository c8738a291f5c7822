"""Read images with worker processes, in a given order, and decide what to do about bad ones.

A worker never raises an error for a bad image. It returns the pixels of an image, or its name and what is wrong, and
the process that trains decides what to do.
"""

import random
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from softless.data.images import Images
from softless.data.sampler import key
from softless.errors import ArgumentError, FileError
from softless.io.pictures import BadImage

OnBadImage = Literal["fail", "skip"]

LIMIT = 0.001  # share of a set that may be skipped


class Batch(NamedTuple):
    """Some images of a set.

    pixels   [B, 3, H, W]: uint8 as they were read, float32 once a loader has normalized them
    labels   int64 [B]
    ids      int64 [B]: the index of each image in its set
    """

    pixels: Tensor
    labels: Tensor
    ids: Tensor


class Draw(NamedTuple):
    """The index of an image to read, and the numbers that seed its augmentation."""

    image: int
    seeds: tuple[int, ...] = ()


class Bad(NamedTuple):
    """An image that cannot be decoded, and why."""

    name: str
    why: str


Reading = tuple[Any, ...] | Bad


class Named(Protocol):
    """A set whose images have names."""

    def names(self, index: int) -> str: ...


class Damage:
    """Decides what to do about images that cannot be decoded, and remembers which ones were skipped.

    fail   stop at the first bad image, and name it
    skip   leave the image out, remember its name, and stop when more than 0.1 % of the set are bad

    An image that comes again in another epoch counts once. Each process has its own count; a training collects the
    skipped images of all processes (`skipped.json`).
    """

    def __init__(self, on_bad_image: OnBadImage, images: int) -> None:
        if on_bad_image not in ("fail", "skip"):
            raise ArgumentError(f"on_bad_image is {on_bad_image!r} and must be 'fail' or 'skip'")
        self.on_bad_image, self.images = on_bad_image, images
        self.skipped: dict[str, str] = {}  # name -> why

    def met(self, name: str, why: str) -> None:
        """Remember a bad image with the first reason that was found, or raise an error."""
        if self.on_bad_image == "fail":
            raise BadImage(name, why)
        self.skipped.setdefault(name, why)
        if len(self.skipped) > LIMIT * self.images:
            raise FileError(
                f"{name}: {why}; {len(self.skipped)} of {self.images} images are damaged by now, and skip leaves out "
                f"at most {LIMIT:.1%} of them: {int(LIMIT * self.images)}"
            )


class SafeReader(Dataset[Reading]):
    """A dataset of what `read` returns, or of `Bad`: it never raises an error for a bad example.

    images   Named: the set, for the names of bad images
    """

    def __init__(self, images: Named) -> None:
        self.named = images

    def __getitem__(self, draw: Draw) -> Reading:
        try:
            return self.read(draw)
        except BadImage as error:
            return Bad(error.name, error.why)
        except FileError as error:
            return Bad(self.named.names(draw.image), str(error))

    def read(self, draw: Draw) -> tuple[Any, ...]:
        """Read one example, and augment it with the numbers of the draw."""
        raise NotImplementedError

    def stacked(self, sound: Sequence[Any]) -> Any:
        """Stack what `read` returned into a batch, possibly of no examples."""
        raise NotImplementedError

    def gather(self, readings: Sequence[Reading]) -> tuple[Any, tuple[Bad, ...]]:
        """Return a batch and the bad examples. Workers do this, because one tensor travels faster than many."""
        sound = [reading for reading in readings if not isinstance(reading, Bad)]
        return self.stacked(sound), tuple(reading for reading in readings if isinstance(reading, Bad))


class Reader(SafeReader):
    """A dataset of (pixels, label, index), with the pixels as a transform returns them."""

    def __init__(self, images: Images, change: Callable[[Any], Tensor | np.ndarray]) -> None:
        super().__init__(images)
        self.images, self.change = images, change

    def read(self, draw: Draw) -> tuple[Tensor, int, int]:
        image, label, _ = self.images[draw.image]
        with augmented_by(draw):
            return torch.as_tensor(self.change(image)), label, draw.image

    def stacked(self, sound: Sequence[tuple[Tensor, int, int]]) -> Batch:
        pixels = (
            torch.stack([pixels for pixels, _, _ in sound]) if sound else torch.empty(0, 3, 1, 1, dtype=torch.uint8)
        )
        labels, ids = (torch.tensor([reading[part] for reading in sound], dtype=torch.int64) for part in (1, 2))
        return Batch(pixels, labels, ids)


def augmented_by(draw: Draw) -> AbstractContextManager[None]:
    """Return a context in which the numbers of a draw seed all generators; a draw without numbers seeds none."""
    return seeded(*draw.seeds) if draw.seeds else nullcontext()


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Seed all generators from these numbers for the body, and restore their state afterwards."""
    seed = key(*numbers)
    before = random.getstate(), np.random.get_state(), torch.default_generator.get_state()  # noqa: NPY002
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 timm draws from it
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.default_generator.set_state(before[2])


def read_all(reader: SafeReader, draws: Iterable[list[Draw]], workers: int) -> Iterator[tuple[Any, tuple[Bad, ...]]]:
    """For each list of draws, yield the images that could be read, and the names of the others."""
    batches = DataLoader(
        reader,
        batch_sampler=draws,
        num_workers=workers,
        collate_fn=reader.gather,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # its own, so that the trainer's random numbers stay as they are
    )
    try:
        with signals_blocked():
            reading = iter(batches)
        yield from reading
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise FileError(f"a process that reads images died ({error})") from None


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block SIGINT and SIGTERM in the workers that the body starts; here, a signal arrives after the body."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
