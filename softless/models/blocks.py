"""The parts of every backbone: the residual block, a stage of blocks, and the positions of a picture.

    x = x + DropPath(attn(norm1(x)));   x = x + DropPath(mlp(norm2(x)))

Shapes: B batch, N tokens of a picture h x w (after class tokens, in DeiT), C channels.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from timm.layers import DropPath, Mlp
from timm.models import register_notrace_module
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from softless.backends import layer_norm
from softless.errors import ArgumentError
from softless.mechanisms import Mechanism
from softless.nn import Attention
from softless.nn.inputs import BufferSnapshot, moving


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """The configuration of one block. `mechanism` None means the family's own softmax attention."""

    dim: int
    heads: int
    mlp_ratio: int
    mechanism: str | Mechanism | None
    local: bool
    qk_conv: bool = False
    window: int | None
    reach: int | None
    odd: bool  # its index in the stage: Swin shifts the windows of odd blocks
    last_stage: bool
    drop_path: float
    proj_drop: float
    attn_drop: float

    @property
    def shifted(self) -> bool:
        """Whether a mixed block's windows start half a window earlier. Windows of one token cannot."""
        return self.odd and self.window is not None and self.window > 1


def attention(plan: BlockConfig) -> Attention:
    """Return the attention of a block: its mechanism, or softmax."""
    return Attention(
        plan.dim,
        plan.heads,
        "softmax" if plan.mechanism is None else plan.mechanism,
        plan.local,
        window=plan.window,
        shifted=plan.shifted,
        qk_conv=plan.qk_conv,
        attn_drop=plan.attn_drop,
        proj_drop=plan.proj_drop,
    )


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm`, on a faster kernel where no gradient is needed."""

    def forward(self, x: Tensor) -> Tensor:
        out = layer_norm(x, self.weight, self.bias, self.eps)
        return super().forward(x) if out is None else out


class Block(nn.Module):
    """Pre-norm attention and MLP. `attn` is called with tokens and their grid."""

    def __init__(self, plan: BlockConfig, attn: nn.Module, eps: float):
        super().__init__()
        self.norm1 = LayerNorm(plan.dim, eps)
        self.attn = attn
        self.drop_path = DropPath(plan.drop_path) if plan.drop_path else nn.Identity()
        self.norm2 = LayerNorm(plan.dim, eps)
        self.mlp = Mlp(plan.dim, plan.mlp_ratio * plan.dim, drop=plan.proj_drop)

    def forward(self, x: Float[Tensor, "b n c"], grid: tuple[int, int]) -> Float[Tensor, "b n c"]:
        x = x + self.drop_path(self.attn(self.norm1(x), grid))
        return x + self.drop_path(self.mlp(self.norm2(x)))


@register_notrace_module  # FX records one call of it, and does not look inside
class Stage(nn.ModuleList):
    """Blocks in order, on tokens [B, N, C] with their grid or on a picture [B, h, w, C]."""

    def __init__(self, blocks: Iterable[nn.Module]):
        super().__init__(blocks)
        self.grad_checkpointing = False

    def step(self, block: nn.Module, x: Tensor, grid: tuple[int, int]) -> Tensor:
        if not self.grad_checkpointing:
            return block(x, grid)
        return rewound(block, x, grid) if moving(block) else checkpoint(block, x, grid, use_reentrant=False)

    def forward(self, x: Tensor, grid: list[int] | None = None) -> Tensor:
        height, width = x.shape[1:3] if grid is None else grid
        tokens = x.flatten(1, 2) if grid is None else x
        for block in self:
            tokens = self.step(block, tokens, (height, width))
        return tokens.unflatten(1, (height, width)) if grid is None else tokens


@torch.compiler.disable
def rewound(block: nn.Module, x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Checkpoint a block whose buffers training updates: the second run starts from the same buffers as the first.

    This is not compiled, because a compiled graph takes no context and would read the updated buffers.
    """
    return checkpoint(block, x, grid, use_reentrant=False, context_fn=BufferSnapshot(block).contexts)


@register_notrace_module
class Checked(nn.Module):
    """Returns images unchanged, after checking that they are floats [B, channels, H, W], at least one patch in size."""

    def __init__(self, channels: int, patch: int):
        super().__init__()
        self.channels, self.patch = channels, patch

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[1] != self.channels:
            needed = f"[batch, {self.channels}, height, width]"
            raise ArgumentError(f"images have shape {list(x.shape)} and must be {needed}")
        if not x.is_floating_point():
            kind = str(x.dtype).removeprefix("torch.")
            raise ArgumentError(f"images are {kind} and must be floats: divide bytes by 255, then normalize them")
        if min(x.shape[2:]) < self.patch:
            size, least = f"{x.shape[2]} x {x.shape[3]}", f"{self.patch} x {self.patch}"
            raise ArgumentError(f"images are {size} pixels and must be at least {least}, one patch")
        return x


@register_notrace_module
class Positions(nn.Module):
    """Resamples a table of positions, made for one picture size, to another size."""

    def __init__(self, native: list[int], mode: str, prefix: int = 0):
        super().__init__()
        self.native, self.mode, self.prefix = native, mode, prefix

    def forward(self, table: Tensor, grid: list[int]) -> Tensor:
        return resample(table, self.native, grid, self.mode, self.prefix)


def resample(table: Tensor, native: list[int], grid: list[int], mode: str, prefix: int) -> Tensor:
    """Resample positions [1, prefix + H W, C] to another picture size."""
    if list(native) == list(grid):
        return table
    own, picture = table[:, :prefix], table[:, prefix:].unflatten(1, tuple(native)).permute(0, 3, 1, 2)
    picture = picture.to(torch.promote_types(table.dtype, torch.float32))
    picture = F.interpolate(picture, tuple(grid), mode=mode, antialias=mode == "bicubic", align_corners=False)
    return torch.cat([own, picture.to(table.dtype).flatten(2).mT], 1)
