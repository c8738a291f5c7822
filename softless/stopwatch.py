"""Measure the time and memory of a call, and how fast this machine copies bytes.

    graph    CUDA: the call as a captured graph, replayed between two events; the L2 cache is flushed before each replay
    events   CUDA: the same for a call that cannot be captured; launch time counts if it exceeds the call itself
    clock    CPU: wall clock; the calls take turns, so that a slow moment of the machine affects all of them
    eager    CUDA: wall clock of an ordinary call among many in a row, launches included

The copy rate is never measured with a graph: a copy inside a graph moves a third fewer bytes per second.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median

import torch

GRAPH, EVENTS, CLOCK = "graph", "events", "clock"

WARM_UP = 3
SHORTEST_TIMING = 0.005  # seconds: faster calls are timed several at a time
SLOW, SLOW_REPEATS = 1.0, 3  # a call slower than this many seconds is repeated no more than this
EAGER_SECONDS, EAGER_CALLS = 0.02, 50
FLUSH_BYTES = 256 << 20  # several times the L2 of any GPU
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}
FREE_SHARE = 0.8  # of the free memory, which a call may fill
CGROUP = Path("/sys/fs/cgroup")

Call = Callable[[], object]
Tick = Callable[[str], None]


@dataclass(frozen=True)
class Timing:
    """Median and fastest seconds of the repeats. `eager_seconds` is None on a CPU, where `seconds` is the same."""

    seconds: float
    fastest: float
    repeats: int
    timing: str
    eager_seconds: float | None = None


def time_calls(
    calls: Mapping[str, Call], device: torch.device, *, repeats: int, tick: Tick = lambda _: None
) -> dict[str, Timing]:
    """Time every call after a warm-up. `tick` gets each label `repeats` times, to show progress."""
    if device.type == "cuda":
        return {label: _on_cuda(label, call, repeats, tick) for label, call in calls.items()}
    return time_in_turns(calls, repeats=repeats, tick=tick)


def time_in_turns(calls: Mapping[str, Call], *, repeats: int, tick: Tick = lambda _: None) -> dict[str, Timing]:
    """Time every call by the wall clock, on any device. The calls take turns in every round."""
    first = {label: seconds_per_call(call) for label, call in calls.items()}
    times: dict[str, list[float]] = {label: [] for label in calls}
    for turn in range(repeats):
        for label, call in calls.items():
            tick(label)
            if turn < SLOW_REPEATS or first[label] < SLOW:
                times[label].append(seconds_per_call(call, max(1, int(SHORTEST_TIMING / first[label]))))
    return {label: Timing(median(taken), min(taken), len(taken), CLOCK) for label, taken in times.items()}


def seconds_per_call(call: Call, count: int = 1) -> float:
    """Return the wall-clock seconds per call, over `count` calls in a row."""
    _wait()
    start = time.perf_counter()
    for _ in range(count):
        call()
    _wait()
    return (time.perf_counter() - start) / count


def copy_rate(device: torch.device, *, repeats: int = 20) -> float:
    """Return the bytes per second that this machine copies; bytes read and bytes written both count."""
    size = COPY_BYTES[device.type]
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))

    def copy() -> None:
        target.copy_(source)

    if device.type == "cuda":
        return 2 * size / median(_between_events(copy, repeats))
    copy()
    return 2 * size / median(seconds_per_call(copy) for _ in range(min(repeats, 5)))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run torch on `count` CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def steady_threads(size: int = 2**20, repeats: int = 20) -> int:
    """Return the number of threads to time with: all of torch's, or 1 on a machine that is busy with other programs.

    A trial decides: if an elementwise pass over `size` numbers is slower with all threads than with one, the threads
    wait for each other.
    """
    most = torch.get_num_threads()
    if most == 1:
        return 1
    x, seconds = torch.zeros(size), {}
    for count in (most, 1):
        with threads(count):
            seconds[count] = median(seconds_per_call(lambda: x + 1, 4) for _ in range(repeats))
    return most if seconds[most] < seconds[1] else 1


def _on_cuda(label: str, call: Call, repeats: int, tick: Tick) -> Timing:
    for _ in range(WARM_UP):
        call()
    first = seconds_per_call(call)
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
    eager = median(seconds_per_call(call, calls) for _ in range(SLOW_REPEATS))
    return Timing(median(times), min(times), len(times), timing, eager)


def _captured(call: Call) -> Call:
    """Capture the call as a CUDA graph, after the warm-up on a side stream that a capture needs."""
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            call()
    current.wait_stream(side)
    graph, generator = torch.cuda.CUDAGraph(), torch.cuda.default_generators[torch.cuda.current_device()]
    spare = generator.clone_state()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        generator.graphsafe_set_state(spare)  # a failed capture leaves its own state, which gives no random numbers
        raise
    return graph.replay


def _between_events(call: Call, repeats: int) -> list[float]:
    """Seconds of each run. All runs are queued at once: the flush hides the time to launch the next run."""
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


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def peak_bytes(call: Call, device: torch.device) -> int:
    """Return the most bytes that PyTorch held at once during the call, beyond those it held before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    return max(accumulate(_allocations(call)), default=0)


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated, or None if the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
    try:
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):
        return free
    return min(free, limit - used)


def shortage(needed: int, device: str) -> str | None:
    """Say that `needed` bytes do not fit: "12.0 GB and 8.0 GB are free". None if they do."""
    free = free_bytes(torch.device(device))
    if free is None or needed <= FREE_SHARE * free:
        return None
    return f"{needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free"


def _allocations(call: Call) -> list[int]:
    """Return the bytes of every allocation (+) and release (-) of PyTorch's CPU allocator, in order."""
    from torch.autograd.profiler import profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it reports each start and stop on stderr
    with profile(profile_memory=True) as profiler:
        call()
    assert profiler.kineto_results is not None
    waiting, sizes = [*reversed(profiler.kineto_results.experimental_event_tree())], []
    while waiting:
        event = waiting.pop()
        waiting += reversed(event.children)
        if event.tag.name == "Allocation":
            sizes.append((event.start_time_ns, event.extra_fields.alloc_size))
    return [size for _, size in sorted(sizes, key=lambda pair: pair[0])]
