"""Backbones by name: InLine-DeiT, -PVT, -Swin and -CSwin, the softmax models they come from, and all ablations."""

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from softless.errors import ArgumentError, MissingExtraError, did_you_mean, shown
from softless.mechanisms import Mechanism
from softless.models.configure import customize
from softless.models.shipped import find_shipped, no_weights, shipped_names
from softless.models.table import CONFIGS, settings
from softless.nn.checks import check_switch

if TYPE_CHECKING:
    from softless.models.backbone import Backbone

CLASSES = {"deit": "DeiT", "pvt": "PVT", "swin": "Swin", "cswin": "CSwin"}  # in the module of the same name

OPTIONS = (
    *("in_chans", "global_pool", "drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"),
    *("position_std", "weight_std"),
)

__all__ = ["create_model", "customize", "list_models"]


def list_models(pretrained: bool = False) -> list[str]:
    """Return the names of the architectures that `create_model` builds, or of the models with trained weights.

    >>> import softless
    >>> softless.list_models()[:3]
    ['inline_deit_tiny', 'inline_deit_small', 'inline_deit_base']
    >>> small = softless.list_models(pretrained=True)               # `create_model(name, pretrained=True)` loads them

    Args:
        pretrained: Whether to list the models whose trained weights ship with softless, instead of the architectures.
            `create_model` takes both. Default: False.
    """
    check_switch("pretrained", pretrained)
    return shipped_names() if pretrained else list(CONFIGS)


def create_model(
    name: str,
    *,
    mechanism: str | Mechanism | None = None,
    local: bool | None = None,
    qk_conv: bool | None = None,
    window: int | Sequence[int | None] | None = None,
    pattern: str | Sequence[str | int] | None = None,
    num_classes: int | None = None,
    img_size: int | tuple[int, int] | None = None,
    patch_size: int | None = None,
    dims: int | Sequence[int] | None = None,
    depths: int | Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
    pretrained: bool = False,
    device: Any = None,
    dtype: Any = None,
    **options: Any,
) -> "Backbone":
    """Build a vision backbone with timm's model contract.

    >>> import torch, softless
    >>> model = softless.create_model("inline_deit_tiny", num_classes=10).eval()
    >>> model(torch.randn(2, 3, 64, 96)).shape                          # [batch, classes]; any size of image
    torch.Size([2, 10])
    >>> twin = softless.create_model("inline_deit_tiny", mechanism="softmax", local=False)  # the same shape, softmax

    Args:
        name: A name from `list_models()`, or from `list_models(pretrained=True)`, which stands for an architecture and
            its options.
        mechanism: A name or a `Mechanism`, for the blocks that `pattern` selects. Default: None, the model's own.
        local: Whether these blocks add the local residual. Default: None, as the model has it.
        qk_conv: Whether these blocks add to q and k a depthwise convolution of their 3x3 neighbors. Default: None, no.
        window: These blocks see windows this wide (stripes in CSwin): one number, or one per stage with None for the
            full picture. Default: None, the full picture.
        pattern: Which blocks take the mechanism, one letter per stage: I for all, S for none, or a number of the first
            blocks, such as "IIIS" or "II2S". The others keep the family's softmax attention. Default: None.
        num_classes: Number of classes, 0 for no head. Default: None, the model's own; 1000 for an architecture.
        img_size: A side or (height, width) that the position tables are made for; other sizes are resampled. Swin and
            CSwin have no tables: there it only changes `pretrained_cfg`. Default: None, the model's own.
        patch_size: Pixels per side of a patch, in the first stage. Default: None, the model's own.
        dims: Channels, one number per stage. dims, depths and heads may have fewer stages than the name, down to one,
            and must have the same number. Default: None, the model's own.
        depths: Blocks, one number per stage. Default: None, the model's own.
        heads: Heads, one number per stage. Default: None, the model's own.
        pretrained: Whether to load the trained weights that ship with softless. Then `num_classes`, the rates, `device`
            and `dtype` can be given. A head with another number of classes is new. Default: False, random weights.
        device: Where to build the model. Default: None, torch's default device.
        dtype: Floating-point type of the weights. Default: None, torch's default type.
        options: in_chans, global_pool, drop_rate, proj_drop_rate, attn_drop_rate, drop_path_rate; and position_std and
            weight_std (0.02 both), the standard deviations that position tables and linear weights start with.

    Returns:
        The model: [batch, channels, height, width] -> [batch, num_classes].
    """
    check_switch("pretrained", pretrained)
    if unknown := [option for option in options if option not in OPTIONS]:
        known = *(create_model.__kwdefaults__ or {}), *OPTIONS
        hint = did_you_mean(unknown[0], known) or f"it takes {', '.join(known)}"
        raise ArgumentError(f"model {shown(name)} has no option {', '.join(unknown)}: {hint}")
    changes = {
        "mechanism": mechanism, "local": local, "qk_conv": qk_conv, "window": window, "pattern": pattern,
        "num_classes": num_classes, "img_size": img_size, "patch_size": patch_size, "dims": dims, "depths": depths,
        "heads": heads,
    }  # fmt: skip
    overrides = {option: value for option, value in changes.items() if value is not None} | options
    shipped = find_shipped(name)
    if shipped is None:
        if pretrained:
            raise ArgumentError(no_weights(name))
        return _build(name, device, dtype, **overrides)
    if pretrained:
        shipped.check(overrides)
    model = _build(shipped.base, device, dtype, **shipped.options | overrides)
    model.pretrained_cfg |= shipped.pretrained_cfg(model.num_classes)
    if pretrained:
        shipped.load(model)
    return model


def _build(name: str, device: Any, dtype: Any, num_classes: int = 1000, **arguments: Any) -> "Backbone":
    """Build a model of the table with random weights."""
    config = customize(name, **{option: value for option, value in arguments.items() if option not in OPTIONS})
    import torch

    try:
        make = getattr(import_module(f"softless.models.{config.family}"), CLASSES[config.family])
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in ("timm", "torchvision"):
            raise
        raise MissingExtraError(
            f"model '{name}' is built with timm, and {package} is not installed: pip install 'softless[models]'"
        ) from None
    if not (dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)):
        raise ArgumentError(f"dtype is {shown(dtype)} and must be a floating-point torch.dtype")
    try:
        place = torch.get_default_device() if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        raise ArgumentError(f"device is {shown(device)} and must be one that torch knows, such as 'cpu'") from None
    options = {option: value for option, value in arguments.items() if option in OPTIONS}
    with place:
        model = make(config, num_classes=num_classes, **options)
    model.pretrained_cfg = {**settings(name, config), "architecture": name, "num_classes": num_classes}
    return model if dtype is None else model.to(dtype)
