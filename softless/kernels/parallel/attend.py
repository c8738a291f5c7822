"""Non-causal attention on the kernels: which are launched, and with what.

    forward    observe -> (merge) -> read                                 or one whole-head kernel
    backward   queries' gradient -> sum over spans -> keys' gradient      or one whole-head kernel

Shapes: q [B, H, N, d]   k [B, G, M, d]   v [B, G, M, e]   key_mask [B, M]   taps [B, H, 9, e]   records [B G, numbers].
"""

from typing import NamedTuple

import torch
from torch import Tensor

from softless.algebra.recipe import Recipe
from softless.kernels.common.features import may_cancel
from softless.kernels.common.launch import as_triton, block, launch
from softless.kernels.common.mask import Mask, mask_of
from softless.kernels.common.record import numbers
from softless.kernels.common.rows import dense, output_like, rows
from softless.kernels.common.tiles import (
    Tile,
    finer,
    is_short,
    is_split,
    is_whole,
    observers,
    readers,
    short,
    slice_width,
    spans,
    tile,
)
from softless.kernels.parallel.gradients import key_gradient_kernel, query_gradient_kernel, query_sums_kernel
from softless.kernels.parallel.observe import merge_kernel, observe_kernel
from softless.kernels.parallel.read import read_kernel
from softless.kernels.parallel.short import short_kernel
from softless.kernels.parallel.whole import whole_gradient_kernel, whole_kernel

MERGED = 128  # numbers of a comoment that one program merges: one a thread, many programs, all loads in flight at once


