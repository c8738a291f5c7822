"""Images read by worker processes, in the order asked for.

A worker answers for every image: with its pixels, or with its name and what is wrong with it. It never raises, so the
process that trains knows which file it was, and decides.
"""

import random
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from softless.data.images import Images
from softless.data.sampler import key
from softless.errors import FileError
from softless.io.pictures import BadImage


class Batch(NamedTuple):
    """Pixels uint8 [B, 3, H, W], labels int64 [B], ids int64 [B]: which images of the set they are."""

    pixels: Tensor
    labels: Tensor
    ids: Tensor


class Draw(NamedTuple):
    """An image to read, and the numbers that what is random about it is drawn from."""

    image: int
    seeds: tuple[int, ...] = ()


class Bad(NamedTuple):
    """What comes in place of an image that cannot be decoded."""

    name: str
    why: str


Reading = tuple[Tensor, int, int] | Bad


class Reader(Dataset[Reading]):
    """(pixels, label, index) of one image as a transform leaves it."""

    def __init__(self, images: Images, change: Callable[[Any], Tensor | np.ndarray]) -> None:
        self.images, self.change = images, change

    def __getitem__(self, draw: Draw) -> Reading:
        try:
            image, label, _ = self.images[draw.image]
            with seeded(*draw.seeds) if draw.seeds else nullcontext():
                return torch.as_tensor(self.change(image)), label, draw.image
        except BadImage as error:
            return Bad(error.name, error.why)
        except FileError as error:
            return Bad(self.images.names(draw.image), str(error))


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Inside, whatever a transform draws follows from the numbers; outside, nothing has been drawn."""
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


def read_all(reader: Reader, draws: Iterable[list[Draw]], workers: int) -> Iterator[tuple[Batch, tuple[Bad, ...]]]:
    """For each list of draws, the images that could be read and those that could not."""
    batches = DataLoader(
        reader,
        batch_sampler=draws,
        num_workers=workers,
        collate_fn=gather,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # its own: the trainer's random numbers are not touched
    )
    try:
        with deaf():
            reading = iter(batches)
        yield from reading
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise FileError(f"a process that reads images died ({error}): without workers it would be this one") from None


@contextmanager
def deaf() -> Iterator[None]:
    """Processes begun inside never hear a signal to stop: it is for the one that trains, and that needs their images.

    A signal that comes meanwhile waits for the end.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def gather(readings: Sequence[Reading]) -> tuple[Batch, tuple[Bad, ...]]:
    """In the worker: one tensor travels faster than many."""
    sound = [reading for reading in readings if not isinstance(reading, Bad)]
    pixels = torch.stack([pixels for pixels, _, _ in sound]) if sound else torch.empty(0, 3, 1, 1, dtype=torch.uint8)
    labels, ids = (torch.tensor([reading[part] for reading in sound], dtype=torch.int64) for part in (1, 2))
    return Batch(pixels, labels, ids), tuple(each for each in readings if isinstance(each, Bad))
