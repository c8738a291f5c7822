"""What a model of ours is made of: of every stage its picture, blocks, attention, parameters and multiply-adds.

    macs        matrix products and convolutions as torch's FlopCounterMode counts them, two FLOPs each, and the nine
                products a value of the local residual
    attention   a block without its norms and its MLP: projections, mixing, local residual, convolutions on values
    rest        what lies outside the blocks: patches, positions, merging, the last norm, the classifier

Nothing is computed: the model runs on the meta device, where tensors have a shape and no data.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from softless.models import create_model
from softless.models.backbone import Backbone
from softless.models.blocks import Stage
from softless.nn.mixing import Mixing

Grid = tuple[int, int]


@dataclass(frozen=True)
class Count:
    """Numbers that are learned, and multiply-adds for one image."""

    parameters: int
    macs: int

    def __add__(self, other: "Count") -> "Count":
        return Count(self.parameters + other.parameters, self.macs + other.macs)

    def __sub__(self, other: "Count") -> "Count":
        return Count(self.parameters - other.parameters, self.macs - other.macs)


@dataclass(frozen=True)
class Kind:
    """Blocks of a stage whose attention is the same. `sees`: global, windows, stripes or reduced keys."""

    blocks: int
    mechanism: str
    local: bool
    sees: str


@dataclass(frozen=True)
class StageFacts:
    """One stage: a picture of tokens, and the blocks that read it."""

    grid: Grid
    blocks: int
    dim: int
    heads: int
    kinds: tuple[Kind, ...]
    total: Count
    attention: Count


@dataclass(frozen=True)
class Anatomy:
    """A whole model at one image size."""

    stages: tuple[StageFacts, ...]
    rest: Count
    total: Count

    @property
    def attention(self) -> Count:
        return sum((stage.attention for stage in self.stages), Count(0, 0))


def anatomy(name: str, image_size: Grid, **options: Any) -> Anatomy:
    """Count `create_model(name, **options)` on one image of this size.

    >>> from softless.bench.anatomy import anatomy
    >>> found = anatomy("inline_deit_tiny", (224, 224))
    >>> found.total.parameters, f"{found.total.macs:.2e}", found.stages[0].kinds[0].sees
    (6477736, '1.11e+09', 'global')
    """
    model = create_model(name, device="meta", **options).eval()
    counter, grids = _run(model, image_size)
    places = {module: place for place, module in model.named_modules()}
    residuals: dict[nn.Module, int] = {
        layer: 9 * h * w * layer.heads * layer.head_dim for layer, (h, w) in _residuals(grids)
    }

    def count(module: nn.Module) -> Count:
        flops = counter.get_flop_counts().get(".".join(filter(None, (type(model).__name__, places[module]))), {})
        macs = sum(flops.values()) // 2 + sum(residuals.get(each, 0) for each in module.modules())
        return Count(sum(parameter.numel() for parameter in module.parameters()), macs)

    config, stages = model.config, []
    for index, (stage, grid) in enumerate(grids.items()):
        total = count(stage)
        attention = sum((_attention(block, count) for block in stage), Count(0, 0))
        kinds = tuple(_kinds(stage, grid))
        stages.append(StageFacts(grid, len(stage), config.dims[index], config.heads[index], kinds, total, attention))
    whole = count(model)
    return Anatomy(tuple(stages), whole - sum((stage.total for stage in stages), Count(0, 0)), whole)


def _run(model: Backbone, image_size: Grid) -> tuple[FlopCounterMode, dict[Stage, Grid]]:
    """One image through the model: what was counted, and the picture that each stage saw."""
    grids: dict[Stage, Grid] = {}

    def see(stage: nn.Module, given: tuple[Any, ...]) -> None:
        assert isinstance(stage, Stage)
        tokens: Tensor = given[0]
        height, width = given[1] if len(given) > 1 else tokens.shape[1:3]
        grids[stage] = (height, width)

    for module in model.modules():
        if isinstance(module, Stage):
            module.register_forward_pre_hook(see)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.empty(1, model.in_chans, *image_size, device="meta"))
    return counter, grids


def _attention(block: Any, count: Callable[[nn.Module], Count]) -> Count:
    parts = count(block)
    for part in (block.norm1, block.norm2, block.mlp):
        parts -= count(part)
    return parts


def _residuals(grids: dict[Stage, Grid]) -> Iterable[tuple[Mixing, Grid]]:
    """Layers with a local residual, and their picture."""
    for stage, grid in grids.items():
        for layer in stage.modules():
            if isinstance(layer, Mixing) and layer.residual is not None:
                yield layer, grid


def _kinds(stage: Stage, grid: Grid) -> Iterable[Kind]:
    """Neighbors that are alike, together."""
    for kind, alike in groupby(_kind(block, grid) for block in stage):
        blocks = len(list(alike))
        yield Kind(blocks, *kind)


def _kind(block: nn.Module, grid: Grid) -> tuple[str, bool, str]:
    layers = [module for module in block.modules() if isinstance(module, Mixing)]
    first = layers[0]
    return first.mechanism.name, first.residual is not None, _sees(layers, grid)


def _sees(layers: list[Mixing], grid: Grid) -> str:
    reduction = getattr(layers[0], "reduction", 1)
    if reduction > 1:
        return f"keys reduced {reduction} x {reduction}"
    sides = [side for layer in layers for side in _cut(layer, grid)]
    if not sides:
        return "global"
    return f"stripes of {min(sides)}" if len(layers) > 1 else f"windows {min(sides)} x {min(sides)}"


def _cut(layer: Mixing, grid: Grid) -> list[int]:
    """The sides of a window that are shorter than the picture's."""
    return [most for most, side in zip(layer.window or (), grid, strict=False) if most is not None and most < side]
