"""How causal work is cut: fixed tables with a reason for each entry, never timing.

The tokens of a head are cut into segments, so that PROGRAMS of them run at once, each from the State before it; the
price is one more pass over keys and values. A segment is at least 20 D tokens long, so that the States, 4 D E bytes
each, take no more than a tenth of the room of an output in half precision.
"""

from typing import NamedTuple

import torch

from softless.kernels.common.tiles import PAIRS

PROGRAMS = 264  # two for each of the 132 multiprocessors of an H100 or H200
ALIGNED = 128  # a segment is a multiple of every chunk
PIECES = 2  # of a segment, summed at the same time: sums over queries have room for four programs a multiprocessor


class Tile(NamedTuple):
    """Tokens a step, value columns a program, warps, and loads in flight."""

    chunk: int
    columns: int
    warps: int
    stages: int


# By the padded width of the keys, or of the values up to 128. The State of a program, width x columns numbers, stays in
# registers: 32 a thread for 64 x 64 and 4 warps, which is what one step's scores take too.
FORWARD = {
    32: Tile(64, 64, 4, 3),
    64: Tile(64, 64, 4, 3),  # three stages: 36 loads of 16 bytes a thread in flight, two programs a multiprocessor
    128: Tile(64, 64, 8, 2),  # columns are independent: two programs a head, each with a State of 128 x 64
    256: Tile(32, 64, 8, 1),  # as much State as above in twice the width; half the tokens, since keys are as wide
}
QUERIES = {
    32: Tile(64, 64, 4, 2),
    64: Tile(64, 64, 4, 2),  # a third stage would leave room for one program a multiprocessor
    128: Tile(32, 128, 8, 1),  # all columns in one program: partial gradients would have to be written and added up
    256: Tile(32, 64, 8, 1),  # a State of 256 x 128 would not fit: partial gradients it is
}
KEYS = {
    32: Tile(64, 64, 4, 3),
    64: Tile(64, 64, 4, 3),
    128: Tile(32, 128, 8, 1),  # 64 tokens a step would spill: the gradient alone takes 64 x 128
    256: Tile(32, 64, 8, 1),
}


def tile(table: dict[int, Tile], width: int, dtype: torch.dtype) -> Tile:
    """float16 multiplies as tf32, whose factors take twice the room: half the tokens. So do those of PAIRS. float32 has
    no tensor cores, and wide PAIRS do not fit otherwise.
    """
    chosen = table[width]
    if dtype == PAIRS and width <= 64:
        return Tile(32, 64, 4, 2)
    if dtype == torch.bfloat16:
        return chosen
    if dtype == torch.float16:
        return Tile(32, min(chosen.columns, 64), chosen.warps, 1)
    return Tile(16, 32, 8, 1)


def cut(tokens: int, heads: int, dim: int) -> tuple[int, int]:
    """(segments, tokens of a segment)."""
    wanted = max(1, PROGRAMS // max(heads, 1))
    most = max(1, tokens // max(20 * dim, ALIGNED))
    length = -(-max(tokens, 1) // min(wanted, most))
    length = -(-length // ALIGNED) * ALIGNED
    return -(-max(tokens, 1) // length), length
