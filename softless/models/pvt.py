"""PVT (Wang et al. 2021) and InLine-PVT (Han et al. 2024, tables 15 and 16).

    4 stages:  x = norm(patches of x) + positions;  x = blocks(x)            then mean -> head, with no norm before it

A mixed block takes keys and values from all tokens, or from its window. PVT's own softmax attention first reduces r x r
tokens to one by a convolution. As in the InLine authors' code, the head reads a mean where PVT has a class token.
Parameter names are theirs: attn.q, attn.kv (k above v), attn.sr, attn.norm.

Shapes: B batch, N = h w tokens, C channels.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from softless.models.backbone import Pyramid, table
from softless.models.blocks import Block, BlockConfig, Positions, Stage
from softless.nn.checks import is_plain
from softless.nn.mixing import Mixing, split_heads
from softless.nn.patches import PatchEmbed


class ReducedAttention(Mixing):
    """Attention with separate projections for queries and for keys and values, which a convolution may reduce first."""

    def __init__(self, plan: BlockConfig):
        super().__init__(
            plan.dim,
            plan.heads,
            "softmax" if plan.mechanism is None else plan.mechanism,
            plan.local,
            window=None if plan.window is None else (plan.window, plan.window),
            shifted=plan.shifted,
            attn_drop=plan.attn_drop,
            qk_conv=plan.qk_conv,
        )
        self.q = nn.Linear(plan.dim, plan.dim)
        self.kv = nn.Linear(plan.dim, 2 * plan.dim)
        self.proj = nn.Linear(plan.dim, plan.dim)
        self.proj_drop = nn.Dropout(plan.proj_drop)
        self.reduction = plan.reach if plan.mechanism is None and plan.reach is not None else 1
        if self.reduction > 1:
            self.sr = nn.Conv2d(plan.dim, plan.dim, self.reduction, self.reduction)
            self.norm = nn.LayerNorm(plan.dim)

    def forward(self, x: Float[Tensor, "b n c"], grid: tuple[int, int]) -> Float[Tensor, "b n c"]:
        if self.reduction > 1:
            q, k, v = (
                split_heads(part, self.head_dim) for part in (self.q(x), *self.kv(self.reduce(x, grid)).chunk(2, -1))
            )
            out = self.mix((q, k, v))
        else:
            out = self.mix(self.packed(x).unflatten(-1, (3, self.heads, self.head_dim)), grid, source=x)
        return self.proj_drop(self.proj(out))

    def packed(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n 3*c"]:
        """Return q, k and v side by side, which the kernels read in place: by one product if both layers are plain."""
        if not (is_plain(self.q, nn.Linear) and is_plain(self.kv, nn.Linear)):
            return torch.cat([self.q(x), self.kv(x)], -1)
        return F.linear(x, torch.cat([self.q.weight, self.kv.weight]), torch.cat([self.q.bias, self.kv.bias]))

    def reduce(self, x: Float[Tensor, "b n c"], grid: tuple[int, int]) -> Float[Tensor, "b m c"]:
        """Reduce r x r tokens to one. A border that does not fill a square is padded with zeros."""
        below, beside = (-side % self.reduction for side in grid)
        picture = F.pad(x.mT.unflatten(2, grid), (0, beside, 0, below)) if below or beside else x.mT.unflatten(2, grid)
        return self.norm(self.sr(picture).flatten(2).mT)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, mechanism={self.mechanism}"


class PVT(Pyramid):
    """Four stages on the full picture, each with its own positions."""

    has_positions = True

    def build(self) -> None:
        dims = self.config.dims
        self.depth = len(dims)
        self.positions = nn.ModuleList()
        for stage, dim in enumerate(dims):
            patch, before = (self.patch, self.in_chans) if stage == 0 else (2, dims[stage - 1])
            native = [-(-side // (self.patch * 2**stage)) for side in self.config.img_size]
            self.positions.append(Positions(native, "bilinear"))
            embed = PatchEmbed(patch, before, dim, nn.LayerNorm, output_fmt="NHWC")
            setattr(self, f"patch_embed{stage + 1}", embed)
            setattr(self, f"pos_embed{stage + 1}", table(1, native[0] * native[1], dim, std=self.position_std))
            blocks = Stage(Block(plan, ReducedAttention(plan), 1e-6) for plan in self.plans(stage))
            setattr(self, f"block{stage + 1}", blocks)
        self.describe([f"block{stage + 1}" for stage in range(self.depth)])

    def stages(self) -> list[tuple[Callable[[Tensor], Tensor], Stage]]:
        return [(partial(self.embed, stage), getattr(self, f"block{stage + 1}")) for stage in range(self.depth)]

    def embed(self, stage: int, x: Tensor) -> Tensor:
        """Turn images [B, 3, H, W], or the picture [B, h, w, C] of the stage before, into patches with positions."""
        x = getattr(self, f"patch_embed{stage + 1}")(x if stage == 0 else x.permute(0, 3, 1, 2))
        grid = [x.shape[1], x.shape[2]]
        return x + self.positions[stage](getattr(self, f"pos_embed{stage + 1}"), grid).unflatten(1, grid)

    def keep_first(self, count: int) -> None:
        for stage in range(count, self.depth):
            for name in (f"patch_embed{stage + 1}", f"pos_embed{stage + 1}", f"block{stage + 1}"):
                delattr(self, name)
        self.depth = count

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        fine = [(r"^(?:patch_embed|pos_embed)(\d)", (0,)), (r"^block(\d)\.(\d+)", None)]
        stages = r"^(?:block|patch_embed|pos_embed)(\d)"
        return {"stem": r"^patch_embed1|pos_embed1", "blocks": stages if coarse else fine}
