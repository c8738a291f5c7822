"""A model that a command looks into or converts, and the input that it takes."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from softless.data.augment import Augment

TIMM, HUGGING_FACE = "timm:", "hf:"
RANDOM, TRAINED, PRETRAINED = "random", "trained", "pretrained"
FAILURES = (OSError, ValueError, ImportError, LookupError, RuntimeError, TypeError)  # of libraries


@dataclass(frozen=True)
class ImageInput:
    """How images are prepared for a model, and the path of a run's own images."""

    side: int
    augment: Augment
    source: str | None = None


@dataclass(frozen=True)
class TextInput:
    """How text is prepared for a model: pieces of at most `longest` tokens."""

    tokenizer: Any
    longest: int


@dataclass(frozen=True)
class Subject:
    """A model, the origin of its weights, and the input that it takes."""

    name: str
    model: nn.Module
    weights: str
    takes: ImageInput | TextInput

    @property
    def is_random(self) -> bool:
        return self.weights == RANDOM


@dataclass(frozen=True)
class Samples:
    """Batches of `count` samples of one kind, such as "images of 224 x 224 pixels"."""

    count: int
    kind: str
    source: str
    batches: Iterator[Any]


def first_sentence(error: Exception) -> str:
    """Return the first sentence of a library's error."""
    return (re.split(r"\n|\.\s", str(error).strip())[0] or type(error).__name__).rstrip(".")


def silence_hub() -> None:
    """Turn off the hub's messages about retries, because our error says it in one sentence."""
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()
