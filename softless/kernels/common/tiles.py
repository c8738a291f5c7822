"""How work is cut: fixed tables with a reason for each entry, never timing. The same call always runs the same code.

Regimes, by the longer of queries and keys:

    short    up to 128 keys, heads of 33 to 64 in bf16: one program per key head, with its weights in registers
    whole    up to 256 tokens, heads up to 64 wide: one program per key head does everything
    spans    longer: a pass over keys, a pass over queries. Tokens are cut into spans so that PROGRAMS run at once, as
             many as the 132 multiprocessors of an H100 or H200 hold. With many heads there is one span of keys per
             head, and nothing to merge. Passes that keep no sums are cut finer (READERS), so that their last programs
             end together. The numbers are fixed, so results do not depend on the machine.

Tiles depend on the shared memory of the GPU, which is a fixed number per architecture (`limits`).
"""

from typing import NamedTuple

import torch

from softless.algebra.kernel_spec import KernelSpec
from softless.kernels.common.limits import KIB, limits_registers, shared_memory

WHOLE = 256
PROGRAMS = 264  # two per multiprocessor; a few more than fit at once would run alone at the end
OBSERVERS = 396  # three per multiprocessor, for sums of 64 x 64 or less, which leave registers to spare
READERS = 4 * PROGRAMS  # programs of a pass that keeps no sums, for heads of 64 x 64 or less
PAIRS = torch.float64  # stands for `arithmetic.PAIRS`: bfloat16 inputs, multiplied with 16 bits
MOST_SPLITS = 128  # parts of a head that `merge_kernel` holds at once
MERGED_BY_ONE = 16  # parts of a head that the program which solves for it merges, one after another


class Tile(NamedTuple):
    """How one program works: its tokens per step, its warps, and how many loads are in flight.

    columns    value columns per program, or per step of one; 0 where a program takes all of them at once
    registers  the most registers a thread may have; None for no limit
    """

    tokens: int
    warps: int
    stages: int
    columns: int = 0
    registers: int | None = None


