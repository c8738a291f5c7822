"""Each token's 3x3 neighbors in a picture, weighted: InLine's local residual (Han et al. 2024, eq. 6).

    residual_i = sum over the 3x3 neighbors j of i of taps_j v_j             zero beyond the border

Tokens before `prefix` (class tokens) lie outside the picture: they get no residual and give none.

Half precision is added up in float32 and rounded once, in the output and in the gradients. The backward pass keeps a
float32 copy of v for this. It is the same sum, with the picture of the gradient and the taps in reverse order:

    dv_i = sum over the 3x3 neighbors j of i of taps_{8-j} t_j            dtaps_j = sum_i t_i v_{i's neighbor j}
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from softless.algebra.modes import eager, recording

Grid = tuple[int, int]


def local_residual(
    v: Float[Tensor, "b heads n d"], taps: Float[Tensor, "b heads 9 d"], grid: Grid, prefix: int = 0
) -> Float[Tensor, "b heads n d"]:
    """Apply one 3x3 kernel per sample and channel, as nine shifted products. Taps are in row order."""
    kind = torch.promote_types(v.dtype, taps.dtype)
    sums = torch.promote_types(kind, torch.float32)
    v, taps = v.to(sums), taps.to(sums)
    out = _Residual.apply(v, taps, grid, prefix) if eager() and recording(v, taps) else _residual(v, taps, grid, prefix)
    return out.to(kind)


def _residual(v: Tensor, taps: Tensor, grid: Grid, prefix: int) -> Tensor:
    windows = _windows(v, grid, prefix)
    out = taps[:, :, 0, None, None] * windows[0]
    for tap in range(1, 9):
        out = torch.addcmul(out, taps[:, :, tap, None, None], windows[tap])
    out = out.flatten(2, 3)
    return F.pad(out, (0, 0, prefix, 0)) if prefix else out


def _windows(v: Tensor, grid: Grid, prefix: int) -> list[Tensor]:
    """Return the picture as each tap sees it: nine views [B, heads, h, w, d] of one picture with a border of zeros."""
    height, width = grid
    bordered = F.pad(v[:, :, prefix:].unflatten(2, grid), (0, 0, 1, 1, 1, 1))
    corners = [divmod(tap, 3) for tap in range(9)]
    return [bordered[:, :, row : row + height, column : column + width] for row, column in corners]


class _Residual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor, taps: Tensor, grid: Grid, prefix: int) -> Tensor:
        ctx.save_for_backward(v, taps)
        ctx.place = grid, prefix
        return _residual(v, taps, grid, prefix)

    @staticmethod
    def backward(ctx: Any, t: Tensor) -> tuple[Tensor | None, ...]:
        v, taps = ctx.saved_tensors
        grid, prefix = ctx.place
        dv = _residual(t, taps.flip(2), grid, prefix)
        picture = t[:, :, prefix:].unflatten(2, grid)
        dtaps = torch.stack([(picture * window).sum((2, 3)) for window in _windows(v, grid, prefix)], 2)
        return dv, dtaps, None, None
