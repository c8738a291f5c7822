"""InLine's local residual inside the kernels (Han et al. 2024, eq. 6): a 3x3 kernel for every sample and channel.

    residual_i = sum_o taps_o v_{i+o}      o over the 3x3 neighbors, zero beyond the border
    dv_j = sum_o taps_o do_{j-o}           dtaps_o = sum_j do_{j-o} v_j

Tokens `prefix` and on are a picture, row by row, `width` wide; those before it get no residual and give none. The nine
shifted tiles come from the cache: only the first read of a row costs memory bandwidth.
"""

import triton
import triton.language as tl

from softless.kernels.common.arithmetic import ONES, factor, product
from softless.kernels.common.mask import real
from softless.kernels.common.rows import load


@triton.jit
def neighbor(tokens, down, right, prefix, height, width):
    """(token, whether there is one) so far down and right of each token."""
    place = tokens - prefix
    line, column = place // width + down, place % width + right
    inside = (place >= 0) & (line >= 0) & (line < height) & (column >= 0) & (column < width)
    return tokens + down * width + right, inside


@triton.jit
def residual(v, taps, mask, b, h, tokens, here, prefix, height, width, E: tl.constexpr, BE: tl.constexpr):
    """The residual of a tile of tokens, [tokens, BE]."""
    channels = tl.arange(0, BE)
    found = tl.zeros((tokens.shape[0], BE), tl.float32)
    for tap in tl.static_range(9):
        near, inside = neighbor(tokens, tap // 3 - 1, tap % 3 - 1, prefix, height, width)
        inside = inside & here
        if mask is not None:
            inside = real(mask, b, near, inside)
        values = load(v, b, h, near, channels, inside[:, None] & (channels < E)[None, :])
        found += values * weights_of(taps, b, h, tap, channels, E)
    return found


@triton.jit
def residual_gradient(d_out, taps, values, sums, b, h, tokens, seen, prefix, height, width, E: tl.constexpr,
                      BE: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """(dv of a tile, sums [ONES, BE] with row o grown by dtaps_o); values are the tile's v."""
    channels = tl.arange(0, BE)
    found = tl.zeros((tokens.shape[0], BE), tl.float32)
    lines = tl.arange(0, ONES)[:, None]
    for tap in tl.static_range(9):
        near, inside = neighbor(tokens, 1 - tap // 3, 1 - tap % 3, prefix, height, width)
        cotangent = load(d_out, b, h, near, channels, (inside & seen)[:, None] & (channels < E)[None, :])
        found += cotangent * weights_of(taps, b, h, tap, channels, E)
        only = factor(tl.where(lines == tap, 1.0, tl.zeros((ONES, tokens.shape[0]), tl.float32)), DTYPE)
        sums = product(only, factor(cotangent * values, DTYPE), sums, DTYPE)
    return found, sums


@triton.jit
def weights_of(taps, b, h, tap, channels, E: tl.constexpr):
    """One tap of every channel, [1, BE]."""
    at = taps.at + b * taps.batch + h * taps.head + tap * taps.token + channels
    return tl.load(at, mask=channels < E, other=0.0).to(tl.float32)[None, :]
