"""How images are prepared for each model, in timm's words.

The InLine authors squash an image to a square and crop that, but for Swin-B at 384 pixels, which sees it whole, as the
ancestors of 384 pixels do.
"""

from typing import Any

from softless.models.table import Config

FIRST_CONVOLUTION = {
    "deit": "patch_embed.proj",
    "pvt": "patch_embed1.proj",
    "swin": "patch_embed.proj",
    "cswin": "stage1_conv_embed.0",
}


def settings(name: str, config: Config) -> dict[str, Any]:
    """timm's `pretrained_cfg` of a model by this name, of these sizes."""
    height, width = config.img_size
    reduction = config.patch * 2 ** (len(config.dims) - 1)
    inline = name.startswith("inline_")
    whole = name.endswith("_384") and name != "inline_cswin_base_384"
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, height, width),
        "pool_size": None if config.family == "deit" else (height // reduction, width // reduction),
        "crop_pct": 1.0 if whole else 0.875 if inline else 0.9,
        "crop_mode": "squash" if inline else "center",
        "interpolation": "bicubic",
        "fixed_input_size": False,
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": FIRST_CONVOLUTION[config.family],
        "classifier": "head",
    }
