"""Which tokens are real: a key mask as kernels see it, or none."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

SCAN = tl.constexpr(1024)  # tokens looked at together


class Mask(NamedTuple):
    """A key mask [batch, tokens] as a kernel argument."""

    at: Any
    batch: int
    token: int


def mask_of(key_mask: Tensor | None) -> Mask | None:
    return None if key_mask is None else Mask(key_mask, *key_mask.stride())


@triton.jit
def real(mask, b, tokens, here):
    """Which of the tokens that are `here` are real."""
    if mask is None:
        return here
    else:
        return tl.load(mask.at + b * mask.batch + tokens.to(tl.int64) * mask.token, mask=here, other=0) != 0


@triton.jit
def visible(mask, b, tokens, stop):
    """Which tokens are before `stop`, and real."""
    return real(mask, b, tokens, tokens < stop)


@triton.jit
def first_visible(mask, b, start, stop):
    """The first real token from `start` on, `stop` if there is none."""
    if mask is None:
        return tl.minimum(start, stop)
    else:
        first = stop
        for at in range(start, stop, SCAN):
            tokens = at + tl.arange(0, SCAN)
            first = tl.minimum(first, tl.min(tl.where(visible(mask, b, tokens, stop), tokens, stop), 0))
        return first
