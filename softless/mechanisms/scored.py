"""Scored attention: a score for every pair, then a rule that turns a row of scores into weights.

    s_ij = scale q_i.k_j + bias_ij          scale = d^-1/2
    w_ij = rule(s_i over the keys that i may see)_j

A bias of minus infinity hides a key. A row that sees nothing weighs nothing.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from softless.mechanisms.base import Call, Mechanism, repeat_heads


def softmax(scores: Tensor, visible: Tensor) -> Tensor:
    """Over the visible keys; a row without any is zero."""
    scores = torch.where(visible, scores, torch.finfo(scores.dtype).min)
    return torch.where(visible, scores.softmax(-1), 0.0)


@dataclass(frozen=True)
class Scored(Mechanism):
    """A subclass says `rule`."""

    family: ClassVar[str] = "scored"
    takes_bias: ClassVar[bool] = True

    def default_scale(self, head_dim: int) -> float | None:
        return head_dim**-0.5

    def rule(self, scores: Tensor, visible: Tensor) -> Tensor:
        """Weights [B, H, N, M] from scores; those of hidden keys may be anything, and must not matter."""
        raise NotImplementedError

    def weights(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        scores, visible = call.scale * (q @ repeat_heads(k, q.shape[1]).mT), call.visible(q, k)
        if call.bias is not None:
            scores, visible = scores + call.bias, visible & (call.bias > -torch.inf)
        return self.rule(scores, visible)