# By pass, for sums of up to 64 x 64 numbers and for larger ones. The sums stay in registers: 64 x 64 take 32 of each
# thread of 4 warps. 64 tokens and 4 warps are one product of a tensor core; 8 warps would do every row twice. Three
# loads in flight hide the memory's latency. Fewer leave it idle; more cost shared memory, so fewer programs fit.
BF16 = {
    "observe": (Tile(64, 4, 3), Tile(32, 4, 4)),
    "observe spread": (Tile(64, 4, 3), Tile(32, 8, 3)),  # twice the sums
    "segment": (Tile(64, 4, 4), Tile(32, 4, 4)),  # of causal attention: often one program per multiprocessor
    "read": (Tile(64, 4, 3), Tile(64, 4, 3)),
    "local": (Tile(64, 4, 3), Tile(64, 8, 2)),  # the residual has nine more loads
    "query": (Tile(64, 4, 3), Tile(64, 8, 3)),
    "query divide": (Tile(64, 4, 3), Tile(64, 4, 2)),  # the mass and its gradient take three more arrays of a tile
    "query sums": (Tile(64, 4, 3), Tile(32, 4, 3)),
    "key": (Tile(64, 4, 3), Tile(64, 8, 3)),
    "local key": (Tile(64, 4, 3), Tile(32, 8, 2)),
    "key spread": (Tile(64, 4, 3), Tile(64, 8, 2)),  # one more factor, of the size of the sums
    "local key spread": (Tile(64, 4, 2), Tile(32, 8, 2)),
}
# As tf32, factors take twice the registers and the shared memory.
FP16 = {
    "observe": (Tile(64, 4, 3), Tile(64, 8, 2)),
    "observe spread": (Tile(64, 4, 2), Tile(32, 8, 2)),
    "segment": (Tile(64, 4, 3), Tile(64, 8, 2)),
    "read": (Tile(64, 4, 3), Tile(64, 8, 2)),
    "local": (Tile(64, 4, 3), Tile(64, 8, 2)),
    "query": (Tile(64, 8, 2), Tile(32, 8, 2)),
    "query divide": (Tile(64, 8, 2), Tile(32, 8, 2)),
    "query sums": (Tile(64, 4, 3), Tile(64, 8, 2)),
    "key": (Tile(64, 8, 2), Tile(32, 8, 2)),
    "key spread": (Tile(64, 8, 2), Tile(32, 8, 1)),
    "local key spread": (Tile(32, 8, 2), Tile(32, 8, 1)),
    "local key": (Tile(32, 8, 2), Tile(32, 8, 1)),  # with two loads in flight wide sums would take 250 KiB
}
WHOLE_FP16 = {
    "whole": (Tile(32, 1, 2, registers=168), Tile(32, 2, 2, registers=168)),
    "whole gradient": (Tile(32, 2, 1, registers=168), Tile(32, 2, 1)),
    "whole regress": (Tile(32, 1, 2, registers=168), Tile(32, 4, 2)),
    "whole regress gradient": (Tile(32, 2, 1), Tile(32, 4, 1)),
}
# Up to 32 x 32, and up to 64 x 64. A program mostly waits for its loads, so many programs must fit at once: one or two
# warps, or four with a tile of one product and at most 128 registers per thread. The residual's loads need more warps.
WHOLE_HEADS = {
    "whole": (Tile(32, 1, 2, registers=168), Tile(64, 4, 2, registers=128)),
    "whole gradient": (Tile(32, 2, 1, registers=168), Tile(64, 4, 1)),
    "whole gradient divide": (Tile(32, 2, 1, registers=168), Tile(32, 2, 1)),  # 64 tokens would spill
    "whole regress": (Tile(32, 1, 2, registers=168), Tile(64, 4, 2, registers=168)),
    "whole regress gradient": (Tile(32, 2, 1), Tile(64, 4, 1)),
    "whole local": (Tile(32, 2, 1), Tile(32, 4, 1)),
    "whole regress local": (Tile(32, 2, 1), Tile(32, 4, 1)),
    "residual gradient": (Tile(32, 2, 1), Tile(32, 4, 1)),
}
# Up to FINE tokens and 32 x 32 in bf16: 65 tokens, an 8 x 8 picture and its class, fill 80 rows instead of 96.
FINE = 128
FINE_HEADS = {
    "whole gradient": Tile(16, 1, 1),
    "whole regress gradient": Tile(16, 1, 1),
    "whole regress local": Tile(16, 1, 1),
    "residual gradient": Tile(16, 1, 1),
}
# Where the tile of an H200 does not fit, by the shared memory that a program may have; `WIDE` sums are larger than
# 64 x 64. Most have one load in flight instead of two or three.
NARROW, WIDE = False, True
SMALLER = {
    163 * KIB: {
        ("local key", torch.bfloat16, NARROW): Tile(64, 4, 2),  # 130 KiB instead of 218
        ("local key", torch.bfloat16, WIDE): Tile(32, 8, 1),  # 85 KiB instead of 169
    },
    99 * KIB: {
        ("key", torch.bfloat16, WIDE): Tile(64, 8, 1),  # 80 KiB instead of 144
        ("local key", torch.bfloat16, NARROW): Tile(64, 4, 1),  # 50 KiB instead of 218
        ("local key", torch.bfloat16, WIDE): Tile(32, 8, 1),  # 85 KiB instead of 169
        ("local key", torch.float16, NARROW): Tile(32, 8, 1),  # 58 KiB instead of 102
        ("local key spread", torch.bfloat16, NARROW): Tile(64, 4, 1),  # one load in flight, as above
        ("local key spread", torch.float16, NARROW): Tile(32, 8, 1),
        ("read", torch.float16, WIDE): Tile(32, 8, 2),  # 88 KiB instead of 112: fewer queries beside the State
        ("read", torch.float32, WIDE): Tile(16, 8, 1),  # 88 KiB instead of 104, likewise
    },
    64 * KIB: {  # with one load in flight, AMD's compiler keeps what it loads in registers
        ("local key", torch.bfloat16, NARROW): Tile(64, 4, 1),  # 8 KiB instead of 152
        ("local key spread", torch.bfloat16, NARROW): Tile(64, 4, 1),
        ("local key", torch.bfloat16, WIDE): Tile(32, 8, 1),  # 32 KiB instead of 80
    },
}
# By keys that a program holds; four programs per multiprocessor.
SHORT = {64: Tile(64, 4, 1), 128: Tile(64, 4, 1, registers=128)}


def finer(dtype: torch.dtype) -> torch.dtype:
    """Return what to multiply these inputs in where small differences of rounded factors count."""
    return PAIRS if dtype == torch.bfloat16 else torch.float32


