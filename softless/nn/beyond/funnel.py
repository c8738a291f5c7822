"""Funnel-Transformer (Dai et al. 2020, arXiv 2006.03236): blocks of layers on ever fewer tokens, and a way back.

    block 0      layers on all N tokens
    block b      starts with  q = pool(h), k = v = h:  N / 2^b tokens read all tokens of the block before
    decoder      layers on  h_0 + repeat(h_last),  h_0 the output of block 0
    layer        a = norm(q + attention(q, k, v));   norm(a + feed forward(a))

The first `prefix` tokens are class tokens and are never pooled. Pooling reads only real tokens, and a pooled token is
real if one of its tokens is. So a sequence that is padded at its end gives the same output in any batch. The authors'
`truncate_seq`, which drops the last token to keep lengths even, would break this and is left out. Their relative
positions, an attention of another kind, are left out too: add positions to x.

Shapes: B batch, N tokens, C channels, n = tokens left.
"""

from itertools import accumulate
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from softless.algebra.state import keep
from softless.errors import ArgumentError, UnsupportedError, check_choice, shown
from softless.mechanisms import Mechanism, resolve
from softless.mechanisms.cosformer import Cosformer
from softless.mechanisms.scored import check_count
from softless.nn.checks import MOST_CHANNELS, MOST_LAYERS, check_token_mask, check_tokens
from softless.nn.mixing import Mixing, split_heads
from softless.nn.pooling import MODES, Tokens, pool_tokens, repeat_tokens


class Funneled(NamedTuple):
    """The output of an encoder: the tokens of its last block, and those of its first, which a decoder returns to.

    >>> import torch, softless
    >>> encoder = softless.nn.FunnelEncoder(dim=8, heads=2, blocks=(1, 1))
    >>> short, full = encoder(torch.randn(5, 9, 8))                     # [B, N, C]
    >>> short.x.shape, full.x.shape
    (torch.Size([5, 5, 8]), torch.Size([5, 9, 8]))
    """

    short: Tokens
    full: Tokens


