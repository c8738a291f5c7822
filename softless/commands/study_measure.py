"""The measuring half of `softless study`: random tensors through the probes, into one document of plain numbers."""

import os
import platform
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from softless.commands.manners import installed_version
from softless.commands.progress import Advance, progress
from softless.commands.study_plan import Plan
from softless.errors import ArgumentError
from softless.mechanisms import Mechanism
from softless.probes import approximation, injectivity, speed
from softless.probes.cases import Case, study_cases
from softless.probes.memory import free_bytes
from softless.probes.stopwatch import threads

TOLERANCE = 0.1  # relative error up to which an approximation counts as safe
LINEAR_COPIES = 16  # tensors of q's size alive at once in the hungriest linear mechanism, q, k and v among them


def pick_device(asked: str) -> str:
    """The device to measure on; auto is cuda where there is one."""
    found = asked != "cpu" and torch.cuda.is_available()
    if asked == "cuda" and not found:
        raise ArgumentError("device cuda was asked for and torch finds none: use --device cpu")
    return "cuda" if found else "cpu"


def measure(plan: Plan, seed: int, device: str, *, show_progress: bool) -> dict[str, Any]:
    """Everything a study says, by part."""
    cases = study_cases()
    _check_memory(plan, device)
    total = sum(plan.tokens) + 2 * plan.score_tokens
    with progress(total, show_progress) as advance:
        with threads(speed.steady_threads()):
            timed = _speed(plan, seed, device, cases, advance)
        return {
            "speed": timed,
            "approximation": _approximation(plan, seed, cases, advance),
            "injectivity": _injectivity(plan, seed, cases),
        }


def circumstances(device: str) -> dict[str, Any]:
    """When, with what and where."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "softless": installed_version(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "processor": torch.cuda.get_device_name() if device == "cuda" else _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": device,
            "load_average": speed.load_average(),
        },
    }


def _speed(plan: Plan, seed: int, device: str, cases: tuple[Case, ...], advance: Advance) -> dict[str, Any]:
    dims = sorted({case.head_dim or plan.head_dim for case in cases}, reverse=True)
    laps: list[speed.Lap] = []
    for tokens in plan.tokens:
        step = tokens / ((plan.repeats + 1) * (len(cases) + len(dims)))
        for dim in dims:
            q, k, v = _normal(seed, 3, plan.heads, tokens, dim, torch.float32).to(device).unbind()
            group = {case.label: case.mechanism for case in cases if (case.head_dim or plan.head_dim) == dim}
            told = lambda label, tokens=tokens, step=step: advance(f"timing {label}, {tokens} tokens", step)  # noqa: E731
            laps += _race(q, k, v, group, plan.repeats, told)
    by_case = sorted(laps, key=lambda lap: (lap.label, -lap.head_dim))  # stable: lengths stay in order
    trends = [speed.trend(list(group)) for _, group in groupby(by_case, key=lambda lap: (lap.label, lap.head_dim))]
    return {
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "heads": plan.heads,
        "head_dim": plan.head_dim,
        "tokens": list(plan.tokens),
        "laps": [asdict(lap) for lap in laps],
        "trends": [asdict(trend) for trend in trends],
    }


def _race(
    q: Tensor, k: Tensor, v: Tensor, group: dict[str, Mechanism], repeats: int, tick: Callable[[str], None]
) -> tuple[speed.Lap, ...]:
    try:
        return speed.race(q, k, v, group, repeats=repeats, tick=tick)
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        raise ArgumentError(f"{q.shape[2]} tokens do not fit in memory: shorten --tokens") from None


def _approximation(plan: Plan, seed: int, cases: tuple[Case, ...], advance: Advance) -> dict[str, Any]:
    q, k = _normal(seed, 2, plan.score_heads, plan.score_tokens, plan.head_dim, torch.float64).unbind()
    uniform = approximation.sweep(q, k, None, plan.deviations)
    curves = [_curve("uniform", uniform, uniform)]
    for case in cases:
        advance(f"comparing {case.label} with softmax", plan.score_tokens / len(cases))
        curves.append(_curve(case.label, approximation.sweep(q, k, case.mechanism, plan.deviations), uniform))
    return {
        "tokens": plan.score_tokens,
        "heads": plan.score_heads,
        "head_dim": plan.head_dim,
        "deviations": list(plan.deviations),
        "tolerance": TOLERANCE,
        "curves": curves,
    }


def _curve(
    label: str, points: tuple[approximation.Approximation, ...], uniform: tuple[approximation.Approximation, ...]
) -> dict[str, Any]:
    return {
        "label": label,
        "approximates_softmax": approximation.approximates(points, uniform),
        "safe_range": approximation.safe_range(points, TOLERANCE),
        "points": [asdict(point) for point in points],
    }


def _injectivity(plan: Plan, seed: int, cases: tuple[Case, ...]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, plan.sets_of_keys, 1, plan.keys, plan.key_dim)
    q, k = torch.randn(shape, generator=generator, dtype=torch.float64).unbind()
    pairs = [{"label": case.label, **asdict(injectivity.collinear_collisions(q, k, case.mechanism))} for case in cases]
    return {"head_dim": plan.key_dim, "keys": plan.keys, "pairs": pairs}


def _normal(seed: int, count: int, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1, heads, tokens, dim, generator=generator, dtype=dtype)


def _check_memory(plan: Plan, device: str) -> None:
    longest, free = max(plan.tokens), free_bytes(torch.device(device))
    needed = LINEAR_COPIES * plan.heads * longest * plan.head_dim * 4
    if free is not None and needed > 0.8 * free:
        raise ArgumentError(
            f"{longest} tokens need about {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free: shorten --tokens"
        )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
