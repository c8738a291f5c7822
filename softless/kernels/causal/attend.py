"""Causal attention on the kernels: which kernels are launched, and with what.

    forward    (State of each segment -> State before each ->) walk
    backward   queries' gradient -> (sums over each segment ->) keys' gradient

Shapes: q [B, H, N, d]   k [B, G, N, d]   v [B, G, N, e]   key_mask [B, N]   Past [B, G, .] or [B, G, segments, .].
Packed sequences are q [1, H, T, d], and so on, with `packs`: B of them, of at most N tokens.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from softless.algebra.kernel_spec import KernelSpec
from softless.kernels.causal import tiles as causal_tiles
from softless.kernels.causal.exponential import (
    Gathered,
    exponential_kernel,
    exponential_scan_kernel,
    exponential_sums_kernel,
)
from softless.kernels.causal.exponential_gradient import (
    exponential_key_kernel,
    exponential_later_kernel,
    exponential_query_kernel,
)
from softless.kernels.causal.forward import decode_kernel, forward_kernel, plain_kernel
from softless.kernels.causal.key_gradient import key_gradient_kernel, later_kernel, sums_kernel
from softless.kernels.causal.query_gradient import query_gradient_kernel
from softless.kernels.causal.states import Memory, prefix_kernel, segment_kernel
from softless.kernels.common import tiles
from softless.kernels.common.features import may_cancel, named
from softless.kernels.common.launch import as_triton, block, launch
from softless.kernels.common.rows import Packs, mask_of, rows, rows_of, sequences
from softless.kernels.common.tiles import Tile

LINE = 128  # numbers per program, of the D E + D + E that the sums of a segment have
CHANNELS = 8  # key channels whose part of a State one program merges
AHEAD = 3  # segments whose loads are in flight while one is added


class Past(NamedTuple):
    """A State's tensors in the kernels' order: n int64 [.], k_mean [., d], v_mean [., e], comoment [., d, e]."""

    n: Tensor
    k_mean: Tensor
    v_mean: Tensor
    comoment: Tensor

    def columns(self, part: slice) -> "Past":
        return Past(self.n, self.k_mean, self.v_mean[..., part], self.comoment[..., part])


def products(spec: KernelSpec, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to multiply in: the input's, or a finer one where a mass may nearly cancel."""
    return tiles.finer(dtype) if may_cancel(spec) else dtype


def extent(x: Tensor, packs: Packs | None) -> tuple[int, int]:
    """Return (sequences, tokens of the longest)."""
    return (x.shape[0], x.shape[2]) if packs is None else (packs.k_offsets.shape[0] - 1, packs.longest_k)


