"""Plan and measure the contests of `softless bench-model`, as one JSON document of schema softless.bench-model/1.

Numbers are null if they could not be measured, and "skipped" gives the reason.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypedDict

import torch

from softless.bench.call_document import PASSES, Advance, place, steady, ticker
from softless.bench.model_contest import ModelRow, Setting, check_memory, entrants, model_contest
from softless.machine import Circumstances, circumstances, timestamp
from softless.models import customize

SCHEMA = "softless.bench-model/1"
PIXELS = {"cuda": 256 * 224**2, "cpu": 4 * 224**2}  # per batch, if the batch size is not set


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


class ModelDocument(Circumstances):
    """The JSON document of `softless bench-model`, schema softless.bench-model/1."""

    schema: str
    command: str
    date: str
    model: str
    options: dict[str, str]
    dtype: str
    device: str
    backend: str
    threads: int
    compile: bool
    results: list[SettingResult]


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """The contests of `softless bench-model`: one model in every setting."""

    name: str
    options: dict[str, Any]
    settings: tuple[Setting, ...]
    passes: tuple[bool, ...]
    compiled: bool
    repeats: int


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
) -> ModelPlan:
    """Settle device, dtype, sizes and batches; refuse windows the model cannot have and images that do not fit."""
    for side in windows or ():
        customize(name, **options | {"window": side})
    sizes = image_sizes or [customize(name, **options).img_size]
    common = Setting(image_size=sizes[0], batch=1, backend=backend, **place(device, dtype))
    most = PIXELS[common.device]
    settings = tuple(
        replace(common, image_size=size, window=side, batch=batch or max(1, most // (size[0] * size[1])))
        for size, side in product(sizes, windows or [None])
    )
    for setting in settings:
        check_memory(name, options, setting, train=train)
    passes = (False, True) if train else (False,)
    return ModelPlan(name=name, options=options, settings=settings, passes=passes, compiled=compiled, repeats=repeats)


def measure_model(
    plan: ModelPlan, *, command: str, option_texts: dict[str, str], advance: Advance = lambda *_: None
) -> ModelDocument:
    """Run the contests of a plan. `command` and `option_texts` are recorded as they are."""
    setting = plan.settings[0]
    with steady(setting.device):
        used, results = torch.get_num_threads(), list(_model_results(plan, advance))
    return {
        "schema": SCHEMA,
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
        "results": results,
    }


def _model_results(plan: ModelPlan, advance: Advance) -> Iterator[SettingResult]:
    total = len(plan.settings) * len(plan.passes)
    for setting in plan.settings:
        everyone = entrants(plan.name, plan.options, setting, compiled=plan.compiled)
        step, (height, width) = 1 / (total * len(everyone) * (plan.repeats + 1)), setting.image_size
        tick = ticker(advance, f"{height} x {width}", step)
        for train in plan.passes:
            rows = model_contest(everyone, setting, train=train, repeats=plan.repeats, tick=tick)
            yield {
                "image_size": list(setting.image_size),
                "window": setting.window,
                "batch": setting.batch,
                "pass": PASSES[train],
                "rows": rows,
            }
