"""Each token's 3x3 neighbors in a picture, weighted: InLine's local residual (Han et al. 2024, eq. 6).

    residual_i = sum over the 3x3 neighbors j of i of taps_j v_j             zero beyond the border

Tokens before `prefix` (class tokens) lie outside the picture: they get no residual and give none.

Half precision is added up in float32 and rounded once, in the output and in the gradients. The backward pass keeps a
float32 copy of v for this.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def local_residual(
    v: Float[Tensor, "b heads n d"], taps: Float[Tensor, "b heads 9 d"], grid: tuple[int, int], prefix: int = 0
) -> Float[Tensor, "b heads n d"]:
    """Apply one 3x3 kernel per sample and channel, as nine shifted products. Taps are in row order."""
    (height, width), kind = grid, torch.promote_types(v.dtype, taps.dtype)
    sums = torch.promote_types(kind, torch.float32)
    taps, picture = taps.to(sums), v[:, :, prefix:].to(sums).unflatten(2, (height, width))  # [B, heads, h, w, d]
    bordered = F.pad(picture, (0, 0, 1, 1, 1, 1))
    out = torch.zeros_like(picture)
    for tap in range(9):
        row, column = divmod(tap, 3)
        out = out + taps[:, :, tap, None, None] * bordered[:, :, row : row + height, column : column + width]
    return F.pad(out.flatten(2, 3).to(kind), (0, 0, prefix, 0))
