"""Time and peak memory of mechanisms against PyTorch's own SDPA, measured side by side.

seconds   median of the repeats; calls take turns, so a slow moment of the machine hits all of them alike
speedup   SDPA's seconds / own seconds, from the same turns
peak      most bytes PyTorch held at once during a call, beyond what was there before: the output and every
          temporary, also those inside one kernel. Buffers a BLAS library keeps for itself are not seen.
growth    value at 2 N / value at N, from the two longest lengths: 2 is linear, 4 is quadratic
crossover the N from which a mechanism stays faster than SDPA, interpolated on log-log axes
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from statistics import median

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from softless.bench.cost import EXPLICIT, form
from softless.bench.memory import free_bytes, peak_bytes
from softless.functional import attention
from softless.mechanisms import Mechanism, mechanism

REFERENCE = "SDPA"
SHORTEST_TIMING = 0.005  # seconds: faster calls are timed several at a time
SLOW, SLOW_REPEATS = 1.0, 3  # a call slower than this many seconds is repeated no more than this
EXPLICIT_COPIES = 6  # weight-sized tensors alive at once in the explicit form, measured with `threshold`


@dataclass(frozen=True)
class Lap:
    """One mechanism at one length. `skipped` says why there are no numbers."""

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
    """How a mechanism scales. `crossover` is None where it is not faster at the longest length."""

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
    tick: Callable[[str], None] = lambda _: None,
) -> tuple[Lap, ...]:
    """Run every mechanism and SDPA in turns. `tick` is told each label `repeats + 1` times, to show progress."""
    grouped = k.shape[1] != q.shape[1]
    calls: dict[str, Callable[[], Tensor]] = {
        REFERENCE: lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)
    }
    for label, made in mechanisms.items():
        calls[label] = lambda made=made: attention(q, k, v, made)  # type: ignore[misc]
    skipped = {label: reason for label, made in mechanisms.items() if (reason := _too_large(made, q, k))}
    first: dict[str, float] = {}
    peaks: dict[str, int] = {}
    for label, call in calls.items():
        tick(label)
        if label not in skipped:
            peaks[label] = peak_bytes(call, q.device)
            first[label] = _seconds(call, 1, q.device)
    times: dict[str, list[float]] = {label: [] for label in calls}
    for turn in range(repeats):
        for label, call in calls.items():
            tick(label)
            if label in first and (turn < SLOW_REPEATS or first[label] < SLOW):
                times[label].append(_seconds(call, max(1, int(SHORTEST_TIMING / first[label])), q.device))
    reference = median(times[REFERENCE])
    return tuple(_lap(label, q, times[label], reference, peaks.get(label), skipped.get(label)) for label in calls)


def trend(laps: Sequence[Lap]) -> Trend:
    """How one mechanism scales over its laps, shortest first."""
    timed = [(lap.tokens, lap.seconds, lap.peak_bytes, lap.speedup) for lap in laps if lap.seconds and lap.speedup]
    seconds = [(tokens, value) for tokens, value, _, _ in timed if value]
    bytes_ = [(tokens, float(value)) for tokens, _, value, _ in timed if value]
    speedups = [(tokens, value) for tokens, _, _, value in timed if value]
    return Trend(
        laps[0].label,
        laps[0].head_dim,
        growth_per_doubling(seconds),
        growth_per_doubling(bytes_),
        faster_from(speedups),
        bool(speedups) and all(value > 1 for _, value in speedups),
    )


def growth_per_doubling(points: Sequence[tuple[int, float]]) -> float | None:
    """(y2 / y1)^(log 2 / log(x2 / x1)) of the last two points."""
    if len(points) < 2:
        return None
    (x1, y1), (x2, y2) = points[-2:]
    return (y2 / y1) ** (log(2) / log(x2 / x1))


def faster_from(speedups: Sequence[tuple[int, float]]) -> int | None:
    """The x from which the speedup stays above 1; the first x if it always is, None if the last one is not."""
    if not speedups or speedups[-1][1] <= 1:
        return None
    start = speedups[0][0]
    for (x1, y1), (x2, y2) in pairwise(speedups):
        if y1 <= 1 < y2:
            start = round(exp(log(x1) + log(x2 / x1) * -log(y1) / log(y2 / y1)))
    return start


def _lap(label: str, q: Tensor, times: list[float], reference: float, peak: int | None, skipped: str | None) -> Lap:
    tokens, head_dim = q.shape[2], q.shape[3]
    if not times:
        return Lap(label, tokens, head_dim, skipped=skipped)
    middle = median(times)
    return Lap(label, tokens, head_dim, middle, min(times), len(times), reference / middle, peak)


def _seconds(call: Callable[[], Tensor], count: int, device: torch.device) -> float:
    """Seconds a call, over `count` calls."""
    _wait(device)
    start = time.perf_counter()
    for _ in range(count):
        call()
    _wait(device)
    return (time.perf_counter() - start) / count


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _too_large(made: str | Mechanism, q: Tensor, k: Tensor) -> str | None:
    """Why the explicit form would not fit in memory, if it would not: the system would kill the process."""
    made = mechanism(made) if isinstance(made, str) else made
    if form(made, False) != EXPLICIT:
        return None
    needed = EXPLICIT_COPIES * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * max(4, q.element_size())
    free = free_bytes(q.device)
    if free is None or needed < 0.8 * free:
        return None
    return f"forms weights of {needed / 1e9:.0f} GB in all, and {free / 1e9:.0f} GB are free"


def steady_threads(size: int = 2**20, repeats: int = 20) -> int:
    """Threads to time with: all of torch's, or 1 where other programs keep them waiting for each other.

    Decided by trying: an elementwise pass over `size` numbers must not be slower with all threads than with one.
    """
    most = torch.get_num_threads()
    if most == 1:
        return 1
    x, middle = torch.zeros(size), {}
    try:
        for threads in (most, 1):
            torch.set_num_threads(threads)
            times = [_seconds(lambda: x + 1, 4, x.device) for _ in range(repeats)]
            middle[threads] = median(times)
    finally:
        torch.set_num_threads(most)
    return most if middle[most] < middle[1] else 1
