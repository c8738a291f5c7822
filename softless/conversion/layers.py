"""The attention layers of a model, whatever its family: run them, replace one, restore all, save the model.

layers_transformers    models of Hugging Face transformers that `softless.transformers` knows
layers_images          ours, and ViT, DeiT and Swin of timm
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from softless.conversion.samples import SampleSet
from softless.conversion.stand_ins import Candidate, Replacement

LABELS = "labels"


class LayerCall(NamedTuple):
    """What one layer did on a batch.

    layer       its number
    output      what the softmax gave, [B, ..., d]
    real        bool, broadcastable to it: False in the padding; None without padding
    replaced    what a stand-in gives for the same input
    """

    layer: int
    output: Tensor
    real: Tensor | None
    replaced: Callable[[Replacement], Tensor]


class Layers(ABC):
    """The layers of softmax attention in a model, which `put` gives another mechanism and `restore` gives back.

    names           paths of their modules, in order
    is_causal       whether a token sees only those before it
    pictures        whether the model reads pictures
    has_residual    whether a layer can have a local residual
    first           the name of the model's first argument
    kind            the architecture, as the document tells it
    package         the package whose version belongs to a measurement
    """

    model: nn.Module
    names: tuple[str, ...]
    is_causal: bool
    pictures: bool
    has_residual: bool
    first: str
    kind: str
    package: str

    def __len__(self) -> int:
        return len(self.names)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @abstractmethod
    def check(self, candidate: Candidate) -> None:
        """Raise if the model cannot have this candidate."""

    @abstractmethod
    def new(self, layer: int, candidate: Candidate) -> Replacement:
        """Return a candidate in the sizes of a layer, not fitted yet."""

    @abstractmethod
    def put(self, layer: int, stand_in: Replacement | None) -> None:
        """Give a layer a stand-in, or its softmax back."""

    @abstractmethod
    def run(self, batch: SampleSet, *, model: Any = None, **how: Any) -> Any:
        """Run the model, or a copy of it, on a batch without labels; there are `logits` or a `last_hidden_state`."""

    @abstractmethod
    def calls(self, batch: SampleSet) -> Iterator[LayerCall]:
        """Run the original on a batch, and yield what each layer did."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the model into a folder, so that `load` finds it."""

    @abstractmethod
    def check_saving(self) -> None:
        """Raise if a conversion of the model could not be saved."""

    @abstractmethod
    def learned(self) -> list[nn.Module]:
        """Return the modules that hold what the stand-ins in the model learn."""

    @property
    @abstractmethod
    def has_logits(self) -> bool:
        """Whether the model answers with words or classes."""

    @property
    def generates(self) -> bool:
        """Whether the model can write on."""
        return False

    @property
    def longest(self) -> int:
        """The most tokens the model reads."""
        raise NotImplementedError

    def generated(self, prompts: Tensor, tokens: int) -> Tensor:
        """Return the tokens [B, tokens] that the model writes after prompts [B, N], the likeliest each time."""
        raise NotImplementedError

    def in_block(self, path: str) -> bool:
        """Return whether a module lies in the stack of blocks that has the layers: below blocks., or model.layers."""
        parts = self.names[0].split(".")
        number = next((at for at, part in enumerate(parts) if part.isdecimal()), len(parts))
        return path.startswith(".".join(parts[:number]) + ".")

    @property
    def most_tokens(self) -> int:
        """The most tokens of a sample that the model has positions for."""
        raise NotImplementedError

    @property
    def vocabulary(self) -> int:
        """The number of tokens that the model knows."""
        raise NotImplementedError

    @property
    @abstractmethod
    def channels(self) -> int:
        """The number of channels of the pictures that the model reads."""

    @property
    @abstractmethod
    def classes(self) -> int:
        """The number of classes of a classifier."""

    @property
    @abstractmethod
    def metrics(self) -> tuple[str, ...]:
        """The names of all metrics that fit the model."""

    @abstractmethod
    def metric(self, samples: SampleSet) -> str:
        """Return the name of the metric that fits the model."""

    @abstractmethod
    def tokens(self, samples: SampleSet) -> int:
        """Return the number of tokens of a sample."""

    @abstractmethod
    def lengths(self, samples: SampleSet) -> Mapping[int, Callable[[], SampleSet]]:
        """Return inputs of one sample to time, by their number of tokens, shortest first."""

    @contextmanager
    def having(self, chosen: Mapping[int, Replacement]) -> Iterator[None]:
        """Give some layers a stand-in inside this context."""
        try:
            for layer, stand_in in chosen.items():
                self.put(layer, stand_in)
            yield
        finally:
            for layer in chosen:
                self.put(layer, None)

    def restore(self) -> None:
        """Give every layer its softmax back. The model is as it was, to the bit."""
        for layer in range(len(self)):
            self.put(layer, None)
