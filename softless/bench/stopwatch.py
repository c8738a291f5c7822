"""Seconds of a call on the device that runs it, and the fastest this machine moves bytes.

    graph    CUDA: a captured graph replayed between two events, the L2 flushed before each: what the device does
    events   CUDA: the same around an ordinary call that cannot be captured; a call shorter than its launch reads long
    clock    CPU: wall clock; calls take turns, so a slow moment of the machine hits all of them alike
    eager    CUDA: wall clock of an ordinary call among many in a row, launches included

The copy rate is never taken from a graph: there the copy engine's own node moves a third fewer bytes a second.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch

from softless.bench.speed import SHORTEST_TIMING, SLOW, SLOW_REPEATS

GRAPH, EVENTS, CLOCK = "graph", "events", "clock"

WARM_UP = 3
EAGER_SECONDS, EAGER_CALLS = 0.02, 50
FLUSH_BYTES = 256 << 20  # several times the L2 of any GPU
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}

Call = Callable[[], object]
Tick = Callable[[str], None]


@dataclass(frozen=True)
class Timing:
    """Median and fastest seconds of the repeats. `eager_seconds` is None where `seconds` is that already."""

    seconds: float
    fastest: float
    repeats: int
    timing: str
    eager_seconds: float | None = None


def time_calls(
    calls: Mapping[str, Call], device: torch.device, *, repeats: int, tick: Tick = lambda _: None
) -> dict[str, Timing]:
    """Time every call, warm. `tick` is told each label `repeats` times, to show progress."""
    if device.type == "cuda":
        return {label: _on_cuda(label, call, repeats, tick) for label, call in calls.items()}
    return _in_turns(calls, repeats, tick)


def copy_rate(device: torch.device, *, repeats: int = 20) -> float:
    """Bytes a second that this machine copies, those read and those written both counted."""
    size = COPY_BYTES[device.type]
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))

    def copy() -> None:
        target.copy_(source)

    if device.type == "cuda":
        return 2 * size / median(_between_events(copy, repeats))
    copy()
    return 2 * size / median(_seconds(copy, 1) for _ in range(min(repeats, 5)))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch on `count` CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _in_turns(calls: Mapping[str, Call], repeats: int, tick: Tick) -> dict[str, Timing]:
    first = {label: _seconds(call, 1) for label, call in calls.items()}
    times: dict[str, list[float]] = {label: [] for label in calls}
    for turn in range(repeats):
        for label, call in calls.items():
            tick(label)
            if turn < SLOW_REPEATS or first[label] < SLOW:
                times[label].append(_seconds(call, max(1, int(SHORTEST_TIMING / first[label]))))
    return {label: Timing(median(taken), min(taken), len(taken), CLOCK) for label, taken in times.items()}


def _on_cuda(label: str, call: Call, repeats: int, tick: Tick) -> Timing:
    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    first = _seconds(call, 1)
    for _ in range(repeats):
        tick(label)
    count = repeats if first < SLOW else min(repeats, SLOW_REPEATS)
    try:
        timing, times = GRAPH, _between_events(_captured(call), count)
    except RuntimeError:  # not permitted in a capture, or no room for the graph's own memory
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        timing, times = EVENTS, _between_events(call, count)
    calls = max(1, min(EAGER_CALLS, int(EAGER_SECONDS / first)))
    eager = median(_seconds(call, calls) for _ in range(SLOW_REPEATS))
    return Timing(median(times), min(times), len(times), timing, eager)


def _captured(call: Call) -> Call:
    """The call as a CUDA graph, warmed up on the stream beside it as capturing wants."""
    beside, here = torch.cuda.Stream(), torch.cuda.current_stream()
    beside.wait_stream(here)
    with torch.cuda.stream(beside):
        for _ in range(WARM_UP):
            call()
    here.wait_stream(beside)
    graph, generator = torch.cuda.CUDAGraph(), torch.cuda.default_generators[torch.cuda.current_device()]
    spare = generator.clone_state()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        generator.graphsafe_set_state(spare)  # a failed capture leaves its own in use, and no random number after it
        raise
    return graph.replay


def _between_events(call: Call, repeats: int) -> list[float]:
    """Seconds of each run, all of them queued at once: the flush hides the time Python takes to launch the next."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    call()
    marks = []
    for _ in range(repeats):
        flush.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        marks.append((start, stop))
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) / 1e3 for start, stop in marks]


def _seconds(call: Call, count: int) -> float:
    """Wall clock seconds a call, over `count` calls in a row."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / count
