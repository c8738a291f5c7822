"""Near and far tokens in causal order as PyTorch operators.

    near(q, held, map_q, map_k, gain, state, reach, scale) -> out    what `near_causal.attend` computes

    softless::nearfar             far sums of each segment -> far sums before each chunk -> output
    softless::nearfar_backward    the same sums -> queries -> sums over later queries -> keys

q [B, H, N, d] as it is; `held` are the tokens of the state and of the call after them. The state's own far tokens enter
as sums, and those that become far during the call are added by the kernels. The gradients of a learned map are products
of what the kernels leave, dz of z = W x, with x.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softless.algebra.modes import recording
from softless.algebra.near_causal import Held, Reach, far
from softless.algebra.state import NearState, State
from softless.kernels.common import tiles
from softless.kernels.common.launch import as_triton, block, fake, gradient, launch, no_gradient, operator
from softless.kernels.common.limits import widest_heads
from softless.kernels.common.rows import dense, output_like, rows
from softless.kernels.common.tiles import Tile
from softless.kernels.near.gradient import later_kernel, near_key_kernel, near_query_kernel
from softless.kernels.near.read import far_kernel, near_kernel

# Up to 64 channels and features, and up to 128. The sums of both halves of the features stay in registers, and so do
# the queries, their features and the weights of a chunk. As tf32, or without tensor cores, fewer tokens fit.
TILES = {
    torch.bfloat16: (Tile(64, 4, 2, 64), Tile(64, 8, 2, 64)),
    torch.float16: (Tile(32, 4, 1, 32), Tile(32, 4, 1, 32)),
    torch.float32: (Tile(16, 4, 1, 32), Tile(16, 8, 1, 32)),
}
WARPS = 8  # of a gradient: four sums of a chunk stay in registers
LEAST = 16  # chunks of a segment
Sums = tuple[Tensor, Tensor]


def near(
    q: Tensor, held: Held, map_q: Tensor | None, map_k: Tensor | None, gain: Tensor, state: NearState, reach: Reach,
    scale: float,
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


def lacks_gradient(tensors: Sequence[Any], inputs: Mapping[str, Tensor]) -> str | None:
    """Return why the kernels lack the gradient of a call, whose first tensors are q, k and v; None if they do not."""
    q, _, v, *_ = tensors
    width = max(q.shape[3], v.shape[3], *(x.shape[1] for name, x in inputs.items() if name != "gain"))
    widest = widest_with_gradient(q.device, q.dtype)
    if width <= widest or not recording(*(x for x in tensors if x is not None)):
        return None
    return f"the kernels of near and far tokens have gradients for heads and maps up to {widest} wide, got {width}"


def widest_with_gradient(device: torch.device, dtype: torch.dtype) -> int:
    """Return the widest heads and maps whose gradients fit: 64 take 104 KiB of shared memory in float32."""
    return 64 if dtype != torch.float32 or widest_heads(device) > 128 else 32


def totals(past: State) -> Sums:
    """Return the sums of features times values [*b, 2 F, e], and of features [*b, 2 F, 1], without their factor."""
    masses = (past.n[..., None] * past.k_mean)[..., None] / (past.k_mean.shape[-1] / 4) ** 0.5
    return past.comoment / (past.k_mean.shape[-1] / 4) ** 0.5 + masses * past.v_mean[..., None, :], masses


def per_query_head(x: Tensor, heads: int) -> Tensor:
    """[B, G, a, b], [B, G, 1, a, b] or [B, G, H/G, a, b] -> [B, H, a, b]."""
    x = x.flatten(1, -3)
    return x.repeat_interleave(heads // x.shape[1], 1)


class NearCall(NamedTuple):
    """The tensors of a call, and how it is cut."""

    q: Tensor
    k: Tensor
    v: Tensor
    first_k: Tensor
    first_v: Tensor
    map_q: Tensor | None
    map_k: Tensor | None
    gain: Tensor
    n: Tensor
    arrived: Tensor
    sums: Tensor
    masses: Tensor
    window: int
    first: int
    scale: float

    @property
    def features(self) -> int:
        return self.q.shape[3] if self.map_k is None else self.map_k.shape[1]

    @property
    def tile(self) -> Tile:
        return TILES[self.q.dtype][max(self.q.shape[3], self.v.shape[3], self.features) > 64]

    @property
    def chunks(self) -> int:
        return -(-self.q.shape[2] // self.tile.tokens)

    @property
    def late(self) -> int:
        """How many tokens further back than the window the first chunk of keys around a chunk of queries begins."""
        return -self.window % self.tile.tokens

    @property
    def around(self) -> int:
        """How many chunks of keys a chunk of queries sees token by token."""
        return -(-self.window // self.tile.tokens) + 1

    def walk(self) -> dict[str, Any]:
        """Return what every kernel is compiled for."""
        (_, heads, _, d), e, tile = self.q.shape, self.v.shape[3], self.tile
        return {
            "D": d, "E": e, "F": self.features, "BD": block(d), "BE": min(block(e), tile.columns),
            "BF": block(self.features), "CHUNK": tile.tokens, "SHARED": heads // self.k.shape[1],
            "DTYPE": as_triton(self.q.dtype), "STAGES": tile.stages, "num_warps": tile.warps,
        }  # fmt: skip

    def reach(self) -> dict[str, int]:
        return {"WINDOW": self.window, "FIRST": self.first, "LATE": self.late}

    def nearby(self) -> dict[str, int]:
        far_ones = min(-(-self.late // self.tile.tokens) + 1, self.around)
        return self.reach() | {"FIRSTS": block(self.first), "BLOCKS": self.around, "FARS": far_ones}

    def columns(self) -> int:
        return -(-self.v.shape[3] // self.walk()["BE"])

    def cut(self) -> tuple[int, int]:
        """Return (segments per head, chunks per segment)."""
        segments = max(min(tiles.PROGRAMS // (self.q.shape[0] * self.q.shape[1]), self.chunks // LEAST), 1)
        length = -(-self.chunks // segments)
        return -(-self.chunks // length), length

    def sums_like(self, *, each: bool) -> Sums:
        """Allocate sums for each chunk, in the dtype of factors, or for each segment."""
        (batch, heads), e = self.q.shape[:2], self.v.shape[3]
        kind = self.q.dtype if each and self.q.dtype == torch.bfloat16 else torch.float32
        shape = batch, heads, self.chunks if each else self.cut()[0], 2 * self.features
        return self.q.new_empty(*shape, e, dtype=kind), self.q.new_empty(*shape, 1, dtype=torch.float32)

    def far_sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sums of far tokens before each chunk, centered, and the centers [B, H, chunks, e]."""
        start = self.sums[:, :, None], self.masses[:, :, None]
        if self.cut()[0] > 1:
            new = self._far((None, None), None)
            start = before(start[0], new[0]), before(start[1], new[1])
        (batch, heads), e = self.q.shape[:2], self.v.shape[3]
        centers = self.q.new_empty(batch, heads, self.chunks, e, dtype=torch.float32)
        return *self._far(start, centers), centers

    def _far(self, start: Any, centers: Tensor | None) -> Sums:
        (batch, heads), (segments, length), each = self.q.shape[:2], self.cut(), centers is not None
        filled = self.sums_like(each=each)
        launch(
            far_kernel, batch * heads * segments * self.columns(), rows(self.k), rows(self.v), self.map_k, self.n,
            self.arrived, *start, *filled, centers, heads, self.chunks, segments, length, EACH=each, **self.reach(),
            **self.walk(),
        )  # fmt: skip
        return filled

    def later_sums(self, d_out: Tensor, lines: Tensor) -> tuple[Sums, Sums]:
        """Return the sums over the queries from each chunk on, and over all queries."""
        segments, _ = self.cut()
        if segments == 1:
            sums = self._later(d_out, lines, (None, None), each=True)
            return sums, (sums[0][:, :, 0].float(), sums[1][:, :, 0])
        new = self._later(d_out, lines, (None, None), each=False)
        after, after_masses = (x.flip(2).cumsum(2).flip(2) for x in new)
        start = after - new[0], after_masses - new[1]
        return self._later(d_out, lines, start, each=True), (after[:, :, 0], after_masses[:, :, 0])

    def _later(self, d_out: Tensor, lines: Tensor, start: Any, *, each: bool) -> Sums:
        (batch, heads, tokens, _), (segments, length) = self.q.shape, self.cut()
        filled = self.sums_like(each=each)
        launch(
            later_kernel, batch * heads * segments * self.columns(), rows(self.q), rows(d_out), self.map_q, self.gain,
            lines, *start, *filled, heads, tokens, self.chunks, segments, length, EACH=each, **self.walk(),
        )  # fmt: skip
        return filled


