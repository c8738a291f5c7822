"""Non-causal attention on the kernels: which kernels are launched, and with what.

    forward    observe -> (merge) -> (solve) -> read                                 or one kernel for short sequences
    backward   queries' gradient -> sum over spans -> (solve) -> keys' gradient      or one kernel for short sequences,
                                                                                     after one for the residual

Shapes: q [B, H, N, d]   k [B, G, M, d]   v [B, G, M, e]   key_mask [B, M]   taps [B, H, 9, e]   records [B G, numbers].
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from softless.algebra.kernel_spec import KernelSpec
from softless.kernels.common import tiles
from softless.kernels.common.features import folded, may_cancel, named
from softless.kernels.common.launch import as_triton, block, launch
from softless.kernels.common.rows import Packs, Rows, dense, mask_of, numbers, output_like, rows_of, sequences
from softless.kernels.common.tiles import Tile, finer, slice_width, spans, tile
from softless.kernels.parallel.gradients import (
    key_gradient_kernel,
    query_gradient_kernel,
    query_sums_kernel,
    residual_gradient_kernel,
)
from softless.kernels.parallel.observe import merge_kernel, observe_kernel
from softless.kernels.parallel.read import Taps, read_kernel
from softless.kernels.parallel.regress import (
    solve_gradient_kernel,
    solve_kernel,
    whole_regress_gradient_kernel,
    whole_regress_kernel,
)
from softless.kernels.parallel.short import short_kernel, whole_gradient_kernel, whole_kernel

DIVIDES = "divide", "blend"  # readers with a mass
MERGED = 128  # numbers of a comoment per program of a merge: one per thread, many programs, all loads in flight at once


class Picture(NamedTuple):
    """Where the tokens lie, for the local residual."""

    prefix: int
    height: int
    width: int


class Operands(NamedTuple):
    """The arguments of a forward pass."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    taps: Tensor | None
    spec: KernelSpec
    picture: Picture
    packs: Packs | None = None
    factors: Tensor | None = None  # [H, 2]

    @property
    def extent(self) -> tuple[int, int, int]:
        """(sequences, queries, keys); of packed sequences, those of the longest."""
        if self.packs is None:
            return self.q.shape[0], self.q.shape[2], self.k.shape[2]
        return self.packs.q_offsets.shape[0] - 1, self.packs.longest_q, self.packs.longest_k

    def rows(self, *tensors: Tensor) -> tuple[Rows, ...]:
        return rows_of(self.packs, *tensors)

    @property
    def offsets(self) -> tuple[Tensor | None, Tensor | None]:
        return (None, None) if self.packs is None else self.packs[:2]

    def spans(self, x: Tensor, step: int, programs: int = tiles.PROGRAMS) -> tuple[int, int]:
        """Return (span, splits) of the tokens of q or k."""
        _, queries, keys = self.extent
        longest = queries if x is self.q else keys
        return spans(longest, sequences(x, self.packs, longest) * x.shape[1], step, programs)

    def even(self, tokens: int, step: int) -> bool:
        """Whether all tiles are full."""
        return (tokens if self.packs is None else self.packs.multiple) % step == 0

    def columns(self, part: slice) -> "Operands":
        """Return the same arguments with only these value columns."""
        return self._replace(v=self.v[..., part], taps=None if self.taps is None else self.taps[..., part])

    def slices(self) -> list[slice]:
        """Cut the value columns into slices that fit beside the features."""
        e = self.v.shape[3]
        width = slice_width(block(self.q.shape[3]), e)
        return [slice(start, min(start + width, e)) for start in range(0, e, width)]

    def sizes(self) -> dict[str, int]:
        d, e = self.q.shape[3], self.v.shape[3]
        return {"D": d, "E": e, "BD": block(d), "BE": block(e)}

    @property
    def more(self) -> int:
        """How many values are observed besides v: regression observes [v, phi(k)]."""
        return self.q.shape[3] if self.spec.reader == "regress" else 0

    def records(self, count: int, more: int = 0) -> Tensor:
        """Allocate the records of `count` States."""
        return self.q.new_empty(count, numbers(self.q.shape[3], self.v.shape[3] + more), dtype=torch.float32)

    def recorded(self, memory: Tensor) -> Tensor:
        """Return the records in what is `kept`."""
        return Solutions.of(memory, self).records if self.more else memory

    @property
    def group(self) -> int:
        """How many query heads read one State. Regression has a State per query head if these have own numbers."""
        alone = self.more and self.factors is not None
        return 1 if alone else self.q.shape[1] // self.k.shape[1]

    def shares(self, splits: int) -> Tensor | None:
        """Allocate what each program adds to the gradient of the factors, if there are any."""
        if self.factors is None:
            return None
        return self.q.new_empty(self.extent[0], self.q.shape[1], splits, 2, dtype=torch.float32)

    def tapped(self) -> Taps | None:
        return None if self.taps is None else Taps(self.taps, *self.taps.stride())


