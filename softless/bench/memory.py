"""Peak memory of a call, and how much is free."""

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

CGROUP = Path("/sys/fs/cgroup")


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Most bytes PyTorch held at once during the call, beyond what it held before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    return max(accumulate(_allocations(call)), default=0)


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated; None where the system does not say."""
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


def _allocations(call: Callable[[], object]) -> list[int]:
    """Bytes of every allocation (+) and release (-) of PyTorch's CPU allocator, in order."""
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would narrate each start and stop on stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        call()
    results = profiler.profiler.kineto_results
    return [size for _, size in sorted(_walk(results.experimental_event_tree()), key=lambda pair: pair[0])]


def _walk(events: Sequence[Any]) -> Iterator[tuple[int, int]]:
    waiting = [*reversed(events)]
    while waiting:
        event = waiting.pop()
        if event.tag.name == "Allocation":
            yield event.start_time_ns, event.extra_fields.alloc_size
        waiting += reversed(event.children)
