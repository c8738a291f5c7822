"""The table of models, written by hand, and how images are prepared for each of them.

The first `mixed` blocks of a stage take `mechanism` and `local`. The other blocks have the family's own softmax
attention, which sees a part of the picture: `reach` is Swin's window, CSwin's stripe, or PVT's reduction of keys.

    Han et al. 2024 (InLine), tables 15 to 18, corrected by the authors' code
    Touvron et al. 2021 (DeiT)    Wang et al. 2021 (PVT)    Liu et al. 2021 (Swin)    Dong et al. 2022 (CSwin)
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from softless.mechanisms import Mechanism


@dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of one model. A tuple has one entry per stage."""

    family: str  # deit | pvt | swin | cswin
    dims: tuple[int, ...]
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    mixed: tuple[int, ...]
    img_size: tuple[int, int] = (224, 224)
    patch: int = 4  # pixels per side of a patch, in the first stage
    mlp_ratios: tuple[int, ...] = (4, 4, 4, 4)
    reach: tuple[int, ...] = ()
    mechanism: "str | Mechanism" = "inline"
    local: bool = True
    qk_conv: bool = False
    windows: tuple[int | None, ...] = ()  # of the mixed blocks; empty, or None for a stage: the full picture


def _deit(dim: int, heads: int, side: int) -> Config:
    return Config(
        family="deit", dims=(dim,), depths=(12,), heads=(heads,), mixed=(12,), img_size=(side, side), patch=16
    )  # fmt: skip


def _pvt(*depths: int) -> Config:
    return Config(
        family="pvt", dims=(64, 128, 320, 512), depths=depths, heads=(2, 4, 10, 16), mixed=depths,
        mlp_ratios=(8, 8, 4, 4), reach=(8, 4, 2, 1),
    )  # fmt: skip


def _swin(dim: int, depths: tuple[int, ...], mixed: tuple[int, ...], side: int = 224) -> Config:
    window = 12 if side == 384 else 7
    return Config(
        family="swin", dims=(dim, 2 * dim, 4 * dim, 8 * dim), depths=depths, mixed=mixed,
        heads=(dim // 32, dim // 16, dim // 8, dim // 4), reach=(window,) * 4, img_size=(side, side),
    )  # fmt: skip


def _cswin(dim: int, depths: tuple[int, ...], heads: tuple[int, ...], side: int = 224) -> Config:
    stripe = 12 if side == 384 else 7
    return Config(
        family="cswin", dims=(dim, 2 * dim, 4 * dim, 8 * dim), depths=depths, heads=heads,
        mixed=(depths[0], depths[1], 0, 0), reach=(1, 2, stripe, stripe), img_size=(side, side),
    )  # fmt: skip


_INLINE = {
    "inline_deit_tiny": _deit(192, 6, 224),
    "inline_deit_small": _deit(320, 10, 288),
    "inline_deit_base": _deit(384, 12, 448),
    "inline_pvt_tiny": _pvt(2, 2, 2, 2),
    "inline_pvt_small": _pvt(3, 4, 6, 3),
    "inline_pvt_medium": _pvt(3, 4, 18, 3),
    "inline_pvt_large": _pvt(3, 8, 27, 3),
    "inline_swin_tiny": _swin(96, (2, 2, 6, 2), (2, 2, 6, 0)),
    "inline_swin_small": _swin(96, (2, 2, 18, 2), (2, 2, 0, 0)),
    "inline_swin_base": _swin(128, (2, 2, 18, 2), (2, 2, 2, 0)),
    "inline_swin_base_384": _swin(128, (2, 2, 18, 2), (2, 2, 2, 0), side=384),
    "inline_cswin_tiny": _cswin(64, (2, 4, 18, 1), (2, 4, 8, 16)),
    "inline_cswin_small": _cswin(64, (3, 6, 29, 2), (2, 4, 8, 16)),
    "inline_cswin_base": _cswin(96, (3, 6, 29, 2), (4, 8, 16, 32)),
    "inline_cswin_base_384": _cswin(96, (3, 6, 29, 2), (4, 8, 16, 32), side=384),
}


def _original(name: str, *, mixed: tuple[int, ...] = (0, 0, 0, 0), **changes: object) -> Config:
    """Return the softmax model that an InLine model was made from."""
    return replace(_INLINE[name], mechanism="softmax", local=False, mixed=mixed, **changes)  # type: ignore[arg-type]


_ORIGINAL = {
    "deit_tiny": _original("inline_deit_tiny", mixed=(12,), heads=(3,)),
    "deit_small": _original("inline_deit_small", mixed=(12,), dims=(384,), heads=(6,), img_size=(224, 224)),
    "deit_base": _original("inline_deit_base", mixed=(12,), dims=(768,), heads=(12,), img_size=(224, 224)),
    "pvt_tiny": _original("inline_pvt_tiny", heads=(1, 2, 5, 8)),
    "pvt_small": _original("inline_pvt_small", heads=(1, 2, 5, 8)),
    "pvt_medium": _original("inline_pvt_medium", heads=(1, 2, 5, 8)),
    "pvt_large": _original("inline_pvt_large", heads=(1, 2, 5, 8)),
    "swin_tiny": _original("inline_swin_tiny"),
    "swin_small": _original("inline_swin_small"),
    "swin_base": _original("inline_swin_base"),
    "swin_base_384": _original("inline_swin_base_384"),
    "cswin_tiny": _original("inline_cswin_tiny", depths=(1, 2, 21, 1)),
    "cswin_small": _original("inline_cswin_small", depths=(2, 4, 32, 2)),
    "cswin_base": _original("inline_cswin_base", depths=(2, 4, 32, 2)),
    "cswin_base_384": _original("inline_cswin_base_384", depths=(2, 4, 32, 2)),
}

CONFIGS: dict[str, Config] = _INLINE | _ORIGINAL

FIRST_CONVOLUTION = {
    "deit": "patch_embed.proj",
    "pvt": "patch_embed1.proj",
    "swin": "patch_embed.proj",
    "cswin": "stage1_conv_embed.0",
}


def settings(name: str, config: Config) -> dict[str, Any]:
    """Return timm's `pretrained_cfg` of a model with this name and these sizes.

    The InLine authors resize an image to a square and crop it. Swin-B at 384 pixels, and the softmax models of 384
    pixels, see the full image.
    """
    height, width = config.img_size
    reduction = config.patch * 2 ** (len(config.dims) - 1)
    inline = name.startswith("inline_")
    full_image = name.endswith("_384") and name != "inline_cswin_base_384"
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, height, width),
        "pool_size": None if config.family == "deit" else (height // reduction, width // reduction),
        "crop_pct": 1.0 if full_image else 0.875 if inline else 0.9,
        "crop_mode": "squash" if inline else "center",
        "interpolation": "bicubic",
        "fixed_input_size": False,
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": FIRST_CONVOLUTION[config.family],
        "classifier": "head",
    }
