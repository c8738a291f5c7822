"""Where the tokens of a layer lie in the picture: the grid of patches, and the class and register tokens before it.

a window          its own sides, as timm's Swin keeps them on the layer and Hugging Face's on the block around it
the whole image   pixels / patch size, of timm's `patch_embed` or Hugging Face's `config`; what is left is the prefix
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

MOST_PREFIX = 16  # class, distillation and register tokens; more is no prefix but another picture


def pixels(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, int] | None:
    """Height and width of the images [B, C, H, W] that a model was called with."""
    images = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim == 4)
    return next(((x.shape[2], x.shape[3]) for x in images), None)


def picture(
    running: Sequence[nn.Module], image: tuple[int, int] | None, tokens: int
) -> tuple[tuple[int, int] | None, int]:
    """(grid, prefix) of the innermost of these modules, with this many tokens; (None, 0) where they are no picture."""
    for module in reversed(running):
        window = _pair(getattr(module, "window_size", None))
        if window is not None and window[0] * window[1] == tokens:
            return window, 0
    patch = next(filter(None, map(_patch, running)), None)
    if image is None or patch is None:
        return None, 0
    height, width = (-(-side // by) for side, by in zip(image, patch, strict=True))
    prefix = tokens - height * width
    return ((height, width), prefix) if 0 <= prefix <= MOST_PREFIX else (None, 0)


def _patch(model: nn.Module) -> tuple[int, int] | None:
    embed, config = getattr(model, "patch_embed", None), getattr(model, "config", None)
    return _pair(getattr(embed, "patch_size", None)) or _pair(getattr(config, "patch_size", None))


def _pair(sides: Any) -> tuple[int, int] | None:
    sides = (sides, sides) if isinstance(sides, int) else tuple(sides) if isinstance(sides, tuple | list) else ()
    return (sides[0], sides[1]) if len(sides) == 2 and all(isinstance(side, int) for side in sides) else None
