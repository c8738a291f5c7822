"""Longformer (Beltagy et al. 2020, arXiv 2004.05150): a sliding window, and a few tokens that see and are seen by all.

With w the window on each side and g global tokens, the first ones, key j is seen by the query at i if

    |i - j| <= w   or   j < g   or   i < g

Causal keeps the j <= i of these. One softmax covers the window and the global keys. Cost is N (2 w + g).
The paper's global tokens read through projections of their own: `softless.nn.LongformerAttention` has both sets.
Hugging Face's `attention_window` counts both sides: it is 2 w.
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
        """The window, the global keys outside of it, and for global queries all the rest."""
        queries, keys, some = q.shape[2], k.shape[2], min(self.global_tokens, k.shape[2])
        j = torch.arange(keys, device=q.device)
        i = j[keys - queries :, None]

        def lot(rows: int, columns: int, pattern: Tensor) -> Piece:
            """The first queries with the first keys; the other queries see nothing."""
            visible = seen[:, None, None, :columns] & pattern
            visible = visible & (j[:columns] <= i[:rows]) if is_causal else visible
            out, log_mass = read(q[:, :, :rows] @ k[:, :, :columns].mT, visible, v[:, :, :columns])
            others = (0, 0, 0, queries - rows)
            return Piece(F.pad(out, others), F.pad(log_mass, others, value=-torch.inf))

        lots = [band(q, k, v, seen, self.window, 0 if is_causal else self.window)]
        if some:
            lots.append(lot(queries, some, (i - j[:some]).abs() > self.window))
        if ours := max(some - (keys - queries), 0):  # global tokens among the queries
            lots.append(lot(ours, keys, ((i[:ours] - j).abs() > self.window) & (j >= some)))
        return lots
