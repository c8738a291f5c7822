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

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from softless.algebra.near import Around, First, pick, read, with_ones

Sides = tuple[int, int]  # rows, columns
Rows = tuple[int, int]  # the first row of tiles, and the one after the last
FeatureMap = Callable[[Tensor], Tensor]


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

    @property
    def counts(self) -> Sides:
        """How many rows and columns of tiles there are."""
        rows, columns = (-(-long // side) for long, side in zip(self.grid, self.tile, strict=True))
        return rows, columns

    def strips(self, tokens: int | None) -> list[Rows]:
        """Cut the rows of tiles into strips of about so many tokens; None: one strip."""
        if tokens is None:
            return [(0, self.counts[0])]
        rows = max(tokens // (self.tile[0] * self.grid[1]), 1)
        return [(start, min(start + rows, self.counts[0])) for start in range(0, self.counts[0], rows)]

    def strip(self, x: Shaped[Tensor, "*b n d"], rows: Rows, border: Sides = (0, 0)) -> Shaped[Tensor, "*b h w d"]:
        """Return these rows of tiles with so many tiles around them. Zeros are where the picture is not."""
        (height, width), (tall, wide), (up, left) = self.grid, self.tile, border
        above, after = (rows[0] - up) * tall, (rows[1] + up) * tall
        beside = left * wide, left * wide + -width % wide
        return F.pad(x.unflatten(-2, self.grid), (0, 0, *beside, -above, after - height))  # a negative pad cuts

    def cut(self, strip: Shaped[Tensor, "*b h w d"], border: Sides = (0, 0)) -> Shaped[Tensor, "*b tiles t d"]:
        """Cut a strip into its tiles, each with so many around it."""
        for dim, side, around in zip((-3, -3), self.tile, border, strict=True):
            strip = strip.unfold(dim, side * (2 * around + 1), side)
        return strip.flatten(-2).mT.flatten(-4, -3)  # [*b, rows, columns, d, h, w] before

    def back(self, x: Float[Tensor, "*b tiles t d"], rows: Rows) -> Float[Tensor, "*b n d"]:
        """Return the tokens of these rows of tiles: the inverse of `cut`."""
        tiles = x.unflatten(-2, self.tile).unflatten(-4, (rows[1] - rows[0], -1))  # [*b, rows, columns, t, t, d]
        picture = tiles.transpose(-4, -3).flatten(-5, -4).flatten(-3, -2)
        return picture[..., : self.grid[0] - rows[0] * self.tile[0], : self.grid[1], :].flatten(-3, -2)

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
        others = _outside(sums.sum(-3, keepdim=True), rows, -4)
        if self.counts[1] == 1:
            return others
        padded = F.pad(sums, (0, 0, 0, 0, 0, 0, rows, rows))
        band = padded.unfold(-4, 2 * rows + 1, 1).sum(-1)
        return others + _outside(band, columns, -3)


def attend(
    q: Float[Tensor, "*b n d"],
    k: Float[Tensor, "*#b n d"],
    v: Float[Tensor, "*#b n e"],
    phi_q: FeatureMap,
    phi_k: FeatureMap,
    gain: Float[Tensor, "*#b 1 1"],
    real: Bool[Tensor, "*#b n"],
    first: int,
    scale: float,
    tiles: Tiles,
    at_once: int | None,
) -> Float[Tensor, "*b n e"]:
    """Return the output, about `at_once` tokens at a time, or all. The `first` tokens are the first that are real."""
    strips, halo = tiles.strips(at_once), tiles.halo
    ordinary = (real & (real.cumsum(-1) > first))[..., None]
    v_ref, known = v.detach()[..., :1, :], phi_k(k) if len(strips) == 1 else None

    def keys(rows: Rows, border: Sides) -> tuple[Tensor, Tensor, Tensor]:
        """Return features, V and whether a token is ordinary."""
        is_ordinary, values = (tiles.strip(x, rows, border) for x in (ordinary, v))
        phi = _on_picture(phi_k, tiles.strip(k, rows, border)) if known is None else tiles.strip(known, rows, border)
        phi, values = torch.where(is_ordinary, phi, 0.0), with_ones(values, v_ref[..., None, :])
        return tiles.cut(phi, border), tiles.cut(values, border), tiles.cut(is_ordinary, border)

    sums = []
    for rows in strips:
        phi, values, _ = keys(rows, (0, 0))
        sums.append((phi.mT @ values).unflatten(-3, (rows[1] - rows[0], -1)))
    rest = tiles.rest(torch.cat(sums, -4))
    where = (~real).long().argsort(dim=-1, stable=True)[..., :first]
    first_k, first_v = pick(k, where), pick(v, where)
    firsts = First(first_k, with_ones(first_v, v_ref), real.gather(-1, where)[..., None, None, :])
    near, pieces = tiles.near(q.device), []
    for rows in strips:
        phi, values, is_ordinary = keys(rows, halo)
        queries = tiles.strip(q, rows)
        beside = rest[..., rows[0] : rows[1], :, :, :].flatten(-4, -3)
        seen = Around(
            tiles.cut(tiles.strip(k, rows, halo), halo), values, phi, near & is_ordinary.mT, ~near[None], beside
        )
        phi = tiles.cut(_on_picture(phi_q, queries))
        pieces.append(tiles.back(read(scale * tiles.cut(queries), phi, seen, firsts, gain, v_ref), rows))
    return torch.cat(pieces, -2)


def _on_picture(phi: FeatureMap, picture: Float[Tensor, "*#b h w d"]) -> Float[Tensor, "*b h w f"]:
    return phi(picture.flatten(-3, -2)).unflatten(-2, picture.shape[-3:-1])


def _outside(sums: Tensor, reach: int, dim: int) -> Tensor:
    """Return at each place the sum over the places more than `reach` before it and after it."""
    return _earlier(sums, reach, dim) + _earlier(sums.flip(dim), reach, dim).flip(dim)


def _earlier(sums: Tensor, reach: int, dim: int) -> Tensor:
    places = sums.shape[dim]
    pad = [0, 0] * (-dim - 1) + [reach + 1, 0]
    return F.pad(sums.cumsum(dim), pad).narrow(dim, 0, places)
