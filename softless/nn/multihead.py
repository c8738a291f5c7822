"""Attention with the calling convention of `torch.nn.MultiheadAttention`, for PyTorch's own transformer layers.

    layer = nn.TransformerEncoderLayer(64, 4, batch_first=True)
    layer.self_attn = softless.nn.MultiheadAttention(64, 4, "inline", batch_first=True)
    encoder = nn.TransformerEncoder(layer, 6)

Shapes: B batch, N queries, M keys, C channels.
"""

from typing import Any

import torch
from torch import Tensor, nn

from softless.algebra.modes import readable
from softless.errors import ArgumentError, UnsupportedError, shown
from softless.mechanisms import Mechanism
from softless.nn.attention import Attention
from softless.nn.checks import check_switch


class MultiheadAttention(nn.Module):
    """`Attention`, called as `torch.nn.MultiheadAttention` is.

    >>> import torch, softless
    >>> layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
    >>> layer.self_attn = softless.nn.MultiheadAttention(64, 4, "inline", batch_first=True)
    >>> x, padding = torch.randn(5, 10, 64), torch.arange(10).expand(5, -1) >= 8        # [B, N, C], True for padding
    >>> layer(x, src_key_padding_mask=padding).shape
    torch.Size([5, 10, 64])

    Args:
        embed_dim: Channels C of the tokens.
        num_heads: Number of heads, a divisor of embed_dim.
        mechanism: A name from `list_mechanisms()`, or `mechanism(name, **options)`. Default: "inline".
        dropout: Dropout rate of the explicit weights, for scored mechanisms only. Default: 0.0.
        bias: Whether the projection of q, k and v has a bias. Default: True.
        batch_first: Whether tokens are [B, N, C] and not [N, B, C]. It must be what the layer around this module was
            built with. Default: False, as in PyTorch.
        kv_heads: Number of key and value heads, a divisor of num_heads. Default: None, as many as num_heads.
        qk_norm: Whether to normalize q and k, as in `Attention`. Default: False.
        rotary: Whether to rotate q and k, as in `Attention`. Default: False.
    """

    _qkv_same_embed_dim = False  # PyTorch's layers read this, and leave their fused softmax path

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        mechanism: str | Mechanism = "inline",
        *,
        dropout: float = 0.0,
        bias: bool = True,
        batch_first: bool = False,
        kv_heads: int | None = None,
        qk_norm: bool | Any = False,
        rotary: bool | float = False,
    ):
        super().__init__()
        check_switch("bias", bias)
        check_switch("batch_first", batch_first)
        self.embed_dim, self.num_heads, self.batch_first = embed_dim, num_heads, batch_first
        self.attention = Attention(
            embed_dim,
            num_heads,
            mechanism,
            kv_heads=kv_heads,
            qk_norm=qk_norm,
            rotary=rotary,
            qkv_bias=bias,
            attn_drop=dropout,
        )

    @property
    def in_proj_weight(self) -> Tensor:
        """The projection to q, k and v, under the name that PyTorch's layers look for."""
        return self.attention.qkv.weight

    @property
    def in_proj_bias(self) -> Tensor | None:
        return self.attention.qkv.bias

    @property
    def out_proj(self) -> nn.Linear:
        return self.attention.proj

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Mix the tokens of `key` for each query.

        Args:
            query: Tokens [B, N, C], or [N, B, C] without batch_first.
            key: Tokens [B, M, C]; the same tensor as query for self-attention.
            value: The same tensor as key.
            key_padding_mask: [B, M]: bool, True for padding (the opposite of `key_mask`), or float, -inf for padding
                and 0 elsewhere. Default: None, no padding.
            need_weights: Must be False: `Attention.with_weights` returns the weights. Default: False.
            attn_mask: [N, M] or [B * heads, N, M]: bool, True where a query must not see a key, or float, added to the
                scores. Scored mechanisms only, unless is_causal says that it is the causal mask. Default: None.
            is_causal: Whether query i sees only the keys up to its own; attn_mask is not read then. Default: False.

        Returns:
            The output, in the layout of query, and None instead of weights.
        """
        if need_weights is not False:
            raise UnsupportedError(
                f"need_weights is {shown(need_weights)} and must be False: Attention.with_weights returns the weights"
            )
        if value is not key:
            raise UnsupportedError("value is not the same tensor as key: one projection makes keys and values")
        if isinstance(query, Tensor) and query.is_nested:
            raise UnsupportedError(
                "query is a nested tensor: build nn.TransformerEncoder after setting self_attn, or with "
                "enable_nested_tensor=False"
            )
        x, context = query, None if key is query else key
        if not self.batch_first:
            x, context = x.transpose(0, 1), None if context is None else context.transpose(0, 1)
        key_mask = None if key_padding_mask is None else self._real(key_padding_mask)
        bias = None if attn_mask is None or is_causal else self._bias(attn_mask, x)
        out = self.attention(x, context=context, key_mask=key_mask, is_causal=is_causal, bias=bias)
        return out if self.batch_first else out.transpose(0, 1), None

    @staticmethod
    def _real(key_padding_mask: Tensor) -> Tensor:
        """Turn a padding mask into a key mask."""
        if not isinstance(key_padding_mask, Tensor):
            raise ArgumentError(f"key_padding_mask is {shown(key_padding_mask)} and must be a tensor")
        if key_padding_mask.dtype == torch.bool:
            return ~key_padding_mask
        real = key_padding_mask == 0
        if readable(key_padding_mask) and not (real | key_padding_mask.isneginf()).all():
            raise ArgumentError("key_padding_mask has values other than 0 and -inf: pass those as attn_mask")
        return real

    def _bias(self, attn_mask: Tensor, x: Tensor) -> Tensor:
        """Turn a mask of PyTorch's into a bias that broadcasts to [B, heads, N, M]."""
        if not isinstance(attn_mask, Tensor) or attn_mask.ndim not in (2, 3):
            shape = list(attn_mask.shape) if isinstance(attn_mask, Tensor) else shown(attn_mask)
            raise ArgumentError(f"attn_mask is {shape} and must be a tensor [N, M] or [B * heads, N, M]")
        if not self.attention.mechanism.takes_bias:
            raise UnsupportedError(
                f"attn_mask is added to scores, and mechanism '{self.attention.mechanism.name}' has none: pass "
                "is_causal=True for a causal mask, or key_padding_mask for padding"
            )
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=x.dtype).masked_fill(attn_mask, -torch.inf)
        return attn_mask if attn_mask.ndim == 2 else attn_mask.unflatten(0, (-1, self.num_heads))
