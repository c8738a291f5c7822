"""Near and far tokens in causal order as a PyTorch operator, without a derivative.

    near(q, held, map_q, map_k, gain, state, reach, scale) -> out    what `near_causal.attend` computes

q [B, H, N, d] as it is; `held` are the tokens of the state and of the call after them. The state's own far tokens enter
as sums, and those that become far during the call are added by the kernels, segment by segment.
"""

from typing import Any

import torch
from torch import Tensor

from softless.algebra.near_causal import Held, Reach, far
from softless.algebra.state import NearState, State
from softless.kernels.common import tiles
from softless.kernels.common.launch import as_triton, block, fake, launch, no_gradient, operator
from softless.kernels.common.rows import dense, output_like, rows
from softless.kernels.common.tiles import Tile
from softless.kernels.near.read import far_kernel, near_kernel

# Up to 64 channels and features, and up to 128. The sums of both halves of the features stay in registers, and so do
# the queries, their features and the weights of a chunk. As tf32, or without tensor cores, fewer tokens fit.
TILES = {
    torch.bfloat16: (Tile(64, 4, 2, 64), Tile(64, 8, 2, 64)),
    torch.float16: (Tile(32, 4, 1, 32), Tile(32, 4, 1, 32)),
    torch.float32: (Tile(16, 4, 1, 32), Tile(16, 8, 1, 32)),
}
LEAST = 16  # chunks of a segment


def near(
    q: Tensor, held: Held, map_q: Tensor | None, map_k: Tensor | None, gain: Tensor, state: NearState,
    reach: Reach, scale: float,
) -> Tensor:  # fmt: skip
    """Return the output [B, H, N, e] of the new tokens after those of the state.

    q is not scaled. It says in which precision to multiply; what is held may be more precise.
    """
    batch, heads = q.shape[:2]
    k, v, first_k, first_v = (dense(x.flatten(1, -3)) for x in (held.k, held.v, held.first_k, held.first_v))
    n, count = (x.reshape(-1).expand(batch).contiguous() for x in (state.n, held.arrived))
    maps = (None if x is None else x.contiguous() for x in (map_q, map_k))
    sums, masses = (per_query_head(x, heads) for x in totals(far(state, reach)))
    return near_op(dense(q), k, v, first_k, first_v, *maps, gain.float(), n, count, sums, masses, *reach, scale)[0]


def totals(past: State) -> tuple[Tensor, Tensor]:
    """Return the sums of features times values [*b, 2 F, e], and of features [*b, 2 F, 1], without their factor."""
    masses = (past.n[..., None] * past.k_mean)[..., None] / (past.k_mean.shape[-1] / 4) ** 0.5
    return past.comoment / (past.k_mean.shape[-1] / 4) ** 0.5 + masses * past.v_mean[..., None, :], masses


def per_query_head(x: Tensor, heads: int) -> Tensor:
    """[B, G, a, b], [B, G, 1, a, b] or [B, G, H/G, a, b] -> [B, H, a, b]."""
    x = x.flatten(1, -3)
    return x.repeat_interleave(heads // x.shape[1], 1)


@operator("nearfar")
def near_op(
    q: Tensor, k: Tensor, v: Tensor, first_k: Tensor, first_v: Tensor, map_q: Tensor | None, map_k: Tensor | None,
    gain: Tensor, n: Tensor, count: Tensor, sums: Tensor, masses: Tensor, window: int, first: int,
    scale: float,
) -> tuple[Tensor]:  # fmt: skip
    """Return the output; `sums` [B, H, 2 F, e] and `masses` [B, H, 2 F, 1] are of the far tokens before the call."""
    (batch, heads, tokens, d), e = q.shape, v.shape[3]
    features = d if map_k is None else map_k.shape[1]
    tile = TILES[q.dtype][max(d, e, features) > 64]
    chunks = -(-tokens // tile.tokens)
    size = {
        "D": d, "E": e, "F": features, "BD": block(d), "BE": min(block(e), tile.columns), "BF": block(features),
        "WINDOW": window, "FIRST": first, "LATE": -window % tile.tokens, "CHUNK": tile.tokens,
        "SHARED": heads // k.shape[1], "DTYPE": as_triton(q.dtype), "STAGES": tile.stages, "num_warps": tile.warps,
    }  # fmt: skip
    columns, keys = -(-e // size["BE"]), (rows(k), rows(v), map_k, n, count)

    def walk(start: Any, each: bool, dtype: torch.dtype, segments: int, length: int) -> tuple[Tensor, Tensor]:
        """Return the sums before each chunk, or those of each segment alone."""
        shape = batch, heads, chunks if each else segments, 2 * features
        filled = q.new_empty(*shape, e, dtype=dtype), q.new_empty(*shape, 1, dtype=torch.float32)
        launch(
            far_kernel, batch * heads * segments * columns, *keys, *start, *filled, heads, chunks, segments, length,
            EACH=each, **size,
        )  # fmt: skip
        return filled

    segments, length = cut(chunks, batch * heads)
    start = sums[:, :, None], masses[:, :, None]
    if segments > 1:
        new_sums, new_masses = walk((None, None), False, torch.float32, segments, length)
        start = before(start[0], new_sums), before(start[1], new_masses)
    kind = q.dtype if q.dtype == torch.bfloat16 else torch.float32  # numbers as they are multiplied
    sums, masses = walk(start, True, kind, segments, length)
    out, around = output_like(q, e), -(-window // tile.tokens) + 1
    far_ones = min(-(-size["LATE"] // tile.tokens) + 1, around)
    launch(
        near_kernel, batch * heads * chunks * columns, rows(q), rows(k), rows(v), rows(first_k), rows(first_v),
        rows(out), map_q, map_k, gain, n, count, sums, masses, heads, tokens, chunks, scale,
        FIRSTS=block(first), BLOCKS=around, FARS=far_ones, **size,
    )  # fmt: skip
    return (out,)


def cut(chunks: int, heads: int) -> tuple[int, int]:
    """Return (segments per head, chunks per segment)."""
    segments = max(min(tiles.PROGRAMS // heads, chunks // LEAST), 1)
    length = -(-chunks // segments)
    return -(-chunks // length), length


def before(start: Tensor, new: Tensor) -> Tensor:
    """Return the sums before each segment, from those before the first and those of each."""
    return torch.cat([start, new[:, :, :-1]], 2).cumsum(2)


@fake("nearfar")
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor]:
    return (output_like(q, v.shape[3]),)


no_gradient("nearfar")
