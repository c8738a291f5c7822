"""Pool windows of tokens to one token each, and repeat tokens to undo it.

    pool     window t = tokens p + s t to p + s t + r - 1, p the prefix, s the stride, r the width
             y_t = mean, maximum or first of its real tokens;    real if any of them is
    repeat   token t becomes s tokens, the prefix stays

The first `prefix` tokens (class tokens) are not pooled. The last window may reach beyond the end, where it reads
padding: so a sequence gives the same result alone and padded at its end.

Shapes: B batch, N tokens, C channels, n = p + ceil((N - p) / s).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from softless.algebra.state import keep
from softless.errors import ArgumentError, check_choice
from softless.mechanisms.scored import check_count
from softless.nn.checks import check_token_mask

MODES = ("mean", "max", "first")


class Tokens(NamedTuple):
    """Tokens, and which of them are real.

    >>> import torch, softless
    >>> x, key_mask = torch.randn(1, 5, 8), torch.arange(5)[None] < 3   # [B, N, C], [B, N]
    >>> softless.nn.pool_tokens(x, key_mask).key_mask
    tensor([[ True,  True, False]])
    """

    x: Float[Tensor, "b n c"]
    key_mask: Bool[Tensor, "b n"]


def pool_tokens(
    x: Float[Tensor, "b n c"],
    key_mask: Bool[Tensor, "b n"] | None = None,
    *,
    stride: int = 2,
    width: int | None = None,
    mode: str = "mean",
    prefix: int = 0,
) -> Tokens:
    """Pool each window of tokens to one token.

    >>> import torch
    >>> from softless.nn import pool_tokens
    >>> x = torch.tensor([0.0, 1, 2, 3, 4, 5])[None, :, None]             # [B, N, C]
    >>> pool_tokens(x, prefix=1).x[0, :, 0]
    tensor([0.0000, 1.5000, 3.5000, 5.0000])

    Args:
        x: Tokens [B, N, C].
        key_mask: bool [B, N], True for a real token. Default: None, all real.
        stride: Tokens from one window to the next. Default: 2.
        width: Tokens in a window, at least the stride. Default: None, the stride.
        mode: "mean", "max" or "first" of the real tokens. Default: "mean".
        prefix: How many of the first tokens are not pooled. Default: 0.

    Returns:
        The pooled tokens [B, n, C] and their mask [B, n].
    """
    check_choice("mode", mode, MODES)
    _check_prefix(prefix, x)
    check_token_mask(key_mask, x)
    real = x.new_ones(x.shape[:2], dtype=torch.bool) if key_mask is None else key_mask
    pieces, valid = (windows(part[:, prefix:], stride, width) for part in (x, real[..., None]))  # [B, n, r, .]
    if mode == "mean":
        pooled = keep(pieces, valid[..., 0]).sum(2) / valid.sum(2).clamp(min=1)
    elif mode == "max":
        pooled = keep(pieces, valid[..., 0], torch.finfo(x.dtype).min).amax(2)
    else:
        first = valid.int().argmax(2, keepdim=True)
        pooled = pieces.gather(2, first.expand(-1, -1, -1, x.shape[2]))[:, :, 0]
    any_real = valid.any(2)[..., 0]
    return Tokens(torch.cat([x[:, :prefix], keep(pooled, any_real)], 1), torch.cat([real[:, :prefix], any_real], 1))


def repeat_tokens(x: Float[Tensor, "b n c"], stride: int, length: int, prefix: int = 0) -> Float[Tensor, "b m c"]:
    """Repeat each token `stride` times, up to `length` tokens. The first `prefix` tokens stay single.

    >>> import torch
    >>> from softless.nn import repeat_tokens
    >>> x = torch.tensor([0.0, 1, 2])[None, :, None]                       # [B, N, C]
    >>> repeat_tokens(x, stride=2, length=4, prefix=1)[0, :, 0]
    tensor([0., 1., 1., 2.])
    """
    _check_prefix(prefix, x)
    check_count("stride", stride)
    check_count("length", length, least=0)
    out = torch.cat([x[:, :prefix], x[:, prefix:].repeat_interleave(stride, 1)], 1)
    if out.shape[1] < length:
        raise ArgumentError(f"{x.shape[1]} tokens, {stride} times each, are fewer than length {length}")
    return out[:, :length]


def windows(x: Tensor, stride: int, width: int | None = None) -> Tensor:
    """Cut [B, N, C] into windows [B, ceil(N / stride), width, C], with zeros beyond the end."""
    width = stride if width is None else width
    if type(stride) is not int or type(width) is not int or stride < 1 or width < stride:
        raise ArgumentError(f"stride {stride} and width {width} must be at least 1, and no token may be left between")
    count = -(-x.shape[1] // stride)
    if count == 0:
        return x.new_zeros(x.shape[0], 0, width, x.shape[2])
    beyond = (count - 1) * stride + width - x.shape[1]
    return F.pad(x, (0, 0, 0, beyond)).unfold(1, width, stride).mT


def _check_prefix(prefix: int, x: Tensor) -> None:
    check_count("prefix", prefix, least=0)
    if prefix > x.shape[1]:
        raise ArgumentError(f"prefix {prefix} is more than the {x.shape[1]} tokens of x")
