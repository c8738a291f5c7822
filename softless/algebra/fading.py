"""A memory that fades: every token multiplies what came before by e^-slope.

    S_t = e^-slope S_{t-1} + k_t v_t^T          o_t = S_t^T q_t
    w_ij = e^{-slope (p_i - p_j)} q_i.k_j,  j <= i          p counts the tokens that are kept: padding does not fade

A chunk reads its own tokens by a triangular product and earlier tokens from the memory. Exponents are differences of
integers, which are exact at any distance, before they are multiplied by the slope.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from softless.algebra.chunks import fold, unfold


def weights(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    slope: Float[Tensor, "h"],
    kept: Bool[Tensor, "#b n"],
) -> Float[Tensor, "b h n n"]:
    """Return the explicit weights of the keys that are kept."""
    place = kept.cumsum(-1)[:, None]
    return (q @ k.mT * _fade(place, slope[:, None, None])).tril() * kept[:, None, None]


def chunked(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n e"],
    slope: Float[Tensor, "h"],
    kept: Bool[Tensor, "#b n"],
    memory: Float[Tensor, "b h d e"],
    chunk: int,
) -> tuple[Float[Tensor, "b h n e"], Float[Tensor, "b h d e"]]:
    """Return the output, and the memory after the last token. Keys that are not kept are zero."""
    q_c, k_c, v_c = (fold(x, chunk) for x in (q, k, v))  # [b, h, c, l, .]
    real = fold(kept[..., None].to(v.dtype), chunk).squeeze(-1).long()
    place = real.cumsum(-1)[:, None]  # [b, 1, c, l], from the start of each chunk
    rate = slope[:, None, None]  # [h, 1, 1]
    left = place[..., -1:] - place
    blocks = (k_c * (-rate * left).exp()[..., None]).mT @ v_c  # [b, h, c, d, e]
    before = []
    for block, fade in zip(blocks.unbind(2), (-rate * place[..., -1:]).exp().unbind(2), strict=True):
        before.append(memory)
        memory = fade[..., None] * memory + block
    reach = q_c * (-rate * place).exp()[..., None]
    own = (q_c @ k_c.mT * _fade(place, rate[..., None])).tril()  # after the product: a later key may be infinite
    out = reach @ torch.stack(before, 2) + own @ v_c
    return unfold(out, v.shape[-2]), memory


def _fade(place: Int[Tensor, "*b l"], rate: Tensor) -> Float[Tensor, "*h l l"]:
    """Return e^{-slope (p_i - p_j)} for j <= i, and 1 for j > i, which is not used."""
    apart = (place[..., :, None] - place[..., None, :]).clamp(min=0)
    return (-rate * apart).exp()
