"""Agent attention (Han et al. 2023, arXiv 2312.08874): a few agents ask for the queries, and report to them.

    a = means of m runs of consecutive queries; of a picture, of p x p cells of queries, p^2 = m
    o = softmax(s q a^T) softmax(s a k^T) v,      s = d^-1/2

Both matrices have rows that sum to one, and so has their product. The paper has pictures (`grid=`), whose class tokens
are in no cell; its agent biases and its convolution of v are left to the module around it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from softless.mechanisms.base import Call
from softless.mechanisms.low_rank import LowRank, check_cells, pooled, real_queries
from softless.mechanisms.scored import MOST_STAND_INS, check_count, softmax


@dataclass(frozen=True)
class Agent(LowRank):
    name: ClassVar[str] = "agent"
    formula: ClassVar[str] = "softmax(q a^T / sqrt(d)) softmax(a k^T / sqrt(d)) v,  a means of queries"
    cost: ClassVar[str] = "O(N m d)"
    paper: ClassVar[str] = "Han et al. 2023, arXiv 2312.08874"
    mixes_queries: ClassVar[bool] = True
    reads_grid: ClassVar[bool] = True

    agents: int = 49

    def __post_init__(self) -> None:
        check_count("agents", self.agents, most=MOST_STAND_INS)

    def check(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
        check_cells("agents", self.agents, call.grid)

    def factors(self, q: Tensor, k: Tensor, call: Call) -> Sequence[Tensor]:
        real_q, mask = real_queries(q, k, call)
        means = pooled(q, self.agents, mask, call.grid)
        used = (means > 0).any(-1, keepdim=True)  # [B, 1, m, 1]
        agents = call.scale * (means @ real_q)
        return softmax(q @ agents.mT, used.mT), softmax(agents @ k.mT, used & call.visible(q, k))
