"""The GPU bars of whole models: what is measured, and the limit it is held to. benchmarks/gpu.py runs them.

Measured by softless.bench.model_contest, as `softless bench-model` does: bfloat16 weights and images, each model
compiled whole, medians of CUDA-graph replays. Ratios are of images per second. Memory is that of ordinary calls, which
need no compiler; all else is compiled, and compiling is most of the time this takes.
"""

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import gpu_bars
import torch
from gpu_bars import Case, Measured, facts

from softless.bench.model_contest import ModelRow, Setting, as_compiled, model_contest, ours, plainly, timms, twin

DTYPE = torch.bfloat16
DEIT, SWIN, PVT = "inline_deit_tiny", "inline_swin_tiny", "inline_pvt_small"
# A model, the side of its images, the images in a batch, and the limit.
AGAINST_TIMM = ((DEIT, 224, 256, 0.95), (DEIT, 1024, 16, 1.7), (DEIT, 2048, 4, 4.3))
AGAINST_PLAIN = ((SWIN, 224, 128, 1.3), (PVT, 224, 128, 1.5))
TRAINED = ((DEIT, 224, 256, 1.5), (SWIN, 224, 128, 1.5))
MEMORY = ((DEIT, 224, 256, 1.05), (DEIT, 1024, 16, 1.05))
# Two ways to compare, the side of the images, the images in a batch, whether it trains, and the limit.
REGRESSED = (("regress", "ours", 1024, 16, False, 0.95), ("small regress", "small", 32, 512, True, 1 / 1.15))
SMALL = {"patch_size": 4, "dims": 192, "depths": 6, "heads": 6, "global_pool": "avg"}  # the twins of docs/results.md
WAYS = {
    "ours": lambda name, setting: ours(name, {}, setting),
    "plain": lambda name, setting: plainly(name, {}, setting),
    "twin": lambda name, setting: twin(name, {}, setting),
    "timm": timms,
    "regress": lambda name, setting: ours(name, {"mechanism": "regress"}, setting),
    "small": lambda name, setting: ours(name, SMALL, setting),
    "small regress": lambda name, setting: ours(name, {**SMALL, "mechanism": "regress"}, setting),
}


@cache
def result(way: str, name: str, side: int, batch: int, train: bool, compiled: bool = True) -> ModelRow:
    """One model computed one way, by itself."""
    device, backend = gpu_bars.DEVICE.type, gpu_bars.BACKEND
    setting = Setting(image_size=(side, side), batch=batch, dtype=DTYPE, device=device, backend=backend)
    torch.compiler.reset()
    entrant = WAYS[way](name, setting)
    entrant = as_compiled(entrant) if compiled else entrant
    (row,) = model_contest([entrant], setting, train=train, repeats=gpu_bars.REPEATS)
    if row["skipped"]:
        raise RuntimeError(row["skipped"])
    return row


def model_facts(row: ModelRow, batch: int) -> dict[str, Any]:
    eager = row["eager_images_per_second"]
    numbers = {name: row[name] for name in ("images_per_second", "memory_bytes")}
    return facts({**row, "eager_ms": None if eager is None else 1e3 * batch / eager}) | numbers


def against(way: str, name: str, side: int, batch: int, train: bool, own: str = "ours") -> Measured:
    mine, theirs = (result(each, name, side, batch, train) for each in (own, way))
    about = {"against": theirs["label"], "against_images_per_second": theirs["images_per_second"]}
    return mine["images_per_second"] / theirs["images_per_second"], model_facts(mine, batch) | about


def memory(name: str, side: int, batch: int) -> Measured:
    mine, theirs = (result(each, name, side, batch, True, compiled=False) for each in ("ours", "twin"))
    about = {"against": theirs["label"], "against_memory_bytes": theirs["memory_bytes"]}
    return mine["memory_bytes"] / theirs["memory_bytes"], model_facts(mine, batch) | about


def against_timm() -> Iterator[Case]:
    """10: InLine-DeiT against timm's DeiT, which runs FlashAttention."""
    for name, side, batch, limit in AGAINST_TIMM:
        group, what = f"{name} at {side} px, images per second, against timm's", f"{batch} images"
        yield Case(10, group, what, "x", ">=", limit, partial(against, "timm", name, side, batch, False))


def against_plain() -> Iterator[Case]:
    """11: models against themselves with the plain formulas."""
    for name, side, batch, limit in AGAINST_PLAIN:
        group, what = f"{name}, images per second, against plain formulas", f"{batch} images of {side} px"
        yield Case(11, group, what, "x", ">=", limit, partial(against, "plain", name, side, batch, False))


def training() -> Iterator[Case]:
    """12: forward and backward against the plain formulas."""
    for name, side, batch, limit in TRAINED:
        group, what = "training step of a model, against plain formulas", f"{name}, {batch} images of {side} px"
        yield Case(12, group, what, "x", ">=", limit, partial(against, "plain", name, side, batch, True))


def training_memory() -> Iterator[Case]:
    """13: peak memory of a training step against the softmax twin, which runs FlashAttention."""
    for name, side, batch, limit in MEMORY:
        group, what = "memory of a training step, against the softmax twin", f"{name}, {batch} images of {side} px"
        yield Case(13, group, what, "x", "<=", limit, partial(memory, name, side, batch))


def regression() -> Iterator[Case]:
    """14: models that regress against the same models with inline."""
    for own, way, side, batch, train, limit in REGRESSED:
        group = f"{'training step' if train else 'images per second'} of {own}, speed of inline's"
        what = f"{batch} images of {side} px"
        yield Case(14, group, what, "x", ">=", limit, partial(against, way, DEIT, side, batch, train, own))


BARS = (against_timm, against_plain, training, training_memory, regression)
