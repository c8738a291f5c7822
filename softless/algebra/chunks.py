"""Cutting tokens into chunks, and the running sum over them."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def fold(x: Float[Tensor, "*b n d"], chunk: int, fill: float = 0.0) -> Float[Tensor, "*b c l d"]:
    """Cut tokens into chunks; the last one is filled up."""
    count = (x.shape[-2] + chunk - 1) // chunk
    return F.pad(x, (0, 0, 0, count * chunk - x.shape[-2]), value=fill).unflatten(-2, (count, chunk))


def unfold(x: Float[Tensor, "*b c l d"], tokens: int) -> Float[Tensor, "*b n d"]:
    """The inverse of `fold`."""
    return x.flatten(-3, -2)[..., :tokens, :]


def before(first: Tensor, blocks: Tensor, dim: int) -> Tensor:
    """What stands before each block: `first`, then every block but the last."""
    return torch.cat([first, blocks], dim).narrow(dim, 0, blocks.shape[dim])
