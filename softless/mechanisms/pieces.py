"""Softmax attention in pieces: each lot of keys gives an output, and the outputs are averaged by their masses.

    o_p = sum_{j in p} e^{s_j} v_j / Z_p,     Z_p = sum_{j in p} e^{s_j}
    o   = sum_p Z_p o_p / sum_p Z_p           over lots that share no key

Masses are kept as logarithms. This law lets a sparse pattern be a union of simple patterns.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from softless.mechanisms.scored import softmax


class Piece(NamedTuple):
    """The outputs of queries [..., N] for one lot of keys; the log mass of a query that sees no key is -inf."""

    out: Tensor  # [..., N, e]
    log_mass: Tensor  # [..., N, 1]


def read(scores: Tensor, visible: Tensor, v: Tensor) -> Piece:
    """Attend to one lot of keys: scores and visible [..., N, M], v [..., M, e]."""
    hidden = torch.finfo(scores.dtype).min
    mass = torch.where(visible, scores, hidden).logsumexp(-1, keepdim=True)
    seen = visible.any(-1, keepdim=True)
    return Piece(softmax(scores, visible) @ v, torch.where(seen, mass, -torch.inf))


def join(pieces: Sequence[Piece]) -> Tensor:
    """Return the output over all lots; zeros for a query that sees no key in any lot."""
    if len(pieces) == 1:
        return pieces[0].out
    masses = torch.stack([piece.log_mass for piece in pieces])  # [P, ..., N, 1]
    share = softmax(masses.movedim(0, -1), masses.movedim(0, -1) > -torch.inf).movedim(-1, 0)
    return sum(w * piece.out for w, piece in zip(share, pieces, strict=True))


class Blocks(NamedTuple):
    """Tokens cut into blocks of `size` queries, each beside the keys from `before` it to `after` it.

    Cost and memory are N (size + before + after), whatever N is.
    """

    tokens: int
    before: int
    after: int

    @property
    def size(self) -> int:
        """As many queries as a query has neighbors: then at least half of the computed scores are used."""
        return min(self.before + self.after + 1, self.tokens)

    @property
    def missing(self) -> int:
        """The number of tokens that the last block lacks."""
        return -self.tokens % self.size

    def queries(self, x: Tensor) -> Tensor:
        """[..., N, d] -> [..., blocks, size, d]"""
        return F.pad(x, (0, 0, 0, self.missing)).unflatten(-2, (-1, self.size))

    def keys(self, x: Tensor) -> Tensor:
        """[..., N, d] -> [..., blocks, before + size + after, d]"""
        padded = F.pad(x, (0, 0, self.before, self.after + self.missing))
        return padded.unfold(-2, self.before + self.size + self.after, self.size).mT

    def near(self, device: torch.device) -> Tensor:
        """Return which keys of a block each query of it is near to [size, before + size + after]."""
        apart = torch.arange(self.before + self.size + self.after, device=device) - self.before
        apart = apart - torch.arange(self.size, device=device)[:, None]
        return (apart >= -self.before) & (apart <= self.after)

    def back(self, x: Tensor) -> Tensor:
        """[..., blocks, size, e] -> [..., N, e]"""
        return x.flatten(-3, -2)[..., : self.tokens, :]