def before(start: Tensor, new: Tensor) -> Tensor:
    """Return the sums before each segment, from those before the first and those of each."""
    return torch.cat([start, new[:, :, :-1]], 2).cumsum(2)


@operator("nearfar")
def near_op(
    q: Tensor, k: Tensor, v: Tensor, first_k: Tensor, first_v: Tensor, map_q: Tensor | None, map_k: Tensor | None,
    gain: Tensor, n: Tensor, count: Tensor, sums: Tensor, masses: Tensor, window: int, first: int, scale: float,
) -> tuple[Tensor]:  # fmt: skip
    """Return the output; `sums` [B, H, 2 F, e] and `masses` [B, H, 2 F, 1] are of the far tokens before the call."""
    x = NearCall(q, k, v, first_k, first_v, map_q, map_k, gain, n, count, sums, masses, window, first, scale)
    batch, heads, tokens, _ = q.shape
    out = output_like(q, v.shape[3])
    launch(
        near_kernel, batch * heads * x.chunks * x.columns(), rows(q), rows(k), rows(v), rows(first_k), rows(first_v),
        rows(out), map_q, map_k, gain, n, count, *x.far_sums(), heads, tokens, x.chunks, scale, **x.nearby(),
        **x.walk(),
    )  # fmt: skip
    return (out,)


