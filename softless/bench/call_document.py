"""Plan and measure the contests of `softless bench`, as one JSON document of schema softless.bench/1.

Numbers are null if they could not be measured, and "skipped" gives the reason.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any, TypedDict

import torch

from softless.bench import contest
from softless.bench.contestants import contestants
from softless.bench.cost import Shape, Terms, chosen, floor_bytes, option_values
from softless.bench.stopwatch import Tick, copy_rate, steady_threads, threads
from softless.machine import Circumstances, circumstances, pick_device, timestamp
from softless.mechanisms import Mechanism

SCHEMA = "softless.bench/1"
PASSES = {False: "forward", True: "forward+backward"}

Advance = Callable[[str, float], None]  # takes a label, and the part of the work that is done: 1 in all


CallResult = TypedDict(
    "CallResult",
    {
        "shape": dict[str, int],  # the fields of Shape
        "pass": str,  # forward | forward+backward
        "floor_bytes": int,
        "floor_ms": float,
        "rows": list[contest.CallRow],
    },
)


class CallsDocument(Circumstances):
    """The JSON document of `softless bench`, schema softless.bench/1."""

    schema: str
    command: str
    date: str
    mechanisms: list[dict[str, Any]]  # name, options, backend, backend_reason
    causal: bool
    dtype: str
    device: str
    backend: str
    threads: int
    quick: bool
    copy_bytes_per_second: float
    results: list[CallResult]


@dataclass(frozen=True, kw_only=True)
class CallPlan:
    """The contests of `softless bench`: every mechanism under every one of the terms."""

    mechanisms: Mapping[str, Mechanism]
    terms: tuple[Terms, ...]
    passes: tuple[bool, ...]  # False: forward, True: forward and backward
    repeats: int
    quick: bool


def plan_calls(
    mechanisms: Mapping[str, Mechanism],
    *,
    shapes: Sequence[tuple[int, ...]],
    tokens: Sequence[int] | None,
    keys: int | None,
    kv_heads: int | None,
    causal: bool,
    backward: bool,
    dtype: str | None,
    device: str,
    backend: str,
    repeats: int,
    quick: bool,
) -> CallPlan:
    """Settle device, dtype and shapes; refuse shapes that do not fit in memory."""
    sizes = [
        Shape(batch, heads, n, dim, keys or n, kv_heads or heads)
        for batch, heads, length, dim in shapes
        for n in tokens or [length]
    ]
    common = Terms(shape=sizes[0], is_causal=causal, backend=backend, **place(device, dtype))
    terms = tuple(replace(common, shape=size) for size in dict.fromkeys(sizes))
    for size_terms in terms:
        contest.check_memory(size_terms)
    passes = (False, True) if backward else (False,)
    return CallPlan(mechanisms=mechanisms, terms=terms, passes=passes, repeats=repeats, quick=quick)


def measure_calls(plan: CallPlan, *, command: str, advance: Advance = lambda *_: None) -> CallsDocument:
    """Run the contests of a plan. `command` is recorded, so that the document says how to repeat it."""
    terms = plan.terms[0]
    with steady(terms.device):
        rate, used = copy_rate(torch.device(terms.device)), torch.get_num_threads()
        results = list(_call_results(plan, rate, advance))
    return {
        "schema": SCHEMA,
        "command": command,
        "date": timestamp(),
        **circumstances(terms.device),
        "mechanisms": [_mechanism(mechanism, terms) for mechanism in plan.mechanisms.values()],
        "causal": terms.is_causal,
        "dtype": str(terms.dtype).removeprefix("torch."),
        "device": terms.device,
        "backend": terms.backend,
        "threads": used,
        "quick": plan.quick,
        "copy_bytes_per_second": rate,
        "results": results,
    }


def _call_results(plan: CallPlan, rate: float, advance: Advance) -> Iterator[CallResult]:
    total = sum(terms.shape.queries for terms in plan.terms) * len(plan.passes)
    for terms in plan.terms:
        everyone, tokens = contestants(plan.mechanisms, terms, compiled=not plan.quick), terms.shape.queries
        step = tokens / (total * len(everyone) * (plan.repeats + 1))
        tick = ticker(advance, f"{tokens} tokens", step)
        for backward in plan.passes:
            rows = contest.contest(everyone, terms, rate=rate, backward=backward, repeats=plan.repeats, tick=tick)
            moved = floor_bytes(terms, backward=backward)
            yield {
                "shape": asdict(terms.shape),
                "pass": PASSES[backward],
                "floor_bytes": moved,
                "floor_ms": moved / rate * 1e3,
                "rows": rows,
            }


def _mechanism(mechanism: Mechanism, terms: Terms) -> dict[str, Any]:
    automatic = terms.backend == "auto"
    backend, reason = chosen(mechanism, terms) if automatic else (terms.backend, "asked for")
    return {"name": mechanism.name, "options": option_values(mechanism), "backend": backend, "backend_reason": reason}


def place(device: str, dtype: str | None) -> dict[str, Any]:
    """Return the device to measure on, and the dtype: by default the one that the device is mostly used with."""
    chosen_device = pick_device(device)
    default = "bfloat16" if chosen_device == "cuda" else "float32"
    return {"device": chosen_device, "dtype": getattr(torch, dtype or default)}


def steady(device: str) -> AbstractContextManager[None]:
    """Run torch on one CPU thread if the machine is busy."""
    return threads(steady_threads() if device == "cpu" else torch.get_num_threads())


def ticker(advance: Advance, size: str, step: float) -> Tick:
    """Return a tick that shows what is timed and moves the progress by one step."""
    return lambda label: advance(f"timing {label}, {size}", step)
