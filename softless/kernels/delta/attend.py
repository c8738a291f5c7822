"""The delta rule on the kernels: which kernels are launched, with what, and how the work is cut.

    forward    solve (T of every chunk) -> walk
    backward   walk again for the memory before each chunk -> walk back -> gradient of every chunk

Only the walks go through the chunks of a head one after another. Everything else is done for all chunks at the same
time. Tiles are fixed, with a reason for each; nothing is timed.

Shapes: q [B, H, N, d]   k [B, G, N, d]   v [B, G, N, e]   beta [B, G, N]   key_mask [B, N]   memory [B, G, d, e].
"""

from typing import NamedTuple

import torch
from torch import Tensor

from softless.kernels.common.launch import block, launch
from softless.kernels.common.rows import mask_of, rows
from softless.kernels.common.tiles import Tile
from softless.kernels.delta.gradient import gradient_kernel
from softless.kernels.delta.solve import solve_kernel
from softless.kernels.delta.walk import walk_back_kernel, walk_kernel

# Numbers of T. 11 bits give bfloat16 results to an eighth of an ulp, and no entry is larger than what is erased.
SOLVED = {torch.bfloat16: torch.float16, torch.float16: torch.float32, torch.float32: torch.float32}
# Tokens per step are those of a chunk, the same in all kernels: 64 rows are one product of a tensor core. A walk waits
# for itself, product after product: with 32 columns a head of 64 has two programs, and these wait at the same time. Two
# stages load the next chunk meanwhile. As tf32 a factor takes twice the room: one stage.
WALK = {
    torch.bfloat16: Tile(64, 4, 2, 32),
    torch.float16: Tile(64, 4, 1, 32),
    torch.float32: Tile(16, 8, 1, 32),  # no tensor cores: every factor is in registers
}
# One program does all of a chunk, because dk adds up over the columns. Its sums take [64, d], twice.
GRADIENT = {
    torch.bfloat16: Tile(64, 4, 2, 64),
    torch.float16: Tile(64, 8, 1, 32),
    torch.float32: Tile(16, 8, 1, 32),
}
WIDE_GRADIENT = GRADIENT | {torch.bfloat16: Tile(64, 8, 2, 64)}  # for heads wider than 64


class Solved(NamedTuple):
    """Numbers that follow from the keys and beta: 1/|k|, a and gain [B, G, 3, N], and T [B, G, chunks, L, L]."""

    scalars: Tensor
    inverse: Tensor


def chunks_of(k: Tensor) -> int:
    return -(-k.shape[2] // WALK[k.dtype].tokens)


def solved_like(k: Tensor) -> Solved:
    heads, size = k.shape[:2], WALK[k.dtype].tokens
    inverse = k.new_empty(*heads, chunks_of(k), size, size, dtype=SOLVED[k.dtype])
    return Solved(k.new_empty(*heads, 3, k.shape[2], dtype=torch.float32), inverse)


def memory_like(k: Tensor, v: Tensor) -> Tensor:
    return k.new_empty(*k.shape[:2], k.shape[3], v.shape[3], dtype=torch.float32)


def sizes(table: dict[torch.dtype, Tile], q: Tensor, k: Tensor, v: Tensor) -> dict[str, int]:
    """Return what a kernel is compiled for, except its stages."""
    tile, d, e = table[k.dtype], k.shape[3], v.shape[3]
    blocks = {"D": d, "E": e, "BD": block(d), "BE": min(block(e), tile.columns), "CHUNK": tile.tokens}
    return blocks | {"SHARED": q.shape[1] // k.shape[1], "num_warps": tile.warps}


def solve(k: Tensor, beta: Tensor, key_mask: Tensor | None, rule: str) -> Solved:
    solved, chunks = solved_like(k), chunks_of(k)
    launch(
        solve_kernel, k.shape[0] * k.shape[1] * chunks, rows(k), rows(beta[..., None]), mask_of(key_mask), *solved,
        k.shape[1], k.shape[2], chunks, D=k.shape[3], BD=block(k.shape[3]), CHUNK=WALK[k.dtype].tokens, RULE=rule,
        num_warps=4,
    )  # fmt: skip
    return solved


def forward(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, memory: Tensor | None, solved: Solved, out: Tensor,
    scale: float,
) -> Tensor:  # fmt: skip
    """Fill `out`; return the memory after the last token."""
    after, size = memory_like(k, v), sizes(WALK, q, k, v)
    launch(
        walk_kernel, k.shape[0] * k.shape[1] * -(-v.shape[3] // size["BE"]), rows(q), rows(k), rows(v), rows(out),
        mask_of(key_mask), *solved, memory, after, None, None, k.shape[1], k.shape[2], chunks_of(k), scale,
        STAGES=WALK[k.dtype].stages, **size,
    )  # fmt: skip
    return after


class Filled(NamedTuple):
    """Where the gradients are written; `memory` is None if no memory came in."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    memory: Tensor | None


def backward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, d_out: Tensor, key_mask: Tensor | None, memory: Tensor | None,
    solved: Solved, last: Tensor | None, filled: Filled, rule: str, scale: float,
) -> None:  # fmt: skip
    """Fill the gradients; `last` is the gradient of the memory after the last token."""
    (batch, groups, tokens, d), e, chunks = k.shape, v.shape[3], chunks_of(k)
    kind = k.dtype if k.dtype == torch.bfloat16 else torch.float32  # numbers as they are multiplied
    states, later = (k.new_empty(batch, groups, chunks, d, e, dtype=kind) for _ in range(2))
    written, refused = (k.new_empty(batch, groups, tokens, e, dtype=torch.float32) for _ in range(2))
    size = sizes(WALK, q, k, v) | {"STAGES": WALK[k.dtype].stages}
    programs, mask = batch * groups * -(-e // size["BE"]), mask_of(key_mask)
    launch(
        walk_kernel, programs, rows(q), rows(k), rows(v), None, mask, *solved, memory, None, states, rows(written),
        groups, tokens, chunks, scale, **size,
    )  # fmt: skip
    launch(
        walk_back_kernel, programs, rows(q), rows(k), rows(d_out), rows(filled.v), mask, *solved, last,
        filled.memory, later, rows(refused), groups, tokens, chunks, scale, **size,
    )  # fmt: skip
    table = WIDE_GRADIENT if max(d, e) > 64 else GRADIENT
    launch(
        gradient_kernel, batch * groups * chunks, rows(q), rows(k), rows(v), rows(beta[..., None]), rows(d_out),
        rows(filled.q), rows(filled.k), rows(filled.beta[..., None]), mask, solved.scalars, states, rows(written),
        later, rows(refused), groups, tokens, chunks, scale, RULE=rule, num_stages=table[k.dtype].stages,
        **sizes(table, q, k, v),
    )  # fmt: skip
