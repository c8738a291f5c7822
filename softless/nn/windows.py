"""Cut a picture of tokens into windows, and join them again.

    cut    [B, h w, ...]  ->  [B windows, n, ...]       row by row; n tokens in a window
    join   its inverse

Windows may reach beyond the picture: `mask` tells real tokens from padding. There are two ways to shift windows by half
a window (Liu et al. 2021). Either they start above and left of the picture, with one more row and column of windows; or
the picture is rolled around its border, and `pairs` says which tokens of a window were neighbors before. The second way
needs a mechanism that can hide a key from one query and not from another.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Shaped
from torch import Tensor


class Windows(NamedTuple):
    """How a picture is cut into windows.

    >>> import torch
    >>> cut = windows((4, 5), (2, 2), shifted=True)
    >>> x = torch.randn(3, 4 * 5, 7)                            # [B, h w, C]
    >>> cut.cut(x).shape, cut.mask(x).sum().item()              # 3 x 3 windows of 4 tokens; 20 of them are real
    (torch.Size([27, 4, 7]), 60)
    >>> torch.equal(cut.join(cut.cut(x)), x)
    True
    """

    grid: tuple[int, int]  # the picture, in tokens
    size: tuple[int, int]  # a window, in tokens
    before: tuple[int, int]  # rows above and columns left of the picture
    roll: tuple[int, int]  # rows and columns taken from the front to the back

    @property
    def counts(self) -> tuple[int, int]:
        """Return the numbers of rows and columns of windows."""
        rows, columns = (-(-(b + g) // s) for b, g, s in zip(self.before, self.grid, self.size, strict=True))
        return rows, columns

    def cut(self, x: Shaped[Tensor, "b n *c"]) -> Shaped[Tensor, "bw m *c"]:
        (rows, columns), (height, width), rest = self.counts, self.size, x.shape[2:]
        (top, left), (h, w) = self.before, self.grid
        picture = x.reshape(x.shape[0], h, w, rest.numel())
        right, bottom = columns * width - left - w, rows * height - top - h
        if any((left, right, top, bottom)):
            picture = F.pad(picture, (0, 0, left, right, top, bottom))
        if any(self.roll):
            picture = picture.roll((-self.roll[0], -self.roll[1]), (1, 2))
        pieces = picture.unflatten(2, (columns, width)).unflatten(1, (rows, height)).transpose(2, 3)
        return pieces.reshape(-1, height * width, *rest)

    def join(self, x: Shaped[Tensor, "bw m *c"]) -> Shaped[Tensor, "b n *c"]:
        (rows, columns), (height, width), rest = self.counts, self.size, x.shape[2:]
        (top, left), (h, w) = self.before, self.grid
        pieces = x.reshape(-1, rows, columns, height, width, rest.numel()).transpose(2, 3)
        picture = pieces.flatten(3, 4).flatten(1, 2)
        if any(self.roll):
            picture = picture.roll(self.roll, (1, 2))
        return picture[:, top : top + h, left : left + w].reshape(-1, h * w, *rest)

    def mask(self, x: Shaped[Tensor, "b n *c"]) -> Bool[Tensor, "bw m"] | None:
        """Return True for real tokens and False for padding, for a batch like x; None if there is no padding."""
        padded = [count * size for count, size in zip(self.counts, self.size, strict=True)]
        if padded == list(self.grid):
            return None
        real = x.new_ones(1, self.grid[0] * self.grid[1], dtype=torch.bool)
        return self.cut(real[..., None])[..., 0].repeat(x.shape[0], 1)

    def pairs(self, device: torch.device) -> Bool[Tensor, "w m m"] | None:
        """Return True where two tokens of a window were neighbors before the roll; None without a roll."""
        if not any(self.roll):
            return None
        moved = [torch.arange(side, device=device) < by for side, by in zip(self.grid, self.roll, strict=True)]
        part = self.cut((2 * moved[0][:, None] + moved[1]).reshape(1, -1, 1))
        return part == part.mT


def windows(grid: tuple[int, int], size: tuple[int, int], *, shifted: bool = False, rolled: bool = False) -> Windows:
    """Return windows of at most this size. A shift is half a window, and none along a side that one window covers."""
    height, width = (min(side, most) for side, most in zip(grid, size, strict=True))
    down, right = (s // 2 if shifted and side > s else 0 for side, s in zip(grid, (height, width), strict=True))
    before = (0, 0) if rolled else (height - down if down else 0, width - right if right else 0)
    return Windows((grid[0], grid[1]), (height, width), before, (down, right) if rolled else (0, 0))
