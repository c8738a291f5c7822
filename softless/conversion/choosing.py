"""Choose the layers to convert: measure the damage of each alone, then find how many the budget allows.

    alone        the harm of the model with only this layer replaced
    measured     layers in the order of their damage, the least first
    the others   first, last, every second, probe (the smallest error to first order), random: to compare with

The harm of a set of layers is measured sample by sample against the original, and stored by the set. So no set is
measured twice, whichever order asks for it.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from softless.conversion.fitting import Advance, Fitted
from softless.conversion.layers import Layers
from softless.conversion.metrics import Metric, Rows, damage
from softless.conversion.samples import SampleSet, batches, count
from softless.conversion.shortcut import Shortcut
from softless.conversion.stand_ins import Replacement
from softless.errors import NonFiniteError
from softless.io.parts import stored
from softless.probes.running import Estimate

MEASURED, RANDOM_ORDERS = "measured", 3


class Ruler:
    """Measures the harm of sets of layers on one part of the data."""

    def __init__(
        self, layers: Layers, fitted: Sequence[Fitted], metric: Metric, samples: SampleSet, *, name: str, size: int,
        depends_on: Mapping[str, Any], work: Path | None, advance: Advance,
    ):  # fmt: skip
        self.layers, self.fitted, self.metric, self.samples = layers, fitted, metric, samples
        self.name, self.size, self.depends_on, self.work, self.advance = name, size, depends_on, work, advance
        self.known: dict[tuple[int, ...], Rows | None] = {}
        self._before: Tensor | None = None

    @property
    def before(self) -> Tensor:
        """The answers of the original model."""
        if self._before is None:
            self._before = self._answers("measuring the original")
            if not torch.isfinite(self._before).all():
                raise NonFiniteError(
                    f"the {self.metric.noun} of {type(self.layers.model).__name__} is not a finite number: there is "
                    "nothing to compare with"
                )
        return self._before

    def compared(self, chosen: Sequence[int], label: str, shortcut: Shortcut | None = None) -> Rows | None:
        """Return what each sample loses if these layers are converted; None if it is not finite."""
        key = tuple(sorted(chosen))
        if key not in self.known:
            self.known[key] = self._stored(key, label, shortcut)
        return self.known[key]

    def harm(self, chosen: Sequence[int], label: str) -> Estimate | None:
        """Return the harm of a set of layers."""
        compared = self.compared(chosen, label)
        return None if compared is None else self.metric.harm(compared)

    def now(self, name: str, also: Mapping[str, Any], label: str) -> Rows | None:
        """Return what each sample loses in the model as it is now; what is stored under this name depends on `also`."""

        def measure() -> Rows | None:
            rows = self.metric.compare(self.before, self._answers(label))
            return rows.tolist() if bool(torch.isfinite(rows).all()) else None

        if self.work is None:
            return measure()
        rows: Rows | None = stored(self.work / self.name / f"{name}.json", {**also, "part": self.name}, measure)
        return rows

    def _stored(self, key: tuple[int, ...], label: str, shortcut: Shortcut | None) -> Rows | None:
        def measure() -> Rows | None:
            if any(self.fitted[layer].stand_in is None for layer in key):
                return None
            before = self.before  # of the original, so not inside the next lines
            if shortcut is not None:
                shortcut.go_to(key[0])
            with self.layers.having(stand_ins_of(self.fitted, key)):
                rows = self.metric.compare(before, self._answers(label, shortcut))
            return rows.tolist() if bool(torch.isfinite(rows).all()) else None

        if self.work is None:
            return measure()
        name = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        rows: Rows | None = stored(
            self.work / self.name / f"{name}.json", {**self.depends_on, "layers": key, "part": self.name}, measure
        )
        return rows

    def batches(self) -> Iterator[SampleSet]:
        return batches(self.samples, self.size, self.layers.device)

    @torch.no_grad()
    def _answers(self, label: str, shortcut: Shortcut | None = None) -> Tensor:
        rows: list[Tensor] = []
        for batch in self.batches():
            run = self.layers.run if shortcut is None else partial(shortcut.run, len(rows))
            rows.append(self.metric.answers(run, batch).double().cpu())
            self.advance(label, len(rows[-1]) / count(self.samples))
        return torch.cat(rows)


def stand_ins_of(fitted: Sequence[Fitted], chosen: Sequence[int]) -> dict[int, Replacement]:
    """Return the best candidates of these layers."""
    pairs = ((layer, fitted[layer].stand_in) for layer in chosen)
    return {layer: stand_in for layer, stand_in in pairs if stand_in is not None}


def alone(ruler: Ruler) -> list[Rows | None]:
    """Return the damage of each layer alone."""
    shortcut = Shortcut(ruler.layers, ruler.batches) if Shortcut.blocks(ruler.layers) else None
    names = ruler.layers.names
    return [ruler.compared([at], f"measuring {name} alone", shortcut) for at, name in enumerate(names)]


def ranked(damages: Sequence[Rows | None]) -> list[int]:
    """Return the layers in the order of their damage, the least first; layers without a finite one come last."""
    means = [damage(rows) for rows in damages]
    return sorted(range(len(means)), key=lambda at: (means[at] is None, means[at] or 0.0, at))


def add(ruler: Ruler, order: Sequence[int], budget: float) -> dict[int, Estimate | None]:
    """Return the harm of the first layers of an order by their count, for the counts that were tried.

    Layers do more harm together than the sum of what they do alone. So the first count is the one where this sum is
    half the budget. From there, steps that double find a count inside and one outside. Their gap is halved until they
    are neighbors.
    """
    harms: dict[int, Estimate | None] = {}
    low, high, step = 0, len(order) + 1, 1  # the largest count that is known to be inside, the smallest one outside
    number = max(1, _first_guess(ruler, order, budget / 2))
    while high - low > 1:
        harms[number] = ruler.harm(order[:number], f"converting {number} of {len(order)} layers")
        fits = inside(harms[number], budget)
        low, high = (number, high) if fits else (low, number)
        if fits and high > len(order):
            number = min(low + step, len(order))
        elif not fits and low == 0:
            number = max(high - step, 1)
        else:
            number = (low + high) // 2
        step *= 2
    return dict(sorted(harms.items()))


def _first_guess(ruler: Ruler, order: Sequence[int], most: float) -> int:
    """Return how many layers of an order do this much harm, if what each does alone is added."""
    total = 0.0
    for number, layer in enumerate(order):
        harm = ruler.harm([layer], f"measuring layer {layer} alone")
        total += inf if harm is None else harm.mean
        if total > most:
            return number
    return len(order)


def inside(harm: Estimate | None, budget: float) -> bool:
    """Return whether the upper end of the interval is inside the budget."""
    return harm is not None and harm.high is not None and harm.high <= budget


def orders(fitted: Sequence[Fitted], seed: int) -> dict[str, list[int]]:
    """Return the orders to compare with."""
    total = len(fitted)
    every = list(range(total))
    orders_by_name = {
        "first": every,
        "last": every[::-1],
        "every second": [*every[::2], *every[1::2]],
        "probe": sorted(every, key=lambda at: fitted[at].first_order_error),
    }
    for number in range(1, RANDOM_ORDERS + 1):
        orders_by_name[f"random {number}"] = Random(f"{seed} {number}").sample(every, total)  # noqa: S311  no secret
    return orders_by_name


def counts(total: int, chosen: int) -> list[int]:
    """Return the numbers of layers at which orders are compared: quarters, and what was chosen."""
    return sorted({max(1, round(total * share / 4)) for share in (1, 2, 3, 4)} | ({chosen} - {0}))


def compare(ruler: Ruler, named: Mapping[str, Sequence[int]], at: Sequence[int]) -> dict[str, list[Estimate | None]]:
    """Return the harm of each order at these numbers of layers."""
    return {
        name: [ruler.harm(order[:number], f"order {name}, {number} layers") for number in at]
        for name, order in named.items()
    }
