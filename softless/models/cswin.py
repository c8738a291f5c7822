"""CSwin (Dong et al. 2022) and InLine-CSwin (Han et al. 2024, table 18).

    images -> 7x7 convolution, norm -> 4 stages, a 3x3 convolution and a norm between two -> norm -> mean -> head

The projections belong to the block, and the attention is in branches:

    o = proj(branches of qkv(norm1(x)), side by side),      branch = attention(q, k, v) + conv3x3(v)

Mixed blocks and the last stage have one branch, with all heads and the full picture. Other blocks have two branches of
half of the heads each, which see vertical and horizontal stripes of the picture; the convolution (LePE) does not cross
the border of a stripe. The local residual of a mixed block reads the mean of x before norm1, unlike in the other
families. Parameter names are the authors'.

Shapes: B batch, N = h w tokens, C channels.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from timm.layers import DropPath, Mlp
from timm.models import register_notrace_module
from torch import Tensor, nn

from softless.errors import ArgumentError
from softless.models.backbone import Pyramid
from softless.models.blocks import BlockConfig, Stage
from softless.nn.mixing import Mixing, Sides


class Branch(Mixing):
    """Attention of some heads in stripes or in the full picture, plus a convolution of their values."""

    def __init__(self, plan: BlockConfig, dim: int, heads: int, window: Sides):
        mechanism = "softmax" if plan.mechanism is None else plan.mechanism
        super().__init__(
            dim, heads, mechanism, plan.local, window=window, attn_drop=plan.attn_drop, qk_conv=plan.qk_conv
        )
        self.get_v = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)

    def forward(
        self, qkv: Float[Tensor, "b n 3 heads d"], grid: tuple[int, int], source: Float[Tensor, "b n c"]
    ) -> Float[Tensor, "b n c"]:
        stripes = self.windows(grid, qkv.shape[1])
        v = stripes.cut(qkv[:, :, 2].flatten(2)).mT.unflatten(2, stripes.size)  # [B stripes, C, rows, columns]
        return self.mix(qkv, grid, source=source) + stripes.join(self.get_v(v).flatten(2).mT)


class CSwinBlock(nn.Module):
    """Pre-norm attention in branches, and MLP."""

    def __init__(self, plan: BlockConfig):
        super().__init__()
        dim, self.heads = plan.dim, plan.heads
        width = plan.window if plan.mechanism is not None else None if plan.last_stage else plan.reach
        sides: list[Sides] = [(None, None)] if width is None else [(None, width), (width, None)]
        parts = len(sides)
        if plan.heads % parts:
            raise ArgumentError(
                f"heads {plan.heads} is odd, and CSwin's upright and level stripes have half of them each"
            )
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.attns = nn.ModuleList(Branch(plan, dim // parts, plan.heads // parts, side) for side in sides)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(plan.proj_drop)
        self.drop_path = DropPath(plan.drop_path) if plan.drop_path else nn.Identity()
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, plan.mlp_ratio * dim, drop=plan.proj_drop)

    def forward(self, x: Float[Tensor, "b n c"], grid: tuple[int, int]) -> Float[Tensor, "b n c"]:
        x = x + self.drop_path(self.proj_drop(self.proj(self.attend(x, grid))))
        return x + self.drop_path(self.mlp(self.norm2(x)))

    def attend(self, x: Float[Tensor, "b n c"], grid: tuple[int, int]) -> Float[Tensor, "b n c"]:
        parts = len(self.attns)
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))  # [B, N, 3, heads, d]
        pieces = zip(self.attns, qkv.chunk(parts, 3), x.chunk(parts, 2), strict=True)
        return torch.cat([branch(part, grid, source) for branch, part, source in pieces], -1)


class ToPicture(nn.Module):
    """[B, C, h, w] -> [B, h, w, C]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1)


@register_notrace_module
class Merge(nn.Module):
    """Halves height and width, and doubles the channels."""

    def __init__(self, dim: int):
        super().__init__()
        self.conv = nn.Conv2d(dim, 2 * dim, 3, 2, 1)
        self.norm = nn.LayerNorm(2 * dim)

    def forward(self, x: Tensor) -> Tensor:  # [B, h, w, C] -> [B, h/2, w/2, 2 C]
        return self.norm(self.conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))


class CSwin(Pyramid):
    """Four stages of attention in stripes or in the full picture."""

    def build(self) -> None:
        dims, patch = self.config.dims, self.config.patch
        self.depth = len(dims)
        self.stage1_conv_embed = nn.Sequential(
            nn.Conv2d(self.in_chans, dims[0], 7, patch, max(0, (8 - patch) // 2)), ToPicture(), nn.LayerNorm(dims[0])
        )
        for stage in range(self.depth):
            setattr(self, f"stage{stage + 1}", Stage(CSwinBlock(plan) for plan in self.plans(stage)))
        for stage, dim in enumerate(dims[:-1]):
            setattr(self, f"merge{stage + 1}", Merge(dim))
        self.norm = nn.LayerNorm(dims[-1])
        self.describe([f"stage{stage + 1}" for stage in range(self.depth)])

    def stages(self) -> list[tuple[Callable[[Tensor], Tensor], Stage]]:
        embeds = [self.stage1_conv_embed, *(getattr(self, f"merge{stage}") for stage in range(1, self.depth))]
        return [(embed, getattr(self, f"stage{stage}")) for stage, embed in enumerate(embeds, 1)]

    def keep_first(self, count: int) -> None:
        for stage in range(count, self.depth):
            delattr(self, f"merge{stage}")
            delattr(self, f"stage{stage + 1}")
        self.depth = count

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        fine = [(r"^merge(\d)", (99999,)), (r"^stage(\d)\.(\d+)", None), (r"^norm", (99999,))]
        return {"stem": r"^stage1_conv_embed", "blocks": r"^(?:stage|merge)(\d)" if coarse else fine}
