"""Causal attention on the kernels: which are launched, and with what.

    forward    (State of each segment -> State before each ->) walk
    backward   queries' gradient -> (sums over each segment ->) keys' gradient

Shapes: q [B, H, N, d]   k [B, G, N, d]   v [B, G, N, e]   key_mask [B, N]   Past [B, G, .] or [B, G, segments, .].
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from softless.kernels.causal import tiles as causal_tiles
from softless.kernels.causal.decode import decode_kernel
from softless.kernels.causal.forward import forward_kernel
from softless.kernels.causal.key_gradient import key_gradient_kernel, later_kernel, sums_kernel
from softless.kernels.causal.memory import Memory
from softless.kernels.causal.plain import plain_kernel
from softless.kernels.causal.query_gradient import query_gradient_kernel
from softless.kernels.causal.states import prefix_kernel, segment_kernel
from softless.kernels.causal.tiles import Tile
from softless.kernels.common import tiles
from softless.kernels.common.features import may_cancel
from softless.kernels.common.launch import as_triton, block, launch
from softless.kernels.common.mask import mask_of
from softless.kernels.common.rows import rows

LINE = 128  # of the D E + D + E numbers of a segment's sums that a program adds up
CHANNELS = 8  # of the keys, whose part of a State a program merges
AHEAD = 3  # segments: the next ones are on their way while one is added


class Past(NamedTuple):
    """The State's tensors in the kernels' order: n int64 [.], k_mean [., d], v_mean [., e], comoment [., d, e]."""

    n: Tensor
    k_mean: Tensor
    v_mean: Tensor
    comoment: Tensor

    def columns(self, some: slice) -> "Past":
        return Past(self.n, self.k_mean, self.v_mean[..., some], self.comoment[..., some])


class Recipe(NamedTuple):
    """A kernelized mechanism in the kernels' words."""

    phi_q: str
    phi_k: str
    reader: str  # divide | subtract | none
    scale: float
    constant: bool  # features are [1, phi]: Taylor attention

    @property
    def names(self) -> dict[str, Any]:
        named = {"PHI_Q": self.phi_q, "PHI_K": self.phi_k, "READER": self.reader, "CONSTANT": self.constant}
        return named | {"SIGNED": self.signed}

    @property
    def signed(self) -> bool:
        return may_cancel(self.phi_q, self.phi_k, self.reader)

    def products(self, dtype: torch.dtype) -> torch.dtype:
        """What to multiply in: the input's dtype, or finer where a mass may nearly cancel."""
        return tiles.finer(dtype) if self.signed else dtype


def past_like(k: Tensor, v: Tensor, *states: int) -> Past:
    """Room for the States of each key head."""
    some = (*k.shape[:2], *states)
    d, e = k.shape[3], v.shape[3]
    shapes = ((*some, d), (*some, e), (*some, d, e))
    return Past(k.new_empty(some, dtype=torch.int64), *(k.new_empty(shape, dtype=torch.float32) for shape in shapes))


def memory_of(past: Past | None) -> Memory | None:
    return None if past is None else Memory(*past, past.comoment.stride(-2))


def sizes(q: Tensor, v: Tensor, columns: int) -> dict[str, int]:
    """Widths, and the blocks that hold them; values are taken so many columns at a time."""
    d, e = q.shape[3], v.shape[3]
    return {"D": d, "E": e, "BD": block(d), "BE": min(block(e), block(columns))}