class Solutions(NamedTuple):
    """What regression keeps for the backward pass, in one piece of memory; S heads have a W of their own."""

    records: Tensor  # [B G, numbers(d, e + d)]
    states: Tensor  # [B S, numbers(d, e)]: W as a comoment
    inverses: Tensor  # [B S, d d and padding]

    @staticmethod
    def shapes(x: Operands) -> list[tuple[int, int]]:
        (d, e), batch, groups = (x.q.shape[3], x.v.shape[3]), x.extent[0], x.k.shape[1]
        heads = batch * (groups if x.factors is None else x.q.shape[1])
        square = -(-d * d // 32) * 32
        return [(batch * groups, numbers(d, e + d)), (heads, numbers(d, e)), (heads, square)]

    @classmethod
    def of(cls, memory: Tensor, x: Operands) -> "Solutions":
        shapes = cls.shapes(x)
        parts = memory.split([rows * columns for rows, columns in shapes])
        return cls(*(part.view(shape) for part, shape in zip(parts, shapes, strict=True)))


def forward(x: Operands, out: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return the output, and the records if the backward pass gets them.

    The output is allocated last: the parts of a merge are freed by then.
    """
    if len(cuts := x.slices()) > 1:
        out = output_like(x.q, x.v.shape[3])
        for part in cuts:
            forward(x.columns(part), out[..., part])
        return out, None
    q, k, v, key_mask, taps, spec, picture, _, factors = x
    (batch, queries, keys), heads, groups = x.extent, q.shape[1], k.shape[1]
    sizes, mask, dtype = x.sizes(), mask_of(key_mask), _products(spec, q.dtype, backward=False)
    wide = sizes["BD"], sizes["BE"]
    whole = tiles.is_whole(queries, keys, *wide)
    alone = "whole regress" if x.more else "whole"
    kind = (alone if whole else "read") if taps is None else (f"{alone} local" if whole else "local")
    cut = tile(kind, *wide, dtype, max(queries, keys))
    constants = {"GROUP": heads // groups, "DTYPE": as_triton(dtype), **sizes, **named(spec), **_meta(cut)}
    records = None if whole else _observe(x, dtype)
    solved = None if records is None or spec.reader != "regress" else Solutions.of(records, x)
    out = output_like(q, v.shape[3]) if out is None else out
    if whole and taps is None and tiles.is_short(keys, spec, *wide, dtype):
        size, cut = tiles.short(keys)
        launch(
            short_kernel, batch * groups, *x.rows(q, k, v, out), mask, *x.offsets, queries, keys, groups,
            spec.scale, spec.t, KEYS=size, **(constants | _meta(cut)))  # fmt: skip
        return out, None
    if records is None and spec.reader == "regress":
        launch(
            whole_regress_kernel, batch * groups, *x.rows(q, k, v, out), x.tapped(), mask, *x.offsets, factors, queries,
            keys, groups, spec.ridge, spec.scale, spec.t, picture, FOLDED=folded(spec), **constants)  # fmt: skip
        return out, None
    if records is None:
        launch(
            whole_kernel, batch * groups, *x.rows(q, k, v, out), x.tapped(), mask, *x.offsets, factors, queries, keys,
            groups, spec.scale, spec.t, picture, **constants)  # fmt: skip
        return out, None
    span, splits = x.spans(q, cut.tokens, tiles.readers(*wide))
    states = records if solved is None else solved.states
    launch(
        read_kernel, batch * heads * splits, *x.rows(q, v, out), x.tapped(), mask, x.offsets[0], states, factors,
        queries, heads, span, splits, spec.scale, spec.t, picture, NUMBERS=states.shape[1],
        EVEN=x.even(queries, cut.tokens), **(constants | {"GROUP": x.group}))  # fmt: skip
    return out, records if keeps_records(x) else None


def backward(
    d_out: Tensor, x: Operands, records: Tensor | None, d_q: Tensor, d_k: Tensor, d_v: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Write the gradients of q, k and v; return those of the taps and of the factors in float32, if there are any."""
    if len(x.slices()) > 1:
        return _sliced_backward(d_out, x, d_q, d_k, d_v)
    q, k, v, key_mask, taps, spec, picture, _, factors = x
    (batch, queries, keys), heads, groups = x.extent, q.shape[1], k.shape[1]
    sizes, mask, dtype = x.sizes(), mask_of(key_mask), _products(spec, q.dtype, backward=True)
    wide, constants = (sizes["BD"], sizes["BE"]), {"DTYPE": as_triton(dtype), **sizes}
    d_out = dense(d_out)
    if tiles.is_whole(queries, keys, *wide):
        kind = "regress gradient" if x.more else "gradient divide" if spec.reader in DIVIDES else "gradient"
        cut = tile(f"whole {kind}", *wide, dtype, max(queries, keys))
        local, d_taps = (None, None) if taps is None else _residual_gradient(d_out, x, dtype)
        of_residual = None if local is None else x.rows(local)[0]
        if spec.reader == "regress":
            launch(
                whole_regress_gradient_kernel, batch * groups, *x.rows(q, k, v, d_out), mask, *x.offsets,
                *x.rows(d_q, d_k, d_v), shares := x.shares(1), of_residual, factors, queries, keys, groups, spec.ridge,
                spec.scale, spec.t, GROUP=heads // groups, STAGES=cut.stages, CENTERED=spec.centered,
                FOLDED=folded(spec), KEYS=as_triton(_key_products(x, dtype)), **constants, **named(spec),
                **_meta(cut))  # fmt: skip
            return d_taps, None if shares is None else shares.sum((0, 2))
        launch(
            whole_gradient_kernel, batch * groups, *x.rows(q, k, v, d_out), mask, *x.offsets,
            *x.rows(d_q, d_k, d_v), shares := x.shares(1), of_residual, factors, queries, keys, groups, spec.scale,
            spec.t, GROUP=heads // groups, STAGES=cut.stages, **constants, **named(spec), **_meta(cut))  # fmt: skip
        return d_taps, None if shares is None else shares.sum((0, 2))
    if records is None:
        records = _observe(x, dtype)
    if spec.reader == "regress":
        solved = Solutions.of(records, x)
        gradients, _ = _query_gradient(d_out, x, solved.states, d_q, dtype)
        records, (gradients, d_factors) = solved.records, _solve_gradient(x, solved, gradients, dtype)
    else:
        gradients, d_factors = _query_gradient(d_out, x, records, d_q, dtype)
    dtype = tiles.key_products(*wide, _key_products(x, dtype))
    cut = tile(("key" if taps is None else "local key") + (" spread" if x.more else ""), *wide, dtype)
    span, splits = x.spans(k, cut.tokens, tiles.readers(*wide))
    d_taps = None if taps is None else q.new_empty(batch, heads, splits, 9, v.shape[3], dtype=torch.float32)
    launch(
        key_gradient_kernel, batch * groups * splits, *x.rows(k, v, d_out), x.tapped(), mask, x.offsets[1],
        *x.rows(d_k, d_v), d_taps, records, gradients, keys, groups, span, splits, spec.t, picture,
        NUMBERS=records.shape[1], PHI_K=spec.phi_k, EVEN=mask is None and x.even(keys, cut.tokens), MORE=x.more,
        **sizes, DTYPE=as_triton(dtype), **_meta(cut))  # fmt: skip
    return None if d_taps is None else d_taps.sum(2), d_factors


def _residual_gradient(d_out: Tensor, x: Operands, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return what the residual adds to dv, and the gradient of the taps, both in float32."""
    (batch, _, keys), groups, e, width = x.extent, x.k.shape[1], x.v.shape[3], x.sizes()["BE"]
    local = x.v.new_empty(x.v.shape, dtype=torch.float32)
    d_taps = x.q.new_empty(batch, groups, 9, e, dtype=torch.float32)
    launch(
        residual_gradient_kernel, batch * groups, *x.rows(x.v, d_out), x.tapped(), mask_of(x.key_mask), *x.rows(local),
        d_taps, keys, groups, x.picture, E=e, BE=width, DTYPE=as_triton(dtype),
        **_meta(tile("residual gradient", width, width, dtype, keys)))  # fmt: skip
    return local, d_taps


def _query_gradient(
    d_out: Tensor, x: Operands, records: Tensor, d_q: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Write the gradient of the queries; return the gradients of all records, and of the factors."""
    heads, spec, sizes = x.q.shape[1], x.spec, x.sizes()
    (batch, queries, _), tokens = x.extent, x.q.shape[2]
    wide, divide = (sizes["BD"], sizes["BE"]), spec.reader in DIVIDES
    split = divide and spec.phi_q != "exp" and tiles.is_split(*wide, dtype)
    cut = tile("query divide" if divide else "query", *wide, dtype)
    span, splits = x.spans(x.q, cut.tokens)
    scalars = x.q.new_empty(x.q.shape[0], heads, 2, tokens, dtype=torch.float32) if split else None
    gradients = None if split else x.records(batch * heads * splits)
    constants = {"DTYPE": as_triton(dtype), "NUMBERS": records.shape[1], **sizes}
    launch(
        query_gradient_kernel, batch * heads * splits, *x.rows(x.q, d_out, d_q), shares := x.shares(splits),
        x.offsets[0], scalars, records, gradients, x.factors, tokens, heads, span, splits, spec.scale, spec.t,
        GROUP=x.group, EVEN=x.even(queries, cut.tokens), STAGES=cut.stages, **constants, **named(spec),
        **_meta(cut))  # fmt: skip
    if gradients is None:
        cut = tile("query sums", *wide, dtype)
        span, splits = x.spans(x.q, cut.tokens)
        gradients = x.records(batch * heads * splits)
        launch(
            query_sums_kernel, batch * heads * splits, *x.rows(x.q, d_out), x.offsets[0], scalars, gradients, tokens,
            heads, span, splits, spec.t, PHI_Q=spec.phi_q, PHI_K=spec.phi_k, READER=spec.reader,
            EVEN=x.even(queries, cut.tokens), STAGES=cut.stages, **constants, **_meta(cut))  # fmt: skip
    gradients = gradients.view(records.shape[0], x.group * splits, records.shape[1]).sum(1)
    return gradients, None if shares is None else shares.sum((0, 2))


def _solve(x: Operands, solved: Solutions, dtype: torch.dtype, parts: Tensor | None = None, splits: int = 1) -> None:
    """Write W and the inverse of every head from its record, or from the parts of a record that is not merged yet."""
    count, spec, sizes, heads = solved.states.shape[0], x.spec, x.sizes(), x.q.shape[1] // x.group
    launch(
        solve_kernel, count, parts, *solved, x.factors, heads, splits, spec.ridge, spec.scale,
        GROUP=heads // x.k.shape[1], FOLDED=folded(spec), DTYPE=as_triton(dtype), **_widths(solved), **sizes,
        num_warps=tiles.solvers(sizes["BD"]), num_stages=1)  # fmt: skip


def _solve_gradient(
    x: Operands, solved: Solutions, gradients: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of all records from those of their W, and the gradient of the factors."""
    count, spec, sizes, heads = solved.states.shape[0], x.spec, x.sizes(), x.q.shape[1] // x.group
    d_records, shares, members = x.records(count, x.more), x.shares(1), heads // x.k.shape[1]
    launch(
        solve_gradient_kernel, count, *solved, gradients, d_records, shares, x.factors, heads, spec.ridge, spec.scale,
        GROUP=members, CENTERED=spec.centered, FOLDED=folded(spec), DTYPE=as_triton(dtype), **_widths(solved), **sizes,
        num_warps=tiles.solvers(sizes["BD"]), num_stages=1)  # fmt: skip
    d_records = d_records if members == 1 else d_records.view(-1, members, d_records.shape[1]).sum(1)
    return d_records, None if shares is None else shares.sum((0, 2))


def _widths(solved: Solutions) -> dict[str, int]:
    return dict(zip(("NUMBERS", "SOLVED", "SQUARE"), (each.shape[1] for each in solved), strict=True))


def _sliced_backward(
    d_out: Tensor, x: Operands, d_q: Tensor, d_k: Tensor, d_v: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Add up, in float32, what each slice of value columns contributes to dq and dk."""
    sum_q, sum_k = (torch.zeros(y.shape, dtype=torch.float32, device=y.device) for y in (x.q, x.k))
    share_q, share_k = torch.empty_like(sum_q), torch.empty_like(sum_k)
    d_taps, d_factors = [], []
    for part in x.slices():
        of_taps, of_factors = backward(d_out[..., part], x.columns(part), None, share_q, share_k, d_v[..., part])
        d_taps += [] if of_taps is None else [of_taps]
        d_factors += [] if of_factors is None else [of_factors]
        sum_q += share_q
        sum_k += share_k
    d_q.copy_(sum_q)
    d_k.copy_(sum_k)
    return torch.cat(d_taps, -1) if d_taps else None, torch.stack(d_factors).sum(0) if d_factors else None


def kept(x: Operands) -> Tensor:
    """Allocate what the backward pass gets from the forward pass."""
    if x.spec.reader != "regress":
        return x.records(x.extent[0] * x.k.shape[1])
    return x.q.new_empty(sum(rows * columns for rows, columns in Solutions.shapes(x)), dtype=torch.float32)


def keeps_records(x: Operands) -> bool:
    """Return whether the backward pass gets the records of the forward pass, instead of making its own."""
    d, e = block(x.q.shape[3]), x.v.shape[3]
    return x.spec.phi_k != "exp" and not tiles.is_whole(*x.extent[1:], d, block(e)) and e <= slice_width(d, e)


def _products(spec: KernelSpec, dtype: torch.dtype, *, backward: bool) -> torch.dtype:
    """Return the dtype to multiply in: the input's, or a finer one where small differences of rounded factors count.

    A mass of signed features may nearly cancel. Exponential keys saturate, and then so do their gradients. Gradients of
    softmax features leave out what all channels share, which is large where nothing centers the sum (reader `none`).
    """
    shared = spec.reader == "none" and "softmax" in (spec.phi_q, spec.phi_k)
    return finer(dtype) if may_cancel(spec) or (backward and (shared or spec.phi_k == "exp")) else dtype


def _key_products(x: Operands, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to multiply keys in: finer than `dtype` where regression has few of them per channel.

    The covariance of such keys may be singular but for the ridge, and then terms of their gradients cancel.
    """
    return finer(dtype) if x.more and tiles.is_few(x.extent[2], x.more) else dtype


def _observe(x: Operands, dtype: torch.dtype) -> Tensor:
    """Return the record of every key head; for regression also what solving it in `dtype` gives."""
    (batch, _, keys), groups, spec, sizes, mask = x.extent, x.k.shape[1], x.spec, x.sizes(), mask_of(x.key_mask)
    kind, of_keys, d, e = "observe spread" if x.more else "observe", _key_products(x, dtype), sizes["D"], sizes["E"]
    cut = tile(kind, sizes["BD"], sizes["BE"], of_keys)
    span, splits = x.spans(x.k, cut.tokens, tiles.observers(sizes["BD"], sizes["BE"]))
    memory = kept(x) if splits == 1 else None
    parts = x.records(batch * groups * splits, x.more) if memory is None else x.recorded(memory)
    launch(
        observe_kernel, batch * groups * splits, *x.rows(x.k, x.v), mask, x.offsets[1], parts, keys, groups, span,
        splits, spec.t, NUMBERS=parts.shape[1], PHI=spec.phi_k, CENTERED=spec.reader != "none",
        DTYPE=as_triton(of_keys), EVEN=mask is None and x.even(keys, cut.tokens), SPREAD=x.more > 0, **sizes,
        **_meta(cut))  # fmt: skip
    if memory is None and _merges(x, splits):
        memory = kept(x)
        _solve(x, Solutions.of(memory, x), dtype, parts, splits)
        return memory
    if memory is None:
        memory, e = kept(x), e + x.more
        launch(
            merge_kernel, batch * groups * -(-d * e // MERGED), parts, x.recorded(memory), splits,
            NUMBERS=parts.shape[1], D=d, E=e, CELLS=MERGED, SHIFTED=spec.phi_k == "exp", num_warps=4)  # fmt: skip
    if x.more:
        _solve(x, Solutions.of(memory, x), dtype)
    return memory


def _merges(x: Operands, splits: int) -> bool:
    """Whether the program that solves for a head merges its splits: they are few, and no other program needs them."""
    alone = x.more > 0 and x.group * x.k.shape[1] == x.q.shape[1]
    narrow = x.sizes()["BD"] * x.sizes()["BE"] <= 64 * 64
    return alone and narrow and splits <= tiles.MERGED_BY_ONE and x.spec.phi_k != "exp"


def _meta(cut: Tile) -> dict[str, Any]:
    limit = {} if cut.registers is None else {"maxnreg": cut.registers}
    return {"T": cut.tokens, "num_warps": cut.warps, "num_stages": cut.stages, **limit}
