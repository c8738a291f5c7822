"""How work is cut: fixed tables with a reason for each entry, never timing. The same call always runs the same code.

Regimes, by the longer of queries and keys:

    short    up to 128 keys, heads of 33 to 64 in bf16: one program a key head, its weights in registers (`short`)
    whole    up to 256 tokens, heads up to 64 wide: one program a key head does everything (`whole`)
    spans    beyond: a pass over keys, a pass over queries. Tokens are cut into spans so that PROGRAMS run at once, as
             many as the 132 multiprocessors of an H100 or H200 hold; with many heads there is one span of keys a head,
             and nothing to merge. Passes that keep no sums are cut finer (READERS), so that the last of them end
             together. The numbers are fixed, so results do not depend on the machine.
"""

from typing import NamedTuple

import torch

from softless.algebra.recipe import Recipe

WHOLE = 256
PROGRAMS = 264  # two a multiprocessor; never a few more than fit at once, they would run alone at the end
OBSERVERS = 396  # three, where the sums are 64 x 64 or less: that pass has registers and shared memory to spare
READERS = 4 * PROGRAMS  # of passes that keep no sums, where these would be 64 x 64 or less
PAIRS = torch.float64  # stands for `arithmetic.PAIRS`: bfloat16 inputs, multiplied with 16 bits
MOST_SPLITS = 128  # parts of a head that `merge_kernel` holds at once


class Tile(NamedTuple):
    """Tokens a step, warps a program, loads in flight, and the most registers a thread may have."""

    tokens: int
    warps: int
    stages: int
    registers: int | None = None


# By pass, for sums of up to 64 x 64 numbers and for larger ones: they stay in registers, 64 x 64 in 32 of each thread
# of 4 warps. 64 tokens and 4 warps are one product of a tensor core; 8 warps would do every row twice. Three loads in
# flight hide the memory; fewer leave it idle, more cost shared memory and with it programs at the same time.
BF16 = {
    "observe": (Tile(64, 4, 3), Tile(32, 4, 4)),
    "segment": (Tile(64, 4, 4), Tile(32, 4, 4)),  # of causal attention: often one program a multiprocessor
    "read": (Tile(64, 4, 3), Tile(64, 4, 3)),
    "local": (Tile(64, 4, 3), Tile(64, 8, 2)),  # nine more loads, those of the residual
    "query": (Tile(64, 4, 3), Tile(64, 8, 3)),
    "query divide": (Tile(64, 4, 3), Tile(64, 4, 2)),  # the mass and its gradient hold three arrays of a tile more
    "query sums": (Tile(64, 4, 3), Tile(32, 4, 3)),
    "key": (Tile(64, 4, 3), Tile(64, 8, 3)),
    "local key": (Tile(64, 4, 3), Tile(32, 8, 2)),
}
# As tf32, factors take twice the registers and the shared memory.
FP16 = {
    "observe": (Tile(64, 4, 3), Tile(64, 8, 2)),
    "segment": (Tile(64, 4, 3), Tile(64, 8, 2)),
    "read": (Tile(64, 4, 3), Tile(64, 8, 2)),
    "local": (Tile(64, 4, 3), Tile(64, 8, 2)),
    "query": (Tile(64, 8, 2), Tile(32, 8, 2)),
    "query divide": (Tile(64, 8, 2), Tile(32, 8, 2)),
    "query sums": (Tile(64, 4, 3), Tile(64, 8, 2)),
    "key": (Tile(64, 8, 2), Tile(32, 8, 2)),
    "local key": (Tile(32, 8, 2), Tile(32, 8, 2)),
}
WHOLE_FP16 = {
    "whole": (Tile(32, 1, 2, 168), Tile(32, 2, 2, 168)),
    "whole gradient": (Tile(32, 2, 1, 168), Tile(32, 2, 1)),
}
# Up to 32 x 32, and up to 64 x 64. A program waits for its loads most of its time, so many of them must fit: one or two
# warps, or four with a tile of one product and at most 128 registers a thread. The residual's loads want more warps.
WHOLE_HEADS = {
    "whole": (Tile(32, 1, 2, 168), Tile(64, 4, 2, 128)),
    "whole gradient": (Tile(32, 2, 1, 168), Tile(64, 4, 1)),
    "whole gradient divide": (Tile(32, 2, 1, 168), Tile(32, 2, 1)),  # 64 tokens would spill
    "whole local": (Tile(32, 2, 1), Tile(32, 4, 1)),
    "whole local gradient": (Tile(32, 2, 1), Tile(32, 4, 2)),
}
SHORT = {64: Tile(64, 4, 1), 128: Tile(64, 4, 1, 128)}  # by keys that a program holds; four programs a multiprocessor


