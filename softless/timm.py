"""Our models in timm: importing this registers them, and nothing else does.

    import softless.timm
    timm.create_model("inline_swin_tiny", features_only=True)

From there on they are timm's like any other: pretrained weights from hf-hub: and local-dir:, in_chans, num_classes,
features_only, and our own arguments (mechanism, local, window, pattern, img_size).
"""

from collections.abc import Callable
from functools import partial
from math import isqrt
from typing import Any

import torch.nn.functional as F

from softless.errors import MissingExtraError
from softless.models import create_model
from softless.models.table import CONFIGS, Config

try:
    from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
except ModuleNotFoundError as missing:
    package = str(missing.name).partition(".")[0]
    raise MissingExtraError(
        f"softless.timm registers models with timm, and {package} is not installed: pip install 'softless[models]'"
    ) from None

from softless.models.blocks import resample

FIRST_CONVOLUTION = {
    "deit": "patch_embed.proj",
    "pvt": "patch_embed1.proj",
    "swin": "patch_embed.proj",
    "cswin": "stage1_conv_embed.0",
}


def _settings(name: str, config: Config) -> dict[str, Any]:
    """How images are prepared: the InLine authors squash them to a square before they crop, but for Swin-B at 384."""
    height, width = config.img_size
    whole = name == "inline_swin_base_384"
    inline = name.startswith("inline_")
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, height, width),
        "pool_size": None if config.family == "deit" else (height // 32, width // 32),
        "crop_pct": 1.0 if whole else 0.875 if inline else 0.9,
        "crop_mode": "squash" if inline else "center",
        "interpolation": "bicubic",
        "fixed_input_size": False,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": FIRST_CONVOLUTION[config.family],
        "classifier": "head",
    }


default_cfgs = generate_default_cfgs({f"{name}.untrained": _settings(name, config) for name, config in CONFIGS.items()})


def fit_tables(state_dict: dict[str, Any], model: Any) -> dict[str, Any]:
    """Weights with their position tables resampled to the model's image size or window."""
    own = model.state_dict()
    fitted = dict(state_dict.get("model", state_dict))
    for key, table in fitted.items():
        if key not in own or table.shape == own[key].shape:
            continue
        if key.endswith("relative_position_bias_table"):
            old, new = isqrt(len(table)), isqrt(len(own[key]))
            square = table.mT.unflatten(1, (old, old))[None].float()
            fitted[key] = F.interpolate(square, (new, new), mode="bicubic")[0].flatten(1).mT.to(table.dtype)
        elif key.startswith("pos_embed"):
            stage = key.removeprefix("pos_embed")
            here = model.positions[int(stage) - 1] if stage else model.positions
            side = isqrt(table.shape[1] - here.prefix)
            fitted[key] = resample(table, [side, side], here.native, here.mode, here.prefix)
    return fitted


def _entry(name: str, family: str) -> Callable[..., Any]:
    """The function that timm calls for a name."""
    features = {"feature_cls": "getter", "out_indices": 3 if family == "deit" else (0, 1, 2, 3)}

    def entry(pretrained: bool = False, **options: Any) -> Any:
        features_of = features | options.pop("feature_cfg", {})
        make = partial(create_model, name)
        return build_model_with_cfg(
            make, name, pretrained, feature_cfg=features_of, pretrained_filter_fn=fit_tables, **options
        )

    entry.__name__ = entry.__qualname__ = name
    entry.__doc__ = f"softless.create_model({name!r})"
    return entry


for _name, _config in CONFIGS.items():
    register_model(_entry(_name, _config.family))
