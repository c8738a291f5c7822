"""Agent attention (Han et al. 2023, arXiv 2312.08874): a few agents ask for the queries, and report to them.

    a = means of m runs of consecutive queries
    o = softmax(s q a^T) softmax(s a k^T) v,      s = d^-1/2

Both matrices have rows that sum to one, and so has their product. The paper's agents are means over the cells of a
picture; its agent biases and its convolution of v are left to the module around it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from softless.mechanisms.base import Call
from softless.mechanisms.low_rank import LowRank, query_mask, segments
from softless.mechanisms.scored import check_count, softmax


@dataclass(frozen=True)
class Agent(LowRank):
    name: ClassVar[str] = "agent"
    formula: ClassVar[str] = "softmax(q a^T / sqrt(d)) softmax(a k^T / sqrt(d)) v,  a means of queries"

    agents: int = 49

    def __post_init__(self) -> None:
        check_count("agents", self.agents)

    def factors(self, q: Tensor, k: Tensor, call: Call) -> Sequence[Tensor]:
        means = segments(q, self.agents, query_mask(q, k, call))
        used = (means > 0).any(-1, keepdim=True)  # [B, 1, m, 1]
        agents = call.scale * (means @ q)
        return softmax(q @ agents.mT, used.mT), softmax(agents @ k.mT, used & call.visible(q, k))
