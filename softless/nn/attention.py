"""Multi-head self-attention with the mechanism left open.

    q, k, v = qkv(x);   o = attention(q, k, v) [+ local residual];   y = proj(heads of o, side by side)

Parameter names are timm's and the InLine authors': qkv, proj, residual.

Shapes: B batch, N tokens, C channels, d = C / heads.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from softless.algebra.neighbors import local_residual
from softless.algebra.state import State, keep
from softless.errors import ArgumentError, UnsupportedError
from softless.functional import attention, attention_qkv, attention_weights, attention_with_state
from softless.mechanisms import Mechanism, resolve
from softless.mechanisms.base import repeat_heads
from softless.nn.local_residual import LocalResidual


class Attention(nn.Module):
    """Self-attention by any mechanism, with or without InLine's local residual.

    >>> import torch, softless
    >>> layer = softless.nn.Attention(dim=64, heads=2, mechanism="inline", local=True)
    >>> layer(torch.randn(5, 1 + 7 * 9, 64), grid=(7, 9)).shape         # [B, N, C]; one class token, 7 x 9 patches
    torch.Size([5, 64, 64])

    kv_heads   fewer key and value heads than query heads (grouped queries)
    local      add `LocalResidual`, its context the mean of the tokens that enter; needs `grid`
    attn_drop  dropout on explicit weights, for scored mechanisms only
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        mechanism: str | Mechanism = "inline",
        local: bool = False,
        *,
        kv_heads: int | None = None,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
    ):
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1 or dim % heads:
            raise ArgumentError(f"dim {dim} is not a multiple of heads {heads}")
        if kv_heads < 1 or heads % kv_heads:
            raise ArgumentError(f"heads {heads} is not a multiple of kv_heads {kv_heads}")
        if local and kv_heads != heads:
            raise ArgumentError(f"local needs a value head for each of {heads} heads, got kv_heads {kv_heads}")
        for name, rate in (("attn_drop", attn_drop), ("proj_drop", proj_drop)):
            if not 0 <= rate < 1:
                raise ArgumentError(f"{name} {rate} is not a rate between 0 and 1")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.mechanism = resolve(mechanism)
        if attn_drop and self.mechanism.family != "scored":
            raise UnsupportedError(
                f"attn_drop {attn_drop} needs explicit weights, and '{self.mechanism.name}' has none"
            )
        self.qkv = nn.Linear(dim, dim + 2 * kv_heads * self.head_dim, bias=qkv_bias)
        shapes = self.mechanism.input_shapes(heads, self.head_dim)
        self.inputs = nn.ParameterDict({name: torch.empty(shape) for name, shape in shapes.items()})
        self.residual = LocalResidual(dim, heads) if local else None
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)
        self._reset_inputs()

    def _reset_inputs(self) -> None:
        """As nn.Linear for the affine map; zero for the scale of focused attention."""
        bound = self.head_dim**-0.5
        for name, parameter in self.inputs.items():
            nn.init.zeros_(parameter) if name == "scale" else nn.init.uniform_(parameter, -bound, bound)

    def forward(
        self,
        x: Float[Tensor, "b n c"],
        grid: tuple[int, int] | None = None,
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        is_causal: bool = False,
        bias: Tensor | None = None,
    ) -> Float[Tensor, "b n c"]:
        options: dict[str, Any] = {"key_mask": key_mask, "inputs": dict(self.inputs.items())}
        taps, prefix = self._taps(x, grid, key_mask, is_causal)
        dropped = self.training and self.attn_drop.p > 0
        if self.kv_heads == self.heads and not (dropped or is_causal or bias is not None):
            qkv = self._qkv(x).unflatten(-1, (3, self.heads, self.head_dim))  # [B, N, 3, heads, d]
            return self._mix(attention_qkv(qkv, self.mechanism, taps=taps, grid=grid, prefix=prefix, **options))
        q, k, v = self._project(x)
        options |= {"is_causal": is_causal, "bias": bias}
        if dropped:
            v = keep(v, None if key_mask is None else key_mask[:, None])
            weights = self.attn_drop(attention_weights(q, k, self.mechanism, **options))
            out = weights @ repeat_heads(v, self.heads)
        else:
            out = attention(q, k, v, self.mechanism, **options)
        if taps is not None:
            assert grid is not None
            out = out + local_residual(v, taps, grid, prefix)
        return self._mix(out)

    def with_state(
        self, x: Float[Tensor, "b n c"], state: State | None = None, *, key_mask: Bool[Tensor, "b n"] | None = None
    ) -> tuple[Float[Tensor, "b n c"], State]:
        """Causal, going on from a state: prefill, then a token at a time."""
        if self.residual is not None:
            raise UnsupportedError("local=True sees a token's 3x3 neighbors, later ones among them: it has no state")
        q, k, v = self._project(x)
        inputs = dict(self.inputs.items())
        out, state = attention_with_state(q, k, v, self.mechanism, state, key_mask=key_mask, inputs=inputs)
        return self._mix(out), state

    def _qkv(self, x: Tensor) -> Tensor:
        dim = self.heads * self.head_dim
        if x.ndim != 3 or x.shape[-1] != dim:
            raise ArgumentError(f"x has shape {list(x.shape)} and must be [batch, tokens, {dim}]")
        return self.qkv(x)

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        dim, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        parts = self._qkv(x).split((dim, kv, kv), -1)
        return tuple(part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)  # [B, heads, N, d]

    def _taps(
        self, x: Tensor, grid: tuple[int, int] | None, key_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor | None, int]:
        """The 3x3 kernels, predicted from the mean of the tokens, and how many tokens precede the picture."""
        if self.residual is None:
            return None, 0
        if is_causal:
            raise UnsupportedError("local=True sees a token's 3x3 neighbors, later ones among them: it is not causal")
        if not isinstance(grid, tuple | list) or len(grid) != 2:
            raise ArgumentError(f"local=True needs grid=(height, width) to place the {x.shape[1]} tokens, got {grid}")
        if key_mask is None:
            context = x.mean(1)
        else:
            context = keep(x, key_mask).sum(1) / key_mask.sum(1, keepdim=True).clamp(min=1)
        return self.residual.taps(context.to(x.dtype)), max(x.shape[1] - grid[0] * grid[1], 0)

    def _mix(self, out: Float[Tensor, "b heads n d"]) -> Float[Tensor, "b n c"]:
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))

    def extra_repr(self) -> str:
        return f"heads={self.heads}, kv_heads={self.kv_heads}, mechanism={self.mechanism}"
