"""PoWER-BERT (Goyal et al. 2020, arXiv 2001.08950): each layer drops the tokens that get the least attention.

    significance   s_j = mean over heads of sum_{i != j} A_ij,     i over real queries
    eliminate      the class token and the most significant others stay, l in all, in their order
    search         the token of rank r is multiplied by W_r in [0, 1], learned;   l = ceil(sum_r W_r)
    penalty        sum over layers j = 1, 2, ... of j sum_r W_jr,                  added to the loss, times a lambda

Elimination happens between the attention of a layer and its feed-forward part. There are three phases: train on all
tokens, search for the numbers l, train again with them. Padding ranks last and is dropped first; the class token, which
is the first real token, ranks first. The choice of tokens has no gradient. The paper rounds l up and its code rounds
down: here l is rounded up.

Shapes: B batch, N tokens, C channels, n tokens left.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from softless.algebra.state import keep
from softless.errors import ArgumentError
from softless.mechanisms import Mechanism
from softless.mechanisms.scored import check_count
from softless.nn.attention import Attention
from softless.nn.checks import MOST_CHANNELS, MOST_LAYERS, check_heads, check_token_mask, check_tokens
from softless.validation import check_key_mask


class Survivors(NamedTuple):
    """The tokens that are left, which of them are real, and their positions in the input.

    >>> import torch, softless
    >>> encoder = softless.nn.EliminationEncoder(dim=8, heads=2, depth=2, length=10)
    >>> encoder.eliminate([6, 3])
    >>> left = encoder(torch.randn(5, 10, 8))                           # [B, N, C]
    >>> left.x.shape, left.places[:, 0].tolist()                        # the class token always stays
    (torch.Size([5, 3, 8]), [0, 0, 0, 0, 0])
    """

    x: Float[Tensor, "b n c"]
    key_mask: Bool[Tensor, "b n"]
    places: Int[Tensor, "b n"]


def significance(
    weights: Float[Tensor, "b heads n n"], key_mask: Bool[Tensor, "b n"] | None = None
) -> Float[Tensor, "b n"]:
    """Return how much attention each token gets from the others.

    >>> import torch
    >>> from softless.nn import significance
    >>> weights = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.9, 0.1], [0.3, 0.7, 0.0]])
    >>> significance(weights[None, None])                               # [B, heads, N, N] -> [B, N]
    tensor([[0.3000, 1.2000, 0.1000]])
    """
    if not isinstance(weights, Tensor) or weights.ndim != 4 or weights.shape[2] != weights.shape[3]:
        shape = list(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise ArgumentError(f"weights are {shape} and must be a tensor [batch, heads, tokens, tokens]")
    check_key_mask(key_mask, weights)
    own = torch.eye(weights.shape[-1], dtype=torch.bool, device=weights.device)
    counted = ~own if key_mask is None else ~own & key_mask[:, None, :, None]
    return torch.where(counted, weights, 0.0).sum(-2).mean(1)


class EliminationEncoder(nn.Module):
    """Layers of attention and feed-forward parts, between which tokens are eliminated.

    >>> import torch, softless
    >>> encoder = softless.nn.EliminationEncoder(dim=64, heads=2, depth=3, length=100)
    >>> x = torch.randn(5, 100, 64)                                     # [B, N, C]
    >>> encoder(x).x.shape                                              # phase 1: all tokens
    torch.Size([5, 100, 64])
    >>> encoder.search()                                                # phase 2
    >>> loss = encoder(x).x.square().mean() + 1e-3 * encoder.penalty()
    >>> loss.backward()                                                 # step, then encoder.clip()
    >>> encoder.eliminate([60, 40, 10])                                 # phase 3; or encoder.found()
    >>> encoder(x).x.shape
    torch.Size([5, 10, 64])

    Args:
        dim: Channels C of the tokens.
        heads: Number of heads, a divisor of dim.
        depth: Number of layers.
        length: The longest sequence that a search can rank; unused before and after the search.
        mechanism: Any mechanism; its explicit weights are formed. Default: "softmax".
        ratio: Width of the feed-forward layers, as a multiple of dim. Default: 4.
    """

    def __init__(
        self, dim: int, heads: int, depth: int, length: int, *, mechanism: str | Mechanism = "softmax", ratio: int = 4
    ):
        super().__init__()
        check_heads(dim, heads)
        check_count("depth", depth, most=MOST_LAYERS)
        check_count("length", length, most=2**24)
        check_count("ratio", ratio, most=MOST_CHANNELS)
        self.dim = dim
        self.layers = nn.ModuleList(EliminationLayer(dim, heads, mechanism, ratio * dim) for _ in range(depth))
        self.retention = nn.Parameter(torch.ones(depth, length))
        self.kept: tuple[int, ...] | None = None
        self.searching = False

    def forward(self, x: Float[Tensor, "b n c"], key_mask: Bool[Tensor, "b n"] | None = None) -> Survivors:
        check_tokens(x, self.dim)
        check_token_mask(key_mask, x)
        batch, tokens = x.shape[:2]
        if self.searching and tokens > self.retention.shape[1]:
            raise ArgumentError(f"a search of length {self.retention.shape[1]} cannot rank {tokens} tokens")
        real = x.new_ones(batch, tokens, dtype=torch.bool) if key_mask is None else key_mask
        now = Survivors(keep(x, real), real, torch.arange(tokens, device=x.device).expand(batch, -1))
        for number, layer in enumerate(self.layers):
            retention = self.retention[number] if self.searching else None
            now = layer(now, retention, None if self.kept is None else self.kept[number])
        return now

    def train_all(self) -> None:
        """Start phase 1: every token stays."""
        self.kept, self.searching = None, False

    def search(self) -> None:
        """Start phase 2: every token stays, and W learns how many are needed."""
        self.kept, self.searching = None, True

    def eliminate(self, kept: Sequence[int]) -> None:
        """Start phase 3: `kept` tokens stay in each layer."""
        counts = list(kept) if isinstance(kept, Sequence) else [kept]
        positive = all(type(count) is int and count >= 1 for count in counts)
        if len(counts) != len(self.layers) or not positive or counts != sorted(counts, reverse=True):
            raise ArgumentError(
                f"kept {counts} must be a number of tokens for each of {len(self.layers)} layers, at least 1 and "
                f"never more than in the layer before"
            )
        self.kept, self.searching = tuple(counts), False

    def get_extra_state(self) -> Int[Tensor, " phase"]:
        """Return the phase, saved with the weights: whether it is a search, then the tokens kept per layer, if set."""
        return torch.tensor([int(self.searching), *(self.kept or ())])

    def set_extra_state(self, state: Int[Tensor, " phase"]) -> None:
        searching, *kept = state.tolist()
        if kept:
            self.eliminate(kept)
        else:
            self.kept, self.searching = None, bool(searching)

    def penalty(self) -> Float[Tensor, ""]:
        """Return sum_j j |W_j|_1, in which later layers count more."""
        order = torch.arange(1, len(self.layers) + 1, device=self.retention.device)
        return (order[:, None] * self.retention.abs()).sum()

    @torch.no_grad()
    def clip(self) -> None:
        """Clip W to [0, 1]; call this after each optimizer step."""
        self.retention.clamp_(0, 1)

    def found(self) -> list[int]:
        """Return how many tokens the search would keep in each layer."""
        masses = self.retention.detach().double().clamp(0, 1).sum(1).tolist()
        counts: list[int] = []
        for mass in masses:
            counts.append(max(1, min(math.ceil(mass), *counts[-1:], self.retention.shape[1])))
        return counts


class EliminationLayer(nn.Module):
    """Attention, elimination, feed-forward; norms after the sums, as in BERT."""

    def __init__(self, dim: int, heads: int, mechanism: str | Mechanism, hidden: int):
        super().__init__()
        self.attn = Attention(dim, heads, mechanism)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.feed = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, now: Survivors, retention: Tensor | None, kept: int | None) -> Survivors:
        out, weights = self.attn.with_weights(now.x, key_mask=now.key_mask)
        now = now._replace(x=self.norm1(now.x + out))
        if retention is not None:
            now = now._replace(x=now.x * self._factors(weights, now.key_mask, retention))
        elif kept is not None:
            order = ranked(weights, now.key_mask)[:, :kept].sort(-1).values  # [B, n]
            now = Survivors(
                now.x.gather(1, order[..., None].expand(-1, -1, now.x.shape[2])),
                now.key_mask.gather(1, order),
                now.places.gather(1, order),
            )
        return now._replace(x=self.norm2(now.x + self.feed(now.x)))

    @staticmethod
    def _factors(weights: Tensor, key_mask: Tensor, retention: Tensor) -> Tensor:
        """Return W of each token's rank [B, N, 1], and 1 for padding."""
        rank = ranked(weights, key_mask).argsort(-1)
        return torch.where(key_mask, retention[rank], 1.0)[..., None]


def ranked(weights: Tensor, key_mask: Tensor) -> Tensor:
    """Return the tokens from the most to the least significant [B, N]: the class token, the others, padding."""
    scores = significance(weights.detach(), key_mask).masked_fill(~key_mask, -torch.inf)
    first = key_mask.int().argmax(-1, keepdim=True)
    return scores.scatter(-1, first, torch.inf).argsort(dim=-1, descending=True, stable=True)
