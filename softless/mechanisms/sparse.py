"""Softmax over few keys: a fixed, thin pattern of them (sparse), or the k that score highest (topk).

    sparse   Child et al. 2019, arXiv 1904.10509. With l the stride, c the summary columns, and i the position of the
             query, key j is seen if

             local           |i - j| < l                          if causal, the last l keys up to i
             strided         (i - j) mod l = 0
             local+strided   either of them: the strided attention of the paper, merged in one head
             fixed           i and j are in one group of l, or j is among the last c of its group

Causal attention keeps the j <= i of these keys; without causality the patterns are symmetric. The local part of the
paper has l + 1 keys; its code, which is followed here, has l. Strided keys share a residue: the sequence is read as a
table of l columns, and each column attends to itself. The cost is N l for local and N^2 / l for the columns, which is
N^1.5 at l = sqrt(N), the choice of the paper for its one length of context. Here l is a fixed number: if it followed N,
padding and future tokens would change what a token sees. Memory is O(N) for every l, but gradients need the weights of
all visible pairs.

    topk     Zhao et al. 2019, arXiv 1912.11637
             s_ij = q_i.k_j / sqrt(d) + bias_ij
             t_i  = the k-th largest s_ij over the keys that i may see
             w_ij = e^{s_ij} / sum_{s_ij' >= t_i} e^{s_ij'}   where s_ij >= t_i,   0 elsewhere

Keys that tie with the k-th are kept too, and a query that may see fewer than k keys keeps them all. Gradients flow
through the scores that are kept, not through the choice. topk costs as much as softmax, because it forms all scores.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from softless.errors import ArgumentError, check_choice
from softless.mechanisms.pieces import Piece
from softless.mechanisms.restricted import Restricted, band, read_in_runs
from softless.mechanisms.scored import Scored, check_count, softmax


@dataclass(frozen=True)
class Sparse(Restricted):
    name: ClassVar[str] = "sparse"
    formula: ClassVar[str] = "softmax over |i - j| < l and (i - j) mod l = 0, l the stride"
    cost: ClassVar[str] = "O(N (l + N/l) d)"
    paper: ClassVar[str] = "Child et al. 2019, arXiv 1904.10509"

    pattern: str = "local+strided"
    stride: int = 64
    summary: int = 4

    def __post_init__(self) -> None:
        check_choice("pattern", self.pattern, ("local", "strided", "local+strided", "fixed"))
        check_count("stride", self.stride)
        check_count("summary", self.summary)
        if self.pattern == "fixed" and self.summary > self.stride:
            raise ArgumentError(
                f"summary {self.summary} is more than the {self.stride} keys of a group of pattern 'fixed', the stride"
            )
        if self.pattern != "fixed" and self.summary != type(self).summary:
            raise ArgumentError(
                f"summary {self.summary} is only read by pattern 'fixed', and pattern is {self.pattern!r}"
            )

    def gives(self, i: Tensor, j: Tensor) -> Tensor:
        if self.pattern == "fixed":
            return (i // self.stride == j // self.stride) | (j % self.stride >= self.stride - self.summary)
        local, strided = (i - j).abs() < self.stride, (i - j) % self.stride == 0
        return {"local": local, "strided": strided, "local+strided": local | strided}[self.pattern]

    def lots(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, is_causal: bool) -> Sequence[Piece]:
        if self.pattern == "fixed":
            return self._fixed(q, k, v, seen, is_causal)
        reach, lots = min(self.stride, k.shape[2]) - 1, []
        if "local" in self.pattern:
            lots.append(band(q, k, v, seen, reach, 0 if is_causal else reach))
        if "strided" in self.pattern:
            lots.append(self._columns(q, k, v, seen, is_causal, itself=self.pattern == "strided"))
        return lots

    def _columns(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, is_causal: bool, itself: bool) -> Piece:
        """Read tokens as a table with rows of l; a query sees its column, with or without `itself`."""
        stride = min(self.stride, k.shape[2])

        def table(x: Tensor) -> Tensor:
            """[..., N, d] -> [..., l, rows, d]"""
            return F.pad(x, (0, 0, -x.shape[-2] % stride, 0)).unflatten(-2, (-1, stride)).transpose(-3, -2)

        queries, keys, real = table(q), table(k), table(seen[..., None]).mT[:, None]
        i = torch.arange(queries.shape[3], device=q.device)[:, None] + keys.shape[3] - queries.shape[3]
        j = torch.arange(keys.shape[3], device=q.device)

        def near(rows: slice) -> Tensor:
            near = j <= i[rows] if is_causal else j >= 0
            return near if itself else near & (j != i[rows])

        piece = read_in_runs(queries, keys, table(v), real, near)
        return Piece(*(x.transpose(-3, -2).flatten(-3, -2)[..., -q.shape[2] :, :] for x in piece))

    def _fixed(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, is_causal: bool) -> Sequence[Piece]:
        """Attend from each group to its own keys, and to the last c keys of the other groups."""
        stride = min(self.stride, k.shape[2])
        summary = min(self.summary, stride)
        past = k.shape[2] - q.shape[2]
        first, lead = past // stride, past % stride  # the first query's group, and its place there

        def groups(x: Tensor, lead: int = 0) -> Tensor:
            """[..., N, d] -> [..., groups, l, d]"""
            return F.pad(x, (0, 0, lead, -k.shape[2] % stride)).unflatten(-2, (-1, stride))

        queries, (keys, values, real) = groups(q, lead), (groups(x) for x in (k, v, seen[..., None]))
        pairs = torch.ones(stride, stride, dtype=torch.bool, device=q.device)
        pairs = pairs.tril() if is_causal else pairs
        own = read_in_runs(
            queries, keys[:, :, first:], values[:, :, first:], real[:, None, first:].mT, pairs.__getitem__
        )

        keys, values, real = (x[..., -summary:, :].flatten(-3, -2) for x in (keys, values, real))
        group = torch.arange(keys.shape[2], device=q.device) // summary
        here = torch.arange(past, past + q.shape[2], device=q.device)[:, None] // stride

        def other(rows: slice) -> Tensor:
            return group < here[rows] if is_causal else group != here[rows]

        rest = read_in_runs(q[:, :, None], keys[:, :, None], values[:, :, None], real.mT[:, None, None], other)
        own = Piece(*(x.flatten(-3, -2)[..., lead : lead + q.shape[2], :] for x in own))
        return own, Piece(*(x.squeeze(2) for x in rest))


@dataclass(frozen=True)
class TopK(Scored):
    name: ClassVar[str] = "topk"
    formula: ClassVar[str] = "softmax over the k keys that score highest"
    paper: ClassVar[str] = "Zhao et al. 2019, arXiv 1912.11637"

    k: int = 32

    def __post_init__(self) -> None:
        check_count("k", self.k)

    def rule(self, scores: Tensor, visible: Tensor) -> Tensor:
        seen = torch.where(visible, scores.detach(), -torch.inf)
        least = seen.topk(min(self.k, scores.shape[-1]), -1).values[..., -1:]
        return softmax(scores, visible & (seen >= least))
