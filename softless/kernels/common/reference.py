"""A typical token of a span. Keys are taken relative to it before they are rounded.

    ninther = median(median(x_0, x_3, x_6), median(x_1, x_4, x_7), median(x_2, x_5, x_8))            Tukey 1978

channel by channel, of nine tokens spread evenly over the span. Neither three outliers nor a third of the span move it.
A monotone phi maps medians to medians, so it is applied once, to the ninther of x. The first visible token stands in
for a hidden one. Any reference gives the same sums; a good one costs few bits.
"""

import triton
import triton.language as tl

from softless.kernels.common.features import feature
from softless.kernels.common.rows import first_visible, load, visible


@triton.jit
def typical(x, mask, b, h, begin, end, t, columns, D: tl.constexpr, PHI: tl.constexpr):
    """The ninther of phi(x) over tokens begin..end, or of its logarithm for exp, [BD]; 0 beyond D.

    A wide ninther is loaded as ROWS equal rows and reduced, so that Triton lays it out like the tiles it is subtracted
    from. A narrow one would only wait for that.
    """
    MONOTONE: tl.constexpr = PHI != "softmax" and PHI != "unit"
    ROWS: tl.constexpr = 16 if columns.shape[0] > 64 else 1
    first = first_visible(mask, b, begin, end)
    left = of_three(x, mask, b, h, begin, end, first, 0, t, columns, D, "identity" if MONOTONE else PHI, ROWS)
    middle = of_three(x, mask, b, h, begin, end, first, 1, t, columns, D, "identity" if MONOTONE else PHI, ROWS)
    right = of_three(x, mask, b, h, begin, end, first, 2, t, columns, D, "identity" if MONOTONE else PHI, ROWS)
    ninther = median(left, middle, right)
    if MONOTONE:
        seen = visible(mask, b, first + tl.arange(0, 1), end)[:, None]
        ninther = tl.where(seen, feature(ninther, t, D, PHI), 0.0)
    if ROWS == 1:
        return tl.reshape(ninther, (columns.shape[0],))
    else:
        return tl.max(ninther, 0)


@triton.jit
def of_three(x, mask, b, h, begin, end, first, index, t, columns, D: tl.constexpr, PHI: tl.constexpr,
             ROWS: tl.constexpr):  # fmt: skip
    """The median of sampled tokens `index`, index + 3 and index + 6, [ROWS, BD]."""
    return median(of_token(x, mask, b, h, begin, end, first, index, t, columns, D, PHI, ROWS),
                  of_token(x, mask, b, h, begin, end, first, index + 3, t, columns, D, PHI, ROWS),
                  of_token(x, mask, b, h, begin, end, first, index + 6, t, columns, D, PHI, ROWS))  # fmt: skip


@triton.jit
def of_token(x, mask, b, h, begin, end, first, index, t, columns, D: tl.constexpr, PHI: tl.constexpr,
             ROWS: tl.constexpr):  # fmt: skip
    """phi of the middle of the index-th ninth of the span, [ROWS, BD]."""
    length, odd = end - begin, 2 * index + 1
    place = length // 18 * odd + length % 18 * odd // 18  # length * odd // 18, and no product is larger than length
    token = begin + place + 0 * tl.arange(0, ROWS)
    token = tl.where(visible(mask, b, token, end), token, first)
    within = visible(mask, b, token, end)[:, None] & (columns < D)[None, :]
    return tl.where(within, feature(load(x, b, h, token, columns, within), t, D, PHI), 0.0)


@triton.jit
def median(a, b, c):
    return tl.maximum(tl.minimum(a, b), tl.minimum(tl.maximum(a, b), c))
