"""Attention in a window with global tokens, which have projections of their own: Longformer (Beltagy et al. 2020).

    a token i        softmax over its window and the global keys, with qkv                  mechanism `longformer`
    a global token   softmax over all tokens, with qkv_global                               the first `global_tokens`

With is_causal, a global token sees the tokens up to itself.

Shapes: B batch, N tokens, C channels, d = C / heads.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from softless.backends import hide
from softless.errors import UnsupportedError
from softless.functional import attention, attention_weights
from softless.mechanisms import mechanism
from softless.mechanisms.base import repeat_heads
from softless.nn.attention import Attention
from softless.nn.mixing import AttentionCall, Heads


class LongformerAttention(Attention):
    """Self-attention in a window, with global tokens that have projections of their own.

    >>> import torch, softless
    >>> layer = softless.nn.LongformerAttention(dim=64, heads=2, window=16, global_tokens=1)
    >>> layer(torch.randn(5, 100, 64)).shape                            # [B, N, C]
    torch.Size([5, 100, 64])

    Args:
        dim: Channels C of the tokens.
        heads: Number of heads, a divisor of dim.
        window: How many keys a token sees on each side; a window of N or more sees all. Default: 256.
        global_tokens: How many of the first tokens see all others, and are seen by them. Default: 1.
        kv_heads: Number of key and value heads, a divisor of heads. Default: None, as many as heads.
        qkv_bias: Whether the projections of q, k and v have a bias. Default: True.
        proj_drop: Dropout rate of the output. Default: 0.0.

    `qkv_global` starts as a copy of `qkv`, as when a trained model is extended to longer sequences.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        window: int = 256,
        global_tokens: int = 1,
        kv_heads: int | None = None,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
    ):
        windowed = mechanism("longformer", window=window, global_tokens=global_tokens)
        super().__init__(dim, heads, windowed, kv_heads=kv_heads, qkv_bias=qkv_bias, proj_drop=proj_drop)
        self.global_tokens = global_tokens
        self.qkv_global = nn.Linear(dim, self.qkv.out_features, bias=self.qkv.bias is not None)
        self.qkv_global.load_state_dict(self.qkv.state_dict())

    def _check_context(self, *_: object) -> None:
        raise UnsupportedError("context was passed, and global tokens see the tokens of one sequence: use nn.Attention")

    def _mix(self, call: AttentionCall) -> Float[Tensor, "b n c"]:
        (q, k, v), options = self._far(call)
        rows = attention(q, k, v, "softmax", **options)
        return torch.cat([rows.transpose(1, 2).flatten(2), super()._mix(call)[:, rows.shape[2] :]], 1)

    def weights(self, call: AttentionCall) -> Float[Tensor, "b heads n n"]:
        """Return the weights: all keys for global tokens, the window and the global keys for the others."""
        (q, k, _), options = self._far(call)
        rows, near = attention_weights(q, k, "softmax", **options), super().weights(call)
        return torch.cat([F.pad(rows, (0, near.shape[3] - rows.shape[3])), near[:, :, rows.shape[2] :]], 2)

    def combine(self, weights: Float[Tensor, "b heads n n"], call: AttentionCall) -> Float[Tensor, "b heads n d"]:
        (q, _, v), options = self._far(call)
        v = repeat_heads(hide(v, options["key_mask"]), self.heads)
        rows = weights[:, :, : q.shape[2], : v.shape[2]] @ v
        return torch.cat([rows, super().combine(weights, call)[:, :, q.shape[2] :]], 2)

    def _far(self, call: AttentionCall) -> tuple[Heads, dict[str, Any]]:
        """Return q, k and v of the global tokens, and the options of their attention."""
        x = call.source
        assert x is not None
        if call.bias is not None:
            raise UnsupportedError("bias would be added to the window's scores and not to the global tokens' own")
        if x.is_nested:
            raise UnsupportedError("x is packed sequences, and each has global tokens: pad them, and pass key_mask")
        count = min(self.global_tokens, x.shape[1])
        seen = count if call.is_causal else x.shape[1]
        q, k, v = self._heads(self.qkv_global(x[:, :seen]))
        mask = None if call.key_mask is None else call.key_mask[:, :seen]
        return (q[:, :, :count], k, v), {"key_mask": mask, "is_causal": call.is_causal}
