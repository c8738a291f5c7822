"""Every probe on one layer, on one batch: one number an image and head for each measure.

Queries are averaged within an image, over all its windows; counts are added up. Padding takes part in nothing.

Shapes: B samples (images, or windows of them, those of an image next to each other), H heads, N queries, M keys.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from softless.backends import widen
from softless.errors import ArgumentError, NonFiniteError
from softless.probes.confusion import collinear_distance, collinear_pairs, confusions
from softless.probes.findings import Measured
from softless.probes.injectivity import side_by_side
from softless.probes.layer import Layer
from softless.probes.locality import is_picture, locality, residual_share
from softless.probes.propositions import rank_condition
from softless.probes.score_range import TAU, effective_rank, filtered, spread

COLLISION = 1e-3
ROOM = 2**20  # weights looked at together: what is formed of them fits a cache, and memory does not grow with the batch
Values = dict[str, Tensor]


def measure(layer: Layer, images: int, tau: Sequence[float] = TAU) -> Measured:
    """Every measure of a layer that saw a batch of so many images, a few of them at a time."""
    samples, heads, queries = layer.q.shape[:3]
    if samples % images:
        raise ArgumentError(
            f"layer '{layer.name}' has {samples} samples for a batch of {images}: it needs as many, or windows of them"
        )
    windows = samples // images
    few = max(1, ROOM // (windows * heads * queries * layer.k.shape[2]))
    cuts = [slice(start * windows, (start + few) * windows) for start in range(0, images, few)]
    first, *rest = (_measure(part_of(layer, cut), windows, tau) for cut in cuts)
    values = {name: torch.cat([x, *(each.values[name] for each in rest)]) for name, x in first.values.items()}
    return replace(first, values=values, rank=min(each.rank for each in (first, *rest)))


def part_of(layer: Layer, samples: slice) -> Layer:
    """The same layer on some of its samples."""
    its = {name: x[samples] for name in ("q", "k", "v", "key_mask", "local") if (x := getattr(layer, name)) is not None}
    inputs = layer.inputs and {
        name: x[samples] if name in layer.mechanism.token_inputs else x for name, x in layer.inputs.items()
    }
    bias = layer.bias if layer.bias is None or layer.bias.shape[0] == 1 else layer.bias[samples]
    return replace(layer, **its, inputs=inputs, bias=bias)


def _measure(layer: Layer, windows: int, tau: Sequence[float]) -> Measured:
    samples, heads, queries = layer.q.shape[:3]
    images = samples // windows
    layer = replace(layer, q=widen(layer.q), k=widen(layer.k), v=widen(layer.v))
    weights, scores, real = layer.weights(), layer.scores(), real_queries(layer)
    _check_finite(layer.name, weights, scores, real)
    values = _of_scores(scores, real, images, tau) | _of_pairs(layer, weights, real, images)
    if is_picture(layer):
        values |= _of_places(layer, weights, scores > -torch.inf, real, images)
    if layer.local is not None:
        share = residual_share(layer.local, layer.combined(weights))
        values["residual_share"] = _by_image(share, images).mean(1)
    keys = rank_condition(layer.k, layer.mechanism, inputs=layer.inputs, key_mask=layer.key_mask)
    smallest = keys.singular_values[..., -1].repeat_interleave(heads // keys.rank.shape[1], 1)
    values["smallest_singular_value"] = _by_image(smallest, images).mean(1)
    rank = int(keys.rank.min())
    return Measured(layer.name, layer.mechanism.name, queries, values, rank, keys.features + 1)


def real_queries(layer: Layer) -> Bool[Tensor, "b n"]:
    """Which queries are tokens and not padding: where they are also the keys, the key mask says so."""
    samples, _, queries, _ = layer.q.shape
    if layer.key_mask is not None and layer.key_mask.shape[1] == queries:
        return layer.key_mask
    return torch.ones(samples, queries, dtype=torch.bool, device=layer.q.device)


def per_image(values: Float[Tensor, "b h n"], real: Bool[Tensor, "b n"], images: int) -> Float[Tensor, "{images} h"]:
    """The mean over the real queries of an image, those of all its windows."""
    total = _by_image(torch.where(real[:, None], values.double(), 0.0), images).sum((1, 3))
    return total / _by_image(real, images).sum((1, 2))[:, None].clamp(min=1)


def _check_finite(name: str, weights: Tensor, scores: Tensor, real: Tensor) -> None:
    wrong = ~weights.sum(-1).isfinite().all(1) | scores.isnan().any(-1).any(1)  # [B, N]
    if bool((wrong & real).any()):
        raise NonFiniteError(
            f"layer '{name}' has scores or weights that are not finite numbers: nothing can be measured"
        )


def _of_scores(scores: Tensor, real: Tensor, images: int, tau: Sequence[float]) -> Values:
    found, kept = spread(scores), filtered(scores, tau)
    each = {"score_range": found.range, "score_deviation": found.deviation, "entropy": found.entropy}
    each |= {"score_volume": found.volume}
    each |= {"first_order_error": found.first_order_error, "uniform_error": found.uniform_error, "bound": found.bound}
    each |= {f"kept {t:g}": x for t, x in zip(tau, kept.kept.unbind(-1), strict=True)}
    each |= {f"discarded {t:g}": x for t, x in zip(tau, kept.discarded.unbind(-1), strict=True)}
    values = {name: per_image(x, real, images) for name, x in each.items()}
    return values | {"effective_rank": _by_image(effective_rank(scores, real), images).mean(1)}


def _of_pairs(layer: Layer, weights: Tensor, real: Tensor, images: int) -> Values:
    rows = side_by_side(weights, layer.q.shape[1])
    confused = confusions(rows, COLLISION, q=layer.q, real=real)
    collides = collinear_distance(layer, weights) < COLLISION
    return {
        "confusions": _by_image(confused, images).sum(1).double(),
        "collinear_pairs": _by_image(collinear_pairs(layer.q, real=real), images).sum(1).double(),
        "collinear_collisions": per_image(collides.double(), real, images),
    }


def _of_places(layer: Layer, weights: Tensor, seen: Tensor, real: Tensor, images: int) -> Values:
    assert layer.grid is not None
    found = locality(
        weights, layer.grid, layer.prefix, seen=seen.repeat_interleave(weights.shape[1] // seen.shape[1], 1)
    )
    each = {"local_mass": found.mass, "local_baseline": found.mass_baseline}
    each |= {"attention_distance": found.distance, "distance_baseline": found.distance_baseline}
    heads, real = layer.q.shape[1], real[:, layer.prefix :]
    return {name: per_image(_per_head(x, heads), real, images) for name, x in each.items()}


def _per_head(values: Float[Tensor, "b c n"], heads: int) -> Float[Tensor, "b {heads} n"]:
    """The mean over a head's matrices, where it has several (hydra)."""
    return values.unflatten(1, (heads, -1)).mean(2)


def _by_image(values: Shaped[Tensor, "b ..."], images: int) -> Shaped[Tensor, "{images} w ..."]:
    return values.unflatten(0, (images, -1))