class FunnelEncoder(nn.Module):
    """Blocks of layers, each on half as many tokens as the one before.

    >>> import torch, softless
    >>> encoder = softless.nn.FunnelEncoder(dim=64, heads=2, blocks=(2, 2, 2))
    >>> encoded = encoder(torch.randn(5, 101, 64))                      # [B, N, C]
    >>> encoded.short.x.shape, encoded.full.x.shape                     # a class token and 100 / 4 others; all tokens
    (torch.Size([5, 26, 64]), torch.Size([5, 101, 64]))

    Args:
        dim: Channels C of the tokens.
        heads: Number of heads, a divisor of dim.
        blocks: Number of layers in each block. Default: (4, 4, 4).
        mechanism: Any mechanism that takes different numbers of queries and keys. Default: "softmax".
        pool: How each block after the first shortens the tokens: "mean", "max" or "first". Default: "mean".
        prefix: Number of class tokens, which are not pooled. Default: 1.
        hidden: Width of the feed-forward layers. Default: None, 4 dim.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        blocks: tuple[int, ...] = (4, 4, 4),
        *,
        mechanism: str | Mechanism = "softmax",
        pool: str = "mean",
        prefix: int = 1,
        hidden: int | None = None,
    ):
        super().__init__()
        if not isinstance(blocks, tuple | list) or not blocks or any(type(n) is not int or n < 1 for n in blocks):
            raise ArgumentError(f"blocks {shown(blocks)} must say how many layers each block has, at least 1")
        check_count("prefix", prefix, least=0)
        check_choice("pool", pool, MODES)
        mechanism = resolve(mechanism)
        if mechanism.mixes_queries and len(blocks) > 1:
            raise UnsupportedError(
                f"'{mechanism.name}' mixes the queries, and cannot tell which pooled ones are padding"
            )
        if isinstance(mechanism, Cosformer) and mechanism.length is None and len(blocks) > 1:
            raise UnsupportedError("'cosformer' would count padding among pooled queries: give it a length=")
        self.dim, self.pool, self.prefix = dim, pool, prefix
        self.ends = tuple(accumulate(blocks))  # a block starts where the one before it ends
        self.layers = nn.ModuleList(FunnelLayer(dim, heads, mechanism, hidden) for _ in range(self.ends[-1]))

    def forward(self, x: Float[Tensor, "b n c"], key_mask: Bool[Tensor, "b n"] | None = None) -> Funneled:
        check_tokens(x, self.dim)
        check_token_mask(key_mask, x)
        real = x.new_ones(x.shape[:2], dtype=torch.bool) if key_mask is None else key_mask
        now = full = Tokens(keep(x, real), real)
        for number, layer in enumerate(self.layers):
            queries = pool_tokens(*now, mode=self.pool, prefix=self.prefix) if number in self.ends else now
            now = Tokens(layer(queries.x, *now), queries.key_mask)
            full = now if number < self.ends[0] else full
        return Funneled(now, full)


class FunnelDecoder(nn.Module):
    """Repeats the tokens of the last block, adds them to those of the first, and runs a few more layers on the sum.

    >>> import torch, softless
    >>> encoder = softless.nn.FunnelEncoder(dim=64, heads=2, blocks=(2, 2, 2))
    >>> decoder = softless.nn.FunnelDecoder(dim=64, heads=2, blocks=3)
    >>> decoder(encoder(torch.randn(5, 101, 64))).shape                 # [B, N, C]
    torch.Size([5, 101, 64])

    Args:
        dim: Channels C of the tokens.
        heads: Number of heads, a divisor of dim.
        blocks: How many blocks the encoder has.
        layers: Number of layers here. Default: 2.
        mechanism: Any mechanism. Default: "softmax".
        prefix: Number of class tokens, as in the encoder; unused if the encoder has one block. Default: 1.
        hidden: Width of the feed-forward layers. Default: None, 4 dim.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        blocks: int,
        layers: int = 2,
        *,
        mechanism: str | Mechanism = "softmax",
        prefix: int = 1,
        hidden: int | None = None,
    ):
        super().__init__()
        if type(blocks) is not int or not 1 <= blocks <= 62:
            raise ArgumentError(f"blocks {shown(blocks)} must be how many blocks the encoder has, 1 to 62")
        check_count("layers", layers, least=0, most=MOST_LAYERS)
        check_count("prefix", prefix, least=0)
        self.dim, self.stride, self.prefix = dim, 2 ** (blocks - 1), prefix
        self.layers = nn.ModuleList(FunnelLayer(dim, heads, mechanism, hidden) for _ in range(layers))

    def forward(self, encoded: Funneled) -> Float[Tensor, "b n c"]:
        if not isinstance(encoded, Funneled):
            raise ArgumentError(f"encoded is a {type(encoded).__name__} and must be the output of a FunnelEncoder")
        (x, real), short = encoded.full, encoded.short.x
        check_tokens(x, self.dim)
        check_token_mask(real, x)
        check_tokens(short, self.dim)
        x = x + repeat_tokens(short, self.stride, x.shape[1], self.prefix)
        for layer in self.layers:
            x = layer(x, x, real)
        return x


class FunnelLayer(Mixing):
    """Cross-attention and a feed-forward part, with norms after the sums, as the authors have them."""

    def __init__(self, dim: int, heads: int, mechanism: str | Mechanism = "softmax", hidden: int | None = None):
        super().__init__(dim, heads, mechanism)
        hidden = 4 * self.heads * self.head_dim if hidden is None else hidden
        check_count("hidden", hidden, most=MOST_CHANNELS)
        self.q, self.kv, self.proj = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.feed = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(
        self, queries: Float[Tensor, "b n c"], x: Float[Tensor, "b m c"], key_mask: Bool[Tensor, "b m"] | None = None
    ) -> Float[Tensor, "b n c"]:
        q, k, v = (split_heads(part, self.head_dim) for part in (self.q(queries), *self.kv(x).chunk(2, -1)))
        out = self.norm1(queries + self.proj(self.mix((q, k, v), source=x, key_mask=key_mask)))
        return self.norm2(out + self.feed(out))
