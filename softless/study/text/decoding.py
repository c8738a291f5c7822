"""The cost of decoding: time and memory of one more token, against the tokens that a model has seen.

Each twin reads a random text in one cache, up to each length in turn. There it decodes a few tokens, which are timed. A
softmax layer keeps keys and values of every token. A linear layer keeps a state of fixed size, and its last tokens, so
that they can be taken back (`softless.transformers`).
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from softless.errors import needs_extra
from softless.stopwatch import threads
from softless.study.text.plan import DecodingPlan
from softless.study.text.twins import TextTwin
from softless.train.language_recipe import BYTES, LanguageRecipe
from softless.train.loop import seed_all
from softless.train.tasks.language import build

AT_ONCE = 1024  # tokens that are read together
WARM = 2  # steps that are not timed


class DecodingPoint(TypedDict):
    """The median seconds of a decode step, and the bytes of the cache."""

    twin: str
    label: str
    tokens: int
    seconds: float
    bytes: int


def decoding_cost(
    twin: TextTwin, recipe: LanguageRecipe, plan: DecodingPlan, tick: Callable[[float], None] = lambda _share: None
) -> list[DecodingPoint]:
    """Time decode steps of a model with random weights; times depend on its sizes alone. `tick` gets shares of 1."""
    with needs_extra("language models come from transformers", "hf"):
        from transformers import DynamicCache
    seed_all(0, -1, 0)
    model = build(twin.recipe(recipe)).eval()
    cache, points = DynamicCache(), list[DecodingPoint]()
    with threads(1), torch.inference_mode():
        for tokens in sorted(plan.tokens):
            while (seen := cache.get_seq_length()) < tokens:
                _read(model, torch.randint(BYTES, (1, min(AT_ONCE, tokens - seen))), cache)
            seconds = [_timed(model, cache) for _ in range(WARM + plan.steps)][WARM:]
            point: DecodingPoint = {
                "twin": twin.id, "label": twin.label, "tokens": tokens, "seconds": median(seconds),
                "bytes": cache_bytes(cache),
            }  # fmt: skip
            points.append(point)
            tick(1 / len(plan.tokens))
    return points


def cache_bytes(cache: Any) -> int:
    """Return the bytes that a cache of transformers holds."""
    sizes = (getattr(layer, "nbytes", None) for layer in cache.layers)
    pairs = [(layer.keys, layer.values) for layer in cache.layers if getattr(layer, "nbytes", None) is None]
    return sum(size for size in sizes if size is not None) + sum(x.nbytes for pair in pairs for x in pair)


def _read(model: nn.Module, tokens: Tensor, cache: Any) -> None:
    model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)


def _timed(model: nn.Module, cache: Any) -> float:
    token = torch.randint(BYTES, (1, 1))
    start = time.perf_counter()
    _read(model, token, cache)
    return time.perf_counter() - start


def continuation(model: nn.Module, prompt: bytes, count: int) -> bytes:
    """Return the bytes that a model of bytes continues a prompt with, drawn from its probabilities with one seed."""
    with needs_extra("language models come from transformers", "hf"):
        from transformers import DynamicCache
    cache, written, tokens = DynamicCache(), bytearray(), torch.tensor([list(prompt)])
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for _ in range(count):
            logits = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            tokens = logits[:, -1].softmax(-1).multinomial(1, generator=generator)
            written.append(int(tokens))
    return bytes(written)
