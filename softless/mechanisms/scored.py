"""Scored attention: a score for every pair, then a rule that turns a row of scores into weights.

    s_ij = scale q_i.k_j + bias_ij          scale = d^-1/2
    w_ij = rule(s_i over the keys that i may see)_j

A bias of minus infinity hides a key. A row that sees no key has weights of zero.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from softless.errors import ArgumentError, UnsupportedError, shown
from softless.mechanisms.base import Call, Mechanism, repeat_heads


def softmax(scores: Tensor, visible: Tensor) -> Tensor:
    """Return the softmax over the visible keys; a row without a visible key is zero."""
    scores = torch.where(visible, scores, torch.finfo(scores.dtype).min)
    return torch.where(visible, scores.softmax(-1), 0.0)


def biased(scores: Tensor, visible: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add a bias of any precision to the scores; return them and which keys are then visible."""
    if bias is None:
        return scores, visible
    bias = bias.to(scores.dtype)
    return scores + bias, visible & (bias != -torch.inf)


@dataclass(frozen=True)
class Scored(Mechanism):
    """A mechanism with a score for every pair. A subclass defines `rule`."""

    family: ClassVar[str] = "scored"
    cost: ClassVar[str] = "O(N^2 d)"
    takes_bias: ClassVar[bool] = True

    def default_scale(self, head_dim: int) -> float | None:
        return head_dim**-0.5

    def rule(self, scores: Tensor, visible: Tensor) -> Tensor:
        """Return weights [B, H, N, M] for scores. The scores of hidden keys may be anything and must have no effect."""
        raise NotImplementedError

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        """Return the score of each pair [B, H, N, M], for k with as many heads as q."""
        return call.scale * (q @ k.mT)

    def weights(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        scores = self.scores(q, repeat_heads(k, q.shape[1]), call)
        return self.rule(*biased(scores, call.visible(q, k), call.bias))


MOST = 2**63 - 1  # the largest integer of torch
MOST_STAND_INS = 2**16  # landmarks, bases or random features, which are formed for any number of tokens
MOST_STEPS = 1000


def check_count(option: str, value: object, least: int = 1, most: int = MOST) -> None:
    """Raise if an option is not an integer from `least` to `most`."""
    if type(value) is not int or value < least:
        raise ArgumentError(f"{option} {shown(value)} is not a whole number, at least {least}")
    if value > most:
        raise ArgumentError(f"{option} {shown(value)} is more than the {most:,} that there can be")


def check_square(name: str, q: Tensor, k: Tensor, call: Call) -> None:
    """Raise if the position of the queries among the keys is unknown."""
    queries, keys = q.shape[2], k.shape[2]
    if queries and keys and queries != keys and not call.is_causal:
        raise UnsupportedError(
            f"{name} gives keys to positions: it needs as many queries as keys, got {queries} and {keys} "
            f"(is_causal=True sets the last query at the last key)"
        )
