"""What a model loses when no query may see its neighbors, or as many tokens elsewhere (InLine, Table 2).

    local k     hides the k x k window around each query of the picture
    random n    hides n tokens outside of its 3 x 3, drawn once for each layer and query

Rows still sum to one, as if the hidden keys had never been there:

    divide, softmax     w_ij / sum over the rest
    subtract            w_ij + (1 - sum over the rest) / count of the rest               which is InLine on the rest
    no normalizer       as they are

A row in which nothing is hidden stays as it is, to the bit; one in which everything is hidden is zero. Class tokens
are never hidden, and see everything. InLine's local residual is not attention: it keeps what it adds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from softless.algebra.state import visible
from softless.errors import ArgumentError, UnsupportedError
from softless.mechanisms import Mechanism
from softless.probes.capture import Edit
from softless.probes.editing import Labeled, edited_accuracy, seeded
from softless.probes.layer import Layer
from softless.probes.locality import Grid, is_picture, neighborhood
from softless.probes.running import Estimate


@dataclass(frozen=True)
class Local:
    """The side x side window around each query."""

    side: int

    def __post_init__(self) -> None:
        if self.side < 1 or self.side % 2 == 0:
            raise ArgumentError(f"side {self.side} is not an odd number of tokens, at least 1")

    def __str__(self) -> str:
        return f"local {self.side}"

    def hidden(self, grid: Grid, seed: int, layer: str) -> Bool[Tensor, "n n"]:
        return neighborhood(grid, self.side)


@dataclass(frozen=True)
class Random:
    """This many tokens outside of each query's 3 x 3, or all of them where there are fewer."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ArgumentError(f"tokens {self.tokens} is not a number of tokens, at least 0")

    def __str__(self) -> str:
        return f"random {self.tokens}"

    def hidden(self, grid: Grid, seed: int, layer: str) -> Bool[Tensor, "n n"]:
        near = neighborhood(grid, 3)
        lot = torch.rand(near.shape, generator=seeded(seed, layer, self.tokens)).masked_fill(near, 2.0)
        return (lot.argsort(-1).argsort(-1) < self.tokens) & ~near


Mask = Local | Random
MASKS: tuple[Mask | None, ...] = (None, Local(3), Local(5), Local(7), Random(9), Random(25), Random(49))


@dataclass(frozen=True)
class MaskedAccuracy:
    """Top-1 accuracy with this mask in each of so many layers."""

    mask: str
    accuracy: Estimate
    layers: int


def mask_out(
    model: nn.Module, batches: Labeled, masks: Sequence[Mask | None] = MASKS, *, seed: int = 0
) -> tuple[MaskedAccuracy, ...]:
    """Table 2: accuracy on (pixels, labels) under each mask, without retraining; None masks nothing."""
    reached: dict[str, set[str]] = {_name(mask): set() for mask in masks}
    edits = {_name(mask): None if mask is None else hide(mask, seed, reached[_name(mask)]) for mask in masks}
    found = edited_accuracy(model, batches, edits)
    for name, layers in reached.items():
        if name != "none" and not layers:
            raise UnsupportedError(f"mask {name} needs tokens that are a picture, and no layer of this model has them")
    return tuple(MaskedAccuracy(name, accuracy, len(reached[name])) for name, accuracy in found.items())


def hide(mask: Mask, seed: int = 0, reached: set[str] | None = None) -> Edit:
    """A mask as an edit for `capture`; layers whose tokens are no picture pass by. `reached` collects the others."""

    def edit(layer: Layer, weights: Tensor) -> Tensor:
        if layer.grid is None or not is_picture(layer):
            return weights
        if reached is not None:
            reached.add(layer.name)
        picture = mask.hidden(layer.grid, seed, layer.name).to(weights.device)
        hidden = F.pad(picture, (layer.prefix, 0, layer.prefix, 0))
        seen = visible(*weights.shape[2:], is_causal=layer.is_causal, key_mask=layer.key_mask, device=weights.device)
        return without(weights, hidden, seen, layer.mechanism)

    return edit


def _name(mask: Mask | None) -> str:
    return "none" if mask is None else str(mask)


def without(
    weights: Float[Tensor, "b c n m"],
    hidden: Bool[Tensor, "n m"],
    seen: Bool[Tensor, "#b 1 #n m"],
    mechanism: Mechanism,
) -> Float[Tensor, "b c n m"]:
    """The weights with the hidden keys at zero and the others normalized as the mechanism does it."""
    rest = seen & ~hidden
    kept = torch.where(rest, weights, 0.0)
    mass, count = kept.sum(-1, keepdim=True), rest.sum(-1, keepdim=True).clamp(min=1)
    if not mechanism.rows_sum_to_one:
        normal = kept
    elif getattr(mechanism, "reader", None) in ("subtract", "contrast"):
        normal = torch.where(rest, kept + (1 - mass) / count, 0.0)
    else:
        even = rest / count if mechanism.family == "kernelized" else torch.zeros_like(kept)  # a bias may hide the rest
        normal = torch.where(mass != 0, kept / torch.where(mass != 0, mass, 1.0), even)
    return torch.where(hidden.any(-1, keepdim=True), normal.to(weights.dtype), weights)
