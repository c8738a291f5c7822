"""Count parameters and multiply-adds of a model, stage by stage.

    macs        matrix products and convolutions as torch's FlopCounterMode counts them, two FLOPs each, and nine
                products per value of the local residual
    attention   a block without its norms and its MLP: projections, mixing, local residual, convolutions on values
    rest        everything outside the blocks: patches, positions, merging, the last norm, the classifier

Nothing is computed: the model runs on the meta device, where tensors have a shape but no data.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from softless.bench.published import FACTS
from softless.mechanisms import resolve
from softless.models import create_model, customize
from softless.models.backbone import Backbone
from softless.models.blocks import Stage
from softless.models.table import Config
from softless.nn.mixing import Mixing

SCHEMA = "softless.explain-model/1"
SOFTMAX_TWIN: dict[str, Any] = {"mechanism": "softmax", "local": False}
FAMILIES = {
    "deit": ("DeiT", "a class token and one stage of blocks on 16 x 16 patches"),
    "pvt": ("PVT", "four stages, each with positions of its own; a mean at the end"),
    "swin": ("Swin", "four stages, 2 x 2 tokens merged between them; a mean at the end"),
    "cswin": ("CSwin", "four stages, a convolution between them; a mean at the end"),
}

Grid = tuple[int, int]


@dataclass(frozen=True)
class Count:
    """Learned numbers, and multiply-adds per image."""

    parameters: int
    macs: int

    def __add__(self, other: "Count") -> "Count":
        return Count(self.parameters + other.parameters, self.macs + other.macs)

    def __sub__(self, other: "Count") -> "Count":
        return Count(self.parameters - other.parameters, self.macs - other.macs)


@dataclass(frozen=True)
class Kind:
    """Consecutive blocks with the same attention. `sees`: global, windows, stripes or reduced keys."""

    blocks: int
    mechanism: str
    local: bool
    sees: str


@dataclass(frozen=True)
class StageFacts:
    """One stage: the height and width of its tokens, and its blocks."""

    grid: Grid
    blocks: int
    dim: int
    heads: int
    kinds: tuple[Kind, ...]
    total: Count
    attention: Count


@dataclass(frozen=True)
class Anatomy:
    """A model at one image size."""

    stages: tuple[StageFacts, ...]
    rest: Count
    total: Count

    @property
    def attention(self) -> Count:
        return sum((stage.attention for stage in self.stages), Count(0, 0))


def anatomy(name: str, image_size: Grid, **options: Any) -> Anatomy:
    """Count `create_model(name, **options)` on one image of this size.

    >>> from softless.bench.anatomy import anatomy
    >>> tiny = anatomy("inline_deit_tiny", (224, 224))
    >>> tiny.total.parameters, f"{tiny.total.macs:.2e}", tiny.stages[0].kinds[0].sees
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
        macs = sum(flops.values()) // 2 + sum(residuals.get(part, 0) for part in module.modules())
        return Count(sum(parameter.numel() for parameter in module.parameters()), macs)

    config, stages = model.config, []
    for index, (stage, grid) in enumerate(grids.items()):
        attention = sum((_attention(block, count) for block in stage), Count(0, 0))
        numbers = len(stage), config.dims[index], config.heads[index]
        stages.append(StageFacts(grid, *numbers, tuple(_kinds(stage, grid)), count(stage), attention))
    total = count(model)
    return Anatomy(tuple(stages), total - sum((stage.total for stage in stages), Count(0, 0)), total)


class ModelExplanation(TypedDict):
    """The JSON document of `softless explain MODEL`, per image. A count has the keys of Count."""

    schema: str
    model: str
    family: str
    about: str
    options: dict[str, str]
    image_size: list[int]  # height, width
    native_size: list[int]
    stages: list[dict[str, Any]]  # the fields of StageFacts
    rest: dict[str, int]
    attention: dict[str, int]
    total: dict[str, int]
    softmax_twin: dict[str, int] | None  # None if the model has no attention but softmax
    paper: dict[str, float] | None  # top1, parameters, macs; None if options make it another model
    notes: list[str]


def explain_model(
    name: str, options: dict[str, Any], image_size: Grid | None, *, option_texts: dict[str, str]
) -> ModelExplanation:
    """Count a model and its softmax twin at one image size; None is the model's own."""
    config = customize(name, **options)
    size = image_size or config.img_size
    counted = anatomy(name, size, **options)
    twin = anatomy(name, size, **options | SOFTMAX_TWIN).total if has_softmax_twin(config) else None
    return {
        "schema": SCHEMA,
        "model": name,
        "family": config.family,
        "about": describe(config),
        "options": option_texts,
        "image_size": list(size),
        "native_size": list(config.img_size),
        "stages": [asdict(stage) for stage in counted.stages],
        "rest": asdict(counted.rest),
        "attention": asdict(counted.attention),
        "total": asdict(counted.total),
        "softmax_twin": None if twin is None else asdict(twin),
        "paper": None if options else FACTS[name].paper,
        "notes": ["A MAC is a product and a sum, two FLOPs. Norms, exponentials and sums are not counted."],
    }


def has_softmax_twin(config: Config) -> bool:
    """Return whether a model has anything to replace by softmax attention without a local residual."""
    return any(config.mixed) and (resolve(config.mechanism).name != "softmax" or config.local)


def describe(config: Config) -> str:
    """Return a line such as "Swin, 6 of 24 blocks inline with local residual: four stages, ..."."""
    family, layout = FAMILIES[config.family]
    mechanism, mixed = resolve(config.mechanism).name, sum(config.mixed)
    if mechanism == "softmax" or not mixed:
        return f"{family}: {layout}"
    local = " with local residual" if config.local else ""
    blocks = "all" if mixed == sum(config.depths) else f"{mixed} of {sum(config.depths)}"
    return f"{family}, {blocks} blocks {mechanism}{local}: {layout}"


def _run(model: Backbone, image_size: Grid) -> tuple[FlopCounterMode, dict[Stage, Grid]]:
    """Run one image through the model; return the counter, and the height and width of the tokens of each stage."""
    grids: dict[Stage, Grid] = {}

    def see(stage: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(stage, Stage)
        tokens: Tensor = arguments[0]
        height, width = arguments[1] if len(arguments) > 1 else tokens.shape[1:3]
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
    """Yield the layers with a local residual, and the height and width of their tokens."""
    for stage, grid in grids.items():
        for layer in stage.modules():
            if isinstance(layer, Mixing) and layer.residual is not None:
                yield layer, grid


def _kinds(stage: Stage, grid: Grid) -> Iterable[Kind]:
    """Group consecutive blocks with the same attention."""
    for kind, alike in groupby(_kind(block, grid) for block in stage):
        yield Kind(len(list(alike)), *kind)


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
    """Return the sides of a window that are shorter than the picture's."""
    return [most for most, side in zip(layer.window or (), grid, strict=False) if most is not None and most < side]
