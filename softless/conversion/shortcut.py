"""Measure layers one after the other without the blocks before them, which give what they gave to the original.

    block 0 .. i-1    give the output of block i-1, as it was
    block i ..        run, with a stand-in in layer i

So all layers of a model alone cost half as much. One output per batch is kept, so memory does not grow with the layers.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from softless.conversion.layers import Layers
from softless.conversion.samples import SampleSet


class Enough(Exception):  # noqa: N818  no error
    """A block has given what was asked for, and the rest of the model need not run."""


class Shortcut:
    """Runs a model from the block of a layer on. Layers are gone to in order."""

    def __init__(self, layers: Layers, batches: Callable[[], Iterable[SampleSet]]):
        self.layers, self.batches = layers, batches
        self.at = 0
        self.outputs: list[Any] = []  # what block `at` - 1 gives, batch by batch

    @staticmethod
    def blocks(layers: Layers) -> list[nn.Module]:
        """Return the block of each layer in one stack, or none if layers share one, as in the stages of Swin."""
        paths = [_block(name) for name in layers.names]
        return [layers.model.get_submodule(path) for path in paths] if len({*paths}) == len(paths) else []

    def go_to(self, layer: int) -> None:
        """Find what the blocks before a layer give, with the softmax in all of them."""
        if layer == self.at:
            return
        block, outputs = self.blocks(self.layers)[layer - 1], list[Any]()

        def stop(_module: nn.Module, _args: Any, out: Any) -> None:
            outputs.append(out)
            raise Enough

        hook = block.register_forward_hook(stop)
        try:
            for number, batch in enumerate(self.batches()):
                with suppress(Enough), torch.no_grad():
                    self.run(number, batch)
        finally:
            hook.remove()
        self.at, self.outputs = layer, outputs

    def run(self, number: int, batch: SampleSet, **how: Any) -> Any:
        """Run the model on a batch, from the layer on that was gone to."""
        with _giving(self.blocks(self.layers)[: self.at], self.outputs[number] if self.at else None):
            return self.layers.run(batch, **how)


@contextmanager
def _giving(blocks: Sequence[nn.Module], output: Any) -> Iterator[None]:
    """Let blocks give an output without running."""
    try:
        for block in blocks:
            block.forward = lambda *_args, **_how: output
        yield
    finally:
        for block in blocks:
            block.__dict__.pop("forward", None)


def _block(path: str) -> str:
    """Return the path of the block that a module lies in: model.layers.3 of model.layers.3.self_attn.

    >>> _block("encoder.layer.11.attention.self")
    'encoder.layer.11'
    """
    parts = path.split(".")
    number = next((at for at, part in enumerate(parts) if part.isdecimal()), 0)
    return ".".join(parts[: number + 1])
