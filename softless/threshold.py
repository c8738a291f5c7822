"""Measure, for every query, how much the threshold filter keeps and how far it is from softmax."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from softless.algebra.precision import widen
from softless.errors import ArgumentError
from softless.functional import attention_weights
from softless.mechanisms import Call, mechanism
from softless.mechanisms.base import repeat_heads
from softless.mechanisms.scored import biased
from softless.mechanisms.threshold import Threshold
from softless.validation import check_tensors, explain_unknown_arguments


@dataclass(frozen=True)
class ThresholdReport:
    """How the threshold filter treats each query. Every field is [B, H, N]; a query that sees no key has zeros.

    >>> import torch, softless
    >>> q, k = torch.randn(2, 1, 4, 256, 64).unbind()           # [batch, heads, tokens, dim]
    >>> report = softless.threshold_report(q, k, tau=2)
    >>> report.range.shape, list(report.summary())
    (torch.Size([1, 4, 256]), ['kept_fraction', 'discarded_mass', 'range', 'error'])

    Attributes:
        kept_fraction: Share of the visible keys whose score is within tau of the row's largest.
        discarded_mass: Softmax weight on the keys that are discarded.
        range: Largest score minus smallest, over the visible keys.
        error: |w - p| / |p|, where w are the threshold weights and p the softmax weights of the row.
    """

    kept_fraction: Tensor
    discarded_mass: Tensor
    range: Tensor
    error: Tensor

    def summary(self) -> dict[str, float]:
        """Return the mean of each field over all queries."""
        return {name: getattr(self, name).mean().item() for name in self.__dataclass_fields__}


@explain_unknown_arguments
def threshold_report(
    q: Tensor,
    k: Tensor,
    *,
    tau: float = 1.0,
    expansion: str = "max",
    tail: str = "drop",
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
) -> ThresholdReport:
    """Measure how well `threshold` approximates softmax on these queries and keys.

    >>> import torch, softless
    >>> q, k = torch.randn(2, 1, 4, 256, 64).unbind()           # [batch, heads, tokens, dim]
    >>> published = softless.threshold_report(q, k)
    >>> better = softless.threshold_report(q, k, expansion="minimax", tail="mean")
    >>> published.error.shape, bool(better.error.mean() < published.error.mean())
    (torch.Size([1, 4, 256]), True)

    Args:
        q: Queries [B, H, N, d].
        k: Keys [B, G, M, d], at least one. H must be a multiple of G.
        tau: Keys whose score is within tau of the row's largest are kept. Default: 1.0.
        expansion: How kept keys are weighed: "max", "mean" or "minimax". Default: "max".
        tail: What discarded keys get: "drop" (nothing) or "mean" (their mean weight). Default: "drop".
        is_causal: Whether query i sees only the keys up to its own. Default: False.
        key_mask: bool [B, M], True for a real token. Default: None, all real.
        bias: Added to the scores, float, broadcastable to [B, H, N, M]. Default: None.
        scale: Factor on q.k. Default: None, which is 1 / sqrt(d).

    Returns:
        A `ThresholdReport` with one number per query.
    """
    threshold = mechanism("threshold", tau=tau, expansion=expansion, tail=tail)
    assert isinstance(threshold, Threshold)
    check_tensors(q, k, k)
    if k.shape[2] == 0:
        raise ArgumentError("threshold_report needs at least one key, got k with 0 tokens")
    q, k = widen(q), widen(k)
    weigh = partial(attention_weights, q, k, is_causal=is_causal, key_mask=key_mask, bias=bias, scale=scale)
    weights, softmax = weigh(mechanism=threshold), weigh(mechanism="softmax")
    visible = Call(is_causal, key_mask).visible(q, k).expand_as(weights)
    scores = (q.shape[3] ** -0.5 if scale is None else scale) * (q @ repeat_heads(k, q.shape[1]).mT)
    scores, visible = biased(scores, visible, bias)
    _, kept, spread = threshold.keep(scores, visible)
    norm = softmax.norm(dim=-1)
    return ThresholdReport(
        kept_fraction=kept.sum(-1) / visible.sum(-1).clamp(min=1),
        discarded_mass=torch.where(kept, 0.0, softmax).sum(-1),
        range=spread.squeeze(-1),
        error=(weights - softmax).norm(dim=-1) / torch.where(norm > 0, norm, 1.0),
    )
