"""DeiT (Touvron et al. 2021) with any mechanism; by default InLine-DeiT (Han et al. 2024).

    x = [class token; patches] + positions;   x = blocks(x);   logits = head(norm(x)[class token])

All blocks are alike. The class token is a query, a key and part of the context; the 3x3 kernels leave it out.
Parameter names are timm's.

Shapes: B batch, N = 1 + h w tokens, C channels.
"""

from typing import Any

import torch
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from softless.errors import check_choice
from softless.models.backbone import FORMATS, Backbone, table
from softless.models.blocks import Block, Positions, Stage, attention
from softless.nn.patches import PatchEmbed


class DeiT(Backbone):
    """A plain vision transformer with a class token."""

    pools = ("token", "avg", "")
    num_prefix_tokens = 1
    has_positions = True

    def build(self) -> None:
        dim = self.config.dims[0]
        native = [-(-side // self.patch) for side in self.config.img_size]
        self.positions = Positions(native, "bicubic", prefix=1)
        self.patch_embed = PatchEmbed(self.patch, self.in_chans, dim, output_fmt="NLC")
        self.cls_token = table(1, 1, dim)
        self.pos_embed = table(1, 1 + native[0] * native[1], dim, std=self.position_std)
        self.blocks = Stage(Block(plan, attention(plan), 1e-6) for plan in self.plans(0))
        self.norm = nn.LayerNorm(dim, 1e-6)
        self.feature_info = [
            {"num_chs": dim, "reduction": self.patch, "module": f"blocks.{index}"} for index in range(len(self.blocks))
        ]

    def embed(self, x: Tensor) -> tuple[Tensor, list[int]]:
        """Return tokens with positions, and the height and width of the picture in patches."""
        x = self.checked(x)
        grid = [(side + self.patch - 1) // self.patch for side in (x.shape[2], x.shape[3])]
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), self.patch_embed(x)], 1)
        return x + self.positions(self.pos_embed, grid), grid

    def forward_features(self, x: Tensor) -> Tensor:
        x, grid = self.embed(x)
        return self.norm(self.blocks(x, grid))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        if self.global_pool == "token":
            x = x[:, 0]
        elif self.global_pool == "avg":
            x = x[:, 1:].mean(1)
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Return the patches after each block of `indices`, and the features too unless `intermediates_only`."""
        check_choice("output_fmt", output_fmt, (*FORMATS, "NLC"))
        take, last = feature_take_indices(len(self.blocks), indices)
        (x, (height, width)), outputs = self.embed(x), []
        for index, block in enumerate(self.blocks):
            x = self.blocks.step(block, x, (height, width))
            if index in take:
                tokens = self.norm(x) if norm else x
                patches = tokens[:, 1:] if output_fmt == "NLC" else tokens[:, 1:].unflatten(1, (height, width))
                patches = patches.permute(0, 3, 1, 2).contiguous() if output_fmt == "NCHW" else patches
                outputs.append((patches, tokens[:, :1]) if return_prefix_tokens else patches)
            if stop_early and index == last:
                break
        return outputs if intermediates_only else (self.norm(x), outputs)

    def outputs(self) -> int:
        return len(self.blocks)

    def keep_first(self, count: int) -> None:
        del self.blocks[count:]

    def no_weight_decay(self) -> set[str]:
        return {"pos_embed", "cls_token"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return timm's groups of parameters. `coarse` is part of timm's contract and unused: DeiT has no stages."""
        return {
            "stem": r"^cls_token|pos_embed|patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }
