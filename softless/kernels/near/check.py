"""What the check of a GPU computes for near and far tokens: the kernels' output, and the formula typed out."""

from collections.abc import Sequence

import torch
from torch import Tensor

from softless.algebra.near import Compact
from softless.algebra.near_causal import Reach, empty, hold
from softless.kernels.near.ops import near

REACH = Reach(window=40, first=3)


def names(maps: str) -> list[str]:
    """Return the names of what is learned. If there are maps, queries and keys have the same one."""
    return ["the gain"] if maps == "identity" else ["the gain", "the map"]


def learned(maps: str, d: int, generator: torch.Generator) -> list[Tensor]:
    """Return the gain of two heads, and a map if there are maps."""
    shapes = [(2,), (2, d, d)][: len(names(maps))]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) / 2 for shape in shapes]


def on_kernels(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, gain: Tensor, matrix: Tensor | None = None
) -> Tensor:
    """Return the output of a sequence [B, H, N, e]."""
    q, k, v = q.unflatten(1, (k.shape[1], -1)), k.float()[:, :, None], v.float()[:, :, None]
    tokens = Compact(mask, k)
    q, k, v = (tokens.first_real(x) for x in (q, k, v))
    features = q.new_zeros(*q.shape[:3], 0, 2 * q.shape[-1], dtype=torch.float32)
    state = empty(k[..., :0, :], v[..., :0, :], features, REACH)
    out = near(q.flatten(1, 2), hold(state, k, v, tokens.count, REACH), matrix, matrix, gain, state, REACH, scale)
    return tokens.back(out.view(*q.shape[:-1], -1)).flatten(1, 2)


def typed(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, gain: Tensor, matrix: Tensor | None = None
) -> Tensor:
    """Compute the formula with explicit weights, in the dtype of the tensors. The gain may be one per query [H, N]."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    real = torch.ones_like(k[:, 0, :, 0], dtype=torch.bool) if mask is None else mask
    place, score = real.cumsum(-1)[:, None], scale * (q @ k.mT)
    seen = real[:, None, None, :] & torch.ones_like(score[:1, :1], dtype=torch.bool).tril()
    close = (place[..., :, None] - place[..., None, :] < REACH.window) | (place <= REACH.first)[..., None, :]
    top = score.masked_fill(~(close & seen), -torch.inf).amax(-1, keepdim=True)
    far = gain.exp().view(len(gain), -1, 1) * (hedgehog(q, matrix) @ hedgehog(k, matrix).mT)
    weights = torch.where(close, (score - top.nan_to_num(neginf=0.0)).exp(), far)
    weights = torch.where(seen, weights, 0.0)
    mass = weights.sum(-1, keepdim=True)
    return (weights @ v) / torch.where(mass > 0, mass, 1.0)


def terms_of_gain(tensors: Sequence[Tensor], mask: Tensor | None, scale: float, upstream: Tensor) -> float:
    """Return sum |t_i| over the queries i, whose t_i add up to the gradient of the gain, of the head with the most."""
    q, k, v, gain, *matrix = (x.double() for x in tensors)
    each = gain[:, None].repeat(1, q.shape[2]).requires_grad_()
    out = typed(q, k, v, mask, scale, each, *matrix)
    return torch.autograd.grad(out, each, upstream.double())[0].abs().sum(-1).max().item()


def hedgehog(x: Tensor, matrix: Tensor | None) -> Tensor:
    z = x if matrix is None else x @ matrix.mT
    return (z.shape[-1] / 2) ** 0.5 * torch.cat([z.softmax(-1), (-z).softmax(-1)], -1)
