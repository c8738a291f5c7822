"""The part of attention between its projections: the mechanism, windows, the local residual, and a convolution.

    [q, k = q + conv(q), k + conv(k)]        o = attention(q, k, v) [+ local residual of v]

`Mixing` is the base of every attention module here. Its subclasses differ in how they project q, k and v, and call
`mix` with the result. Each window has its own means and its own 3x3 kernels, and padding counts in neither.

Shapes: B batch, N tokens, C channels, d = C / heads.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from softless.algebra.neighbors import local_residual
from softless.algebra.state import keep
from softless.backends import hide
from softless.errors import ArgumentError, UnsupportedError
from softless.functional import attention, attention_qkv, attention_weights
from softless.mechanisms import Call, Mechanism, resolve
from softless.mechanisms.scored import check_count
from softless.nn.checks import check_fits, check_heads, check_rate, check_switch
from softless.nn.inputs import Inputs
from softless.nn.local_residual import LocalResidual
from softless.nn.windows import Windows, windows

Heads = tuple[Tensor, Tensor, Tensor]  # q [B, heads, N, d], k and v [B, kv_heads, M, d]
Grid = tuple[int, int]
Sides = tuple[int | None, int | None]  # height and width of a window; None for the whole side


class AttentionCall(NamedTuple):
    """The arguments of one attention call. With windows, each window is a row of the batch."""

    qkv: Tensor | Heads
    grid: Grid | None
    source: Tensor | None
    key_mask: Tensor | None
    bias: Tensor | None
    is_causal: bool


class Mixing(nn.Module):
    """Holds the tensors that a mechanism learns, the local residual and the convolution. The base of `Attention`."""

    backend = "auto"  # softless.bench times a model on another one

    def __init__(
        self,
        dim: int,
        heads: int,
        mechanism: str | Mechanism = "inline",
        local: bool = False,
        *,
        window: Sides | None = None,
        shifted: bool = False,
        attn_drop: float = 0.0,
        kv_heads: int | None = None,
        qk_conv: bool = False,
    ):
        super().__init__()
        check_heads(dim, heads)
        check_rate("attn_drop", attn_drop)
        check_switch("local", local)
        check_switch("shifted", shifted)
        check_switch("qk_conv", qk_conv)
        if shifted and (window is None or 1 in window):
            raise ArgumentError(f"shifted=True needs windows of 2 tokens or more on a side, got window {window}")
        kv_heads = heads if kv_heads is None else kv_heads
        check_count("kv_heads", kv_heads)
        if heads % kv_heads:
            raise ArgumentError(f"heads {heads} is not a multiple of kv_heads {kv_heads}")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.window, self.shifted = window, shifted
        self.mechanism = resolve(mechanism)
        if attn_drop and self.mechanism.family != "scored":
            raise UnsupportedError(
                f"attn_drop {attn_drop} needs explicit weights, and '{self.mechanism.name}' has none"
            )
        self.inputs = Inputs(self.mechanism, dim, heads, kv_heads)
        self.takes_inputs = len(self.mechanism.inputs) > 0
        self.residual = LocalResidual(dim, heads) if local else None
        if qk_conv and (kv_heads != heads or self.mechanism.shares_keys):
            reason = (
                f"kv_heads {kv_heads}" if kv_heads != heads else f"mechanism '{self.mechanism.name}', which has k = q"
            )
            raise ArgumentError(f"qk_conv=True needs a key head of its own for each of {heads} heads, got {reason}")
        self.qk_conv = nn.Conv2d(2 * dim, 2 * dim, 3, padding=1, groups=2 * dim) if qk_conv else None
        self.attn_drop = nn.Dropout(attn_drop)

    def mix(
        self,
        qkv: Float[Tensor, "b n 3 heads d"] | Heads,
        grid: Grid | None = None,
        *,
        source: Float[Tensor, "b m c"] | None = None,
        key_mask: Bool[Tensor, "b m"] | None = None,
        bias: Tensor | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "b n c"]:
        """Run attention and return the heads side by side.

        `source` holds the tokens that k and v come from. They predict the local residual's kernels and the inputs that
        the mechanism needs per token.
        """
        call, cut = self.as_call(qkv, grid, source, key_mask, bias, is_causal)
        out = self._mix(call)
        if self.training and self.mechanism.moves_inputs:
            self.inputs.move(as_heads(call.qkv)[1], call.key_mask)
        return out if cut is None else cut.join(out)

    def as_call(
        self,
        qkv: Tensor | Heads,
        grid: Grid | None = None,
        source: Tensor | None = None,
        key_mask: Tensor | None = None,
        bias: Tensor | None = None,
        is_causal: bool = False,
    ) -> tuple[AttentionCall, Windows | None]:
        """Return the call to run, and the windows that its tokens were cut into, if any."""
        if self.qk_conv is not None:
            qkv = self.convolved(self.qk_conv, qkv, grid, key_mask, is_causal)
        if self.window is None:
            return AttentionCall(qkv, grid, source, key_mask, bias, is_causal), None
        if not isinstance(qkv, Tensor) or is_causal:
            raise UnsupportedError(f"window {self.window} needs a key head for each query head, and no causal order")
        cut = self.windows(grid, qkv.shape[1])
        real = cut.mask(qkv) if key_mask is None else cut.cut(key_mask[..., None])[..., 0]
        reads_source = self.residual is not None or len(self.inputs.predicted) > 0
        source = cut.cut(source) if reads_source and source is not None else None
        bias = rolled_bias(bias, cut.pairs(qkv.device), qkv)
        return AttentionCall(cut.cut(qkv), cut.size, source, real, bias, False), cut

    def convolved(
        self, conv: nn.Conv2d, qkv: Tensor | Heads, grid: Grid | None, key_mask: Tensor | None, is_causal: bool
    ) -> Float[Tensor, "b n 3 heads d"]:
        """Add to q and k of each token a weighted sum of its 3x3 neighbors, channel by channel; not to class tokens."""
        if is_causal or not isinstance(qkv, Tensor):
            reason = "is_causal=True" if is_causal else "packed sequences or a context"
            raise UnsupportedError(f"qk_conv=True sees a token's 3x3 neighbors in one picture, got {reason}")
        tokens = qkv.shape[1]
        if grid is None:
            raise ArgumentError(f"qk_conv=True needs grid=(height, width) to place the {tokens} tokens, got None")
        check_fits(grid, tokens)
        qk, v = qkv.split((2, 1), 2)  # [B, N, 2, heads, d], [B, N, 1, heads, d]
        before, picture = qk.split((tokens - grid[0] * grid[1], grid[0] * grid[1]), 1)
        seen = picture.flatten(2)  # [B, h w, 2 C]
        seen = seen if key_mask is None else keep(seen, key_mask[:, before.shape[1] :])
        summed = conv(seen.mT.unflatten(2, (grid[0], grid[1]))).flatten(2).mT  # [B, h w, 2 C]
        picture = picture + summed.unflatten(2, picture.shape[2:])
        return torch.cat([torch.cat([before, picture], 1), v], 2)

    def windows(self, grid: Grid | None, tokens: int) -> Windows:
        """Return how this module cuts a picture."""
        assert self.window is not None
        if grid is None:
            raise ArgumentError(f"window {self.window} needs grid=(height, width) of all {tokens} tokens, got None")
        check_fits(grid, tokens, all_of_them=True)
        height, width = (side if most is None else most for side, most in zip(grid, self.window, strict=True))
        rolled = self.mechanism.takes_bias and self.residual is None  # a 3x3 kernel cannot skip neighbors
        return windows((grid[0], grid[1]), (height, width), shifted=self.shifted, rolled=rolled)

    def _mix(self, call: AttentionCall) -> Tensor:
        qkv, grid, source, key_mask, bias, is_causal = call
        taps, prefix = self.taps(source, grid, key_mask, is_causal)
        dropped = self.training and self.attn_drop.p > 0
        if isinstance(qkv, Tensor) and not (dropped or is_causal or bias is not None):
            grid = grid if taps is not None or self.mechanism.reads_grid else None
            inputs = self.inputs(source) if self.takes_inputs else None
            options: dict[str, Any] = {"key_mask": key_mask, "inputs": inputs, "backend": self.backend}
            out = attention_qkv(qkv, self.mechanism, taps=taps, grid=grid, prefix=prefix, **options)
            return out.transpose(1, 2).flatten(2)
        q, k, v = as_heads(qkv)
        if dropped:
            out = self.combine(self.attn_drop(self.weights(call)), call)
        else:
            out = attention(q, k, v, self.mechanism, **self._options(call))
        if taps is not None:
            assert grid is not None
            out = out + local_residual(hide(v, key_mask), taps, grid, prefix)
        return out.transpose(1, 2).flatten(2)

    def weights(self, call: AttentionCall) -> Float[Tensor, "b matrices n m"]:
        """Return the explicit weights of a call, without the local residual."""
        q, k, _ = as_heads(call.qkv)
        return attention_weights(q, k, self.mechanism, **self._options(call))

    def combine(self, weights: Float[Tensor, "b matrices n m"], call: AttentionCall) -> Float[Tensor, "b heads n d"]:
        """Return the output of each head for explicit weights."""
        v = hide(as_heads(call.qkv)[2], call.key_mask)
        return self.mechanism.combine(weights, v, Call(key_mask=call.key_mask))

    def _options(self, call: AttentionCall) -> dict[str, Any]:
        return {
            "key_mask": call.key_mask,
            "bias": call.bias,
            "is_causal": call.is_causal,
            "inputs": self.inputs(call.source),
            "grid": call.grid if self.mechanism.reads_grid else None,
        }

    def taps(
        self, source: Tensor | None, grid: Grid | None, key_mask: Tensor | None = None, is_causal: bool = False
    ) -> tuple[Tensor | None, int]:
        """Return the 3x3 kernels, predicted from the mean of the tokens, and how many tokens precede the picture."""
        if self.residual is None:
            return None, 0
        assert source is not None
        if is_causal:
            raise UnsupportedError("local=True sees a token's 3x3 neighbors, later ones among them: it is not causal")
        tokens = source.shape[1]
        if grid is None:
            raise ArgumentError(f"local=True needs grid=(height, width) to place the {tokens} tokens, got None")
        check_fits(grid, tokens)
        if key_mask is None:
            context = source.mean(1)
        else:
            context = keep(source, key_mask).sum(1) / key_mask.sum(1, keepdim=True).clamp(min=1)
            context = context.to(source.dtype)
        return self.residual.taps(context), tokens - grid[0] * grid[1]


def split_heads(x: Float[Tensor, "b n c"], head_dim: int) -> Float[Tensor, "b heads n d"]:
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def as_heads(qkv: Tensor | Heads) -> Heads:
    """Split [B, N, 3, heads, d] into q, k and v, each [B, heads, N, d]."""
    if not isinstance(qkv, Tensor):
        return qkv
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
    return q, k, v


def rolled_bias(bias: Tensor | None, pairs: Tensor | None, like: Tensor) -> Tensor | None:
    """Return a bias [heads, n, n] for every window that also hides the tokens which only a roll brought together."""
    if pairs is None:
        return bias
    apart = torch.where(pairs, 0.0, -torch.inf).to(like.dtype)[:, None]  # [windows, 1, n, n]
    return (apart if bias is None else apart + bias).repeat(like.shape[0], 1, 1, 1)
