"""Longformer's self-attention with both sets of projections (Beltagy et al. 2020).

    a token i        softmax over its window and the global keys, by qkv                    mechanism `longformer`
    a global token   softmax over all tokens, by qkv_global                                 the first `global_tokens`

Global rows of the first are computed anew by the second. Causal, a global token sees those up to itself.

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
from softless.nn.mixing import Asked, Heads


class LongformerAttention(Attention):
    """Self-attention in a window, and global tokens that ask through projections of their own.

    >>> import torch, softless
    >>> layer = softless.nn.LongformerAttention(dim=64, heads=2, window=16, global_tokens=1)
    >>> layer(torch.randn(5, 100, 64)).shape                            # [B, N, C]
    torch.Size([5, 100, 64])

    window         keys on each side; one of N or more sees all
    global_tokens  how many of the first tokens see all others, and are seen by them

    `qkv_global` starts as a copy of `qkv`, as when a trained model is made longer.
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
        made = mechanism("longformer", window=window, global_tokens=global_tokens)
        super().__init__(dim, heads, made, kv_heads=kv_heads, qkv_bias=qkv_bias, proj_drop=proj_drop)
        self.global_tokens = global_tokens
        self.qkv_global = nn.Linear(dim, self.qkv.out_features, bias=self.qkv.bias is not None)
        self.qkv_global.load_state_dict(self.qkv.state_dict())

    def _mix(self, asked: Asked) -> Float[Tensor, "b n c"]:
        (q, k, v), options = self._far(asked)
        rows = attention(q, k, v, "softmax", **options)
        return torch.cat([rows.transpose(1, 2).flatten(2), super()._mix(asked)[:, rows.shape[2] :]], 1)

    def weights(self, asked: Asked) -> Float[Tensor, "b heads n n"]:
        """Of the global tokens over their own keys, of the others over those of the window."""
        (q, k, _), options = self._far(asked)
        rows, near = attention_weights(q, k, "softmax", **options), super().weights(asked)
        return torch.cat([F.pad(rows, (0, near.shape[3] - rows.shape[3])), near[:, :, rows.shape[2] :]], 2)

    def combined(self, weights: Float[Tensor, "b heads n n"], asked: Asked) -> Float[Tensor, "b heads n d"]:
        (q, _, v), options = self._far(asked)
        v = repeat_heads(hide(v, options["key_mask"]), self.heads)
        rows = weights[:, :, : q.shape[2], : v.shape[2]] @ v
        return torch.cat([rows, super().combined(weights, asked)[:, :, q.shape[2] :]], 2)

    def _far(self, asked: Asked) -> tuple[Heads, dict[str, Any]]:
        """What global tokens ask of the tokens that they see, and how."""
        x = asked.source
        assert x is not None
        if asked.bias is not None:
            raise UnsupportedError("bias would be added to the window's scores and not to the global tokens' own")
        if x.is_nested:
            raise UnsupportedError("x is packed sequences, and each has global tokens: pad them, and give key_mask")
        some = min(self.global_tokens, x.shape[1])
        seen = some if asked.is_causal else x.shape[1]
        q, k, v = self._heads(self.qkv_global(x[:, :seen]))
        mask = None if asked.key_mask is None else asked.key_mask[:, :seen]
        return (q[:, :, :some], k, v), {"key_mask": mask, "is_causal": asked.is_causal}