def segments_of(q: Tensor, k: Tensor, packs: Packs | None) -> tuple[int, int]:
    """Return (segments per head, tokens per segment)."""
    tokens, (_, heads, _, d) = extent(q, packs)[1], q.shape
    return causal_tiles.cut(tokens, sequences(q, packs, tokens) * heads, -(-d * k.shape[1] // max(heads, 1)))


def past_like(k: Tensor, v: Tensor, *states: int, packs: Packs | None = None) -> Past:
    """Allocate the States of each key head."""
    heads, d, e = (extent(k, packs)[0], k.shape[1], *states), k.shape[3], v.shape[3]
    shapes = ((*heads, d), (*heads, e), (*heads, d, e))
    return Past(k.new_empty(heads, dtype=torch.int64), *(k.new_empty(shape, dtype=torch.float32) for shape in shapes))


def offsets_of(packs: Packs | None) -> Tensor | None:
    return None if packs is None else packs.k_offsets


def memory_of(past: Past | None) -> Memory | None:
    return None if past is None else Memory(*past, past.comoment.stride(-2))


def sizes(q: Tensor, v: Tensor, columns: int) -> dict[str, int]:
    """Return the widths and the blocks that hold them; values are taken `columns` at a time."""
    d, e = q.shape[3], v.shape[3]
    return {"D": d, "E": e, "BD": block(d), "BE": min(block(e), block(columns))}


def walk(table: dict[int, Tile], q: Tensor, v: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """Return what a walking kernel whose products are in `dtype` is compiled for."""
    return walk_in(choose(table, q, v, dtype), q, v, dtype)


def walk_in(tile: Tile, q: Tensor, v: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    steps = {"CHUNK": tile.tokens, "STAGES": tile.stages, "num_warps": tile.warps, "DTYPE": as_triton(dtype)}
    return sizes(q, v, tile.columns) | steps


def choose(table: dict[int, Tile], q: Tensor, v: Tensor, dtype: torch.dtype) -> Tile:
    return causal_tiles.tile(table, padded_width(q, v), dtype)


def padded_width(q: Tensor, v: Tensor) -> int:
    return max(block(q.shape[3]), min(block(v.shape[3]), 128))


def starts(
    k: Tensor, v: Tensor, key_mask: Tensor | None, past: Past | None, spec: KernelSpec, segments: int, length: int,
    packs: Packs | None,
) -> Past:  # fmt: skip
    """Return the State before each segment."""
    dtype, heads = products(spec, k.dtype), extent(k, packs)[0] * k.shape[1]
    before, raw = (past_like(x, v, segments, packs=packs) for x in (k, k[..., :0]))
    states = Past(raw.n, before.k_mean, raw.v_mean, before.comoment)
    width = tiles.slice_width(block(k.shape[3]), v.shape[3])
    for at in range(0, v.shape[3], width):
        part = slice(at, at + width)
        size = sizes(k, v[..., part], width)
        cut = tiles.tile("segment", size["BD"], size["BE"], dtype)
        launch(
            segment_kernel, heads * (segments - 1), *rows_of(packs, k, v[..., part]), mask_of(key_mask),
            offsets_of(packs), memory_of(states.columns(part)), k.shape[1], k.shape[2], segments, length,
            PHI=spec.phi_k, EVEN=key_mask is None and packs is None and length % cut.tokens == 0,
            DTYPE=as_triton(dtype), T=cut.tokens, num_warps=cut.warps, num_stages=cut.stages, **size,
        )  # fmt: skip
    launch(
        prefix_kernel, heads * -(-k.shape[3] // CHANNELS), memory_of(states), memory_of(past),
        memory_of(before), segments, D=k.shape[3], E=v.shape[3], BE=block(v.shape[3]), ROWS=CHANNELS, STAGES=AHEAD,
        num_warps=2,
    )  # fmt: skip
    return before


def forward(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, past: Past | None, out: Tensor, after: Past | None,
    spec: KernelSpec, packs: Packs | None = None,
) -> Past | None:  # fmt: skip
    """Fill `out`, and the State `after` the last token; return the States before each segment if there are several."""
    heads, (segments, length) = extent(q, packs)[0] * q.shape[1], segments_of(q, k, packs)
    starting = starts(k, v, key_mask, past, spec, segments, length, packs) if segments > 1 else None
    dtype = products(spec, q.dtype)
    size = walk(causal_tiles.FORWARD, q, v, dtype)
    plain = spec.reader != "subtract" and dtype in (torch.bfloat16, torch.float16)
    launch(
        plain_kernel if plain else forward_kernel, heads * segments * -(-v.shape[3] // size["BE"]),
        *rows_of(packs, q, k, v, out), mask_of(key_mask), offsets_of(packs),
        memory_of(past if starting is None else starting), memory_of(after), q.shape[1], q.shape[2], segments, length,
        spec.scale, SHARED=q.shape[1] // k.shape[1], **named(spec), **size,
    )  # fmt: skip
    return starting


def decode(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, past: Past | None, out: Tensor, spec: KernelSpec
) -> Past:
    """Fill `out` for one token; return the State after it."""
    after, d, e = past_like(k, v), k.shape[3], v.shape[3]
    columns = min(block(e), 64)  # 16 KB of State at d = 64, 64 numbers per thread: all loads in flight
    launch(
        decode_kernel, k.shape[0] * k.shape[1] * -(-e // columns), rows(q), rows(k), rows(v), rows(out),
        mask_of(key_mask), memory_of(past), memory_of(after), k.shape[1], spec.scale,
        D=d, E=e, BD=block(d), BE=columns, SHARED=q.shape[1] // k.shape[1], num_warps=max(1, block(d) // 32),
        **named(spec),
    )  # fmt: skip
    return after


class Sums(NamedTuple):
    """Sums over queries: g f do^T [B, G, d, e], g delta f [B, G, d], even do [B, G, e]."""

    outer: Tensor
    of_queries: Tensor
    of_outputs: Tensor

    def columns(self, part: slice) -> "Sums":
        """Return the sums of these value columns. `of_queries` belongs to all columns and goes with the first."""
        of_queries = self.of_queries if part.start == 0 else torch.zeros_like(self.of_queries)
        return Sums(self.outer[..., part], of_queries, self.of_outputs[..., part])


def backward(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, key_mask: Tensor | None, before: Past | None,
    v_ref: Tensor, last: Sums | None, filled: tuple[Tensor, Tensor, Tensor], summed: bool,
    spec: KernelSpec, packs: Packs | None = None,
) -> Sums | None:  # fmt: skip
    """Fill the gradients of q, k, v; return the sums over all queries if `summed`.

    v_ref  the values' mean over the whole call; values are taken relative to it
    last   the sums over the queries that come after the call
    """
    e, columns = v.shape[3], choose(causal_tiles.QUERIES, q, v, products(spec, q.dtype)).columns
    if e <= columns:
        return _backward(q, k, v, d_out, key_mask, before, v_ref, last, filled, summed, spec, packs)
    dq, dk = (torch.zeros_like(x, dtype=torch.float32) for x in filled[:2])
    share_q, share_k, parts = torch.empty_like(dq), torch.empty_like(dk), []
    for at in range(0, e, columns):
        part = slice(at, at + columns)
        into = share_q, share_k, filled[2][..., part]
        past, end = None if before is None else before.columns(part), None if last is None else last.columns(part)
        of = q, k, v[..., part], d_out[..., part], key_mask, past, v_ref[..., part]
        parts.append(_backward(*of, end, into, summed, spec, packs))
        dq += share_q
        dk += share_k
    filled[0].copy_(dq)
    filled[1].copy_(dk)
    if not summed:
        return None
    outer, of_queries, of_outputs = zip(*(x for x in parts if x is not None), strict=True)
    return Sums(torch.cat(outer, -1), torch.stack(of_queries).sum(0), torch.cat(of_outputs, -1))


def _backward(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, key_mask: Tensor | None, before: Past | None,
    v_ref: Tensor, last: Sums | None, filled: tuple[Tensor, Tensor, Tensor], summed: bool,
    spec: KernelSpec, packs: Packs | None = None,
) -> Sums | None:  # fmt: skip
    """`backward` for value columns that fit into one program."""
    (_, heads, tokens, d), groups, e, batch = q.shape, k.shape[1], v.shape[3], extent(q, packs)[0]
    segments, length = segments_of(q, k, packs)
    width, scalars = v_ref.stride(1), q.new_empty(q.shape[0], heads, 3, tokens, dtype=torch.float32)
    dtype, shared = products(spec, q.dtype), heads // groups
    launch(
        query_gradient_kernel, batch * heads * segments, *rows_of(packs, q, k, v, d_out, filled[0]),
        mask_of(key_mask), offsets_of(packs), memory_of(before), v_ref, width, scalars, heads, tokens,
        segments, length, spec.scale, SHARED=shared, **named(spec), **walk(causal_tiles.QUERIES, q, v, dtype),
    )  # fmt: skip
    later = _later(q, k, d_out, key_mask, scalars, last, summed, spec, packs)
    launch(
        key_gradient_kernel, batch * groups * segments, *rows_of(packs, q, k, v, d_out, *filled[1:]),
        mask_of(key_mask), offsets_of(packs), v_ref, width, scalars, later, groups, tokens, segments, length,
        SHARED=shared, PHI_Q=spec.phi_q, PHI_K=spec.phi_k, CENTERED=spec.reader == "subtract",
        **walk(causal_tiles.KEYS, q, v, dtype),
    )  # fmt: skip
    if later is None or not summed:
        return None
    outer, of_queries, of_outputs = later[:, :, 0].split([d * e, d, e], -1)
    return Sums(outer.unflatten(-1, (d, e)), of_queries, of_outputs)


def _later(
    q: Tensor, k: Tensor, d_out: Tensor, key_mask: Tensor | None, scalars: Tensor, last: Sums | None, summed: bool,
    spec: KernelSpec, packs: Packs | None,
) -> Tensor | None:  # fmt: skip
    """Return the sums over the queries of each segment and all later ones, then `last`: [B, G, segments + 1, .].

    Return None where nothing follows any segment. Without `summed` the first row lacks the first segment, because
    nothing reads it.
    """
    (_, heads, tokens, d), groups, e, batch = q.shape, k.shape[1], d_out.shape[3], extent(q, packs)[0]
    segments, length = segments_of(q, k, packs)
    if segments == 1 and last is None and not summed:
        return None
    shared, size, skipped = heads // groups, d * e + d + e, int(not summed)
    pieces, left_out = segments * causal_tiles.PIECES, skipped * causal_tiles.PIECES
    sums = q.new_empty(batch, groups, shared, pieces - left_out, size, dtype=torch.float32)
    launch(
        sums_kernel, batch * heads * (pieces - left_out), *rows_of(packs, q, k, d_out), mask_of(key_mask),
        offsets_of(packs), scalars, sums, heads, tokens, pieces, left_out, length // causal_tiles.PIECES,
        SHARED=shared, PHI_Q=spec.phi_q, PHI_K=spec.phi_k, CENTERED=spec.reader == "subtract",
        **walk(causal_tiles.KEYS, q, d_out, products(spec, q.dtype)),
    )  # fmt: skip
    later = q.new_empty(batch, groups, segments + 1, size, dtype=torch.float32)
    end = None if last is None else torch.cat([x.flatten(2) for x in last], 2)
    launch(
        later_kernel, batch * groups * -(-size // LINE), sums, end, later, segments, skipped, size,
        PIECES=causal_tiles.PIECES, SHARED=shared, BLOCK=LINE, STAGES=AHEAD, num_warps=1,
    )  # fmt: skip
    return later


class SumsInUnits(NamedTuple):
    """The sums of `exponential`, for each segment of each head: S [., d, e], y [., e], Z | u | n [., 2 d + 1]."""

    outer: Tensor
    of_values: Tensor
    rest: Tensor

    def columns(self, part: slice) -> "SumsInUnits":
        return SumsInUnits(self.outer[..., part], self.of_values[..., part], self.rest)


def sums_like(q: Tensor, v: Tensor, heads: int, packs: Packs | None) -> SumsInUnits:
    """Allocate the sums of these many heads."""
    rows, d, e = (extent(q, packs)[0], heads, segments_of(q, v, packs)[0]), q.shape[3], v.shape[3]
    return SumsInUnits(*(q.new_empty(*rows, *shape, dtype=torch.float32) for shape in ((d, e), (e,), (2 * d + 1,))))


def gathered(sums: SumsInUnits | None) -> Gathered | None:
    return None if sums is None else Gathered(*sums, sums.outer.stride(-2))


def scanned(sums: SumsInUnits, *, reverse: bool) -> SumsInUnits:
    """Return the sums of all segments before each one, or after it."""
    before, (batch, heads, segments, d, e) = SumsInUnits(*map(torch.empty_like, sums)), sums.outer.shape
    launch(
        exponential_scan_kernel, batch * heads * -(-d // CHANNELS), gathered(sums), gathered(before), segments, D=d,
        E=e, BE=block(e), ROWS=CHANNELS, REVERSE=reverse, num_warps=2,
    )  # fmt: skip
    return before


def exponential_forward(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, out: Tensor, spec: KernelSpec, packs: Packs | None
) -> SumsInUnits | None:
    """Fill `out`, for keys that are exponential; return the sums before each segment if there are several."""
    (segments, length), batch = segments_of(q, k, packs), extent(q, packs)[0]
    size = walk(causal_tiles.FORWARD, q, v, q.dtype)
    blocks, before = -(-v.shape[3] // size["BE"]), None
    if segments > 1:
        sums = sums_like(q, v, k.shape[1], packs)
        launch(
            exponential_sums_kernel, batch * k.shape[1] * (segments - 1) * blocks, *rows_of(packs, k, v),
            mask_of(key_mask), offsets_of(packs), gathered(sums), k.shape[1], k.shape[2], segments, length, spec.t,
            **size,
        )  # fmt: skip
        before = scanned(sums, reverse=False)
    launch(
        exponential_kernel, batch * q.shape[1] * segments * blocks, *rows_of(packs, q, k, v, out), mask_of(key_mask),
        offsets_of(packs), gathered(before), q.shape[1], q.shape[2], segments, length, spec.t,
        SHARED=q.shape[1] // k.shape[1], READER=spec.reader, **size,
    )  # fmt: skip
    return before


def exponential_backward(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, key_mask: Tensor | None, before: SumsInUnits | None,
    filled: tuple[Tensor, Tensor, Tensor], spec: KernelSpec, packs: Packs | None,
) -> None:  # fmt: skip
    """Fill the gradients of q, and those of k and v for every query head: [B, H, N, d], [B, H, N, e]."""
    e, columns = v.shape[3], choose(causal_tiles.QUERIES, q, v, q.dtype).columns
    if e <= columns:
        return _exponential_backward(q, k, v, d_out, key_mask, before, filled, spec, packs)
    dq, dk = (torch.zeros_like(x, dtype=torch.float32) for x in filled[:2])
    share_q, share_k = torch.empty_like(dq), torch.empty_like(dk)
    for at in range(0, e, columns):
        part = slice(at, at + columns)
        into, past = (share_q, share_k, filled[2][..., part]), None if before is None else before.columns(part)
        _exponential_backward(q, k, v[..., part], d_out[..., part], key_mask, past, into, spec, packs)
        dq += share_q
        dk += share_k
    filled[0].copy_(dq)
    filled[1].copy_(dk)
    return None


def _exponential_backward(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, key_mask: Tensor | None, before: SumsInUnits | None,
    filled: tuple[Tensor, Tensor, Tensor], spec: KernelSpec, packs: Packs | None,
) -> None:  # fmt: skip
    """`exponential_backward` for value columns that fit into one program."""
    (segments, length), batch, heads = segments_of(q, k, packs), extent(q, packs)[0], q.shape[1]
    width = k.shape[3] if spec.reader == "channel" else 1
    scalars = q.new_empty(q.shape[0], heads, 2, q.shape[2], width, dtype=torch.float32)
    shared, cut = {"SHARED": heads // k.shape[1], "READER": spec.reader}, (heads, q.shape[2], segments, length, spec.t)
    launch(
        exponential_query_kernel, batch * heads * segments, *rows_of(packs, q, k, v, d_out, filled[0]),
        mask_of(key_mask), offsets_of(packs), gathered(before), scalars, *cut, **shared,
        **walk(causal_tiles.QUERIES, q, v, q.dtype),
    )  # fmt: skip
    size = walk_in(causal_tiles.exponential_keys(padded_width(q, v), q.dtype), q, v, q.dtype)
    later = None
    if segments > 1:
        sums = sums_like(q, v, heads, packs)
        launch(
            exponential_later_kernel, batch * heads * (segments - 1), *rows_of(packs, q, d_out), offsets_of(packs),
            scalars, gathered(sums), *cut, READER=spec.reader, **size,
        )  # fmt: skip
        later = scanned(sums, reverse=True)
    launch(
        exponential_key_kernel, batch * heads * segments, *rows_of(packs, q, k, v, d_out, *filled[1:]),
        mask_of(key_mask), offsets_of(packs), scalars, gathered(later), *cut, **shared, **size,
    )  # fmt: skip