class Picture(NamedTuple):
    """Where the tokens lie, for the local residual."""

    prefix: int
    height: int
    width: int


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    taps: Tensor | None,
    recipe: Recipe,
    picture: Picture,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(output, records, if they are kept). The output is allocated last: the parts of a merge are gone by then."""
    if len(cuts := _slices(q, v)) > 1:
        out = output_like(q, v.shape[3])
        for each in cuts:
            part = None if taps is None else taps[..., each].contiguous()
            forward(q, k, v[..., each], key_mask, part, recipe, picture, out[..., each])
        return out, _records(q, v, 0)
    (batch, heads, queries, _), (groups, keys) = q.shape, k.shape[1:3]
    sizes, mask, tapped = _sizes(q, v), mask_of(key_mask), None if taps is None else rows(taps)
    dtype = _products(recipe, q.dtype, backward=False)
    whole = is_whole(queries, keys, sizes["BD"], sizes["BE"])
    kind = ("whole" if whole else "read") if taps is None else ("whole local" if whole else "local")
    cut = _tile(kind, sizes, dtype)
    common = {"GROUP": heads // groups, "DTYPE": as_triton(dtype), **sizes, **_names(recipe), **_meta(cut)}
    records = _records(q, v, 0) if whole else _observe(k, v, mask, recipe, dtype)
    out = output_like(q, v.shape[3]) if out is None else out
    if whole and taps is None and is_short(keys, recipe, sizes["BD"], sizes["BE"], dtype):
        size, cut = short(keys)
        launch(
            short_kernel, batch * groups, q, rows(q), rows(k), rows(v), rows(out), mask, queries, keys, groups,
            recipe.scale, recipe.t, KEYS=size, **(common | _meta(cut)))  # fmt: skip
        return out, records
    if whole:
        launch(
            whole_kernel, batch * groups, q, rows(q), rows(k), rows(v), rows(out), tapped, mask, queries, keys, groups,
            recipe.scale, recipe.t, picture, **common)  # fmt: skip
        return out, records
    span, splits = spans(queries, batch * heads, cut.tokens, readers(sizes["BD"], sizes["BE"]))
    launch(
        read_kernel, batch * heads * splits, q, rows(q), rows(v), rows(out), tapped, mask, records, queries,
        heads, span, splits, recipe.scale, recipe.t, picture, NUMBERS=records.shape[1],
        EVEN=queries % cut.tokens == 0, **common)  # fmt: skip
    return out, records if keeps_records(q, k, v, recipe.phi_k) else _records(q, v, 0)


def backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    taps: Tensor | None,
    records: Tensor,
    recipe: Recipe,
    picture: Picture,
    d_q: Tensor,
    d_k: Tensor,
    d_v: Tensor,
) -> Tensor | None:
    """Write the gradients of q, k and v; return that of the taps, float32."""
    if len(cuts := _slices(q, v)) > 1:
        return _sliced_backward(d_out, q, k, v, key_mask, taps, cuts, recipe, picture, d_q, d_k, d_v)
    (batch, heads, queries, _), (groups, keys) = q.shape, k.shape[1:3]
    sizes, mask, tapped = _sizes(q, v), mask_of(key_mask), None if taps is None else rows(taps)
    dtype = _products(recipe, q.dtype, backward=True)
    products = {"DTYPE": as_triton(dtype)}
    d_out = dense(d_out)
    if is_whole(queries, keys, sizes["BD"], sizes["BE"]):
        kind = "whole gradient divide" if recipe.reader == "divide" else "whole gradient"
        cut = _tile(kind if taps is None else "whole local gradient", sizes, dtype)
        d_taps = None if taps is None else q.new_empty(batch, heads, 9, v.shape[3], dtype=torch.float32)
        launch(
            whole_gradient_kernel, batch * groups, q, rows(q), rows(k), rows(v), rows(d_out), tapped, mask, rows(d_q),
            rows(d_k), rows(d_v), d_taps, queries, keys, groups, recipe.scale, recipe.t, picture, GROUP=heads // groups,
            STAGES=cut.stages, **sizes, **_names(recipe), **products, **_meta(cut))  # fmt: skip
        return d_taps
    if records.shape[0] == 0:
        records = _observe(k, v, mask, recipe, dtype)
    gradients = _query_gradient(q, d_out, d_q, records, recipe, dtype, groups, sizes)
    cut = _tile("key" if taps is None else "local key", sizes, dtype)
    span, splits = spans(keys, batch * groups, cut.tokens, readers(sizes["BD"], sizes["BE"]))
    d_taps = None if taps is None else q.new_empty(batch, heads, splits, 9, v.shape[3], dtype=torch.float32)
    launch(
        key_gradient_kernel, batch * groups * splits, q, rows(k), rows(v), rows(d_out), tapped, mask, rows(d_k),
        rows(d_v), d_taps, records, gradients, keys, groups, span, splits, recipe.t, picture, NUMBERS=records.shape[1],
        PHI_K=recipe.phi_k, EVEN=mask is None and keys % cut.tokens == 0, **sizes, **products,
        **_meta(cut))  # fmt: skip
    return None if d_taps is None else d_taps.sum(2)


def _query_gradient(
    q: Tensor, d_out: Tensor, d_q: Tensor, records: Tensor, recipe: Recipe, dtype: torch.dtype, groups: int,
    sizes: dict[str, int],
) -> Tensor:  # fmt: skip
    """Write that of the queries; return the gradient of every key head's record."""
    batch, heads, queries, _ = q.shape
    split = recipe.reader == "divide" and recipe.phi_q != "exp" and is_split(sizes["BD"], sizes["BE"], dtype)
    cut = _tile("query divide" if recipe.reader == "divide" else "query", sizes, dtype)
    span, splits = spans(queries, batch * heads, cut.tokens)
    numbers_, even = records.shape[1], queries % cut.tokens == 0
    scalars = q.new_empty(batch, heads, 2, queries, dtype=torch.float32) if split else None
    gradients = None if split else _records(q, d_out, batch * heads * splits)
    products = {"DTYPE": as_triton(dtype), **sizes}
    launch(
        query_gradient_kernel, batch * heads * splits, q, rows(q), rows(d_out), rows(d_q), scalars, records, gradients,
        queries, heads, span, splits, recipe.scale, recipe.t, GROUP=heads // groups, NUMBERS=numbers_, EVEN=even,
        STAGES=cut.stages, **products, **_names(recipe), **_meta(cut))  # fmt: skip
    if gradients is None:
        cut = _tile("query sums", sizes, dtype)
        span, splits = spans(queries, batch * heads, cut.tokens)
        gradients = _records(q, d_out, batch * heads * splits)
        launch(
            query_sums_kernel, batch * heads * splits, q, rows(q), rows(d_out), scalars, gradients, queries, heads,
            span, splits, recipe.t, NUMBERS=numbers_, PHI_Q=recipe.phi_q, PHI_K=recipe.phi_k,
            EVEN=queries % cut.tokens == 0, STAGES=cut.stages, **products, **_meta(cut))  # fmt: skip
    return gradients.view(batch * groups, heads // groups * splits, numbers_).sum(1)


def _sliced_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    taps: Tensor | None,
    cuts: list[slice],
    recipe: Recipe,
    picture: Picture,
    d_q: Tensor,
    d_k: Tensor,
    d_v: Tensor,
) -> Tensor | None:
    """Each slice of values gives its share of dq and dk: added up in float32."""
    sum_q, sum_k = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k))
    share_q, share_k = torch.empty_like(sum_q), torch.empty_like(sum_k)
    d_taps, none = [], _records(q, v, 0)
    for each in cuts:
        values, part = v[..., each], None if taps is None else taps[..., each].contiguous()
        found = backward(
            d_out[..., each], q, k, values, key_mask, part, none, recipe, picture, share_q, share_k, d_v[..., each]
        )
        d_taps += [] if found is None else [found]
        sum_q += share_q
        sum_k += share_k
    d_q.copy_(sum_q)
    d_k.copy_(sum_k)
    return torch.cat(d_taps, -1) if d_taps else None


