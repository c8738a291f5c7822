"""Backbones by name: InLine-DeiT, -PVT, -Swin and -CSwin, their softmax ancestors, and every ablation between them."""

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from softless.errors import ArgumentError, MissingExtraError, UnsupportedError, did_you_mean, no_such, shown
from softless.mechanisms import Mechanism, resolve
from softless.models.settings import settings
from softless.models.shape import MOST_PIXELS, reshaped
from softless.models.table import CONFIGS, Config

if TYPE_CHECKING:
    from softless.models.backbone import Backbone

CLASSES = {
    "deit": ("softless.models.deit", "DeiT"),
    "pvt": ("softless.models.pvt", "PVT"),
    "swin": ("softless.models.swin", "Swin"),
    "cswin": ("softless.models.cswin", "CSwin"),
}

OPTIONS = (
    *("in_chans", "global_pool", "drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"),
    *("position_std", "weight_std"),
)

__all__ = ["create_model", "list_models"]


def list_models() -> list[str]:
    """Names that `create_model` takes.

    >>> import softless
    >>> softless.list_models()[:3]
    ['inline_deit_tiny', 'inline_deit_small', 'inline_deit_base']
    """
    return list(CONFIGS)


def create_model(
    name: str,
    *,
    mechanism: str | Mechanism | None = None,
    local: bool | None = None,
    window: int | Sequence[int | None] | None = None,
    pattern: str | Sequence[str | int] | None = None,
    num_classes: int = 1000,
    img_size: int | tuple[int, int] | None = None,
    patch_size: int | None = None,
    dims: int | Sequence[int] | None = None,
    depths: int | Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
    device: Any = None,
    dtype: Any = None,
    **options: Any,
) -> "Backbone":
    """A vision backbone with timm's model contract.

    >>> import torch, softless
    >>> model = softless.create_model("inline_deit_tiny", num_classes=10).eval()
    >>> model(torch.randn(2, 3, 64, 96)).shape                          # [batch, classes]; any size of image
    torch.Size([2, 10])
    >>> twin = softless.create_model("inline_deit_tiny", mechanism="softmax", local=False)  # the same shape, softmax

    mechanism    of the blocks that are not the family's own softmax attention: a name or a `Mechanism`
    local        whether they add the local residual
    window       they see windows this wide (stripes, in CSwin) in place of the whole picture; one a stage, or one
    pattern      which blocks those are, a letter a stage: I all, S none, or how many of the first: "IIIS", "II2S"
    img_size     (height, width) the position tables are made for; other sizes are resampled. Swin and CSwin have no
                 such tables: there it is only what `pretrained_cfg` says about images
    patch_size, dims, depths, heads   other sizes than the name stands for, one a stage and as many of each, down to
                 one; patch_size is the first stage's
    options      in_chans, global_pool, drop_rate, proj_drop_rate, attn_drop_rate, drop_path_rate; position_std and
                 weight_std, the deviations at the start of the table of positions and of linear weights (0.02 both):
                 pixels by themselves say little without their place, and narrow layers fade what small weights carry
    """
    config = customize(
        name, mechanism, local, window, pattern, img_size, patch_size=patch_size, dims=dims, depths=depths, heads=heads
    )
    import torch

    module, cls = CLASSES[config.family]
    try:
        make = getattr(import_module(module), cls)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in ("timm", "torchvision"):
            raise
        raise MissingExtraError(
            f"model '{name}' is built with timm, and {package} is not installed: pip install 'softless[models]'"
        ) from None
    if unknown := [option for option in options if option not in OPTIONS]:
        hint = did_you_mean(unknown[0], OPTIONS) or f"it takes {', '.join(OPTIONS)}"
        raise ArgumentError(f"model '{name}' has no option {', '.join(unknown)}: {hint}")
    if not (dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)):
        raise ArgumentError(f"dtype is {shown(dtype)} and must be a floating-point torch.dtype")
    try:
        place = torch.get_default_device() if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        raise ArgumentError(f"device is {shown(device)} and must be one that torch knows, such as 'cpu'") from None
    with place:
        model = make(config, num_classes=num_classes, **options)
    model.pretrained_cfg = {**settings(name, config), "architecture": name, "num_classes": num_classes}
    return model if dtype is None else model.to(dtype)


def customize(
    name: str,
    mechanism: object = None,
    local: bool | None = None,
    window: object = None,
    pattern: object = None,
    img_size: object = None,
    **sizes: object,
) -> Config:
    """The named configuration with these changes; what would have no effect raises."""
    if not isinstance(name, str) or name not in CONFIGS:
        raise ArgumentError(no_such("model", name, CONFIGS))
    if not (local is None or isinstance(local, bool)):
        raise ArgumentError(f"local is {shown(local)} and must be True, False or None")
    config = reshaped(CONFIGS[name], **sizes)
    mixed = config.mixed if pattern is None else _mixed(pattern, config.depths)
    given = [
        word for word, value in (("mechanism", mechanism), ("local", local), ("window", window)) if value is not None
    ]
    if given and not any(mixed):
        raise ArgumentError(
            f"{' and '.join(given)} would change no block of model '{name}', whose own softmax attention is in all: "
            f"give a pattern such as {'I' * len(mixed)!r}"
        )
    return replace(
        config,
        mixed=mixed,
        mechanism=resolve(config.mechanism if mechanism is None else mechanism),
        local=config.local if local is None else local,
        windows=() if window is None else _windows(window, config, mixed),
        img_size=config.img_size if img_size is None else _sides(img_size),
    )


def _mixed(pattern: object, depths: tuple[int, ...]) -> tuple[int, ...]:
    """How many of the first blocks of each stage take the mechanism."""
    letters = list(pattern) if isinstance(pattern, str | list | tuple) else []
    counts = [
        {"I": depth, "S": 0}.get(str(letter), int(letter) if str(letter).isdecimal() else -1)
        for letter, depth in zip(letters, depths, strict=False)
    ]
    if len(letters) != len(depths) or not all(0 <= count <= depth for count, depth in zip(counts, depths, strict=True)):
        raise ArgumentError(
            f"pattern {shown(pattern)} must have an I, an S or a number of blocks for each stage, of {list(depths)} "
            f"blocks"
        )
    return tuple(counts)


def _windows(window: Any, config: Config, mixed: tuple[int, ...]) -> tuple[int | None, ...]:
    if config.family == "deit":
        raise UnsupportedError(f"window {shown(window)} cuts a picture, and DeiT has a class token beside it")
    sides = tuple(window) if isinstance(window, list | tuple) else (window,) * len(config.depths)
    if len(sides) != len(config.depths) or not all(side is None or (type(side) is int and side > 0) for side in sides):
        raise ArgumentError(
            f"window {shown(window)} must be a positive number, or {len(config.depths)} of them or None"
        )
    idle = [stage for stage, (side, blocks) in enumerate(zip(sides, mixed, strict=True)) if side and not blocks]
    if idle and isinstance(window, list | tuple):
        raise ArgumentError(
            f"window {window!r} would change no block of stage {idle[0] + 1}, whose attention is the family's own: "
            f"give None there"
        )
    return sides


def _sides(img_size: object) -> tuple[int, int]:
    sides = tuple(img_size) if isinstance(img_size, list | tuple) else (img_size, img_size)
    if len(sides) != 2 or not all(type(side) is int and 0 < side <= MOST_PIXELS for side in sides):
        raise ArgumentError(
            f"img_size {shown(img_size)} must be a positive number, or (height, width), of at most {MOST_PIXELS:,}"
        )
    return sides[0], sides[1]
