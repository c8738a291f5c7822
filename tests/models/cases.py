"""Small models of every family, made from the real ones by narrowing them: fast to run, nothing left out."""

from dataclasses import replace

import torch

import softless
from softless.models import customize
from softless.models.backbone import Backbone
from softless.models.blocks import BlockConfig
from softless.models.cswin import CSwin
from softless.models.deit import DeiT
from softless.models.pvt import PVT
from softless.models.swin import Swin

CLASSES = {"deit": DeiT, "pvt": PVT, "swin": Swin, "cswin": CSwin}
FAMILIES = list(CLASSES)
SMALL = [f"{prefix}{family}_tiny" for prefix in ("inline_", "") for family in FAMILIES]


def small(name: str, *, img_size: int | tuple[int, int] = 64, num_classes: int = 5, **options: object) -> Backbone:
    """As `softless.create_model(name)`, with a sixth of the channels and at most two blocks a stage."""
    changes = ("mechanism", "local", "window", "pattern")
    given = [options.pop(word, None) for word in changes]
    config = customize(name, *given, img_size, qk_conv=options.pop("qk_conv", None))
    depths = tuple(min(depth, 2) for depth in config.depths)
    config = replace(
        config,
        dims=tuple(4 * heads for heads in config.heads),
        depths=depths,
        mixed=tuple(min(mixed, depth) for mixed, depth in zip(config.mixed, depths, strict=True)),
        reach=tuple(min(reach, 3) for reach in config.reach),
    )
    model = CLASSES[config.family](config, num_classes=num_classes, **options)
    return model.eval()


def loud(model: Backbone) -> Backbone:
    """Weights large enough for every part to matter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 1.0 if parameter.ndim < 2 else parameter[0].numel() ** -0.5
            parameter.copy_(scale * torch.randn_like(parameter) + ("norm" in name and name.endswith("weight")))
    return model


def plan(sizes: dict[str, int], **changes: object) -> BlockConfig:
    """A block of these sizes, softmax in the whole picture unless changed."""
    options = {
        "dim": sizes["dim"],
        "heads": sizes["heads"],
        "mlp_ratio": 4,
        "mechanism": None,
        "local": False,
        "window": None,
        "reach": None,
        "odd": False,
        "last_stage": False,
        "drop_path": 0.0,
        "proj_drop": 0.0,
        "attn_drop": 0.0,
    }
    return BlockConfig(**(options | changes))


def images(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype)


def mixings(model: torch.nn.Module) -> dict[str, softless.nn.Attention]:
    from softless.nn.mixing import Mixing

    return {name: module for name, module in model.named_modules() if isinstance(module, Mixing)}
