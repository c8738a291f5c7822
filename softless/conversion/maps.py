"""What converted layers look at: the weights of one query, before and after, on a picture that took no part.

The query is the patch in the middle of the picture, or of the first window. Weights are means over heads. The
local residual is no part of them. The first, the middle and the last of the converted layers are drawn.
"""

import io
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import torch
from torch import Tensor

from softless.conversion.layers import Layers
from softless.conversion.layers_images import ImageLayers
from softless.conversion.samples import SampleSet
from softless.probes.capture import capture
from softless.probes.layer import Layer
from softless.report.page import COLORS

SIDE = 96  # pixels of the picture's longer side, as it is kept
DIGITS = 5  # of a weight

Grid = list[list[float]]  # rows of weights


class Looks:
    """The weights of some layers before the conversion, to compare with those after it.

    Made while the model is the original; `compared` looks at the model again. Only models of images are looked at.
    """

    def __init__(self, layers: Layers, samples: SampleSet, chosen: Sequence[int]) -> None:
        self.layers, self.batch = layers, {key: x[:1] for key, x in samples.items()}
        picked = {0, (len(chosen) - 1) // 2, len(chosen) - 1} if chosen and isinstance(layers, ImageLayers) else ()
        self.which = [chosen[at] for at in sorted(picked)]
        self.before = self._weights()

    def compared(self) -> dict[str, Any] | None:
        """Return what the page draws: the picture, and both weights of every layer; None if there is nothing."""
        rows = [
            {"layer": self.layers.names[at], "original": old, "converted": new}
            for at, old, new in zip(self.which, self.before, self._weights(), strict=True)
        ]
        return {"picture": picture_of(self.batch[self.layers.first][0]), "layers": rows} if rows else None

    @torch.no_grad()
    def _weights(self) -> list[Grid]:
        """Return the weights [rows, columns] of the middle query in each layer of the model, as it is now."""
        if not self.which:
            return []
        with capture(self.layers.model) as captured:
            self.layers.run(self.batch)
        layers_by_name = {layer.name: layer for layer in captured.layers}
        return [of_the_middle(layers_by_name[self.layers.names[at]]) for at in self.which]


def of_the_middle(layer: Layer) -> Grid:
    """Return the weights of the middle query over the patches."""
    assert layer.grid is not None
    height, width = layer.grid
    query = layer.prefix + height // 2 * width + width // 2
    seen = layer.select(slice(0, 1)).weights()[0, :, query, layer.prefix :].double().mean(0)
    return [[round(x, DIGITS) for x in row] for row in seen.view(height, width).tolist()]


def picture_of(x: Tensor) -> str:
    """Return normalized pixels [C, H, W] as a PNG in base64, from their darkest to their brightest number."""
    x = x.detach().float().cpu()
    by = min(1.0, SIDE / max(x.shape[1:]))
    size = [max(1, round(by * side)) for side in x.shape[1:]]
    x = torch.nn.functional.interpolate(x[None], size, mode="area")[0]
    low, high = x.aminmax()
    x = (255 * (x - low) / (high - low).clamp(min=1e-6)).round()
    return png(x.expand(3, -1, -1) if x.shape[0] == 1 else x[:3])


def heat(weights: Grid, top: float) -> str:
    """Return weights as a PNG in base64: white is 0, blue is `top`, orange is -top."""
    x = (torch.tensor(weights) / max(top, 1e-12)).clamp(-1, 1)[None]
    blue, orange = (torch.tensor([int(c[at : at + 2], 16) for at in (1, 3, 5)])[:, None, None] for c in COLORS[:2])
    return png((255 + x.abs() * (torch.where(x > 0, blue, orange) - 255)).round())


def png(pixels: Tensor) -> str:
    """Return pixels [3, H, W] from 0 to 255 as a PNG in base64."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels.to(torch.uint8).permute(1, 2, 0).numpy()).save(file, "PNG")
    return b64encode(file.getvalue()).decode()


def table_of(looks: Mapping[str, Any]) -> str:
    """Return the table of the page as HTML: the picture, and a column for each layer."""
    show = "<td><img alt='{}' src='data:image/png;base64,{}' style='width:150px;height:150px;image-rendering:{}'></td>"
    tops = [
        max(abs(x) for side in ("original", "converted") for line in row[side] for x in line) for row in looks["layers"]
    ]
    lines = ["".join(f"<th>{name}</th>" for name in ("", "", *(escape(row["layer"]) for row in looks["layers"])))]
    for side, first in (("original", show.format("the picture", looks["picture"], "auto")), ("converted", "<td></td>")):
        maps = (
            show.format(side, heat(row[side], top), "pixelated") for row, top in zip(looks["layers"], tops, strict=True)
        )
        lines.append(f"{first}<td>{side}</td>{''.join(maps)}")
    return f"<table cellpadding='8'>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
