"""How work is cut: fixed tables with a reason for each entry, never timing. The same call always runs the same code.

Regimes, by the longer of queries and keys:

    whole    up to 256 tokens, heads up to 64 wide: one program a key head does everything (`whole`)
    spans    beyond: a pass over keys, a pass over queries. Tokens are cut into spans so that some 264 programs run, two
             for each multiprocessor of an H100 or H200; with many heads there is one span of keys a head, and nothing
             to merge. Passes that keep no sums (READERS) are cut finer. The numbers are fixed, so results do not depend
             on the machine.
"""

from typing import NamedTuple

import torch

WHOLE = 256
PROGRAMS = 264
READERS = 8 * PROGRAMS
MOST_SPLITS = 128  # parts of a head that `merge_kernel` holds at once


class Tile(NamedTuple):
    """Tokens a step, warps a program, loads in flight."""

    tokens: int
    warps: int
    stages: int


def tile(kind: str, bd: int, be: int, dtype: torch.dtype) -> Tile:
    """The tile of a pass whose sums are bd x be numbers: they stay in registers.

    64 x 64 sums take 32 registers a thread with 4 warps, 128 x 128 take 64 with 8. Longer tiles make better products,
    shorter ones leave registers to the loads in flight; the queries' gradient holds five arrays of a tile at once, and
    spills with fewer warps or longer tiles.
    float32 multiplies without tensor cores and holds its factors whole: short tiles. `kind` is forward or
    backward; local and local backward hold nine more loads, those of the residual.
    """
    if dtype == torch.float32:
        return Tile(32, 4 if bd * be <= 4096 else 8, 1)
    if kind == "forward":
        return Tile(64, 4, 3) if bd * be <= 4096 else Tile(64, 8, 2)
    if bd * be <= (1024 if kind == "local backward" else 4096):
        return Tile(64, 8, 2)
    return Tile(32, 8, 2)


def slice_width(bd: int, e: int) -> int:
    """Value channels that fit beside bd features: beyond 128 x 128 sums, values are cut into slices."""
    return min(e, 128 * 128 // max(bd, 128))


def is_whole(queries: int, keys: int, bd: int, be: int) -> bool:
    """Whether one program does a head; wider ones than 64 x 64 would not leave it registers for both passes."""
    return max(queries, keys) <= WHOLE and bd * be <= 4096


def spans(tokens: int, heads: int, step: int, programs: int = PROGRAMS) -> tuple[int, int]:
    """(span, splits): tokens a program, a multiple of the tile, and programs a head."""
    steps = max(1, -(-tokens // step))
    wanted = min(steps, MOST_SPLITS, max(1, -(-programs // max(heads, 1))))
    span = -(-steps // wanted) * step
    return span, max(1, -(-tokens // span))
