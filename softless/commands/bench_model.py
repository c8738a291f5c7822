"""The measuring half of `softless bench --model`: a plan from the words, and the contests it asks for in one document.

JSON (schema softless.bench-model/1); numbers are null where they could not be measured, and "skipped" says why:

    {"schema", "command", "date", "versions": {...}, "machine": {...},                     as in softless.bench/1
     "model", "options": {option: value}, "dtype", "device", "backend", "threads", "compile",
     "results": [{"image_size": [height, width], "window" | null, "batch", "pass": "forward" | "forward+backward",
                  "rows": [{"label", "role": "ours" | "plain" | "softmax" | "timm", "compiled", "parameters",
                            "images_per_second",
                            "ratio",                      to the softmax twin's images a second
                            "ms", "fastest_ms", "repeats", "timing": "graph" | "events" | "clock",
                            "eager_images_per_second"     CUDA: ordinary calls, launches included
                            "memory_bytes",               the weights, and the most that a call holds
                            "skipped" | null}]}]}
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from softless.bench.measure import PASSES, times
from softless.bench.model_contest import (
    ModelResult,
    Setting,
    check_memory,
    entrants,
    model_contest,
)
from softless.bench.speed import steady_threads
from softless.bench.stopwatch import threads
from softless.commands.model import model_options, settled
from softless.commands.progress import progress
from softless.errors import ArgumentError, no_such
from softless.machine import circumstances, pick_device, timestamp
from softless.models.table import CONFIGS

SCHEMA = "softless.bench-model/1"
PIXELS = {"cuda": 256 * 224**2, "cpu": 4 * 224**2}  # in a batch, where its size is not given


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """What to measure: one model in every setting, forward and perhaps backward, perhaps compiled too."""

    name: str
    words: dict[str, str]
    options: dict[str, Any]
    settings: tuple[Setting, ...]
    passes: tuple[bool, ...]
    compiled: bool
    repeats: int
    command: str


def plan(
    name: str,
    words: dict[str, str],
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
) -> ModelPlan:
    """Refuse what cannot be measured; settle the rest."""
    if name not in CONFIGS:
        raise ArgumentError(no_such("--model", name, CONFIGS))
    options, place = model_options(name, words), pick_device(device)
    if windows and "window" in options:
        raise ArgumentError(f"--option window={words['window']} and --window are the same: give one of them")
    for side in windows or ():
        settled(name, options | {"window": side})
    sizes = image_sizes or [settled(name, options).img_size]
    dtype = dtype or ("bfloat16" if place == "cuda" else "float32")
    common = Setting(image_size=sizes[0], batch=1, dtype=getattr(torch, dtype), device=place, backend=backend)
    settings = tuple(
        replace(common, image_size=size, window=side, batch=batch or max(1, PIXELS[place] // (size[0] * size[1])))
        for size, side in product(sizes, windows or [None])
    )
    for setting in settings:
        check_memory(name, options, setting, train=train)
    said = ["softless bench", f"--model {name}", *(f"--option {option}={text}" for option, text in words.items())]
    said += [f"--image-size {','.join(f'{height}x{width}' for height, width in sizes)}"]
    said += [f"--window {','.join('none' if side is None else str(side) for side in windows)}"] if windows else []
    said += [f"--batch {batch}"] * bool(batch) + ["--train"] * train + ["--compile"] * compiled
    said += [f"--dtype {dtype}", f"--device {place}", f"--backend {backend}", f"--repeats {repeats}"]
    return ModelPlan(
        name=name,
        words=words,
        options=options,
        settings=settings,
        passes=(False, True) if train else (False,),
        compiled=compiled,
        repeats=repeats,
        command=" ".join(said),
    )


def measure(plan: ModelPlan, *, show_progress: bool) -> dict[str, Any]:
    """The whole document."""
    setting = plan.settings[0]
    with threads(steady_threads() if setting.device == "cpu" else torch.get_num_threads()):
        used, results = torch.get_num_threads(), list(_results(plan, show_progress))
    return {
        "schema": SCHEMA,
        "command": plan.command,
        "date": timestamp(),
        **circumstances(setting.device),
        "model": plan.name,
        "options": plan.words,
        "dtype": str(setting.dtype).removeprefix("torch."),
        "device": setting.device,
        "backend": setting.backend,
        "threads": used,
        "compile": plan.compiled,
        "results": results,
    }


def _results(plan: ModelPlan, show_progress: bool) -> Iterator[dict[str, Any]]:
    with progress(len(plan.settings) * len(plan.passes), show_progress) as advance:
        for setting in plan.settings:
            everyone = entrants(plan.name, plan.options, setting, compiled=plan.compiled)
            step, (height, width) = 1 / (len(everyone) * (plan.repeats + 1)), setting.image_size

            def told(label: str, step: float = step, size: str = f"{height} x {width}") -> None:
                advance(f"timing {label}, {size}", step)

            for train in plan.passes:
                found = model_contest(everyone, setting, train=train, repeats=plan.repeats, tick=told)
                yield {
                    "image_size": list(setting.image_size),
                    "window": setting.window,
                    "batch": setting.batch,
                    "pass": PASSES[train],
                    "rows": [_row(result, setting.batch) for result in found],
                }


def _row(result: ModelResult, batch: int) -> dict[str, Any]:
    timing = result.timing
    eager = None if timing is None else timing.eager_seconds
    return {
        "label": result.label,
        "role": result.role,
        "compiled": result.compiled,
        "parameters": result.parameters,
        "images_per_second": result.images_per_second,
        "ratio": result.ratio,
        **times(timing),
        "eager_images_per_second": None if eager is None else batch / eager,
        "memory_bytes": result.memory_bytes,
        "skipped": result.skipped,
    }
