"""Whether attention looks at a token's neighbors in the image (InLine, Figure 3).

    local mass    sum of w_ij over the k x k neighborhood of i, its own token included
    distance      sum |w_ij| d_ij / sum |w_ij|              in patches, Euclidean, over the patches of the image
    baselines     the same of uniform weights over the keys i sees   (9/197 for DeiT's 3 x 3, less at the borders)
    share         |local| / (|local| + |output|)            of InLine's local residual in a layer's output

Class tokens have no position in the image: their own rows are left out, but their share of the other rows counts.
"""

from functools import cache

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from softless.probes.layer import Grid


def locality(
    weights: Float[Tensor, "b c n n"],
    grid: Grid,
    prefix: int = 0,
    *,
    side: int = 3,
    seen: Bool[Tensor, "b #c n n"] | None = None,
) -> dict[str, Float[Tensor, "b c patches"]]:
    """Return mass and distance with their baselines, one number per patch.

    Args:
        weights: attention over `prefix` class tokens, then the patches of an image.
        grid: rows and columns of patches.
        prefix: number of class tokens. Default: 0.
        side: tokens along a side of the neighborhood. Default: 3.
        seen: which keys each query sees. Default: all.
    """
    near, apart = neighborhood(grid, side).to(weights.device), distances(grid).to(weights)
    uniform = torch.ones_like(weights) if seen is None else seen.to(weights).expand_as(weights)
    uniform = uniform / uniform.sum(-1, keepdim=True).clamp(min=1)
    own, even = (_mass_and_distance(x[:, :, prefix:, prefix:], near, apart) for x in (weights, uniform))
    return {"local_mass": own[0], "local_baseline": even[0], "attention_distance": own[1], "distance_baseline": even[1]}


def _mass_and_distance(
    weights: Float[Tensor, "b c n n"], near: Bool[Tensor, "n n"], apart: Float[Tensor, "n n"]
) -> tuple[Float[Tensor, "b c n"], Float[Tensor, "b c n"]]:
    size = weights.abs()
    total = size.sum(-1)
    return (weights * near).sum(-1), (size * apart).sum(-1) / torch.where(total > 0, total, 1.0)


def residual_share(local: Float[Tensor, "b h n e"], output: Float[Tensor, "b h n e"]) -> Float[Tensor, "b h"]:
    """Return the share of the local residual in a layer's output, by length."""
    own, rest = (x.double().flatten(2).norm(dim=-1) for x in (local, output))
    return own / torch.where(own + rest > 0, own + rest, 1.0)


@cache
def neighborhood(grid: Grid, side: int) -> Bool[Tensor, "n n"]:
    """Return which patches lie in the side x side window around each patch."""
    offsets = (_places(grid)[:, None] - _places(grid)[None]).abs()
    return (offsets <= side // 2).all(-1)


@cache
def distances(grid: Grid) -> Float[Tensor, "n n"]:
    """Return the distances between patches, in patches."""
    return (_places(grid)[:, None] - _places(grid)[None]).double().norm(dim=-1)


def _places(grid: Grid) -> Tensor:
    """Return (row, column) of each patch, [N, 2]."""
    return torch.cartesian_prod(torch.arange(grid[0]), torch.arange(grid[1]))
