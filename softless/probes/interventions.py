"""Accuracy of a model after its attention weights are edited, without retraining (InLine, Tables 1 and 2).

Hide keys:

    local k       hides the k x k window around each query of the image
    random n      hides n tokens outside of its 3 x 3, drawn once for each layer and query

Rows still sum to one, as if the hidden keys did not exist:

    divide, softmax     w_ij / sum over the rest
    subtract            w_ij + (1 - sum over the rest) / count of the rest               which is InLine on the rest
    no normalizer       unchanged

Confuse queries:

    f1            softmax on ReLU(q) / |ReLU(q)|                     confuses as phi = ReLU does under division
    f2            softmax on ReLU(A q + b) / |ReLU(A q + b)|         A and b drawn like those of a new layer
    rows 25 %     a quarter of the queries become pairs that read one row, and nothing else changes

f1 and f2 also drop the length of a query, which a trained softmax relies on; the paper retrains (the mechanism
`softmax` has the option `confusion` for that). Pairs that share a row work with any mechanism.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from zlib import crc32

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Generator, Tensor, nn

from softless.algebra.state import visible
from softless.errors import ArgumentError, UnsupportedError
from softless.mechanisms import Mechanism, mechanism
from softless.probes.capture import Edit, capture
from softless.probes.layer import Grid, Layer
from softless.probes.locality import neighborhood
from softless.probes.running import Estimate, proportion

Labeled = Iterable[tuple[Tensor, Tensor] | list[Tensor]]  # batches of (pixels, labels)


def edited_accuracy(model: nn.Module, batches: Labeled, edits: Mapping[str, Edit | None]) -> dict[str, Estimate]:
    """Return the top-1 accuracy under each edit; None is the model as it is. Each batch runs once per edit."""
    right, images = dict.fromkeys(edits, 0), 0
    with torch.no_grad(), evaluating(model):
        for pixels, labels in batches:
            images += len(labels)
            for name, edit in edits.items():
                with nullcontext() if edit is None else capture(model, edit=edit):
                    out = model(pixels)
                logits = getattr(out, "logits", out)  # Hugging Face's models return more than logits
                right[name] += int((logits.argmax(-1) == labels).sum())
    if not images:
        raise ArgumentError("there are no images to measure an accuracy on: batches is empty")
    return {name: proportion(count, images) for name, count in right.items()}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode inside the block, and each module back in its own mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _seeded(seed: int, *names: object) -> Generator:
    """Return a generator that draws the same for these names in every batch and every process."""
    return Generator().manual_seed(crc32(repr((seed, *names)).encode()))


@dataclass(frozen=True)
class Local:
    """Hides the side x side window around each query."""

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
    """Hides this many tokens outside of each query's 3 x 3, or all of them if there are fewer."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ArgumentError(f"tokens {self.tokens} is not a number of tokens, at least 0")

    def __str__(self) -> str:
        return f"random {self.tokens}"

    def hidden(self, grid: Grid, seed: int, layer: str) -> Bool[Tensor, "n n"]:
        near = neighborhood(grid, 3)
        lot = torch.rand(near.shape, generator=_seeded(seed, layer, self.tokens)).masked_fill(near, 2.0)
        return (lot.argsort(-1).argsort(-1) < self.tokens) & ~near


Mask = Local | Random
MASKS: tuple[Mask | None, ...] = (None, Local(3), Local(5), Local(7), Random(9), Random(25), Random(49))


def mask_out(
    model: nn.Module, batches: Labeled, masks: Sequence[Mask | None] = MASKS, *, seed: int = 0
) -> dict[str, Estimate]:
    """Return the accuracy of a classifier by mask (InLine, Table 2); the seed draws the random masks."""
    by_name = {"none" if mask is None else str(mask): mask for mask in masks}
    reached: dict[str, set[str]] = {name: set() for name in by_name}
    edits = {name: None if mask is None else hide(mask, seed, reached[name]) for name, mask in by_name.items()}
    accuracies = edited_accuracy(model, batches, edits)
    for name, layers in reached.items():
        if name != "none" and not layers:
            raise UnsupportedError(f"mask {name} needs tokens that are patches of an image: no layer has them")
    return accuracies


