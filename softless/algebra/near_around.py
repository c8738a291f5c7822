"""Near and far tokens in a picture or a sequence, where every query sees every token.

    near(i)   the tokens less than `apart` rows and columns away from i, and the first tokens
    far(i)    all others

A sequence is a picture of one row. Tiles of it are the blocks of queries. Around a tile are as many whole tiles as its
tokens reach into. Of all other tiles only sums are read, first those in other rows of tiles, then those beside:

    a a a a a        a  the sums over rows of tiles above and below
    b t t t b        b  the sums over tiles to both sides
    a a a a a        t  read token by token

No tile's sum is subtracted from a total: what is left of a difference may be nothing but rounding.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from softless.algebra.near import Around, First, read, with_ones

Sides = tuple[int, int]  # rows, columns


class Tiles(NamedTuple):
    """A picture cut into tiles. `apart`: how far apart tokens are that are no longer near each other."""

    grid: Sides
    tile: Sides
    apart: Sides

    @property
    def halo(self) -> Sides:
        """How many tiles are around one, to each side."""
        rows, columns = (max(-(-(far - 1) // side), 0) for far, side in zip(self.apart, self.tile, strict=True))
        return rows, columns

    def cut(self, x: Float[Tensor, "*b n d"], border: Sides = (0, 0)) -> Float[Tensor, "*b rows columns t d"]:
        """Cut into tiles with so many tiles around them, and fill up the last ones and the border with zeros."""
        (height, width), (tall, wide) = self.grid, self.tile
        up, left = border[0] * tall, border[1] * wide
        picture = F.pad(x.unflatten(-2, self.grid), (0, 0, left, left + -width % wide, up, up + -height % tall))
        tall, wide = tall + 2 * up, wide + 2 * left
        tiles = picture.unfold(-3, tall, self.tile[0]).unfold(
            -3, wide, self.tile[1]
        )  # [*b, rows, columns, d, tall, wide]
        return tiles.flatten(-2).mT

    def back(self, x: Float[Tensor, "*b rows columns t d"]) -> Float[Tensor, "*b n d"]:
        """The inverse of `cut`."""
        picture = x.unflatten(-2, self.tile).transpose(-4, -3).flatten(-5, -4).flatten(-3, -2)
        return picture[..., : self.grid[0], : self.grid[1], :].flatten(-3, -2)

    def near(self, device: torch.device) -> Bool[Tensor, "t around"]:
        """Return which tokens around a tile are near each token of it."""
        rows, columns = (
            (
                torch.arange(side, device=device)[:, None]
                - torch.arange(side * (2 * halo + 1), device=device)
                + halo * side
            ).abs()
            < apart
            for side, halo, apart in zip(self.tile, self.halo, self.apart, strict=True)
        )
        return (rows[:, None, :, None] & columns[None, :, None, :]).flatten(2, 3).flatten(0, 1)

    def rest(self, sums: Float[Tensor, "*b rows columns f e"]) -> Float[Tensor, "*b rows columns f e"]:
        """Return for each tile the sum over the tiles that are not around it."""
        rows, columns = self.halo
        padded = F.pad(sums, (0, 0, 0, 0, 0, 0, rows, rows))
        band = padded.unfold(-4, 2 * rows + 1, 1).sum(-1)
        return _outside(sums.sum(-3, keepdim=True), rows, -4) + _outside(band, columns, -3)


def attend(
    q: Float[Tensor, "*b n d"],
    k: Float[Tensor, "*#b n d"],
    v: Float[Tensor, "*#b n e"],
    phi_q: Float[Tensor, "*b n f"],
    phi_k: Float[Tensor, "*#b n f"],
    gain: Float[Tensor, "*#b 1 1"],
    real: Bool[Tensor, "*#b n"],
    first: int,
    tiles: Tiles,
) -> Float[Tensor, "*b n e"]:
    """Return the output for scaled queries. The `first` tokens are the first that are real."""
    ordinary = real & (real.cumsum(-1) > first)
    v_ref = v.detach()[..., :1, :]
    values, phi = with_ones(v, v_ref), torch.where(ordinary[..., None], phi_k, 0.0)
    sums = tiles.cut(phi).mT @ tiles.cut(values)
    at_k, at_v, at_phi, kept = (
        tiles.cut(x, tiles.halo).flatten(-4, -3) for x in (k, values, phi, ordinary[..., None].to(k.dtype))
    )
    near = tiles.near(q.device)
    seen = Around(at_k, at_v, at_phi, near & (kept.mT > 0), ~near[None], tiles.rest(sums).flatten(-4, -3))
    where = (~real).long().argsort(dim=-1, stable=True)[..., :first]
    first_k, first_v = (x.take_along_dim(where[..., None], -2) for x in (k, values))
    firsts = First(first_k, first_v, real.gather(-1, where)[..., None, None, :])
    out = read(tiles.cut(q).flatten(-4, -3), tiles.cut(phi_q).flatten(-4, -3), seen, firsts, gain, v_ref)
    rows = -(-tiles.grid[0] // tiles.tile[0])
    return tiles.back(out.unflatten(-3, (rows, -1)))


def _outside(sums: Tensor, reach: int, dim: int) -> Tensor:
    """Return at each place the sum over the places more than `reach` before it and after it."""
    return _earlier(sums, reach, dim) + _earlier(sums.flip(dim), reach, dim).flip(dim)


def _earlier(sums: Tensor, reach: int, dim: int) -> Tensor:
    places = sums.shape[dim]
    pad = [0, 0] * (-dim - 1) + [reach + 1, 0]
    return F.pad(sums.cumsum(dim), pad).narrow(dim, 0, places)
