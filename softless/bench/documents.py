"""Plan and measure the contests of `softless bench` and `softless bench-model`, as one JSON document each.

Numbers are null if they could not be measured, and "skipped" gives the reason.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, TypedDict

import torch

from softless.bench.contest import CallRow, check_memory, contest
from softless.bench.contestants import contestants
from softless.bench.cost import Shape, Terms, chosen, floor_bytes, option_values
from softless.bench.model_contest import ModelRow, Setting, check_images, entrants, model_contest
from softless.bench.model_heads import TASKS
from softless.errors import ArgumentError
from softless.machine import Circumstances, circumstances, pick_device, timestamp
from softless.mechanisms import Mechanism
from softless.models import customize
from softless.stopwatch import Tick, copy_rate, steady_threads, threads

CALLS_SCHEMA, MODEL_SCHEMA = "softless.bench/1", "softless.bench-model/1"
PIXELS = {"cuda": 256 * 224**2, "cpu": 4 * 224**2}  # per batch, if the batch size is not set
PASSES = {False: "forward", True: "forward+backward"}

Advance = Callable[[str, float], None]  # takes a label and a share of all work


CallResult = TypedDict(
    "CallResult",
    {
        "shape": dict[str, int],  # the fields of Shape
        "pass": str,  # forward | forward+backward
        "floor_bytes": int,
        "floor_ms": float,
        "rows": list[CallRow],
    },
)


class BenchDocument(Circumstances):
    """The part that the JSON documents of both verbs share."""

    schema: str
    command: str
    date: str
    dtype: str
    device: str
    backend: str
    threads: int


class CallsDocument(BenchDocument):
    """The JSON document of `softless bench`."""

    mechanisms: list[dict[str, Any]]  # name, options, backend, backend_reason
    causal: bool
    quick: bool
    copy_bytes_per_second: float
    results: list[CallResult]


SettingResult = TypedDict(
    "SettingResult",
    {
        "image_size": list[int],  # height, width
        "window": int | None,
        "batch": int,
        "pass": str,  # forward | forward+backward
        "rows": list[ModelRow],
    },
)


class ModelDocument(BenchDocument):
    """The JSON document of `softless bench-model`."""

    model: str
    options: dict[str, str]
    compile: bool
    head: str | None  # the head on the model; None is its classifier
    results: list[SettingResult]


@dataclass(frozen=True, kw_only=True)
class CallPlan:
    """The contests of `softless bench`: every mechanism under every one of the terms."""

    mechanisms: Mapping[str, Mechanism]
    terms: tuple[Terms, ...]
    passes: tuple[bool, ...]  # False: forward, True: forward and backward
    repeats: int
    quick: bool


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """The contests of `softless bench-model`: one model in every setting."""

    name: str
    options: dict[str, Any]
    settings: tuple[Setting, ...]
    passes: tuple[bool, ...]
    compiled: bool
    repeats: int


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
    common = Terms(shape=sizes[0], is_causal=causal, backend=backend, **_place(device, dtype))
    terms = tuple(replace(common, shape=size) for size in dict.fromkeys(sizes))
    for size_terms in terms:
        check_memory(size_terms)
    passes = (False, True) if backward else (False,)
    return CallPlan(mechanisms=mechanisms, terms=terms, passes=passes, repeats=repeats, quick=quick)


def measure_calls(plan: CallPlan, *, command: str, advance: Advance = lambda *_: None) -> CallsDocument:
    """Run the contests of a plan. `command` is recorded, so that the document says how to repeat it."""
    terms = plan.terms[0]
    with _steady(terms.device):
        rate, used = copy_rate(torch.device(terms.device)), torch.get_num_threads()
        results = list(_call_results(plan, rate, advance))
    return {
        "schema": CALLS_SCHEMA,
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
        tick = _ticker(advance, f"{tokens} tokens", step)
        for backward in plan.passes:
            rows = contest(everyone, terms, rate=rate, backward=backward, repeats=plan.repeats, tick=tick)
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


def plan_model(
    name: str,
    options: dict[str, Any],
    *,
    image_sizes: Sequence[tuple[int, int]] | None,
    windows: Sequence[int | None] | None,
    batch: int | None,
    train: bool,
    compiled: bool,
    dtype: str | None,
    device: str,
    backend: str,
    repeats: int,
    head: str | None = None,
    bound: bool = False,
) -> ModelPlan:
    """Settle device, dtype, sizes and batches; refuse windows the model cannot have and images that do not fit."""
    if compiled and head in TASKS["detect"]:
        raise ArgumentError(f"--compile: {head} makes boxes of any number, and cannot be compiled as a whole")
    for side in windows or ():
        customize(name, **options | {"window": side})
    sizes = image_sizes or [customize(name, **options).img_size]
    common = Setting(image_size=sizes[0], batch=1, backend=backend, head=head, bound=bound, **_place(device, dtype))
    most = PIXELS[common.device]
    settings = tuple(
        replace(common, image_size=size, window=side, batch=batch or max(1, most // (size[0] * size[1])))
        for size, side in product(sizes, windows or [None])
    )
    for setting in settings:
        check_images(name, options, setting, train=train)
    passes = (False, True) if train else (False,)
    return ModelPlan(name=name, options=options, settings=settings, passes=passes, compiled=compiled, repeats=repeats)


def measure_model(
    plan: ModelPlan, *, command: str, option_texts: dict[str, str], advance: Advance = lambda *_: None
) -> ModelDocument:
    """Run the contests of a plan. `command` and `option_texts` are recorded as they are."""
    setting = plan.settings[0]
    with _steady(setting.device):
        used, results = torch.get_num_threads(), list(_model_results(plan, advance))
    return {
        "schema": MODEL_SCHEMA,
        "command": command,
        "date": timestamp(),
        **circumstances(setting.device),
        "model": plan.name,
        "options": option_texts,
        "dtype": str(setting.dtype).removeprefix("torch."),
        "device": setting.device,
        "backend": setting.backend,
        "threads": used,
        "compile": plan.compiled,
        "head": setting.head,
        "results": results,
    }


def _model_results(plan: ModelPlan, advance: Advance) -> Iterator[SettingResult]:
    total = len(plan.settings) * len(plan.passes)
    for setting in plan.settings:
        everyone = entrants(plan.name, plan.options, setting, compiled=plan.compiled)
        step, (height, width) = 1 / (total * len(everyone) * (plan.repeats + 1)), setting.image_size
        tick = _ticker(advance, f"{height} x {width}", step)
        for train in plan.passes:
            rows = model_contest(everyone, setting, train=train, repeats=plan.repeats, tick=tick)
            yield {
                "image_size": list(setting.image_size),
                "window": setting.window,
                "batch": setting.batch,
                "pass": PASSES[train],
                "rows": rows,
            }


def _place(device: str, dtype: str | None) -> dict[str, Any]:
    """Return the device to measure on, and the dtype: by default the one that the device is mostly used with."""
    chosen_device = pick_device(device)
    default = "bfloat16" if chosen_device == "cuda" else "float32"
    return {"device": chosen_device, "dtype": getattr(torch, dtype or default)}


def _steady(device: str) -> AbstractContextManager[None]:
    """Run torch on one CPU thread if the machine is busy."""
    return threads(steady_threads() if device == "cpu" else torch.get_num_threads())


def _ticker(advance: Advance, size: str, step: float) -> Tick:
    return lambda label: advance(f"timing {label}, {size}", step)
