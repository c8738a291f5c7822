"""How well a model answers when its attention weights are edited, without retraining.

A batch is run once for every edit, so one pass over the images serves them all, and nothing is kept but counts.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from zlib import crc32

import torch
from torch import Generator, Tensor, nn

from softless.errors import ArgumentError
from softless.probes.capture import Edit, capture
from softless.probes.running import Estimate, proportion

Labeled = Iterable[tuple[Tensor, Tensor] | list[Tensor]]  # batches of (pixels, labels)


def edited_accuracy(model: nn.Module, batches: Labeled, edits: Mapping[str, Edit | None]) -> dict[str, Estimate]:
    """Top-1 accuracy under each edit; None is the model as it is."""
    right, images = dict.fromkeys(edits, 0), 0
    with torch.no_grad(), at_rest(model):
        for pixels, labels in batches:
            images += len(labels)
            for name, edit in edits.items():
                with nullcontext() if edit is None else capture(model, edit=edit):
                    out = model(pixels)
                logits = getattr(out, "logits", out)  # Hugging Face's models answer with more than logits
                right[name] += int((logits.argmax(-1) == labels).sum())
    if not images:
        raise ArgumentError("there are no images to measure an accuracy on: batches is empty")
    return {name: proportion(count, images) for name, count in right.items()}


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards each module is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def seeded(seed: int, *names: object) -> Generator:
    """A generator for what these names name: the same draws in every batch and every process."""
    return Generator().manual_seed(crc32(repr((seed, *names)).encode()))
