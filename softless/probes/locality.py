"""Whether attention looks at a token's neighbors in the picture (InLine, Figure 3).

    local mass    sum of w_ij over the k x k neighborhood of i, its own token included
    distance      sum |w_ij| d_ij / sum |w_ij|              in patches, Euclidean, over the tokens of the picture
    baselines     the same of uniform weights over the keys i sees   (9/197 for DeiT's 3 x 3, less what borders cut off)
    share         |local| / (|local| + |output|)            of InLine's local residual in what a layer puts out

Class tokens have no place in a picture: they ask for nothing here, but hold their part of a row.
"""

from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from softless.errors import UnsupportedError
from softless.probes.layer import Layer

Grid = tuple[int, int]


@dataclass(frozen=True)
class Locality:
    """One number a query of the picture, each [B, C, height x width]."""

    mass: Tensor
    distance: Tensor
    mass_baseline: Tensor
    distance_baseline: Tensor


def locality(
    weights: Float[Tensor, "b c n n"],
    grid: Grid,
    prefix: int = 0,
    *,
    side: int = 3,
    seen: Bool[Tensor, "b #c n n"] | None = None,
) -> Locality:
    """Of explicit weights over `prefix` tokens and a picture; `seen` says which keys there are, if not all."""
    near, apart = neighborhood(grid, side).to(weights.device), distances(grid).to(weights)
    uniform = torch.ones_like(weights) if seen is None else seen.to(weights).expand_as(weights)
    uniform = uniform / uniform.sum(-1, keepdim=True).clamp(min=1)
    (mass, distance), baselines = (_look(each[:, :, prefix:, prefix:], near, apart) for each in (weights, uniform))
    return Locality(mass, distance, *baselines)


def _look(
    picture: Float[Tensor, "b c n n"], near: Bool[Tensor, "n n"], apart: Float[Tensor, "n n"]
) -> tuple[Float[Tensor, "b c n"], Float[Tensor, "b c n"]]:
    size = picture.abs()
    total = size.sum(-1)
    return (picture * near).sum(-1), (size * apart).sum(-1) / torch.where(total > 0, total, 1.0)


def residual_share(local: Float[Tensor, "b h n e"], output: Float[Tensor, "b h n e"]) -> Float[Tensor, "b h"]:
    """How much of a layer's output is its local residual, by length."""
    own, rest = (x.double().flatten(2).norm(dim=-1) for x in (local, output))
    return own / torch.where(own + rest > 0, own + rest, 1.0)


def is_picture(layer: Layer) -> bool:
    """Whether its queries and its keys are the tokens of one picture."""
    if layer.grid is None:
        return False
    return layer.prefix + layer.grid[0] * layer.grid[1] == layer.q.shape[2] == layer.k.shape[2]


def layer_locality(layer: Layer, *, side: int = 3) -> Locality:
    """Of a layer that `capture` found."""
    if layer.grid is None or not is_picture(layer):
        raise UnsupportedError(
            f"locality needs tokens that are a picture, and layer '{layer.name}' has {layer.q.shape[2]} queries and "
            f"{layer.k.shape[2]} keys for grid {layer.grid} after {layer.prefix} other tokens"
        )
    seen = layer.scores() > -torch.inf
    return locality(layer.weights(), layer.grid, layer.prefix, side=side, seen=seen)


@cache
def neighborhood(grid: Grid, side: int) -> Bool[Tensor, "n n"]:
    """Which tokens of a picture lie in the side x side window around each."""
    offsets = (_places(grid)[:, None] - _places(grid)[None]).abs()
    return (offsets <= side // 2).all(-1)


@cache
def distances(grid: Grid) -> Float[Tensor, "n n"]:
    """Between the tokens of a picture, in patches."""
    return (_places(grid)[:, None] - _places(grid)[None]).double().norm(dim=-1)


def _places(grid: Grid) -> Tensor:
    """(row, column) of each token [N, 2]."""
    return torch.cartesian_prod(torch.arange(grid[0]), torch.arange(grid[1]))