def tile(kind: str, bd: int, be: int, dtype: torch.dtype, tokens: int = WHOLE) -> Tile:
    """Return the tile of a pass whose sums are bd x be numbers, for the GPU that the plan is for.

    `tokens` are those of a whole head, and count there alone. float32 multiplies without tensor cores, in short tiles.
    PAIRS have the tiles of bfloat16, except for wide heads, whose factors would not fit twice.
    """
    wide = bd * be > 64 * 64
    if dtype == torch.float32 or (dtype == PAIRS and wide):
        cut = Tile(32, 8 if wide else 4, 1)
    elif kind in FINE_HEADS and tokens <= FINE and bd * be <= 32 * 32 and dtype == torch.bfloat16:
        cut = FINE_HEADS[kind]
    elif kind in WHOLE_HEADS:
        table = WHOLE_HEADS if dtype == torch.bfloat16 else WHOLE_HEADS | WHOLE_FP16
        cut = table[kind][bd * be > 32 * 32]
    elif kind == "local key" and dtype == PAIRS:
        cut = Tile(64, 4, 2)  # a third load in flight would take 242 KiB
    else:
        cut = (FP16 if dtype == torch.float16 else BF16)[kind][wide]
    inputs = torch.bfloat16 if dtype == PAIRS else dtype
    return compilable(SMALLER.get(shared_memory(), {}).get((kind, inputs, wide), cut))


def compilable(cut: Tile) -> Tile:
    """Return the tile without a limit on registers where the compiler takes none."""
    return cut if limits_registers() else cut._replace(registers=None)


def key_products(bd: int, be: int, dtype: torch.dtype) -> torch.dtype:
    """Return what the gradient of the keys multiplies in: `dtype`, or float32 where its factors do not fit.

    The factors are the gradient of a State, as it is and transposed. 128 x 128 numbers take 128 KiB as tf32 and as
    PAIRS. float32 needs no copy in shared memory. GPUs with 99 KiB have nearly as many units for it as for tf32.
    """
    crowded = bd * be > 64 * 64 and dtype in (torch.float16, PAIRS)
    return torch.float32 if crowded and shared_memory() == 99 * KIB else dtype


def slice_width(bd: int, e: int) -> int:
    """Return how many value columns fit beside bd features: beyond 128 x 128 sums, values are cut into slices."""
    return min(e, 128 * 128 // max(bd, 128))


def is_short(keys: int, spec: KernelSpec, bd: int, be: int, dtype: torch.dtype) -> bool:
    """Whether a head's weights fit in registers, and heads are so wide that a State would take more products."""
    taken = spec.reader in ("divide", "subtract", "none") and "exp" not in (spec.phi_q, spec.phi_k)
    return keys <= max(SHORT) and bd == be == 64 and dtype == torch.bfloat16 and taken


def short(keys: int) -> tuple[int, Tile]:
    """Return (keys that a program holds, its tile)."""
    size, cut = next((size, cut) for size, cut in SHORT.items() if keys <= size)
    return size, compilable(cut)


def is_whole(queries: int, keys: int, bd: int, be: int) -> bool:
    """Whether one program does a head; heads wider than 64 x 64 would leave no registers for both passes."""
    return max(queries, keys) <= WHOLE and bd * be <= 64 * 64


def is_split(bd: int, be: int, dtype: torch.dtype) -> bool:
    """Whether a division's queries are read twice, for dq and for the sums: wide heads have no registers for both."""
    return bd * be > 64 * 64 and dtype not in (torch.float32, PAIRS)


def is_few(keys: int, channels: int) -> bool:
    """Whether keys may leave some direction nearly empty, though they are random and one of them is large.

    Then they are multiplied with twice the bits, which takes twice the shared memory: only where there is as much as on
    an H200, because the tiles of smaller GPUs were not made for it.
    """
    return keys <= 16 * channels and shared_memory() >= 227 * KIB


def solvers(bd: int) -> int:
    """Return the warps of a program that solves for one head: a matrix of bd x bd numbers stays in registers."""
    return 4 if bd <= 64 else 8


def observers(bd: int, be: int) -> int:
    """Return how many programs the pass over keys has."""
    return OBSERVERS if bd * be <= 64 * 64 else PROGRAMS


def readers(bd: int, be: int) -> int:
    """Return how many programs a pass without sums has. Each reads a State first, and wide States cost too much."""
    return READERS if bd * be <= 64 * 64 else PROGRAMS


def spans(tokens: int, heads: int, step: int, programs: int = PROGRAMS) -> tuple[int, int]:
    """Return (span, splits): tokens per program, a multiple of the tile, and programs per head."""
    steps = max(1, -(-tokens // step))
    wanted = min(steps, MOST_SPLITS, max(1, programs // max(heads, 1)))
    span = -(-steps // wanted) * step
    return span, max(1, -(-tokens // span))
