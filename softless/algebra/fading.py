"""A memory that fades: every token multiplies what came before by e^-slope.

    S_t = e^-slope S_{t-1} + k_t v_t^T          o_t = S_t^T q_t
    w_ij = e^{-slope (p_i - p_j)} q_i.k_j,  j <= i          p counts the tokens that are kept: padding does not fade

A chunk reads its own tokens by a triangular product and those before it by their faded sum. Exponents are
differences of whole numbers, exact however far apart, before they are multiplied.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from softless.algebra.chunks import before, fold, unfold

GROUP = 64  # chunks whose faded sums are one product


def weights(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    slope: Float[Tensor, "h"],
    kept: Bool[Tensor, "#b n"],
) -> Float[Tensor, "b h n n"]:
    """Explicit weights of the keys that are kept."""
    place = kept.cumsum(-1)[:, None]
    return q @ k.mT * _fade(place, slope[:, None, None]) * kept[:, None, None]


def chunked(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n e"],
    slope: Float[Tensor, "h"],
    kept: Bool[Tensor, "#b n"],
    memory: Float[Tensor, "b h d e"],
    chunk: int,
) -> tuple[Float[Tensor, "b h n e"], Float[Tensor, "b h d e"]]:
    """The output, and the memory after the last token. Keys that are not kept are zero."""
    q_c, k_c, v_c = (fold(x, chunk) for x in (q, k, v))  # [b, h, c, l, .]
    real = fold(kept[..., None].to(v.dtype), chunk).squeeze(-1).long()
    place = real.cumsum(-1)[:, None]  # [b, 1, c, l], from the start of each chunk
    rate = slope[:, None, None]  # [h, 1, 1]
    left = place[..., -1:] - place
    blocks = (k_c * (-rate * left).exp()[..., None]).mT @ v_c  # [b, h, c, d, e]
    past, memory = _running(place[..., -1], blocks, slope, memory)
    reach = q_c * (-rate * place).exp()[..., None]
    out = reach @ past + (q_c @ k_c.mT * _fade(place, rate[..., None])) @ v_c
    return unfold(out, v.shape[-2]), memory


def _fade(place: Int[Tensor, "*b l"], rate: Tensor) -> Float[Tensor, "*h l l"]:
    """e^{-slope (p_i - p_j)} for j <= i, and 0."""
    apart = (place[..., :, None] - place[..., None, :]).clamp(min=0)
    return (-rate * apart).exp().tril()


def _running(
    counts: Int[Tensor, "#b 1 c"],
    blocks: Float[Tensor, "b h c d e"],
    slope: Float[Tensor, "h"],
    memory: Float[Tensor, "b h d e"],
) -> tuple[Float[Tensor, "b h c d e"], Float[Tensor, "b h d e"]]:
    """The memory before each chunk and after the last, by groups of chunks, then sums of groups."""
    chunks = blocks.shape[2]
    group = min(GROUP, chunks + 1)
    groups = (chunks + group) // group  # of the memory that comes in, and the chunks
    spare = groups * group - chunks - 1
    ends = F.pad(counts, (1, spare)).cumsum(-1).unflatten(-1, (groups, group))  # [b, 1, g, k]
    whole = torch.cat([memory[:, :, None], blocks], 2).flatten(-2)  # [b, h, 1 + c, d e]
    whole = F.pad(whole, (0, 0, 0, spare)).unflatten(2, (groups, group))  # [b, h, g, k, d e]
    inner = _fade(ends, slope[:, None, None, None]) @ whole
    last = ends[..., -1]  # [b, 1, g]
    totals = _fade(last, slope[:, None, None]) @ inner[..., -1, :]  # [b, h, g, d e]
    since = ends - before(torch.zeros_like(last[..., :1]), last, -1)[..., None]
    earlier = before(torch.zeros_like(totals[:, :, :1]), totals, 2)[..., None, :]
    total = inner + (-slope[:, None, None] * since).exp()[..., None] * earlier
    total = total.flatten(2, 3).unflatten(-1, memory.shape[-2:])
    return total.narrow(2, 0, chunks), total.narrow(2, chunks, 1).squeeze(2).clone()  # to keep, without the others
