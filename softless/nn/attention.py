"""Multi-head attention with any mechanism.

    q, k, v = qkv(x);   o = attention(q, k, v) [+ local residual];   y = proj(heads of o, side by side)

Parameter names are timm's and the InLine authors': qkv, proj, q_norm, k_norm, residual. Mechanisms that are made for
k = q (reformer, soft) have no projection for k.

Shapes: B batch, N tokens, C channels, d = C / heads.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from softless.algebra.state import AnyState
from softless.errors import ArgumentError, UnsupportedError, shown
from softless.functional import attention_with_state
from softless.mechanisms import Mechanism
from softless.mechanisms.scored import check_count
from softless.nn.checks import check_fits, check_rate, check_switch, check_token_mask, check_tokens, is_plain
from softless.nn.mixing import Heads, Mixing, split_heads
from softless.nn.rotary import check_rotary, rotate, token_positions
from softless.packed import nested


class Attention(Mixing):
    """Self-attention or cross-attention with any mechanism, with or without InLine's local residual.

    >>> import torch, softless
    >>> layer = softless.nn.Attention(dim=64, heads=2, mechanism="inline", local=True)
    >>> layer(torch.randn(5, 1 + 7 * 9, 64), grid=(7, 9)).shape         # [B, N, C]; one class token, 7 x 9 patches
    torch.Size([5, 64, 64])

    Args:
        dim: Channels C of the tokens.
        heads: Number of heads, a divisor of dim.
        mechanism: A name from `list_mechanisms()`, or `mechanism(name, **options)`. Default: "inline".
        local: Whether to add `LocalResidual`, predicted from the mean of the tokens; needs `grid`. Default: False.
        num_heads: Another name for `heads`, as in timm and PyTorch. Default: None.
        kv_heads: Number of key and value heads, a divisor of heads (grouped queries). Default: None, as many as heads.
        window: Tokens see only their own window of the picture, at most this many rows and columns; needs `grid`.
            Default: None, tokens see the full picture.
        shifted: Whether windows start half a window earlier, along each side with more than one window. Default: False.
        qk_norm: Whether to normalize q and k of each head: True for `nn.LayerNorm`, or a class that is called with the
            head dimension, such as `nn.RMSNorm`. Default: False.
        rotary: Whether to rotate q and k by the position of their token, before the feature map: True for base 10,000,
            or a number for another base (`softless.nn.rotary` has the formula). Default: False.
        qkv_bias: Whether the qkv projection has a bias. Default: True.
        qk_conv: Whether to add to q and k a depthwise convolution of their 3x3 neighbors; needs `grid`. Default: False.
        attn_drop: Dropout rate of the explicit weights, for scored mechanisms only. Default: 0.0.
        proj_drop: Dropout rate of the output. Default: 0.0.
    """

    def __init__(
        self,
        dim: int,
        heads: int | None = None,
        mechanism: str | Mechanism = "inline",
        local: bool = False,
        *,
        num_heads: int | None = None,
        kv_heads: int | None = None,
        window: int | None = None,
        shifted: bool = False,
        qk_norm: bool | Callable[[int], nn.Module] = False,
        rotary: bool | float = False,
        qkv_bias: bool = True,
        qk_conv: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
    ):
        heads = number_of_heads(heads, num_heads)
        if window is not None:
            check_count("window", window)
        sides = None if window is None else (window, window)
        super().__init__(
            dim, heads, mechanism, local, window=sides, shifted=shifted, attn_drop=attn_drop, kv_heads=kv_heads,
            qk_conv=qk_conv,
        )  # fmt: skip
        check_switch("qkv_bias", qkv_bias)
        check_rate("proj_drop", proj_drop)
        if not (isinstance(qk_norm, bool) or callable(qk_norm)):
            raise ArgumentError(f"qk_norm is {shown(qk_norm)} and must be True, False or a norm layer")
        self.rotary = check_rotary(rotary, self.head_dim)
        self.shares_keys = self.mechanism.shares_keys
        if (local or self.shares_keys) and self.kv_heads != heads:
            reason = "local=True" if local else f"mechanism '{self.mechanism.name}', which has k = q,"
            raise ArgumentError(f"{reason} needs a key head for each of {heads} heads, got kv_heads {kv_heads}")
        norm = nn.LayerNorm if qk_norm is True else qk_norm or (lambda _: nn.Identity())
        self.qkv = nn.Linear(dim, dim + (1 if self.shares_keys else 2) * self.kv_heads * self.head_dim, bias=qkv_bias)
        self.q_norm: nn.Module = norm(self.head_dim)
        if not isinstance(self.q_norm, nn.Module):
            raise ArgumentError(f"qk_norm is {shown(qk_norm)} and must build a module, but built {shown(self.q_norm)}")
        self.k_norm = nn.Identity() if self.shares_keys else norm(self.head_dim)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)
        self.dim, self.num_heads = dim, heads
        self.norms_or_rotates = bool(qk_norm) or self.rotary is not None

    def forward(
        self,
        x: Float[Tensor, "b n c"],
        grid: tuple[int, int] | None = None,
        *,
        context: Float[Tensor, "b m c"] | None = None,
        key_mask: Bool[Tensor, "b m"] | None = None,
        is_causal: bool = False,
        bias: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Float[Tensor, "b n c"]:
        """Mix the tokens.

        Args:
            x: Tokens [B, N, C]; or packed sequences, a jagged nested tensor [B, j, C], without local, window and
                attn_drop.
            grid: (height, width) of the picture that all tokens form, or the last of them after class tokens. Read by
                local, window and mechanisms that read pictures. Elsewhere it is unused, but must fit the tokens, so
                that a stack of different layers can be called alike. Default: None.
            context: Tokens [B, M, C] that keys and values come from (cross-attention). Default: None, from x.
            key_mask: bool [B, N], or [B, M] with context, True for a real token. Default: None, all real.
            is_causal: Whether token i sees only the tokens up to itself. Default: False.
            bias: Added to the scores [B, heads, N, M], for scored mechanisms only; with windows of n tokens
                [heads, n, n]. Default: None.
            attn_mask: Must be None. timm's blocks pass it.
        """
        self._check(x, grid, context, key_mask, is_causal, attn_mask)
        qkv = self.project(x, context, key_mask)
        source = x if context is None else context  # the tokens that k and v come from
        out = self.mix(qkv, grid, source=source, key_mask=key_mask, is_causal=is_causal, bias=bias)  # [B, N, C]
        return self.proj_drop(self.proj(out))

    def with_state(
        self, x: Float[Tensor, "b n c"], state: AnyState | None = None, *, key_mask: Bool[Tensor, "b n"] | None = None
    ) -> tuple[Float[Tensor, "b n c"], AnyState]:
        """Run causal attention that continues from a state: a prompt, then one token at a time.

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
        if self.qk_conv is not None:
            raise UnsupportedError("qk_conv=True sees a token's 3x3 neighbors, later ones among them: it has no state")
        if self.window is not None:
            raise UnsupportedError(f"window {self.window} cuts a picture, whose tokens have no causal order")
        check_tokens(x, self.dim, packed=True)
        q, k, v = self._heads(self.qkv(x), self._positions(x, key_mask, state))
        inputs = self.inputs(x)
        out, state = attention_with_state(q, k, v, self.mechanism, state, key_mask=key_mask, inputs=inputs)
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2))), state

    def with_weights(
        self, x: Float[Tensor, "b n c"], *, key_mask: Bool[Tensor, "b n"] | None = None
    ) -> tuple[Float[Tensor, "b n c"], Float[Tensor, "b m n n"]]:
        """Return the output and the explicit weights behind it, one matrix per head.

        >>> import torch, softless
        >>> layer = softless.nn.Attention(dim=64, heads=2)
        >>> out, weights = layer.with_weights(torch.randn(5, 10, 64))   # [B, N, C]
        >>> out.shape, weights.shape
        (torch.Size([5, 10, 64]), torch.Size([5, 2, 10, 10]))
        """
        if self.residual is not None or self.window is not None:
            raise UnsupportedError("local=True and window add to the weights: softless.nn.maps has those of a model")
        self._check(x, key_mask=key_mask)
        call, _ = self.as_call(self.project(x, None, key_mask), source=x, key_mask=key_mask)
        weights = self.weights(call)
        out = self.combine(weights, call)
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2))), weights

    def project(
        self, x: Tensor, context: Tensor | None = None, key_mask: Tensor | None = None
    ) -> Float[Tensor, "b n 3 heads d"] | Heads:
        """Project tokens to q, k and v: one packed tensor if all three have the same shape, three tensors otherwise."""
        if context is not None:
            return self._cross_heads(x, context)
        packable = self.kv_heads == self.heads and not x.is_nested
        if packable and not (self.shares_keys or self.norms_or_rotates):
            return self.qkv(x).view(*x.shape[:2], 3, self.heads, self.head_dim)
        q, k, v = self._heads(self.qkv(x), self._positions(x, key_mask))
        return torch.stack([part.transpose(1, 2) for part in (q, k, v)], 2) if packable else (q, k, v)

    def _cross_heads(self, x: Tensor, context: Tensor) -> Heads:
        """Project x to q with the first part of `qkv`, and the context to k and v with the rest."""
        if is_plain(self.qkv, nn.Linear):
            weights = self.qkv.weight.tensor_split([self.dim])
            biases = (None, None) if self.qkv.bias is None else self.qkv.bias.tensor_split([self.dim])
            q, kv = (F.linear(*part) for part in zip((x, context), weights, biases, strict=True))
        else:
            q, kv = self.qkv(x)[..., : self.dim], self.qkv(context)[..., self.dim :]
        q, k, v = (split_heads(part, self.head_dim) for part in (q, *kv.chunk(2, -1)))
        return self.q_norm(q), self.k_norm(k), v

    def _heads(self, qkv: Tensor, positions: Tensor | None = None) -> Heads:
        """Split a projection [B, N, ...] into heads, normalize and rotate them."""
        if qkv.is_nested:  # splitting a nested tensor crashes the process in the backward pass: split its values
            packed: Any = qkv.contiguous()
            heads = self._heads(packed.values()[None], positions)  # [1, heads, tokens of all sequences, d]
            return cast(Heads, tuple(nested(part[0].transpose(0, 1), packed.offsets()) for part in heads))
        q, kv = qkv.split((self.dim, qkv.shape[-1] - self.dim), -1)
        q = self._placed(self.q_norm(split_heads(q, self.head_dim)), positions)
        if self.shares_keys:
            return q, q, split_heads(kv, self.head_dim)
        k, v = (split_heads(part, self.head_dim) for part in kv.chunk(2, -1))
        return q, self._placed(self.k_norm(k), positions), v

    def _placed(self, x: Tensor, positions: Tensor | None) -> Tensor:
        return x if self.rotary is None or positions is None else rotate(x, positions, self.rotary)

    def _positions(
        self, x: Tensor, key_mask: Tensor | None, state: AnyState | None = None
    ) -> Int[Tensor, "*b n"] | None:
        return None if self.rotary is None else token_positions(x, key_mask, None if state is None else state.n)

    def _check(
        self,
        x: Any,
        grid: Any = None,
        context: Any = None,
        key_mask: Any = None,
        is_causal: Any = False,
        attn_mask: Any = None,
    ) -> None:
        check_tokens(x, self.dim, packed=True)
        check_switch("is_causal", is_causal)
        if attn_mask is not None:
            shape = list(attn_mask.shape) if isinstance(attn_mask, Tensor) else shown(attn_mask)
            raise UnsupportedError(
                f"attn_mask {shape} is not taken: pass key_mask [batch, tokens], is_causal, or a bias"
            )
        if context is not None:
            self._check_context(x, grid, context, key_mask)
        elif x.is_nested:  # packed sequences take no mask, and attention says so
            if self.residual is not None or self.window is not None:
                raise UnsupportedError("local=True and window need the tokens of one picture: x is packed sequences")
            if grid is not None and not self.mechanism.reads_grid:
                raise UnsupportedError(f"grid {shown(grid)} was passed, and nothing reads it: x is packed sequences")
        else:
            check_token_mask(key_mask, x)
            if grid is not None:
                check_fits(grid, x.shape[1])

    def _check_context(self, x: Tensor, grid: Any, context: Any, key_mask: Any) -> None:
        """Raise if an option in use needs queries and keys of the same tokens."""
        options = {
            "grid": grid, "local": self.residual, "window": self.window, "rotary": self.rotary, "qk_conv": self.qk_conv
        }  # fmt: skip
        used = [name for name, value in options.items() if value is not None]
        if self.shares_keys:
            used.append(f"mechanism '{self.mechanism.name}'")
        if used:
            raise UnsupportedError(f"{used[0]} needs queries and keys of the same tokens: it cannot go with context")
        if x.is_nested:
            raise UnsupportedError("x is packed sequences, and context needs dense tokens: pad them, and pass key_mask")
        check_tokens(context, self.dim, name="context")
        check_token_mask(key_mask, context)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, kv_heads={self.kv_heads}, mechanism={self.mechanism}"


def number_of_heads(heads: int | None, num_heads: int | None) -> int:
    """Return the number of heads, which users may pass under either name."""
    if heads is None and num_heads is None:
        raise ArgumentError("heads is None and must be the number of heads")
    equal = type(heads) is type(num_heads) is int and heads == num_heads
    if heads is not None and num_heads is not None and not equal:
        raise ArgumentError(f"heads {shown(heads)} and num_heads {shown(num_heads)} are two names for the same number")
    return cast(int, num_heads if heads is None else heads)