@fake("nearfar")
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor]:
    return (output_like(q, v.shape[3]),)


@operator("nearfar_backward")
def near_backward_op(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, first_k: Tensor, first_v: Tensor, map_q: Tensor | None,
    map_k: Tensor | None, gain: Tensor, n: Tensor, count: Tensor, sums: Tensor, masses: Tensor, window: int, first: int,
    scale: float,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, the first keys and values, the gain, the sums, and of the maps if there are any.

    Those of keys, values and sums are for every query head, in float32.
    """
    x = NearCall(q, k, v, first_k, first_v, map_q, map_k, gain, n, count, sums, masses, window, first, scale)
    (batch, heads, tokens, d), held, e, learned = q.shape, k.shape[2], v.shape[3], map_k is not None

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return q.new_empty(batch, heads, *shape, dtype=dtype)

    dq, dk, dv, lines = output_like(q, d), empty(held, d), empty(held, e), empty(5, tokens)
    dz_q, dz_k = (empty(size, x.features, dtype=q.dtype) if learned else None for size in (tokens, held))
    d_firsts, largest = [empty(x.chunks, first, size) for size in (d, e)], empty(tokens, dtype=torch.int32)
    whole, (*past, centers) = x.walk() | {"BE": block(e), "num_warps": WARPS, "STAGES": 1}, x.far_sums()
    launch(
        near_query_kernel, batch * heads * x.chunks, rows(q), rows(k), rows(v), rows(first_k), rows(first_v),
        rows(d_out), rows(dq), dz_q, *d_firsts, lines, largest, map_q, map_k, gain, n, count, *past, centers, heads,
        tokens, x.chunks, scale, **x.nearby(), **whole,
    )  # fmt: skip
    later, (d_sums, d_masses) = x.later_sums(d_out, lines)
    blocks = -(-(x.late + held) // x.tile.tokens)
    launch(
        near_key_kernel, batch * heads * blocks, rows(q), rows(k), rows(v), rows(d_out), rows(dk), rows(dv), dz_k,
        lines, largest, map_q, map_k, gain, n, count, *later, centers, heads, tokens, held, x.chunks, blocks, scale,
        BLOCKS=x.around, **x.reach(), **whole,
    )  # fmt: skip
    d_gain, d_masses = lines[:, :, 3].sum((0, 2)), d_masses + (d_sums * centers[:, :, -1:]).sum(3, keepdim=True)
    gradients = [dq, dk, dv, *(part.sum(2) for part in d_firsts), d_gain, d_sums, -d_masses]
    if dz_q is None or dz_k is None or map_q is None or map_k is None:
        return gradients
    keys = k.to(q.dtype).repeat_interleave(heads // k.shape[1], 1)
    kind = torch.float32 if q.dtype == torch.float16 else q.dtype  # whose sums may overflow
    of_maps = (torch.einsum("bhnf,bhnd->hfd", dz.to(kind), y.to(kind)) for dz, y in ((dz_q, q), (dz_k, keys)))
    return [*gradients, *(dw.to(w.dtype) for dw, w in zip(of_maps, (map_q, map_k), strict=True))]


@fake("nearfar_backward")
def _(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, first_k: Tensor, first_v: Tensor, map_q: Tensor | None,
      map_k: Tensor | None, gain: Tensor, n: Tensor, count: Tensor, *past: Any) -> list[Tensor]:  # fmt: skip
    heads = q.shape[1]
    of_keys = (x.new_empty(x.shape[0], heads, *x.shape[2:], dtype=torch.float32) for x in (k, v, first_k, first_v))
    maps = (x.new_empty(x.shape) for x in (map_q, map_k) if x is not None)
    return [output_like(q, q.shape[3]), *of_keys, *(x.new_empty(x.shape) for x in (gain, *past[:2])), *maps]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:12])
    ctx.options = inputs[12:]


def _differentiate(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
    groups = ctx.saved_tensors[1].shape[1]
    dq, *of_keys, d_gain, d_sums, d_masses = (
        gradients := near_backward_op(dense(d_out), *ctx.saved_tensors, *ctx.options)
    )[:8]
    of_keys = [x.unflatten(1, (groups, -1)).sum(2) for x in of_keys]
    of_keys = [x.to(y.dtype) for x, y in zip(of_keys, ctx.saved_tensors[1:5], strict=True)]
    return dq, *of_keys, *(gradients[8:] or (None, None)), d_gain, None, None, d_sums, d_masses, None, None, None


gradient("nearfar", _differentiate, _save)
no_gradient("nearfar_backward")
