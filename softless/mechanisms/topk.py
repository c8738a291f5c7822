"""Explicit sparse attention (Zhao et al. 2019, arXiv 1912.11637): softmax over each query's k best keys.

    s_ij = q_i.k_j / sqrt(d) + bias_ij
    t_i  = the k-th largest s_ij over the keys that i may see
    w_ij = e^{s_ij} / sum_{s_ij' >= t_i} e^{s_ij'}   where s_ij >= t_i,   0 elsewhere

Keys that tie with the k-th are kept too; a query that may see fewer than k keys keeps them all. The choice
has no gradient, the kept scores have theirs. It costs what softmax costs: the scores are all formed.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from softless.mechanisms.scored import Scored, check_count, softmax


@dataclass(frozen=True)
class TopK(Scored):
    name: ClassVar[str] = "topk"
    formula: ClassVar[str] = "softmax over the k keys that score highest"
    cost: ClassVar[str] = "O(N^2 d)"
    paper: ClassVar[str] = "Zhao et al. 2019, arXiv 1912.11637"

    k: int = 32

    def __post_init__(self) -> None:
        check_count("k", self.k)

    def rule(self, scores: Tensor, visible: Tensor) -> Tensor:
        seen = torch.where(visible, scores.detach(), -torch.inf)
        least = seen.topk(min(self.k, scores.shape[-1]), -1).values[..., -1:]
        return softmax(scores, visible & (seen >= least))
