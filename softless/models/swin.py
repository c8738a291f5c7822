"""Swin (Liu et al. 2021) and InLine-Swin (Han et al. 2024, table 17).

    images -> 4x4 patches, norm -> 4 stages, a patch merging between two -> norm -> mean -> head

A mixed block runs its mechanism on the full picture or in windows; only the 3x3 residual tells it about positions. The
other blocks are Swin's: softmax in windows, shifted by half a window in odd blocks, with a bias by relative position

    bias_ij = table[(y_i - y_j + W - 1)(2 W - 1) + (x_i - x_j + W - 1)]

Parameter names are the authors', who follow Swin's. Weights with timm's names can be loaded too.

Shapes: B batch, h x w tokens, C channels, W window.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from timm.models import register_notrace_module
from torch import Tensor, nn

from softless.io.weights import DERIVED
from softless.models.backbone import Pyramid, table
from softless.models.blocks import Block, BlockConfig, Stage, attention
from softless.nn import Attention
from softless.nn.patches import PatchEmbed


class WindowAttention(Attention):
    """Softmax in windows, with a bias for each relative position."""

    def __init__(self, plan: BlockConfig):
        side = plan.reach
        assert side is not None
        super().__init__(
            plan.dim,
            plan.heads,
            "softmax",
            window=side,
            shifted=plan.odd,
            attn_drop=plan.attn_drop,
            proj_drop=plan.proj_drop,
        )
        self.side = side
        self.relative_position_bias_table = table((2 * side - 1) ** 2, plan.heads)

    def forward(  # type: ignore[override]  # always a picture, and nothing else
        self, x: Float[Tensor, "b n c"], grid: tuple[int, int]
    ) -> Float[Tensor, "b n c"]:
        return super().forward(x, grid, bias=self.bias(self.windows(grid, x.shape[1]).size))

    def bias(self, size: tuple[int, int]) -> Float[Tensor, "heads m m"]:
        """Return the bias between the tokens of a window. A smaller window uses a part of the table."""
        return self.relative_position_bias_table[self.index(size)].permute(2, 0, 1)

    def index(self, size: tuple[int, int]) -> Int[Tensor, "m m"]:
        """Return the row of the table that holds the bias of each two tokens of a window."""
        device, span = self.relative_position_bias_table.device, 2 * self.side - 1
        y, x = (torch.arange(side, device=device) for side in size)
        dy, dx = (at[:, None] - at + self.side - 1 for at in (y, x))  # [rows, rows], [columns, columns]
        index = span * dy[:, None, :, None] + dx[None, :, None, :]  # [rows, columns, rows, columns]
        tokens = size[0] * size[1]
        return index.reshape(tokens, tokens)

    @property
    def relative_position_index(self) -> Int[Tensor, "m m"]:
        """The buffer that the authors' files have under this name."""
        return self.index((self.side, self.side))


@register_notrace_module
class Merging(nn.Module):
    """Concatenates 2 x 2 tokens (top left, bottom left, top right, bottom right), then halves the channels."""

    def __init__(self, dim: int):
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, h, w, C] -> [B, h/2, w/2, 2 C]
        height, width = x.shape[1:3]
        if height % 2 or width % 2:
            x = F.pad(x, (0, 0, 0, width % 2, 0, height % 2))
        squares = x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))  # [B, h/2, row, w/2, column, C]
        return self.reduction(self.norm(squares.permute(0, 1, 3, 4, 2, 5).flatten(3)))


class SwinStage(nn.Module):
    """A stage's blocks and the layer that makes the next stage's picture. It only groups their names."""

    def __init__(self, blocks: Stage, downsample: nn.Module):
        super().__init__()
        self.blocks = blocks
        self.downsample = downsample


class Swin(Pyramid):
    """Four stages of attention in windows or in the full picture."""

    def build(self) -> None:
        dims = self.config.dims
        self.patch_embed = PatchEmbed(self.patch, self.in_chans, dims[0], nn.LayerNorm, output_fmt="NHWC")
        self.layers = nn.ModuleList(
            SwinStage(
                Stage(
                    Block(plan, WindowAttention(plan) if plan.mechanism is None else attention(plan), 1e-5)
                    for plan in self.plans(stage)
                ),
                Merging(dim) if stage < len(dims) - 1 else nn.Identity(),
            )
            for stage, dim in enumerate(dims)
        )
        self.norm = nn.LayerNorm(dims[-1])
        self.register_load_state_dict_pre_hook(_accept_names)
        self.describe([f"layers.{stage}.blocks" for stage in range(len(dims))])

    def stages(self) -> list[tuple[Callable[[Tensor], Tensor], Stage]]:
        layers: list[Any] = list(self.layers)
        embeds = [self.patch_embed, *(layer.downsample for layer in layers)]
        return [(embed, layer.blocks) for embed, layer in zip(embeds, layers, strict=False)]

    def keep_first(self, count: int) -> None:
        del self.layers[count:]
        self.layers[-1].downsample = nn.Identity()

    def own_names(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Translate timm's names: there a merging belongs to the stage after it, and the classifier is head.fc."""
        if not any(name.startswith(("layers.3.downsample.", "head.fc.")) for name in weights):
            return weights

        def ours(name: str) -> str:
            name = re.sub(r"^layers\.(\d)\.downsample", lambda match: f"layers.{int(match[1]) - 1}.downsample", name)
            return re.sub(r"^head\.fc\.", "head.", name)

        return {ours(name): tensor for name, tensor in weights.items()}

    def no_weight_decay(self) -> set[str]:
        return {name for name, _ in self.named_parameters() if name.endswith("relative_position_bias_table")}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        last = (99999,)
        fine = [(r"^layers\.(\d+)\.downsample", last), (r"^layers\.(\d+)\.\w+\.(\d+)", None), (r"^norm", last)]
        return {"stem": r"^patch_embed", "blocks": r"^layers\.(\d+)" if coarse else fine}


def _accept_names(module: Swin, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Accept the names of the authors and of timm, and drop Swin's index and mask, which follow from the sizes."""
    weights = {key.removeprefix(prefix): state_dict.pop(key) for key in [*state_dict] if key.startswith(prefix)}
    for name, tensor in module.own_names(weights).items():
        if name.rpartition(".")[2] not in DERIVED:
            state_dict[prefix + name] = tensor
