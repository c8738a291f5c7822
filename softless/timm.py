"""Register the models of this library with timm. Importing this module does it, and nothing else does.

    import softless.timm
    timm.create_model("inline_swin_tiny", features_only=True)

The models then work as timm's own: pretrained weights from hf-hub: and local-dir:, in_chans, num_classes and
features_only. They also take the arguments of `softless.create_model` (mechanism, local, window, pattern, img_size).
"""

from collections.abc import Callable
from functools import partial
from math import isqrt
from typing import Any

import torch
import torch.nn.functional as F

from softless.errors import FileError, needs_extra
from softless.models import create_model
from softless.models.configure import reshaped
from softless.models.table import CONFIGS, settings

with needs_extra("softless.timm registers models with timm", "models"):
    from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from softless.models.blocks import resample

default_cfgs = generate_default_cfgs({f"{name}.untrained": settings(name, config) for name, config in CONFIGS.items()})


def fit_tables(state_dict: dict[str, Any], model: Any) -> dict[str, Any]:
    """Return the weights under the model's names, with position tables resampled to its image size or window."""
    own = model.state_dict()
    fitted = dict(model.own_names(state_dict.get("model", state_dict)))
    for key, table in fitted.items():
        if key not in own or table.shape == own[key].shape or table.shape[-1:] != own[key].shape[-1:]:
            continue
        if key.endswith("relative_position_bias_table"):
            old, new = _side(key, len(table)), isqrt(len(own[key]))
            square = table.mT.unflatten(1, (old, old))[None].to(torch.promote_types(table.dtype, torch.float32))
            fitted[key] = F.interpolate(square, (new, new), mode="bicubic")[0].flatten(1).mT.to(table.dtype)
        elif key.startswith("pos_embed"):
            stage = key.removeprefix("pos_embed")
            positions = model.positions[int(stage) - 1] if stage else model.positions
            side = _side(key, table.shape[1] - positions.prefix)
            fitted[key] = resample(table, [side, side], positions.native, positions.mode, positions.prefix)
    return fitted


def _side(key: str, places: int) -> int:
    side = isqrt(max(places, 0))
    if side == 0 or side**2 != places:
        raise FileError(f"{key} has {places} places, and only a square of them can be resampled to another size")
    return side


def _entry(name: str, family: str) -> Callable[..., Any]:
    """Return the function that timm calls for a name."""

    def entry(pretrained: bool = False, **options: Any) -> Any:
        depths = reshaped(CONFIGS[name], **{size: options.get(size) for size in ("dims", "depths", "heads")}).depths
        stages = min(3, depths[0]) if family == "deit" else tuple(range(len(depths)))
        features_of = {"feature_cls": "getter", "out_indices": stages} | options.pop("feature_cfg", {})
        make = partial(create_model, name)
        return build_model_with_cfg(
            make, name, pretrained, feature_cfg=features_of, pretrained_filter_fn=fit_tables, **options
        )

    entry.__name__ = entry.__qualname__ = name
    entry.__doc__ = f"softless.create_model({name!r})"
    return entry


for _name, _config in CONFIGS.items():
    register_model(_entry(_name, _config.family))

__all__ = ["default_cfgs", "fit_tables"]  # register_model would add the names of all models