def finer(dtype: torch.dtype) -> torch.dtype:
    """What to multiply these inputs in where small differences of rounded factors count."""
    return PAIRS if dtype == torch.bfloat16 else torch.float32


def tile(kind: str, bd: int, be: int, dtype: torch.dtype) -> Tile:
    """The tile of a pass whose sums are bd x be numbers. float32 multiplies without tensor cores: short tiles. PAIRS
    have those of bfloat16, but for wide heads, whose factors would not fit twice.
    """
    wide = bd * be > 64 * 64
    if dtype == torch.float32 or (dtype == PAIRS and wide):
        return Tile(32, 8 if wide else 4, 1)
    if kind in WHOLE_HEADS:
        return (WHOLE_HEADS if dtype == torch.bfloat16 else WHOLE_HEADS | WHOLE_FP16)[kind][bd * be > 32 * 32]
    return (FP16 if dtype == torch.float16 else BF16)[kind][wide]


def slice_width(bd: int, e: int) -> int:
    """Value channels that fit beside bd features: beyond 128 x 128 sums, values are cut into slices."""
    return min(e, 128 * 128 // max(bd, 128))


def is_short(keys: int, recipe: Recipe, bd: int, be: int, dtype: torch.dtype) -> bool:
    """Whether a head's weights fit in registers, with heads wide enough that a State takes more products.

    dtype  that of the products: float32 where a mass may cancel, so that none of those is short
    """
    exponential = "exp" in (recipe.phi_q, recipe.phi_k)
    return keys <= max(SHORT) and bd == be == 64 and dtype == torch.bfloat16 and not exponential


def short(keys: int) -> tuple[int, Tile]:
    """(keys that a program holds, its tile)."""
    return next((size, cut) for size, cut in SHORT.items() if keys <= size)


def is_whole(queries: int, keys: int, bd: int, be: int) -> bool:
    """Whether one program does a head; wider ones than 64 x 64 would not leave it registers for both passes."""
    return max(queries, keys) <= WHOLE and bd * be <= 64 * 64


def is_split(bd: int, be: int, dtype: torch.dtype) -> bool:
    """Whether a division's queries are read twice, for dq and for the sums: wide heads have no registers for both."""
    return bd * be > 64 * 64 and dtype not in (torch.float32, PAIRS)


def observers(bd: int, be: int) -> int:
    """Programs of the pass over keys."""
    return OBSERVERS if bd * be <= 64 * 64 else PROGRAMS


def readers(bd: int, be: int) -> int:
    """Programs of a pass that keeps no sums. Each reads a State first, and wide ones are not worth reading often."""
    return READERS if bd * be <= 64 * 64 else PROGRAMS


def spans(tokens: int, heads: int, step: int, programs: int = PROGRAMS) -> tuple[int, int]:
    """(span, splits): tokens a program, a multiple of the tile, and programs a head."""
    steps = max(1, -(-tokens // step))
    wanted = min(steps, MOST_SPLITS, max(1, programs // max(heads, 1)))
    span = -(-steps // wanted) * step
    return span, max(1, -(-tokens // span))
