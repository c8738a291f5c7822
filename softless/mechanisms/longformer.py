"""Longformer (Beltagy et al. 2020, arXiv 2004.05150): a sliding window and a few global tokens.

With w the window on each side and g global tokens at the start, the query at i sees key j if

    |i - j| <= w   or   j < g   or   i < g

Causal attention keeps the j <= i of these keys. One softmax covers the window and the global keys. The cost is
N (2 w + g). In the paper global tokens have projections of their own: `softless.nn.LongformerAttention` has both sets.
`attention_window` of Hugging Face counts both sides, so it is 2 w.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from softless.mechanisms.pieces import Piece, read
from softless.mechanisms.restricted import Restricted, band
from softless.mechanisms.scored import check_count


@dataclass(frozen=True)
class Longformer(Restricted):
    name: ClassVar[str] = "longformer"
    formula: ClassVar[str] = "softmax over |i - j| <= w, the first g keys, and all keys for the first g queries"
    cost: ClassVar[str] = "O(N w d)"
    paper: ClassVar[str] = "Beltagy et al. 2020, arXiv 2004.05150"

    window: int = 256
    global_tokens: int = 1

    def __post_init__(self) -> None:
        check_count("window", self.window, least=0)
        check_count("global_tokens", self.global_tokens, least=0)

    def gives(self, i: Tensor, j: Tensor) -> Tensor:
        return ((i - j).abs() <= self.window) | (j < self.global_tokens) | (i < self.global_tokens)

    def lots(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, is_causal: bool) -> Sequence[Piece]:
        """Return three lots: the window, the global keys outside of it, and the other keys of global queries."""
        queries, keys, first = q.shape[2], k.shape[2], min(self.global_tokens, k.shape[2])
        j = torch.arange(keys, device=q.device)
        i = j[keys - queries :, None]

        def lot(rows: int, columns: int, pattern: Tensor) -> Piece:
            """Attend from the first queries to the first keys; the other queries see nothing."""
            visible = seen[:, None, None, :columns] & pattern
            visible = visible & (j[:columns] <= i[:rows]) if is_causal else visible
            out, log_mass = read(q[:, :, :rows] @ k[:, :, :columns].mT, visible, v[:, :, :columns])
            others = (0, 0, 0, queries - rows)
            return Piece(F.pad(out, others), F.pad(log_mass, others, value=-torch.inf))

        lots = [band(q, k, v, seen, self.window, 0 if is_causal else self.window)]
        if first:
            lots.append(lot(queries, first, (i - j[:first]).abs() > self.window))
        if global_queries := max(first - (keys - queries), 0):  # global tokens among the queries
            lots.append(lot(global_queries, keys, ((i[:global_queries] - j).abs() > self.window) & (j >= first)))
        return lots
