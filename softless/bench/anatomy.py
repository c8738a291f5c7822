"""Count parameters and multiply-adds of a model, stage by stage.

    macs        matrix products and convolutions as torch's FlopCounterMode counts them, two FLOPs each, and nine
                products per value of the local residual
    attention   a block without its norms and its MLP: projections, mixing, local residual, convolutions on values
    rest        everything outside the blocks: patches, positions, merging, the last norm, the classifier

Nothing is computed: the model runs on the meta device, where tensors have a shape but no data.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain, groupby
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
    """Parameters, and multiply-adds per image."""

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
        layer: 9 * height * width * layer.heads * layer.head_dim
        for stage, (height, width) in grids.items()
        for layer in stage.modules()
        if isinstance(layer, Mixing) and layer.residual is not None
    }

    def count(*modules: nn.Module) -> Count:
        parts = [part for module in modules for part in module.modules()]
        names = [".".join(filter(None, (type(model).__name__, places[module]))) for module in modules]
        flops = sum(sum(counter.get_flop_counts().get(name, {}).values()) for name in names)
        macs = flops // 2 + sum(residuals.get(part, 0) for part in parts)
        return Count(sum(weight.numel() for module in modules for weight in module.parameters()), macs)

    stages = []
    for (stage, grid), dim, heads in zip(grids.items(), model.config.dims, model.config.heads, strict=True):
        blocks: list[Any] = list(stage)
        others = [part for block in blocks for part in (block.norm1, block.norm2, block.mlp)]
        attention = count(*blocks) - count(*others)
        stages.append(StageFacts(grid, len(stage), dim, heads, tuple(_kinds(stage, grid)), count(stage), attention))
    return Anatomy(tuple(stages), count(model) - count(*grids), count(model))


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


def _kinds(stage: Stage, grid: Grid) -> Iterator[Kind]:
    """Group consecutive blocks with the same attention."""
    for kind, alike in groupby(_kind(block, grid) for block in stage):
        yield replace(kind, blocks=len(list(alike)))


def _kind(block: nn.Module, grid: Grid) -> Kind:
    layers = [module for module in block.modules() if isinstance(module, Mixing)]
    first, reduction = layers[0], getattr(layers[0], "reduction", 1)
    windows = (zip(layer.window or (), grid, strict=False) for layer in layers)
    sides = [most for most, side in chain(*windows) if most is not None and most < side]  # shorter than the picture's
    sees = f"keys reduced {reduction} x {reduction}" if reduction > 1 else "global"
    if sides and reduction == 1:
        sees = f"stripes of {min(sides)}" if len(layers) > 1 else f"windows {min(sides)} x {min(sides)}"
    return Kind(1, first.mechanism.name, first.residual is not None, sees)
