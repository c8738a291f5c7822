"""Multi-head self-attention with the mechanism left open.

    q, k, v = qkv(x);   o = attention(q, k, v) [+ local residual];   y = proj(heads of o, side by side)

Parameter names are timm's and the InLine authors': qkv, proj, residual. A mechanism that is meant for k = q (reformer,
soft) has no projection for k.

Shapes: B batch, N tokens, C channels, d = C / heads.
"""

from typing import Any, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from softless.algebra.state import State
from softless.errors import ArgumentError, UnsupportedError, shown
from softless.functional import attention_with_state
from softless.mechanisms import Mechanism
from softless.mechanisms.scored import check_count
from softless.nn.mixing import Heads, Mixing, check_heads, check_rate, check_switch
from softless.packed import nested
from softless.validation import check_fits, check_token_mask, check_tokens


class Attention(Mixing):
    """Self-attention by any mechanism, with or without InLine's local residual.

    >>> import torch, softless
    >>> layer = softless.nn.Attention(dim=64, heads=2, mechanism="inline", local=True)
    >>> layer(torch.randn(5, 1 + 7 * 9, 64), grid=(7, 9)).shape         # [B, N, C]; one class token, 7 x 9 patches
    torch.Size([5, 64, 64])

    kv_heads   fewer key and value heads than query heads (grouped queries)
    local      add `LocalResidual`, its context the mean of the tokens that enter; needs `grid`
    window     tokens see those of their own window of the picture, at most this many rows and columns; needs `grid`
    shifted    the windows start half a window earlier, along each side that has more than one window
    attn_drop  dropout on explicit weights, for scored mechanisms only

    A call takes

    x          tokens [B, N, C], or packed sequences, a jagged nested tensor [B, j, C]: without local, window, attn_drop
    grid       (height, width) of the picture that all tokens are, or the last of them after class tokens. It is read by
               local, by window and by mechanisms that read pictures. Elsewhere it is unused, but must fit the tokens,
               so that a stack of different layers can be called alike
    key_mask   bool [B, N], True for a real token
    is_causal  token i sees tokens up to itself
    bias       added to the scores [B, heads, N, N], for scored mechanisms only; with windows [heads, n, n] of n tokens
    attn_mask  always None: timm's blocks pass it. Other values raise
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        mechanism: str | Mechanism = "inline",
        local: bool = False,
        *,
        kv_heads: int | None = None,
        window: int | None = None,
        shifted: bool = False,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
    ):
        check_heads(dim, heads)
        key_heads = heads if kv_heads is None else kv_heads
        check_count("kv_heads", key_heads)
        if heads % key_heads:
            raise ArgumentError(f"heads {heads} is not a multiple of kv_heads {kv_heads}")
        check_switch("qkv_bias", qkv_bias)
        if window is not None:
            check_count("window", window)
        sides = None if window is None else (window, window)
        options: dict[str, Any] = {"window": sides, "shifted": shifted, "attn_drop": attn_drop, "kv_heads": key_heads}
        super().__init__(dim, heads, mechanism, local, **options)
        self.kv_heads = key_heads
        if local and self.kv_heads != heads:
            raise ArgumentError(f"local needs a value head for each of {heads} heads, got kv_heads {self.kv_heads}")
        check_rate("proj_drop", proj_drop)
        if self.mechanism.shares_keys and self.kv_heads != heads:
            raise ArgumentError(
                f"'{self.mechanism.name}' has k = q, a key head for each of {heads} heads, got kv_heads {self.kv_heads}"
            )
        projected = 1 if self.mechanism.shares_keys else 2
        self.qkv = nn.Linear(dim, dim + projected * self.kv_heads * self.head_dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    @torch.jit.ignore
    def forward(
        self,
        x: Float[Tensor, "b n c"],
        grid: tuple[int, int] | None = None,
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        is_causal: bool = False,
        bias: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Float[Tensor, "b n c"]:
        if attn_mask is not None:  # what timm's blocks hand on: None, unless a model masks
            given = list(attn_mask.shape) if isinstance(attn_mask, Tensor) else shown(attn_mask)
            raise UnsupportedError(
                f"attn_mask {given} is not taken: give key_mask [batch, tokens], is_causal, or a bias"
            )
        out = self.mixed(x, grid, key_mask=key_mask, is_causal=is_causal, bias=bias)
        return self.proj_drop(self.proj(out))

    def mixed(
        self,
        x: Float[Tensor, "b n c"],
        grid: tuple[int, int] | None = None,
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        is_causal: bool = False,
        bias: Tensor | None = None,
    ) -> Float[Tensor, "b n c"]:
        """The heads side by side, before the last projection."""
        check_tokens(x, self.heads * self.head_dim, packed=True)
        check_switch("is_causal", is_causal)
        if x.is_nested:  # they take no mask, and attention says so
            self._check_packed(grid)
        else:
            check_token_mask(key_mask, x)
            if grid is not None:
                check_fits(grid, x.shape[1])
        apart = x.is_nested or self.kv_heads != self.heads
        qkv = self._project(x) if apart else self._packed(x)
        return self.mix(qkv, grid, source=x, key_mask=key_mask, is_causal=is_causal, bias=bias)

    def with_state(
        self, x: Float[Tensor, "b n c"], state: State | None = None, *, key_mask: Bool[Tensor, "b n"] | None = None
    ) -> tuple[Float[Tensor, "b n c"], State]:
        """Causal, going on from a state: prefill, then a token at a time.

        >>> import torch, softless
        >>> layer = softless.nn.Attention(dim=64, heads=2, mechanism="linear")
        >>> x = torch.randn(5, 10, 64)                                  # [B, N, C]
        >>> prompt, state = layer.with_state(x[:, :9])
        >>> token, state = layer.with_state(x[:, 9:], state)
        >>> torch.allclose(torch.cat([prompt, token], 1), layer(x, is_causal=True), atol=1e-5)
        True
        """
        if self.residual is not None:
            raise UnsupportedError("local=True sees a token's 3x3 neighbors, later ones among them: it has no state")
        if self.window is not None:
            raise UnsupportedError(f"window {self.window} cuts a picture, whose tokens have no causal order")
        q, k, v = self._project(x)
        inputs = self.inputs(x)
        out, state = attention_with_state(q, k, v, self.mechanism, state, key_mask=key_mask, inputs=inputs)
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2))), state

    def with_weights(
        self, x: Float[Tensor, "b n c"], *, key_mask: Bool[Tensor, "b n"] | None = None
    ) -> tuple[Float[Tensor, "b n c"], Float[Tensor, "b m n n"]]:
        """The output, and the explicit weights that it is made with: a matrix for each head.

        >>> import torch, softless
        >>> layer = softless.nn.Attention(dim=64, heads=2)
        >>> out, weights = layer.with_weights(torch.randn(5, 10, 64))   # [B, N, C]
        >>> out.shape, weights.shape
        (torch.Size([5, 10, 64]), torch.Size([5, 2, 10, 10]))
        """
        if self.residual is not None or self.window is not None:
            raise UnsupportedError("local=True and window add to the weights: softless.nn.maps has those of a model")
        asked, _ = self.asked(self._project(x), source=x, key_mask=key_mask)
        weights = self.weights(asked)
        out = self.combined(weights, asked)
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2))), weights

    def _check_packed(self, grid: object) -> None:
        if self.residual is not None or self.window is not None:
            raise UnsupportedError("local=True and window need the tokens of one picture, and x is packed sequences")
        if grid is not None and not self.mechanism.reads_grid:
            raise UnsupportedError(f"grid {shown(grid)} was given, and nothing reads it: x is packed sequences")

    def _packed(self, x: Tensor) -> Float[Tensor, "b n 3 heads d"]:
        parts = self.qkv(x).unflatten(-1, (-1, self.heads, self.head_dim))
        if not self.mechanism.shares_keys:
            return parts
        q, v = parts.unbind(2)
        return torch.stack([q, q, v], 2)

    def _project(self, x: Tensor) -> Heads:
        check_tokens(x, self.heads * self.head_dim, packed=True)
        return self._heads(self.qkv(x))

    def _heads(self, qkv: Tensor) -> Heads:
        if qkv.is_nested:  # by its values: a backward pass through the split of a nested tensor ends the process
            whole: Any = qkv.contiguous()
            flat = (x[0].transpose(0, 1) for x in self._heads(whole.values()[None]))  # [tokens of all, heads, d]
            return cast(Heads, tuple(nested(x, whole.offsets()) for x in flat))
        dim, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        widths = (dim, kv) if self.mechanism.shares_keys else (dim, kv, kv)
        q, *k, v = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, heads, N, d]
            for part in qkv.split(widths, -1)
        )
        return q, *(k or [q]), v

    def extra_repr(self) -> str:
        return f"heads={self.heads}, kv_heads={self.kv_heads}, mechanism={self.mechanism}"
