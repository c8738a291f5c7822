"""The measuring half of a study: random tensors, of any length, through mechanisms; and where that was."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from softless.bench import scaling
from softless.bench.scaling import Case, cases_named
from softless.bench.stopwatch import free_bytes, steady_threads, threads, time_calls
from softless.commands.progress import Advance
from softless.errors import ArgumentError
from softless.mechanisms import Mechanism
from softless.probes import approximation
from softless.study.plan import Plan

TOLERANCE = 0.1  # relative error up to which an approximation counts as safe
LINEAR_COPIES = 16  # tensors of q's size alive at once in the hungriest linear mechanism, q, k and v among them


def timed(plan: Plan, seed: int, device: str, advance: Advance) -> dict[str, Any]:
    """Time and memory of calls against the number of tokens, beside SDPA; on one thread where the machine is busy."""
    with threads(steady_threads()):
        return _speed(plan, seed, device, cases_named(plan.mechanisms), advance)


def _speed(plan: Plan, seed: int, device: str, cases: tuple[Case, ...], advance: Advance) -> dict[str, Any]:
    dims = sorted({case.head_dim or plan.head_dim for case in cases}, reverse=True)
    laps: list[scaling.Lap] = []
    for tokens in plan.tokens:
        step = 1 / (len(plan.tokens) * (plan.repeats + 1) * (len(cases) + len(dims)))
        for dim in dims:
            q, k, v = _normal(seed, 3, plan.heads, tokens, dim, torch.float32).to(device).unbind()
            group = {case.label: case.mechanism for case in cases if (case.head_dim or plan.head_dim) == dim}
            told = lambda label, tokens=tokens, step=step: advance(f"timing {label}, {tokens} tokens", step)  # noqa: E731
            laps += _race(q, k, v, group, plan.repeats, told)
    by_case = sorted(laps, key=lambda lap: (lap.label, -lap.head_dim))  # stable: lengths stay in order
    trends = [scaling.trend(list(group)) for _, group in groupby(by_case, key=lambda lap: (lap.label, lap.head_dim))]
    return {
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "heads": plan.heads,
        "head_dim": plan.head_dim,
        "tokens": list(plan.tokens),
        "laps": [asdict(lap) for lap in laps],
        "trends": [asdict(trend) for trend in trends],
    }


def own_speed(twins: Mapping[str, nn.Module], pictures: Tensor, repeats: int, advance: Advance) -> dict[str, float]:
    """Seconds per image that each trained twin takes to answer, by id; they take turns on the same pictures."""
    step = 1 / (len(twins) * repeats) if twins else 1.0
    with threads(steady_threads()), torch.inference_mode():
        calls = {id_: partial(model, pictures) for id_, model in twins.items()}
        tick = lambda id_: advance(f"timing the twin {id_}", step)  # noqa: E731
        found = time_calls(calls, pictures.device, repeats=repeats, tick=tick)
    taken = {id_: each.seconds if each.eager_seconds is None else each.eager_seconds for id_, each in found.items()}
    return {id_: seconds / len(pictures) for id_, seconds in taken.items()}


def _race(
    q: Tensor, k: Tensor, v: Tensor, group: dict[str, Mechanism], repeats: int, tick: Callable[[str], None]
) -> tuple[scaling.Lap, ...]:
    try:
        return scaling.race(q, k, v, group, repeats=repeats, tick=tick)
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        raise ArgumentError(f"{q.shape[2]} tokens do not fit in memory: shorten --tokens") from None


def approximated(plan: Plan, seed: int, advance: Advance) -> list[dict[str, Any]]:
    """How far mechanisms are from softmax, against the range of random scores; "uniform" is the baseline 1/n."""
    cases = cases_named(plan.mechanisms)
    q, k = _normal(seed, 2, plan.score_heads, plan.score_tokens, plan.head_dim, torch.float64).unbind()
    uniform = approximation.sweep(q, k, None, plan.deviations)
    curves = [_curve("uniform", uniform, uniform)]
    for case in cases:
        advance(f"comparing {case.label} with softmax", 1 / len(cases))
        curves.append(_curve(case.label, approximation.sweep(q, k, case.mechanism, plan.deviations), uniform))
    return curves


def _curve(
    label: str, points: tuple[approximation.Approximation, ...], uniform: tuple[approximation.Approximation, ...]
) -> dict[str, Any]:
    return {
        "label": label,
        "approximates_softmax": approximation.approximates(points, uniform),
        "safe_range": approximation.safe_range(points, TOLERANCE),
        "points": [asdict(point) for point in points],
    }


def _normal(seed: int, count: int, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1, heads, tokens, dim, generator=generator, dtype=dtype)


def check_memory(plan: Plan, device: str) -> None:
    """Refuse lengths that do not fit, before anything is trained."""
    longest, free = max(plan.tokens), free_bytes(torch.device(device))
    needed = LINEAR_COPIES * plan.heads * longest * plan.head_dim * 4
    if free is not None and needed > 0.8 * free:
        raise ArgumentError(
            f"{longest} tokens need about {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free: shorten --tokens"
        )
