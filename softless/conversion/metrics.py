"""What a model is good at, and what it loses when layers are replaced: one number per sample, compared in pairs.

    perplexity   causal models: e^{mean loss of the next token}           harm: its relative growth, e^{mean d} - 1
    masked       masked tokens: the same, of the tokens with a label      d: the growth of a sample's mean loss
    cosine       encoders: of the embedding with the original's           harm: 1 - mean cosine
    accuracy     classifiers: share of right answers                      harm: share of the answers lost - gained

An embedding is the mean over the real tokens. Intervals are 95 %: Student's t over samples, and Agresti and Min (2005)
for the difference of two shares, which has a width even if no answer changes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import expm1, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softless.conversion.layers import LABELS, Layers
from softless.conversion.samples import SampleSet
from softless.errors import ArgumentError, no_such
from softless.probes.running import Estimate, Z, observe

Rows = list[list[float]]  # one row per sample
Run = Callable[..., Any]
IGNORED = -100  # a label that asks for nothing
TOKENS = 64  # whose losses are computed together


@dataclass(frozen=True)
class Metric:
    """How answers are taken and compared.

    name       as users name it
    noun       what the verdict calls it
    answers    (run, batch) -> [n, c], what is kept of each sample; run(batch, **how) is a pass of the model
    compare    (before, after) -> [n, c], the damage of each sample in its first column
    harm       compared -> an estimate, which the budget limits
    value      (before, compared or None) -> the metric itself
    """

    name: str
    noun: str
    answers: Callable[[Run, SampleSet], Tensor]
    compare: Callable[[Tensor, Tensor], Tensor]
    harm: Callable[[Rows], Estimate]
    value: Callable[[Tensor, Rows | None], float]

    def says(self, harm: Estimate) -> str:
        """Write a harm as a sentence does: perplexity +3.1 % (+2.4 to +3.9)."""
        low, high = (harm.mean if end is None else end for end in (harm.low, harm.high))
        if self.name == "cosine":
            return f"cosine {1 - harm.mean:.4f} ({1 - high:.4f} to {1 - low:.4f})"
        if self.name == "accuracy":
            return f"accuracy {0 - 100 * harm.mean:+.1f} points ({0 - 100 * high:+.1f} to {0 - 100 * low:+.1f})"
        return f"{self.noun} {100 * harm.mean:+.1f} % ({100 * low:+.1f} to {100 * high:+.1f})"


def damage(compared: Rows | None) -> float | None:
    """Return the mean damage that layers are ranked by; None if it is not finite."""
    return None if compared is None else sum(row[0] for row in compared) / len(compared)


def metric_of(layers: Layers, samples: SampleSet, name: str | None) -> Metric:
    """Return the metric of this name, or the one that fits the model."""
    if name is not None and name not in METRICS:
        raise ArgumentError(no_such("metric", name, METRICS))
    chosen, kind = METRICS[layers.metric(samples) if name is None else name], type(layers.model).__name__
    fitting = layers.metrics
    if chosen.name not in fitting:
        of_words = layers.pictures and chosen.name in ("perplexity", "masked")
        why = f"is of words, and {kind} reads pictures" if of_words else f"does not fit {kind}"
        raise ArgumentError(f"metric '{chosen.name}' {why}: metric can be {' or '.join(fitting)}")
    if chosen.name in ("masked", "accuracy") and LABELS not in samples:
        raise ArgumentError(
            f"{kind} is measured by its labels (metric '{chosen.name}'), and data has only {', '.join(samples)}"
        )
    return chosen


def _next_token(run: Run, batch: SampleSet) -> Tensor:
    tokens = batch["input_ids"]
    logits = run(batch, use_cache=False).logits[:, :-1]
    real = batch["attention_mask"][:, 1:].bool() if "attention_mask" in batch else torch.ones_like(tokens[:, 1:]).bool()
    return _mean_loss(logits, tokens[:, 1:].masked_fill(~real, IGNORED))


def _masked_token(run: Run, batch: SampleSet) -> Tensor:
    return _mean_loss(run(batch).logits, batch[LABELS])


def _mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of each sample over its targets, [n, 1]; -100 is none.

    A few tokens at a time: the losses of a large vocabulary would take as much memory as the logits, and more time.
    """
    sums = torch.stack([_sum_of_losses(z, y) for z, y in zip(logits, targets, strict=True)])
    return sums[:, None] / (targets != IGNORED).sum(1, keepdim=True).clamp(min=1)


def _sum_of_losses(logits: Tensor, targets: Tensor) -> Tensor:
    parts = zip(logits.split(TOKENS), targets.split(TOKENS), strict=True)
    return torch.stack([_losses(z, y).double().sum() for z, y in parts]).sum()


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORED)


def _embedding(run: Run, batch: SampleSet) -> Tensor:
    output = run(batch)
    x = output.last_hidden_state if hasattr(output, "last_hidden_state") else output.logits
    if x.ndim == 2:
        return x.double()
    mask = batch.get("attention_mask")
    mask = torch.ones(x.shape[:2], device=x.device) if mask is None else mask
    return (x.double() * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


def _answer(run: Run, batch: SampleSet) -> Tensor:
    logits, labels = run(batch).logits.double(), batch[LABELS]
    loss = F.cross_entropy(logits, labels, reduction="none")
    return torch.stack([loss, (logits.argmax(-1) == labels).double()], 1)


def _cosine(before: Tensor, after: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(before, after, dim=1)[:, None]


def _difference(before: Tensor, after: Tensor) -> Tensor:
    return after - before


def _growth(compared: Rows) -> Estimate:
    """Return the relative growth of a perplexity."""
    estimate = _mean(compared)
    low, high = (None if end is None else expm1(end) for end in (estimate.low, estimate.high))
    return Estimate(expm1(estimate.mean), low, high, estimate.n)


def _mean(compared: Rows) -> Estimate:
    (estimate,) = observe(torch.tensor(compared, dtype=torch.float64)[:, :1]).estimates()
    return estimate


def _lost(compared: Rows) -> Estimate:
    """Return the share of answers that were right and are wrong now, minus the share that changed the other way."""
    changes = [row[1] for row in compared]
    n, lost, gained = len(changes), sum(x < 0 for x in changes), sum(x > 0 for x in changes)
    middle, both = (lost - gained) / (n + 2), (lost + gained + 1) / (n + 2)
    half = Z * sqrt((both - middle**2) / (n + 2))
    return Estimate((lost - gained) / n, middle - half, middle + half, n)


def _perplexity(before: Tensor, compared: Rows | None) -> float:
    return float((before.mean() + (damage(compared) or 0.0)).exp())


def _similarity(_before: Tensor, compared: Rows | None) -> float:
    return 1.0 - (damage(compared) or 0.0)


def _share(before: Tensor, compared: Rows | None) -> float:
    return float(before[:, 1].mean()) - (0.0 if compared is None else _lost(compared).mean)


METRICS = {
    metric.name: metric
    for metric in (
        Metric("perplexity", "perplexity", _next_token, _difference, _growth, _perplexity),
        Metric("masked", "perplexity of masked tokens", _masked_token, _difference, _growth, _perplexity),
        Metric("cosine", "cosine", _embedding, _cosine, _mean, _similarity),
        Metric("accuracy", "accuracy", _answer, _difference, _lost, _share),
    )
}
