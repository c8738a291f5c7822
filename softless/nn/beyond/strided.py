"""A feed-forward layer that shortens the sequence: its first product is a convolution of stride s.

    y_t = W2 act(sum_r W1_r x_{s t + r} + b1) + b2,      r = 0 .. width - 1

The convolution reads zeros for padding and beyond the end. y_t is real if a token of its window is. With `renormalize`
the sum is multiplied by width / (real tokens of the window), so that a window with padding weighs as much as others.
With stride 1 and width 1 this is the usual feed-forward layer of a transformer.

The layer is not causal, because y_t reads all tokens of its window. `pool_tokens` shortens a residual over the same
windows, and `repeat_tokens` gives each token the y of its window.

Shapes: B batch, N tokens, C channels, n = ceil(N / s).
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from softless.algebra.state import keep
from softless.errors import ArgumentError
from softless.mechanisms.scored import check_count
from softless.nn.checks import MOST_CHANNELS, check_switch, check_token_mask, check_tokens
from softless.nn.pooling import Tokens, windows


class StridedFeedForward(nn.Module):
    """Shortens tokens [B, N, C] to [B, ceil(N / stride), C], and returns their mask too.

    >>> import torch, softless
    >>> x, mask = torch.randn(5, 100, 64), torch.ones(5, 100).bool()     # [B, N, C], [B, N]
    >>> feed = softless.nn.StridedFeedForward(64, stride=2)
    >>> short, real = softless.nn.pool_tokens(x, mask, stride=2)         # the residual, over the same windows
    >>> (short + feed(x, mask).x).shape, real.shape
    (torch.Size([5, 50, 64]), torch.Size([5, 50]))

    Args:
        dim: Channels C of the tokens.
        hidden: Width of the hidden layer. Default: None, 4 C.
        stride: Tokens from one window to the next. Default: 2.
        width: Tokens in a window; more than the stride makes windows overlap. Default: None, the stride.
        renormalize: Whether to rescale windows that have padding or reach beyond the end. Default: False.
    """

    def __init__(
        self,
        dim: int,
        hidden: int | None = None,
        *,
        stride: int = 2,
        width: int | None = None,
        renormalize: bool = False,
    ):
        super().__init__()
        self.stride, self.width, self.renormalize = stride, stride if width is None else width, renormalize
        check_count("dim", dim, most=MOST_CHANNELS)
        check_count("stride", stride, most=MOST_CHANNELS)
        check_count("width", self.width, most=MOST_CHANNELS)
        if self.width < self.stride:
            raise ArgumentError(f"width {self.width} must be at least the stride, {stride}")
        check_switch("renormalize", renormalize)
        hidden = 4 * dim if hidden is None else hidden
        check_count("hidden", hidden, most=MOST_CHANNELS)
        self.dim = dim
        self.fc1 = nn.Linear(self.width * dim, hidden)  # the tokens of a window, side by side
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Float[Tensor, "b n c"], key_mask: Bool[Tensor, "b n"] | None = None) -> Tokens:
        check_tokens(x, self.dim)
        check_token_mask(key_mask, x)
        real = x.new_ones(x.shape[:2], dtype=torch.bool) if key_mask is None else key_mask
        pieces, valid = (windows(part, self.stride, self.width) for part in (keep(x, key_mask), real[..., None]))
        pieces = pieces.flatten(2)  # [B, n, width C]
        count = valid.sum(2)  # [B, n, 1]
        if self.renormalize:
            pieces = pieces * (self.width / count.clamp(min=1).to(x.dtype))
        out = self.fc2(self.act(self.fc1(pieces)))
        return Tokens(out, count[..., 0] > 0)

    def extra_repr(self) -> str:
        return f"stride={self.stride}, width={self.width}, renormalize={self.renormalize}"
