"""Linformer (Wang et al. 2020, arXiv 2006.04768): keys and values projected along the sequence to a fixed rank.

    o = softmax(q (E k)^T / sqrt(d)) (F v),      E, F [rank, length], learned

    share   none    one E and one F per head
            heads   one E and one F for all heads
            kv      one E for all heads, and F = E
    To share across layers as well, pass the same tensors to every layer.

A sequence of M <= length keys uses the first M columns. Padding is zero in k and v, so it adds nothing to E k and
F v. Rows of F need not sum to one, and so neither do the weights softmax(...) F.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from softless.errors import ArgumentError, check_choice
from softless.mechanisms.base import Call
from softless.mechanisms.low_rank import LowRank
from softless.mechanisms.scored import MOST_STAND_INS, check_count


@dataclass(frozen=True)
class Linformer(LowRank):
    name: ClassVar[str] = "linformer"
    formula: ClassVar[str] = "softmax(q (E k)^T / sqrt(d)) (F v),  E and F of rank rows"
    paper: ClassVar[str] = "Wang et al. 2020, arXiv 2006.04768"
    rows_sum_to_one: ClassVar[bool] = False

    rank: int = 256
    length: int = 4096
    share: str = "kv"

    def __post_init__(self) -> None:
        check_count("rank", self.rank, most=MOST_STAND_INS)
        check_count("length", self.length, most=2**24)
        check_choice("share", self.share, ("none", "heads", "kv"))

    def input_shapes(self, heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        shape = (heads, self.rank, self.length) if self.share == "none" else (self.rank, self.length)
        return dict.fromkeys(("e",) if self.share == "kv" else ("e", "f"), shape)

    def initialize(self, name: str, tensor: Tensor) -> None:
        torch.nn.init.uniform_(tensor, -(self.rank**-0.5), self.rank**-0.5)

    def check(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
        if k.shape[2] > self.length:
            raise ArgumentError(f"linformer has length {self.length} and got {k.shape[2]} keys: it projects no more")

    def factors(self, q: Tensor, k: Tensor, call: Call) -> Sequence[Tensor]:
        e, f = (call.inputs[name].to(q.dtype)[..., : k.shape[2]] for name in ("e", self.inputs[-1]))
        if call.key_mask is not None:
            f = torch.where(call.key_mask[:, None, None], f, 0.0)  # [B, 1 or H, rank, M]
        scores = call.scale * (q @ (e @ k).mT)  # [B, H, N, rank]
        return scores.softmax(-1), f
