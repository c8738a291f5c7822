"""Softmax attention over a fixed pattern of keys, without ever forming the N x M matrix.

    w_ij = e^{s_ij} / sum_{j' in S_i} e^{s_ij'}   where j is in S_i,   0 elsewhere
    S_i  = the keys that the pattern gives to position i, without the hidden keys

The last query has the position of the last key. A pattern is a union of lots that share no key, and each lot is
computed in blocks (pieces.py). A bias is an N x M matrix itself, so with a bias explicit weights are formed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from softless.mechanisms.base import Call, repeat_heads
from softless.mechanisms.pieces import Blocks, Piece, join, read
from softless.mechanisms.scored import Scored, check_square, softmax


@dataclass(frozen=True)
class Restricted(Scored):
    """A subclass defines its pattern twice: as a mask (`gives`, the specification) and as lots (the fast way)."""

    form: ClassVar[str] = "blocks"
    pairs_tokens: ClassVar[bool] = True

    def gives(self, i: Tensor, j: Tensor) -> Tensor:
        """Return whether the pattern gives key j [M] to position i [N, 1], before causality."""
        raise NotImplementedError

    def lots(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, is_causal: bool) -> Sequence[Piece]:
        """Return the lots of the last N of M >= N positions; q is scaled, `seen` [B, M] is False for hidden keys."""
        raise NotImplementedError

    def check(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
        check_square(self.name, q, k, call)

    def rule(self, scores: Tensor, visible: Tensor) -> Tensor:
        queries, keys = scores.shape[-2:]
        i = torch.arange(queries, device=scores.device)[:, None] + keys - queries
        return softmax(scores, visible & self.gives(i, torch.arange(keys, device=scores.device)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        if call.bias is not None:
            return super().attend(q, k, v, call)
        early = max(q.shape[2] - k.shape[2], 0)  # queries before the first key
        k, v = (repeat_heads(x, q.shape[1]) for x in (k, v))
        seen = k.new_ones(1, k.shape[2]).bool() if call.key_mask is None else call.key_mask
        lots = self.lots(call.scale * q[:, :, early:], k, v, seen, call.is_causal)
        return F.pad(join(lots), (0, 0, early, 0))


def band(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, before: int, after: int) -> Piece:
    """Attend from each of the last N of M positions to the keys from `before` it to `after` it, at most M."""
    before, after = (min(reach, k.shape[2]) for reach in (before, after))
    past = min(before, k.shape[2] - q.shape[2])
    q, start = F.pad(q, (0, 0, past, 0)), k.shape[2] - q.shape[2] - past
    k, v, seen = k[:, :, start:], v[:, :, start:], seen[:, start:]
    cut = Blocks(k.shape[2], before, after)
    real, near = cut.keys(seen[..., None]).mT[:, None], cut.near(q.device)
    piece = read_in_runs(cut.queries(q), cut.keys(k), cut.keys(v), real, near.__getitem__)
    return Piece(*(cut.back(x)[:, :, past:] for x in piece))


def read_in_runs(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, near: Callable[[slice], Tensor]) -> Piece:
    """Attend from blocks of queries [B, H, blocks, n, d] to their own keys [B, H, blocks, m, .], part by part.

    A query sees the keys that are `seen` [B, 1, blocks, 1, m] and that `near` gives for its row [rows, m].
    """
    size, fit = q.shape[3], at_once(q) // max(q.shape[0] * q.shape[1] * k.shape[3], 1)  # rows of scores at once
    if fit >= q.shape[2] * size or torch.compiler.is_compiling():  # one graph for any length
        return read(q @ k.mT, seen & near(slice(None)), v)
    blocks, rows, runs = max(fit // size, 1), max(fit, 1), []
    for queries, keys, values, real in zip(*(x.split(blocks, 2) for x in (q, k, v, seen)), strict=True):
        places = [slice(start, start + rows) for start in range(0, size, rows)]
        runs.append(_cat([read(queries[:, :, :, at] @ keys.mT, real & near(at), values) for at in places], 3))
    return _cat(runs, 2)


def _cat(pieces: Sequence[Piece], dim: int) -> Piece:
    return Piece(*(torch.cat(parts, dim) for parts in zip(*pieces, strict=True)))


def at_once(q: Tensor) -> int:
    """Return how many scores to form at once: what the cache of a CPU holds, or the memory of a GPU."""
    return 2**20 if q.is_cpu else 2**27
