"""The local residual of InLine attention (Han et al. 2024, eq. 6), as the authors' models compute it.

    r = MLP(mean of the input tokens)                     a 3x3 kernel for every sample and channel
    residual_i = sum over the 3x3 neighbors j of i of r_j v_j             zero beyond the border

The MLP is two 1x1 convolutions in `heads` groups with a GELU between: d -> d -> 9 d in each head.
Class tokens (`prefix`) lie outside the picture: they get no residual and give none.

Shapes: B batch, C = heads * d channels, N = prefix + h * w tokens.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from softless.algebra.neighbors import local_residual
from softless.errors import ArgumentError
from softless.nn.checks import check_heads, is_plain
from softless.validation import check_picture


class LocalResidual(nn.Sequential):
    """The local residual: predicted 3x3 kernels on v.

    >>> import torch, softless
    >>> residual = softless.nn.LocalResidual(dim=64, heads=2)
    >>> context, v = torch.randn(5, 64), torch.randn(5, 2, 1 + 7 * 9, 32)     # [B, C], [B, heads, N, d]
    >>> residual(context, v, grid=(7, 9), prefix=1).shape
    torch.Size([5, 2, 64, 32])

    Add the result to the attention output. The parameters are named `0.*` and `2.*`, as in the authors' weights.

    Args:
        dim: Channels C of the tokens.
        heads: Number of heads, a divisor of dim.
    """

    def __init__(self, dim: int, heads: int):
        check_heads(dim, heads)
        super().__init__(nn.Conv1d(dim, dim, 1, groups=heads), nn.GELU(), nn.Conv1d(dim, 9 * dim, 1, groups=heads))
        self.heads, self.dim = heads, dim

    def taps(self, context: Float[Tensor, "b c"]) -> Float[Tensor, "b heads 9 d"]:
        """Return the 3x3 kernel of every channel, row by row; tap 4 is the center.

        A grouped convolution of one point is one matrix per head, so two batched products replace the convolutions.
        """
        heads, d = self.heads, context.shape[1] // self.heads
        layers: list[Any] = list(self)
        first, _, last = layers
        if not (is_plain(first, nn.Conv1d) and is_plain(last, nn.Conv1d)):
            return super().forward(context[..., None])[..., 0].unflatten(1, (heads, d, 9)).mT
        x = context.view(-1, heads, d).transpose(0, 1)  # [heads, B, d]
        x = F.gelu(torch.baddbmm(first.bias.view(heads, 1, d), x, first.weight.view(heads, d, d).mT))
        x = torch.baddbmm(last.bias.view(heads, 1, 9 * d), x, last.weight.view(heads, 9 * d, d).mT)
        return x.view(heads, -1, d, 9).permute(1, 0, 3, 2)  # the output is 9 c + tap

    def forward(  # type: ignore[override]  # Sequential's takes one argument
        self, context: Float[Tensor, "b c"], v: Float[Tensor, "b heads n d"], grid: tuple[int, int], prefix: int = 0
    ) -> Float[Tensor, "b heads n d"]:
        check_picture(grid, prefix)
        if context.ndim != 2 or context.shape[1] != self.dim:
            raise ArgumentError(f"context has shape {list(context.shape)} and must be [batch, {self.dim}]")
        needed = (context.shape[0], self.heads, prefix + grid[0] * grid[1], self.dim // self.heads)
        if v.shape != needed:
            raise ArgumentError(
                f"v has shape {list(v.shape)} and must be [batch, heads, tokens, dim] = {list(needed)}, for a context "
                f"{list(context.shape)} and a grid of {grid[0]} x {grid[1]} with prefix {prefix}"
            )
        return local_residual(v, self.taps(context), grid, prefix)
