"""Every probe on every layer of a model, in one pass over its images.

    batch -> model -> q, k, v of each layer -> one number an image and head for each measure -> means and intervals

A batch is forgotten before the next one comes: memory depends on its size, not on how many there are.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from softless.errors import ArgumentError
from softless.probes.capture import capture
from softless.probes.editing import at_rest
from softless.probes.findings import Examination, Measured, Tally
from softless.probes.histogram import Histogram, histogram
from softless.probes.layer import Layer
from softless.probes.measure import measure
from softless.probes.score_range import TAU

Forward = Callable[[nn.Module, Any], object]


def examine(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Forward | None = None,
    advance: Callable[[int], object] | None = None,
    only: Callable[[str], bool] | None = None,
    tau: Sequence[float] = TAU,
) -> Examination:
    """What attention does in each layer of a model, on these batches.

    A batch is a tensor, a tuple whose first part the model takes, or a mapping of keyword arguments; `forward`(model,
    batch) runs any other. `advance`(images) is called after each batch. `only` picks layers by name.
    """
    tallies: list[Tally] = []
    images, together = 0, Histogram()
    with torch.no_grad(), at_rest(model):
        for batch in batches:
            with capture(model) as captured:
                (forward or _forward)(model, batch)
            size = _size(batch)
            found = [measure(layer, size, tau) for layer in _picked(captured.layers, only)]
            tallies = _added(tallies, found)
            together += histogram(torch.stack([each.values["confusions"].sum(1) for each in found]).sum(0))
            images += size
            if advance is not None:
                advance(size)
    if not images:
        raise ArgumentError("there is nothing to examine: batches is empty")
    return Examination(tuple(tally.findings(tau) for tally in tallies), images, together)


def _picked(layers: Sequence[Layer], only: Callable[[str], bool] | None) -> list[Layer]:
    picked = [layer for layer in layers if only is None or only(layer.name)]
    if not picked:
        raise ArgumentError(f"no layer was picked of {', '.join(layer.name for layer in layers)}")
    return picked


def _added(tallies: list[Tally], found: Sequence[Measured]) -> list[Tally]:
    if not tallies:
        return [Tally(each) for each in found]
    before, now = [tally.first.name for tally in tallies], [each.name for each in found]
    if before != now:
        raise ArgumentError(f"every batch must run the same layers: the first ran {before}, another {now}")
    for tally, each in zip(tallies, found, strict=True):
        tally.add(each)
    return tallies


def _forward(model: nn.Module, batch: Any) -> object:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, tuple | list) else batch)


def _size(batch: Any) -> int:
    """How many images or texts a batch holds."""
    if isinstance(batch, Mapping):
        batch = next(iter(batch.values()))
    parts = isinstance(batch, tuple | list) and isinstance(batch[0], Tensor)
    return len(batch[0] if parts else batch)
