"""The interface between the trainer and a task, such as image classification.

The trainer (loop, engine, snapshot, devices, run) makes updates, saves them and resumes, on one rank or many. A `Task`
provides the rest:

    model      the network, built from a recipe and the data
    batches    `train` and `test`: loaders whose batches are finished tensors on the device
    loss       the loss of a batch, and how a batch is split and mixed before
    metrics    what an evaluation measures, and which number decides whether the weights are the best so far

A new task is a new file in this folder, and the trainer stays as it is.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from softless.data.sampler import ResumableSampler
from softless.train.devices import Devices

Tensors = tuple[Tensor, ...]


class Batches(Protocol):
    """A loader. Iterating it gives an epoch, or what is left of the epoch.

    A batch is a named tuple of tensors on the device. Its field `ids`, int64 [B], says which examples it holds.

    sampler     the order, and the position in the epoch
    batch       examples per batch on this rank
    per_epoch   batches of a complete epoch, on the rank with the most
    skipped     name -> reason of the examples that could not be read so far
    """

    sampler: ResumableSampler
    batch: int
    per_epoch: int
    skipped: dict[str, str]

    def __iter__(self) -> Iterator[Any]: ...

    def blank(self) -> Any:
        """Return a batch of one empty example."""


class Loss(Protocol):
    """The loss of a batch."""

    def parts(self, batch: Any, count: int) -> list[Tensors]:
        """Split a batch into `count` parts, one per pass, and mix or mask each part as the task wants."""

    def __call__(self, model: nn.Module, part: Tensors) -> Tensor:
        """Return the mean loss of a part, a scalar."""


@dataclass(frozen=True)
class Evaluation:
    """The result of one evaluation.

    loss       mean loss over the examples; training stops if it is not finite
    numbers    what the log and the checkpoints show, by name
    document   everything that was measured, as JSON; saved with the best weights
    answers    a result per example, as JSON, to compare two models example by example; None if the task has none
    """

    loss: float
    numbers: dict[str, float]
    document: Mapping[str, Any]
    answers: Mapping[str, Any] | None = None


class Metrics(Protocol):
    """Sums over the batches of an evaluation."""

    def add(self, model: nn.Module, batch: Any) -> None:
        """Run the model on a batch, and count its answers."""

    def tensors(self) -> list[Tensor]:
        """Return the sums, which the trainer adds up over ranks in place."""

    def evaluation(self) -> Evaluation: ...


@runtime_checkable
class KeepsApart(Metrics, Protocol):
    """Metrics that also keep what no sum can hold.

    kept   index of an example -> what was found; the trainer gives every rank that of all ranks
    """

    kept: dict[int, Any]


class Task(Protocol):
    """Everything that the trainer needs to know about what it trains.

    unit               the word for examples, in the plural: "images"
    speed_unit         the word for what the log counts per second, and how many of these an example has: ("images", 1)
    metric             the number of `Evaluation.numbers` that decides which weights are the best
    higher_is_better   whether the best weights have the highest number; False means the lowest
    """

    unit: str
    speed_unit: tuple[str, int]
    metric: str
    higher_is_better: bool
    model: nn.Module
    train: Batches
    test: Batches
    loss: Loss

    def metrics(self) -> Metrics:
        """Begin an evaluation."""

    def names(self, ids: list[int]) -> list[str]:
        """Return the names of training examples, for a report to the user."""


M = TypeVar("M", bound=Metrics)


def evaluate(model: nn.Module, batches: Batches, metrics: Callable[[], M], devices: Devices) -> M:
    """Run a model on every example once, and return the metrics over all ranks.

    A compiled model runs uncompiled here, because the last batch is smaller, and torch would compile for each size. All
    ranks of a sharded model must make equally many passes, so a rank with fewer batches adds passes on a blank batch.
    """
    model.eval()
    counted, passes = metrics(), 0
    batches.sampler.load_state_dict({"epoch": 0, "position": 0})
    with torch.no_grad(), devices.autocast(), torch.compiler.set_stance("force_eager"):
        for batch in batches:
            counted.add(model, batch)
            passes += 1
        for _ in range(batches.per_epoch - passes if devices.sharing == "fsdp" else 0):
            metrics().add(model, batches.blank())
    devices.add_up(counted.tensors())
    if isinstance(counted, KeepsApart):
        counted.kept = {index: answers for rank in devices.gather(counted.kept) for index, answers in rank.items()}
    return counted


def all_skipped(batches: Batches, devices: Devices) -> dict[str, str]:
    """Return name -> reason of the examples that any rank has skipped; every rank must call this."""
    return dict(sorted(item for rank in devices.gather(batches.skipped) for item in rank.items()))
