"""The measuring half of `softless bench`: a plan from the words, and the contests it asks for in one document."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from softless.bench import contest
from softless.bench.contestants import Terms, contestants
from softless.bench.cost import Shape, chosen
from softless.bench.speed import steady_threads
from softless.bench.stopwatch import Timing, copy_rate, threads
from softless.commands.mechanism import make
from softless.commands.progress import progress
from softless.machine import circumstances, pick_device, timestamp
from softless.mechanisms import Mechanism

PASSES = {False: "forward", True: "forward+backward"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure: every mechanism on every one of the terms, forward and perhaps backward."""

    mechanisms: dict[str, Mechanism]
    terms: tuple[Terms, ...]
    passes: tuple[bool, ...]
    repeats: int
    quick: bool
    command: str


def plan(
    names: Sequence[str],
    options: dict[str, str],
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
) -> Plan:
    """Refuse what cannot be measured; settle the rest."""
    place = pick_device(device)
    dtype = dtype or ("bfloat16" if place == "cuda" else "float32")
    sizes = [
        Shape(batch, heads, n, dim, keys or n, kv_heads or heads)
        for batch, heads, length, dim in shapes
        for n in tokens or [length]
    ]
    common = Terms(shape=sizes[0], is_causal=causal, dtype=getattr(torch, dtype), device=place, backend=backend)
    words = ["softless bench", *dict.fromkeys(names)]
    words += [f"--shape {','.join(map(str, shape))}" for shape in shapes]
    words += [f"--tokens {','.join(map(str, tokens))}"] if tokens else []
    words += [f"--keys {keys}"] * bool(keys) + [f"--kv-heads {kv_heads}"] * bool(kv_heads)
    words += ["--causal"] * causal + ["--backward"] * backward
    words += [f"--option {name}={value}" for name, value in options.items()]
    words += [f"--dtype {dtype}", f"--device {place}", f"--backend {backend}", f"--repeats {repeats}"]
    words += ["--quick"] * quick
    made = Plan(
        mechanisms={name: make(name, options) for name in names},
        terms=tuple(replace(common, shape=size) for size in dict.fromkeys(sizes)),
        passes=(False, True) if backward else (False,),
        repeats=repeats,
        quick=quick,
        command=" ".join(words),
    )
    for terms in made.terms:
        contest.check_memory(terms)
    return made


def measure(plan: Plan, *, show_progress: bool) -> dict[str, Any]:
    """The whole document but its schema."""
    terms = plan.terms[0]
    device = torch.device(terms.device)
    with threads(steady_threads() if device.type == "cpu" else torch.get_num_threads()):
        rate, used = copy_rate(device), torch.get_num_threads()
        results = list(_results(plan, rate, show_progress))
    return {
        "command": plan.command,
        "date": timestamp(),
        **circumstances(terms.device),
        "mechanisms": [_mechanism(made, terms) for made in plan.mechanisms.values()],
        "causal": terms.is_causal,
        "dtype": str(terms.dtype).removeprefix("torch."),
        "device": terms.device,
        "backend": terms.backend,
        "threads": used,
        "quick": plan.quick,
        "copy_bytes_per_second": rate,
        "results": results,
    }


def _results(plan: Plan, rate: float, show_progress: bool) -> Iterator[dict[str, Any]]:
    total = sum(terms.shape.queries for terms in plan.terms) * len(plan.passes)
    with progress(total, show_progress) as advance:
        for terms in plan.terms:
            everyone = contestants(plan.mechanisms, terms, compiled=not plan.quick)
            tokens = terms.shape.queries
            step = tokens / (len(everyone) * (plan.repeats + 1))

            def told(label: str, tokens: int = tokens, step: float = step) -> None:
                advance(f"timing {label}, {tokens} tokens", step)

            for backward in plan.passes:
                found = contest.contest(everyone, terms, rate=rate, backward=backward, repeats=plan.repeats, tick=told)
                moved = contest.floor_bytes(terms, backward)
                yield {
                    "shape": asdict(terms.shape),
                    "pass": PASSES[backward],
                    "floor_bytes": moved,
                    "floor_ms": moved / rate * 1e3,
                    "rows": [_row(result) for result in found],
                }


def times(timing: Timing | None) -> dict[str, Any]:
    """What a document says of one timing."""
    return {
        "ms": None if timing is None else timing.seconds * 1e3,
        "fastest_ms": None if timing is None else timing.fastest * 1e3,
        "repeats": 0 if timing is None else timing.repeats,
        "timing": None if timing is None else timing.timing,
    }


def _row(result: contest.Result) -> dict[str, Any]:
    timing = result.timing
    eager = None if timing is None else timing.eager_seconds
    return {
        "label": result.label,
        "role": result.role,
        "mechanism": result.mechanism,
        **times(timing),
        "eager_ms": None if eager is None else eager * 1e3,
        "ratio": result.ratio,
        "share": result.share,
        "extra_bytes": result.extra_bytes,
        "extra_share": result.extra_share,
        "skipped": result.skipped,
    }


def _mechanism(made: Mechanism, terms: Terms) -> dict[str, Any]:
    values = {field.name: getattr(made, field.name) for field in fields(made)}
    options = {name: "exp(q.k/sqrt(d))" if callable(value) else value for name, value in values.items()}
    if terms.backend == "auto":
        call: dict[str, Any] = {"is_causal": terms.is_causal, "dtype": terms.dtype, "device": terms.device}
        backend, reason = chosen(made, terms.shape, **call)
    else:
        backend, reason = terms.backend, "asked for"
    return {"name": made.name, "options": options, "backend": backend, "backend_reason": reason}
