"""What confusion costs: a model's queries are confused on purpose, without retraining (InLine, Table 1).

    f1            softmax on ReLU(q) / |ReLU(q)|                     confuses as phi = ReLU does under division
    f2            softmax on ReLU(A q + b) / |ReLU(A q + b)|         A and b drawn as a fresh layer's are
    rows 25 %     a quarter of the queries become pairs that read one row: confusion and nothing else

f1 and f2 also take the length of a query away, to which a trained softmax is used; the paper retrains (the mechanism
`softmax` has the option `confusion` for that). Pairs that share a row work with any mechanism.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from softless.errors import ArgumentError, UnsupportedError
from softless.mechanisms import mechanism
from softless.probes.capture import Edit
from softless.probes.editing import Labeled, edited_accuracy, seeded
from softless.probes.layer import Layer
from softless.probes.running import Estimate


@dataclass(frozen=True)
class InducedAccuracy:
    """Top-1 accuracy with nothing ("none"), f1, f2, or a share of the rows confused."""

    what: str
    accuracy: Estimate


def induced_confusion(
    model: nn.Module, batches: Labeled, *, ratios: Sequence[float] = (0.25, 0.5, 1.0), seed: int = 0
) -> tuple[InducedAccuracy, ...]:
    """Accuracy of a softmax model under every way of confusing its queries."""
    edits: dict[str, Edit | None] = {"none": None, "f1": induce("relu"), "f2": induce("affine_relu", seed)}
    edits |= {f"rows {100 * ratio:g} %": share_rows(ratio, seed) for ratio in ratios}
    found = edited_accuracy(model, batches, edits)
    return tuple(InducedAccuracy(what, accuracy) for what, accuracy in found.items())


def induce(confusion: str = "relu", seed: int = 0) -> Edit:
    """f1 ("relu") or f2 ("affine_relu") before the softmax of every layer."""
    confused = mechanism("softmax", confusion=confusion)

    def edit(layer: Layer, _weights: Tensor) -> Tensor:
        if layer.mechanism.name != "softmax":
            raise UnsupportedError(
                f"induce confuses the queries of a softmax, and layer '{layer.name}' runs '{layer.mechanism.name}'"
            )
        _, heads, _, dim = layer.q.shape
        inputs = {name: _drawn(shape, layer, seed) for name, shape in confused.input_shapes(heads, dim).items()}
        return replace(layer, mechanism=confused, inputs=inputs).weights()

    return edit


def share_rows(ratio: float, seed: int = 0) -> Edit:
    """`ratio` of the queries, drawn once for each layer, become pairs that read one row, that of the first."""
    if not 0 <= ratio <= 1:
        raise ArgumentError(f"ratio {ratio} is not a share between 0 and 1")

    def edit(layer: Layer, weights: Tensor) -> Tensor:
        tokens = weights.shape[2]
        drawn = torch.randperm(tokens, generator=seeded(seed, layer.name))[: round(ratio * tokens)]
        reads = torch.arange(tokens)
        reads[drawn] = drawn[torch.arange(len(drawn)) // 2 * 2]
        return weights[:, :, reads.to(weights.device)]

    return edit


def _drawn(shape: tuple[int, ...], layer: Layer, seed: int) -> Tensor:
    bound = layer.q.shape[-1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=seeded(seed, layer.name, shape)).to(layer.q)
