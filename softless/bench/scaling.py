"""Compare mechanisms with PyTorch's SDPA as the number of tokens grows.

seconds   median of the repeats; the calls take turns, so that a slow moment of the machine affects all of them
speedup   SDPA's seconds / own seconds, from the same rounds
peak      most bytes that PyTorch held at once during a call, beyond those it held before: the output and every
          temporary, including those inside one kernel. Buffers that a BLAS library keeps for itself do not count.
growth    value at 2 N / value at N, from the two longest lengths: 2 is linear, 4 is quadratic
crossover the N from which a mechanism stays faster than SDPA, interpolated on log-log axes
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import exp, log

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from softless.bench.cost import Shape, Terms, weights_shortage
from softless.errors import ArgumentError, did_you_mean
from softless.functional import attention
from softless.mechanisms import Mechanism, list_mechanisms, mechanism, resolve
from softless.stopwatch import Tick, peak_bytes, time_in_turns

REFERENCE = "SDPA"


@dataclass(frozen=True)
class Case:
    """A mechanism and its name in a report. `head_dim` replaces the study's if the number of features grows with it."""

    label: str
    name: str
    options: dict[str, object] = field(default_factory=dict)
    head_dim: int | None = None

    @property
    def mechanism(self) -> Mechanism:
        return mechanism(self.name, **self.options)


CASES = (
    Case("softmax", "softmax"),
    Case("inline", "inline"),
    Case("linear elu", "linear", {"phi": "elu"}),
    Case("linear relu", "linear", {"phi": "relu"}),
    Case("efficient", "efficient"),
    Case("taylor", "taylor"),
    Case("taylor order 2", "taylor", {"order": 2}, head_dim=16),
    Case("hydra", "hydra"),
    Case("angular", "angular"),
    Case("focused", "focused"),
    Case("threshold", "threshold"),
    Case("threshold minimax", "threshold", {"expansion": "minimax", "tail": "mean"}),
    Case("asymmetric", "asymmetric_nonlocal"),
)


def study_cases() -> tuple[Case, ...]:
    """Return `CASES`, then every other mechanism that runs on q, k and v alone, with its default options."""
    named = {case.name for case in CASES}
    others = (Case(name, name) for name in list_mechanisms() if name not in named)
    return (*CASES, *(case for case in others if _runs_alone(case)))


def cases_named(names: Iterable[str]) -> tuple[Case, ...]:
    """Return cases by label, or mechanisms by name with their default options; "all" returns every case."""
    every = study_cases()
    known = {case.name: Case(case.name, case.name) for case in every} | {case.label: case for case in every}
    names = list(dict.fromkeys(names))
    if names == ["all"]:
        return every
    if unknown := [name for name in names if name not in known]:
        hint = did_you_mean(unknown[0], known) or f"there are {', '.join(known)}, or all"
        raise ArgumentError(f"{', '.join(map(repr, unknown))} cannot be compared: {hint}")
    return tuple(known[name] for name in names)


def _runs_alone(case: Case) -> bool:
    try:
        mechanism = case.mechanism
    except ArgumentError:
        return False
    return not mechanism.inputs and not mechanism.needs_grid and mechanism.lacks(is_causal=False) is None


@dataclass(frozen=True)
class Lap:
    """One mechanism at one length. `skipped` is the reason if there are no numbers."""

    label: str
    tokens: int
    head_dim: int
    seconds: float | None = None
    fastest: float | None = None
    repeats: int = 0
    speedup: float | None = None
    peak_bytes: int | None = None
    skipped: str | None = None


@dataclass(frozen=True)
class Trend:
    """How a mechanism scales. `crossover` is None if the mechanism is not faster at the longest length."""

    label: str
    head_dim: int
    seconds_growth: float | None
    bytes_growth: float | None
    crossover: int | None
    faster_everywhere: bool


@torch.inference_mode()
def race(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g m d"],
    v: Float[Tensor, "b g m e"],
    mechanisms: Mapping[str, str | Mechanism],
    *,
    repeats: int = 5,
    tick: Tick = lambda _: None,
) -> tuple[Lap, ...]:
    """Run SDPA and every mechanism in turns. `tick` gets each label `repeats + 1` times, to show progress."""
    shape = Shape.of(q, k)
    terms = Terms(shape=shape, dtype=q.dtype, device=q.device.type)
    calls: dict[str, Callable[[], Tensor]] = {
        REFERENCE: partial(F.scaled_dot_product_attention, q, k, v, enable_gqa=terms.grouped)
    }
    skipped: dict[str, str] = {}
    for label, name in mechanisms.items():
        calls[label] = partial(attention, q, k, v, name)
        if reason := weights_shortage(resolve(name), terms):
            skipped[label] = reason
    peaks: dict[str, int] = {}
    for label, call in calls.items():
        tick(label)
        if label not in skipped:
            peaks[label] = peak_bytes(call, q.device)
    for label in skipped:
        for _ in range(repeats):
            tick(label)
    timings = time_in_turns({label: calls[label] for label in peaks}, repeats=repeats, tick=tick)

    def lap(label: str) -> Lap:
        if label in skipped:
            return Lap(label, shape.queries, shape.head_dim, skipped=skipped[label])
        timing = timings[label]
        numbers = timing.seconds, timing.fastest, timing.repeats, timings[REFERENCE].seconds / timing.seconds
        return Lap(label, shape.queries, shape.head_dim, *numbers, peaks[label])

    return tuple(map(lap, calls))


def trend(laps: Sequence[Lap]) -> Trend:
    """Return how one mechanism scales over its laps, shortest first."""
    timed = [lap for lap in laps if lap.seconds and lap.speedup]
    seconds = [(lap.tokens, lap.seconds) for lap in timed if lap.seconds]
    bytes_ = [(lap.tokens, lap.peak_bytes) for lap in timed if lap.peak_bytes]
    speedups = [(lap.tokens, lap.speedup) for lap in timed if lap.speedup]
    growth = growth_per_doubling(seconds), growth_per_doubling(bytes_)
    everywhere = bool(speedups) and all(value > 1 for _, value in speedups)
    return Trend(laps[0].label, laps[0].head_dim, *growth, faster_from(speedups), everywhere)


def growth_per_doubling(points: Sequence[tuple[int, float]]) -> float | None:
    """Return (y2 / y1)^(log 2 / log(x2 / x1)) of the last two points."""
    if len(points) < 2:
        return None
    (x1, y1), (x2, y2) = points[-2:]
    return (y2 / y1) ** (log(2) / log(x2 / x1))


def faster_from(speedups: Sequence[tuple[int, float]]) -> int | None:
    """Return the x from which the speedup stays above 1, or None if the last speedup is not above 1."""
    if not speedups or speedups[-1][1] <= 1:
        return None
    start = speedups[0][0]
    for (x1, y1), (x2, y2) in pairwise(speedups):
        if y1 <= 1 < y2:
            start = round(exp(log(x1) + log(x2 / x1) * -log(y1) / log(y2 / y1)))
    return start