def keeps_records(q: Tensor, k: Tensor, v: Tensor, phi_k: str) -> bool:
    """Whether the backward pass gets the forward's records; it makes its own for whole heads, slices and exp keys."""
    whole = is_whole(q.shape[2], k.shape[2], block(q.shape[3]), block(v.shape[3]))
    return phi_k != "exp" and not whole and len(_slices(q, v)) == 1


def _products(recipe: Recipe, dtype: torch.dtype, *, backward: bool) -> torch.dtype:
    """What to multiply in: the input's dtype, or finer where small differences of rounded factors count.

    A mass of signed features may nearly cancel; exponential keys saturate, and then their gradients do; those of
    softmax features leave out what the channels of a sum that nothing centers have in common.
    """
    signed = may_cancel(*recipe[:3])
    shared = recipe.reader == "none" and "softmax" in (recipe.phi_q, recipe.phi_k)
    return finer(dtype) if signed or (backward and (shared or recipe.phi_k == "exp")) else dtype


def _slices(q: Tensor, v: Tensor) -> list[slice]:
    e, width = v.shape[3], slice_width(block(q.shape[3]), v.shape[3])
    return [slice(start, min(start + width, e)) for start in range(0, e, width)]


def _observe(k: Tensor, v: Tensor, mask: Mask | None, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """The record of every key head, from products in `dtype`."""
    batch, groups, keys, _ = k.shape
    sizes = _sizes(k, v)
    cut = _tile("observe", sizes, dtype)
    span, splits = spans(keys, batch * groups, cut.tokens, observers(sizes["BD"], sizes["BE"]))
    parts = _records(k, v, batch * groups * splits)
    launch(
        observe_kernel, batch * groups * splits, k, rows(k), rows(v), mask, parts, keys, groups, span, splits, recipe.t,
        NUMBERS=parts.shape[1], PHI=recipe.phi_k, CENTERED=recipe.reader != "none",
        DTYPE=as_triton(dtype), EVEN=mask is None and keys % cut.tokens == 0, **sizes, **_meta(cut))  # fmt: skip
    if splits == 1:
        return parts
    records, d, e = _records(k, v, batch * groups), k.shape[3], v.shape[3]
    launch(
        merge_kernel, batch * groups * -(-d * e // MERGED), k, parts, records, splits, NUMBERS=parts.shape[1], D=d, E=e,
        CELLS=MERGED, SHIFTED=recipe.phi_k == "exp", num_warps=4)  # fmt: skip
    return records


def _records(q: Tensor, v: Tensor, count: int) -> Tensor:
    return q.new_empty(count, numbers(q.shape[3], v.shape[3]), dtype=torch.float32)


def _sizes(q: Tensor, v: Tensor) -> dict[str, int]:
    d, e = q.shape[3], v.shape[3]
    return {"D": d, "E": e, "BD": block(d), "BE": block(e)}


def _tile(kind: str, sizes: dict[str, int], dtype: torch.dtype) -> Tile:
    return tile(kind, sizes["BD"], sizes["BE"], dtype)


def _names(recipe: Recipe) -> dict[str, str | bool]:
    exponential = "exp" in (recipe.phi_q, recipe.phi_k)  # whose units differ by channel
    signed = may_cancel(*recipe[:3]) and not exponential
    named = {"PHI_Q": recipe.phi_q, "PHI_K": recipe.phi_k, "READER": recipe.reader}
    return named | {"SIGNED": signed, "CONSTANT": recipe.constant}


def _meta(cut: Tile) -> dict[str, int | None]:
    return {"T": cut.tokens, "num_warps": cut.warps, "num_stages": cut.stages, "maxnreg": cut.registers}