def hide(mask: Mask, seed: int = 0, reached: set[str] | None = None) -> Edit:
    """Return a mask as an edit for `capture`.

    The edit skips layers whose tokens are no image, and adds the names of the others to `reached`. Class tokens are
    never hidden and see everything. InLine's local residual is not attention, so it stays.
    """

    def edit(layer: Layer, weights: Tensor) -> Tensor:
        grid = layer.picture()
        if grid is None:
            return weights
        if reached is not None:
            reached.add(layer.name)
        hidden = F.pad(mask.hidden(grid, seed, layer.name).to(weights.device), (layer.prefix, 0, layer.prefix, 0))
        seen = visible(*weights.shape[2:], is_causal=layer.is_causal, key_mask=layer.key_mask, device=weights.device)
        return without(weights, hidden, seen, layer.mechanism)

    return edit


def without(
    weights: Float[Tensor, "b c n m"],
    hidden: Bool[Tensor, "n m"],
    seen: Bool[Tensor, "#b 1 #n m"],
    mechanism: Mechanism,
) -> Float[Tensor, "b c n m"]:
    """Return the weights with hidden keys at zero and the rest normalized as the mechanism does it.

    A row without hidden keys stays as it is, to the bit; a row whose keys are all hidden becomes zero.
    """
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


def induced_confusion(
    model: nn.Module, batches: Labeled, *, ratios: Sequence[float] = (0.25, 0.5, 1.0), seed: int = 0
) -> dict[str, Estimate]:
    """Return the accuracy of a softmax classifier by confusion: none, f1, f2, and shares of rows (InLine, Table 1)."""
    edits: dict[str, Edit | None] = {"none": None, "f1": induce("relu"), "f2": induce("affine_relu", seed)}
    edits |= {f"rows {100 * ratio:g} %": share_rows(ratio, seed) for ratio in ratios}
    return edited_accuracy(model, batches, edits)


def induce(confusion: str = "relu", seed: int = 0) -> Edit:
    """Return the edit that applies f1 ("relu") or f2 ("affine_relu") before the softmax of every layer."""
    confused = mechanism("softmax", confusion=confusion)

    def edit(layer: Layer, _weights: Tensor) -> Tensor:
        if layer.mechanism.name != "softmax":
            raise UnsupportedError(
                f"induce confuses the queries of a softmax, and layer '{layer.name}' runs '{layer.mechanism.name}'"
            )
        _, heads, _, dim = layer.q.shape
        bound = dim**-0.5
        inputs: dict[str, Tensor] = {}
        for name, shape in confused.input_shapes(heads, dim).items():
            drawn = torch.empty(shape).uniform_(-bound, bound, generator=_seeded(seed, layer.name, shape))
            inputs[name] = drawn.to(layer.q)
        return replace(layer, mechanism=confused, inputs=inputs).weights()

    return edit


def share_rows(ratio: float, seed: int = 0) -> Edit:
    """Return the edit that turns `ratio` of the queries into pairs; both queries of a pair read the row of the first.

    The queries are drawn once for each layer.
    """
    if not 0 <= ratio <= 1:
        raise ArgumentError(f"ratio {ratio} is not a share between 0 and 1")

    def edit(layer: Layer, weights: Tensor) -> Tensor:
        tokens = weights.shape[2]
        drawn = torch.randperm(tokens, generator=_seeded(seed, layer.name))[: round(ratio * tokens)]
        reads = torch.arange(tokens)
        reads[drawn] = drawn[torch.arange(len(drawn)) // 2 * 2]
        return weights[:, :, reads.to(weights.device)]

    return edit
