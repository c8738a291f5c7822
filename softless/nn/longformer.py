"""Longformer's self-attention with both sets of projections (Beltagy et al. 2020).

    a token i        softmax over its window and the global keys, by qkv                    mechanism `longformer`
    a global token   softmax over all tokens, by qkv_global                                 the first `global_tokens`

Global rows of the first are computed anew by the second. Causal, a global token sees those up to itself.

Shapes: B batch, N tokens, C channels, d = C / heads.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from softless.errors import UnsupportedError
from softless.functional import attention
from softless.mechanisms import mechanism
from softless.nn.attention import Attention


class LongformerAttention(Attention):
    """Self-attention in a window, and global tokens that ask through projections of their own.

    >>> import torch, softless
    >>> layer = softless.nn.LongformerAttention(dim=64, heads=2, window=16, global_tokens=1)
    >>> layer(torch.randn(5, 100, 64)).shape                            # [B, N, C]
    torch.Size([5, 100, 64])

    window         keys on each side
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

    def mixed(
        self,
        x: Float[Tensor, "b n c"],
        grid: tuple[int, int] | None = None,
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        is_causal: bool = False,
        bias: Tensor | None = None,
    ) -> Float[Tensor, "b n c"]:
        if bias is not None:
            raise UnsupportedError("bias would be added to the window's scores and not to the global tokens' own")
        out = super().mixed(x, grid, key_mask=key_mask, is_causal=is_causal)
        some = min(self.global_tokens, x.shape[1])
        seen = some if is_causal else x.shape[1]
        q, k, v = self._heads(self.qkv_global(x[:, :seen]))
        mask = None if key_mask is None else key_mask[:, :seen]
        rows = attention(q[:, :, :some], k, v, "softmax", key_mask=mask, is_causal=is_causal)
        return torch.cat([rows.transpose(1, 2).flatten(2), out[:, some:]], 1)