def walk(table: dict[int, Tile], q: Tensor, v: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """What a walking kernel whose products are in `dtype` is compiled for."""
    tile = choose(table, q, v, dtype)
    steps = {"CHUNK": tile.chunk, "STAGES": tile.stages, "num_warps": tile.warps, "DTYPE": as_triton(dtype)}
    return sizes(q, v, tile.columns) | steps


def choose(table: dict[int, Tile], q: Tensor, v: Tensor, dtype: torch.dtype) -> Tile:
    return causal_tiles.tile(table, max(block(q.shape[3]), min(block(v.shape[3]), 128)), dtype)


def starts(k: Tensor, v: Tensor, key_mask: Tensor | None, past: Past | None, recipe: Recipe, heads: int) -> Past:
    """The State before each segment."""
    dtype = recipe.products(k.dtype)
    segments, length = causal_tiles.cut(k.shape[2], heads, k.shape[3])
    before, raw = past_like(k, v, segments), past_like(k[:, :, :0, :0], v, segments)
    states = Past(raw.n, before.k_mean, raw.v_mean, before.comoment)
    width = tiles.slice_width(block(k.shape[3]), v.shape[3])
    for at in range(0, v.shape[3], width):
        some = slice(at, at + width)
        size = sizes(k, v[..., some], width)
        cut = tiles.tile("segment", size["BD"], size["BE"], dtype)
        launch(
            segment_kernel, k.shape[0] * k.shape[1] * (segments - 1), k, rows(k), rows(v[..., some]),
            mask_of(key_mask), memory_of(states.columns(some)), k.shape[1], k.shape[2], segments, length,
            PHI=recipe.phi_k, EVEN=key_mask is None and length % cut.tokens == 0, DTYPE=as_triton(dtype), T=cut.tokens,
            num_warps=cut.warps, num_stages=cut.stages, **size,
        )  # fmt: skip
    launch(
        prefix_kernel, k.shape[0] * k.shape[1] * -(-k.shape[3] // CHANNELS), k, memory_of(states), memory_of(past),
        memory_of(before), segments, D=k.shape[3], E=v.shape[3], BE=block(v.shape[3]), ROWS=CHANNELS, STAGES=AHEAD,
        num_warps=2,
    )  # fmt: skip
    return before


def forward(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, past: Past | None, out: Tensor, recipe: Recipe
) -> tuple[Past, Past | None]:
    """Fill `out`; the State after the last token, and those before each segment, if there are several."""
    heads, after = q.shape[0] * q.shape[1], past_like(k, v)
    segments, length = causal_tiles.cut(q.shape[2], heads, q.shape[3])
    starting = starts(k, v, key_mask, past, recipe, heads) if segments > 1 else None
    dtype = recipe.products(q.dtype)
    size = walk(causal_tiles.FORWARD, q, v, dtype)
    plain = recipe.reader != "subtract" and dtype in (torch.bfloat16, torch.float16)
    launch(
        plain_kernel if plain else forward_kernel, heads * segments * -(-v.shape[3] // size["BE"]), q, rows(q),
        rows(k), rows(v), rows(out), mask_of(key_mask), memory_of(past if starting is None else starting),
        memory_of(after), q.shape[1], q.shape[2], segments, length, recipe.scale, SHARED=q.shape[1] // k.shape[1],
        **recipe.names, **size,
    )  # fmt: skip
    return after, starting


def decode(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, past: Past | None, out: Tensor, recipe: Recipe
) -> Past:
    """One token: fill `out`; the State after it."""
    after, d, e = past_like(k, v), k.shape[3], v.shape[3]
    columns = min(block(e), 64)  # a block of the State is 16 KB at d = 64, 64 numbers a thread: all loads in flight
    launch(
        decode_kernel, k.shape[0] * k.shape[1] * -(-e // columns), q, rows(q), rows(k), rows(v), rows(out),
        mask_of(key_mask), memory_of(past), memory_of(after), k.shape[1], recipe.scale,
        D=d, E=e, BD=block(d), BE=columns, SHARED=q.shape[1] // k.shape[1], num_warps=max(1, block(d) // 32),
        **recipe.names,
    )  # fmt: skip
    return after


class Sums(NamedTuple):
    """Over queries: sum g f do^T [B, G, d, e], sum g delta f [B, G, d], sum even do [B, G, e]."""

    outer: Tensor
    of_queries: Tensor
    of_outputs: Tensor

    def columns(self, some: slice) -> "Sums":
        """Those of some value columns; what belongs to all of them goes with the first."""
        of_queries = self.of_queries if some.start == 0 else torch.zeros_like(self.of_queries)
        return Sums(self.outer[..., some], of_queries, self.of_outputs[..., some])


def backward(
    q: Tensor, k: Tensor, v: Tensor, given: Tensor, key_mask: Tensor | None, before: Past | None,
    v_ref: Tensor, last: Sums | None, filled: tuple[Tensor, Tensor, Tensor], summed: bool,
    recipe: Recipe,
) -> Sums | None:  # fmt: skip
    """Fill the gradients of q, k, v; the sums over all queries, where `summed`.

    v_ref  the values' mean over the whole call: they are taken relative to it
    last   the sums over what comes after the call
    """
    e, columns = v.shape[3], choose(causal_tiles.QUERIES, q, v, recipe.products(q.dtype)).columns
    if e <= columns:
        return _backward(q, k, v, given, key_mask, before, v_ref, last, filled, summed, recipe)
    dq, dk = (torch.zeros_like(x, dtype=torch.float32) for x in filled[:2])
    share_q, share_k, parts = torch.empty_like(dq), torch.empty_like(dk), []
    for at in range(0, e, columns):
        some = slice(at, at + columns)
        into = share_q, share_k, filled[2][..., some]
        past, end = None if before is None else before.columns(some), None if last is None else last.columns(some)
        of = q, k, v[..., some], given[..., some], key_mask, past, v_ref[..., some]
        parts.append(_backward(*of, end, into, summed, recipe))
        dq += share_q
        dk += share_k
    filled[0].copy_(dq)
    filled[1].copy_(dk)
    if not summed:
        return None
    outer, of_queries, of_outputs = zip(*(x for x in parts if x is not None), strict=True)
    return Sums(torch.cat(outer, -1), torch.stack(of_queries).sum(0), torch.cat(of_outputs, -1))


def _backward(
    q: Tensor, k: Tensor, v: Tensor, given: Tensor, key_mask: Tensor | None, before: Past | None,
    v_ref: Tensor, last: Sums | None, filled: tuple[Tensor, Tensor, Tensor], summed: bool,
    recipe: Recipe,
) -> Sums | None:  # fmt: skip
    """`backward` for value columns that fit into one program."""
    (batch, heads, tokens, d), groups, e = q.shape, k.shape[1], v.shape[3]
    segments, length = causal_tiles.cut(tokens, batch * heads, d)
    width, scalars = v_ref.stride(1), q.new_empty(batch, heads, 3, tokens, dtype=torch.float32)
    dtype, shared = recipe.products(q.dtype), heads // groups
    launch(
        query_gradient_kernel, batch * heads * segments, q, rows(q), rows(k), rows(v), rows(given), rows(filled[0]),
        mask_of(key_mask), memory_of(before), v_ref, width, scalars, heads, tokens,
        segments, length, recipe.scale, SHARED=shared, **recipe.names, **walk(causal_tiles.QUERIES, q, v, dtype),
    )  # fmt: skip
    later = _later(q, k, given, key_mask, scalars, last, summed, recipe)
    launch(
        key_gradient_kernel, batch * groups * segments, q, rows(q), rows(k), rows(v), rows(given), rows(filled[1]),
        rows(filled[2]), mask_of(key_mask), v_ref, width, scalars, later, groups, tokens, segments, length,
        SHARED=shared, PHI_Q=recipe.phi_q, PHI_K=recipe.phi_k, CENTERED=recipe.reader == "subtract",
        **walk(causal_tiles.KEYS, q, v, dtype),
    )  # fmt: skip
    if later is None or not summed:
        return None
    outer, of_queries, of_outputs = later[:, :, 0].split([d * e, d, e], -1)
    return Sums(outer.unflatten(-1, (d, e)), of_queries, of_outputs)


def _later(
    q: Tensor, k: Tensor, given: Tensor, key_mask: Tensor | None, scalars: Tensor, last: Sums | None, summed: bool,
    recipe: Recipe,
) -> Tensor | None:  # fmt: skip
    """The sums over the queries of each segment and all that follow, then `last`: [B, G, segments + 1, .].

    None where nothing follows any segment. Without `summed` the first row lacks the first segment: nobody asks.
    """
    (batch, heads, tokens, d), groups, e = q.shape, k.shape[1], given.shape[3]
    segments, length = causal_tiles.cut(tokens, batch * heads, d)
    if segments == 1 and last is None and not summed:
        return None
    shared, size, skipped = heads // groups, d * e + d + e, int(not summed)
    pieces, left_out = segments * causal_tiles.PIECES, skipped * causal_tiles.PIECES
    sums = q.new_empty(batch, groups, shared, pieces - left_out, size, dtype=torch.float32)
    launch(
        sums_kernel, batch * heads * (pieces - left_out), q, rows(q), rows(k), rows(given), mask_of(key_mask), scalars,
        sums, heads, tokens, pieces, left_out, length // causal_tiles.PIECES, SHARED=shared, PHI_Q=recipe.phi_q,
        PHI_K=recipe.phi_k, CENTERED=recipe.reader == "subtract",
        **walk(causal_tiles.KEYS, q, given, recipe.products(q.dtype)),
    )  # fmt: skip
    later = q.new_empty(batch, groups, segments + 1, size, dtype=torch.float32)
    end = None if last is None else torch.cat([x.flatten(2) for x in last], 2)
    launch(
        later_kernel, batch * groups * -(-size // LINE), q, sums, end, later, segments, skipped, size,
        PIECES=causal_tiles.PIECES, SHARED=shared, BLOCK=LINE, STAGES=AHEAD, num_warps=1,
    )  # fmt: skip
    return later
