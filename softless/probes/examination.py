"""Examine a model: every measure of every attention layer, in one pass over its images.

    batch -> model -> q, k, v of each layer -> one number per image, head and measure -> means and intervals

A batch is dropped before the next one comes: memory depends on the size of a batch, not on the number of batches.
Queries are averaged within an image, over all its windows; counts are added up. Padding takes no part.

Shapes: B samples (images, or windows of them, those of an image next to each other), H heads, N queries, M keys.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn

from softless.algebra.precision import widen
from softless.errors import ArgumentError, NonFiniteError
from softless.probes.capture import capture
from softless.probes.findings import Examination, LayerTally, Measured
from softless.probes.injectivity import collinear_distance, collinear_pairs, confusions, rank_condition, rows_per_head
from softless.probes.interventions import evaluating
from softless.probes.layer import Captured, Grid, Layer
from softless.probes.locality import locality, residual_share
from softless.probes.running import Histogram, histogram
from softless.probes.score_range import TAU, effective_rank, filtered, spread

COLLISION = 1e-3
ROOM = 2**20  # number of weights measured together: they fit a cache, and memory does not grow with the batch
Forward = Callable[[nn.Module, Any], object]
Values = dict[str, Tensor]


def examine(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Forward | None = None,
    advance: Callable[[int], object] | None = None,
    only: Callable[[str], bool] | None = None,
    tau: Sequence[float] = TAU,
) -> Examination:
    """Measure the attention in each layer of a model on these batches.

    Args:
        model: any model that `capture` can read.
        batches: each a tensor, a tuple whose first part the model takes, or a mapping of keyword arguments.
        forward: runs `forward(model, batch)` for any other kind of batch. Default: call the model.
        advance: `advance(images)` is called after each batch. Default: None.
        only: returns whether to measure the layer of this name. Default: all layers.
        tau: thresholds at which the filter is measured. Default: six from 0.25 to 8.

    Every batch must run the same layers.
    """
    tallies: list[LayerTally] = []
    images, together = 0, Histogram()
    with torch.no_grad(), evaluating(model):
        for batch in batches:
            size, captured = _size(batch), capture_batch(model, batch, forward)
            picked = [layer for layer in captured.layers if only is None or only(layer.name)]
            if not picked:
                raise ArgumentError(f"no layer was picked of {', '.join(layer.name for layer in captured.layers)}")
            measured = [measure(layer, size, tau) for layer in picked]
            tallies = _added(tallies, measured)
            together += histogram(torch.stack([layer.values["confusions"].sum(1) for layer in measured]).sum(0))
            images += size
            if advance is not None:
                advance(size)
    if not images:
        raise ArgumentError("there is nothing to examine: batches is empty")
    return Examination(tuple(tally.findings(tau) for tally in tallies), images, together)


def capture_batch(model: nn.Module, batch: Any, forward: Forward | None = None) -> Captured:
    """Capture the model on one batch."""
    with torch.no_grad(), capture(model) as captured:
        (forward or _forward)(model, batch)
    return captured


def _forward(model: nn.Module, batch: Any) -> object:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, tuple | list) else batch)


def _size(batch: Any) -> int:
    """Return how many images or texts a batch holds."""
    if isinstance(batch, Mapping):
        batch = next(iter(batch.values()))
    parts = isinstance(batch, tuple | list) and isinstance(batch[0], Tensor)
    return len(batch[0] if parts else batch)


def _added(tallies: list[LayerTally], measured: Sequence[Measured]) -> list[LayerTally]:
    if not tallies:
        return [LayerTally(layer) for layer in measured]
    before, now = [tally.first.name for tally in tallies], [layer.name for layer in measured]
    if before != now:
        raise ArgumentError(f"every batch must run the same layers: the first ran {before}, another {now}")
    for tally, layer in zip(tallies, measured, strict=True):
        tally.add(layer)
    return tallies


def measure(layer: Layer, images: int, tau: Sequence[float] = TAU) -> Measured:
    """Measure a layer on a batch of this many images; a few images at a time, to save memory."""
    samples, heads, queries = layer.q.shape[:3]
    if samples % images:
        raise ArgumentError(
            f"layer '{layer.name}' has {samples} samples for a batch of {images}, not a multiple of {images}"
        )
    windows = samples // images
    few = max(1, ROOM // (windows * heads * queries * layer.k.shape[2]))
    cuts = [slice(start * windows, (start + few) * windows) for start in range(0, images, few)]
    parts = [_measure(layer.select(cut), windows, tau) for cut in cuts]
    values = {name: torch.cat([part.values[name] for part in parts]) for name in parts[0].values}
    return replace(parts[0], values=values, rank=min(part.rank for part in parts))


def _measure(layer: Layer, windows: int, tau: Sequence[float]) -> Measured:
    samples, heads, queries = layer.q.shape[:3]
    images = samples // windows
    layer = replace(layer, q=widen(layer.q), k=widen(layer.k), v=widen(layer.v))
    weights, scores, real = layer.weights(), layer.scores(), real_queries(layer)
    _check_finite(layer.name, weights, scores, real)
    values = _score_measures(scores, real, images, tau) | _pair_measures(layer, weights, real, images)
    if (grid := layer.picture()) is not None:
        values |= _place_measures(layer, grid, weights, scores > -torch.inf, real, images)
    if layer.local is not None:
        share = residual_share(layer.local, layer.combined(weights))
        values["residual_share"] = _by_image(share, images).mean(1)
    keys = rank_condition(layer.k, layer.mechanism, inputs=layer.inputs, key_mask=layer.key_mask)
    smallest = keys.singular_values[..., -1].repeat_interleave(heads // keys.rank.shape[1], 1)
    values["smallest_singular_value"] = _by_image(smallest, images).mean(1)
    return Measured(layer.name, layer.mechanism.name, queries, values, int(keys.rank.min()), keys.features + 1)


def real_queries(layer: Layer) -> Bool[Tensor, "b n"]:
    """Return which queries are tokens and not padding: where they are also the keys, the key mask says so."""
    samples, _, queries, _ = layer.q.shape
    if layer.key_mask is not None and layer.key_mask.shape[1] == queries:
        return layer.key_mask
    return torch.ones(samples, queries, dtype=torch.bool, device=layer.q.device)


def per_image(values: Float[Tensor, "b h n"], real: Bool[Tensor, "b n"], images: int) -> Float[Tensor, "{images} h"]:
    """Return the mean over the real queries of each image, in all its windows."""
    total = _by_image(torch.where(real[:, None], values.double(), 0.0), images).sum((1, 3))
    return total / _by_image(real, images).sum((1, 2))[:, None].clamp(min=1)


def _check_finite(name: str, weights: Tensor, scores: Tensor, real: Tensor) -> None:
    wrong = ~weights.sum(-1).isfinite().all(1) | scores.isnan().any(-1).any(1)  # [B, N]
    if bool((wrong & real).any()):
        raise NonFiniteError(
            f"layer '{name}' has scores or weights that are not finite numbers: nothing can be measured"
        )


def _score_measures(scores: Tensor, real: Tensor, images: int, tau: Sequence[float]) -> Values:
    by_query = spread(scores)
    for label, shares in zip(("kept", "discarded"), filtered(scores, tau), strict=True):
        by_query |= {f"{label} {t:g}": x for t, x in zip(tau, shares.unbind(-1), strict=True)}
    values = {name: per_image(x, real, images) for name, x in by_query.items()}
    return values | {"effective_rank": _by_image(effective_rank(scores, real), images).mean(1)}


def _pair_measures(layer: Layer, weights: Tensor, real: Tensor, images: int) -> Values:
    confused = confusions(rows_per_head(weights, layer.q.shape[1]), COLLISION, q=layer.q, real=real)
    collides = collinear_distance(layer, weights) < COLLISION
    return {
        "confusions": _by_image(confused, images).sum(1).double(),
        "collinear_pairs": _by_image(collinear_pairs(layer.q, real=real), images).sum(1).double(),
        "collinear_collisions": per_image(collides.double(), real, images),
    }


def _place_measures(layer: Layer, grid: Grid, weights: Tensor, seen: Tensor, real: Tensor, images: int) -> Values:
    heads = layer.q.shape[1]
    seen = seen.repeat_interleave(weights.shape[1] // heads, 1)
    by_query = locality(weights, grid, layer.prefix, seen=seen)
    by_head = {name: x.unflatten(1, (heads, -1)).mean(2) for name, x in by_query.items()}  # hydra has several matrices
    return {name: per_image(x, real[:, layer.prefix :], images) for name, x in by_head.items()}


def _by_image(values: Shaped[Tensor, "b ..."], images: int) -> Shaped[Tensor, "{images} w ..."]:
    return values.unflatten(0, (images, -1))
