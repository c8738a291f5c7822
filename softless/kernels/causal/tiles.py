"""How causal work is cut: fixed tables with a reason for each entry, never timing.

The tokens of a head are cut into segments, so that PROGRAMS of them run at once, each from the State before it. The
price is one more pass over keys and values. A segment is at least 20 D tokens long, so that the States, 4 D E bytes
each, take at most a tenth of the memory of an output in half precision. If r heads of queries share a State, 20 D / r
tokens are enough.
"""

import torch

from softless.kernels.common.tiles import PAIRS, PROGRAMS, Tile

ALIGNED = 128  # a segment is a multiple of every chunk
PIECES = 2  # of a segment, summed at the same time: sums over queries leave room for four programs per multiprocessor

# By the padded width of the keys, or of the values up to 128. The State of a program, width x columns numbers, stays in
# registers: 32 per thread for 64 x 64 and 4 warps, as many as the scores of one step take.
FORWARD = {
    32: Tile(64, 4, 3, 64),
    64: Tile(64, 4, 3, 64),  # three stages: 36 loads of 16 bytes per thread in flight, two programs per multiprocessor
    128: Tile(64, 8, 2, 64),  # columns are independent: two programs per head, each with a State of 128 x 64
    256: Tile(32, 8, 1, 64),  # as much State as above in twice the width; half the tokens, since keys are as wide
}
QUERIES = {
    32: Tile(64, 4, 2, 64),
    64: Tile(64, 4, 2, 64),  # a third stage would leave room for one program per multiprocessor
    128: Tile(32, 8, 1, 128),  # all columns in one program: partial gradients would have to be written and added up
    256: Tile(32, 8, 1, 64),  # a State of 256 x 128 would not fit: partial gradients are added up
}
KEYS = {
    32: Tile(64, 4, 3, 64),
    64: Tile(64, 4, 3, 64),
    128: Tile(32, 8, 1, 128),  # 64 tokens per step would spill: the gradient alone takes 64 x 128
    256: Tile(32, 8, 1, 64),
}


def tile(table: dict[int, Tile], width: int, dtype: torch.dtype) -> Tile:
    """Return the tile of a pass for heads of this width, multiplied in `dtype`.

    float16 multiplies as tf32, whose factors take twice the room, and so do PAIRS: half the tokens. float32 has no
    tensor cores, and wide PAIRS do not fit otherwise.
    """
    chosen = table[width]
    if dtype == PAIRS and width <= 64:
        return Tile(32, 4, 2, 64)
    if dtype == torch.bfloat16:
        return chosen
    if dtype == torch.float16:
        return Tile(32, chosen.warps, 1, min(chosen.columns, 64))
    return Tile(16, 8, 1, 32)


def exponential_keys(width: int, dtype: torch.dtype) -> Tile:
    """Return the tile for the gradient of exponential keys.

    On an H200, four warps on 32 x 32 numbers of tf32 gave other numbers in each run (Triton 3.6); two warps do not.
    """
    chosen = tile(KEYS, width, dtype)
    return chosen._replace(warps=2) if dtype == torch.float16 and width == 32 else chosen


def cut(tokens: int, heads: int, share: int) -> tuple[int, int]:
    """Return (segments per head, tokens per segment) for heads of queries; `share` is D / r."""
    wanted = max(1, PROGRAMS // max(heads, 1))
    most = max(1, tokens // max(20 * share, ALIGNED))
    length = -(-max(tokens, 1) // min(wanted, most))
    length = -(-length // ALIGNED) * ALIGNED
    return -(-max(tokens, 1) // length), length
