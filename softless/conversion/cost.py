"""What a converted model costs, beside the original, as its input grows: seconds of a pass, and bytes that it carries.

The original runs as it was given, without a cache. The bytes are those of the cache after that many tokens: keys and
values in layers of softmax, a state of constant size in the others. Encoders carry nothing.
"""

from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import nn

from softless.bench.stopwatch import time_in_turns
from softless.conversion.fitting import Advance
from softless.conversion.layers import Layers
from softless.conversion.samples import SampleSet
from softless.nn.inputs import Inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHORTEST, LONGEST = 256, 32768
PATIENCE, REPEATS = 0.5, 2  # seconds: no longer input is timed after a pass that took as long
PROBE = 80  # tokens after which the size of a state no longer grows


class CostRow(TypedDict):
    """Both models at one length."""

    tokens: int
    seconds: list[float] | None  # original, converted; None where it was not timed
    bytes: list[int] | None  # the same; None for encoders


def lengths_of(model: "PreTrainedModel") -> list[int]:
    """Return the lengths to measure: doubling, up to where learned positions end; one for images."""
    if model.main_input_name != "input_ids":
        return [0]
    most = LONGEST if getattr(model.config, "rope_parameters", None) else model.config.max_position_embeddings - 2
    found = [SHORTEST << step for step in range(8) if SHORTEST << step <= most]
    return found or [most]


@torch.no_grad()
def measure_cost(layers: Layers, chosen: dict[int, Inputs], samples: SampleSet, advance: Advance) -> list[CostRow]:
    """Measure both models at every length, until a pass takes too long."""
    rows: list[CostRow] = []
    patient = True
    carried = _carried(layers, chosen)
    for tokens in lengths_of(layers.model):
        seconds = _seconds(layers, chosen, _input(layers, samples, tokens)) if patient else None
        patient = seconds is not None and max(seconds) < PATIENCE
        size = [int(fixed + each * tokens) for fixed, each in carried] if carried else None
        rows.append({"tokens": tokens, "seconds": seconds, "bytes": size})
        advance("timing", 1)
    return rows


def _input(layers: Layers, samples: SampleSet, tokens: int) -> SampleSet:
    name, model = layers.model.main_input_name, layers.model
    device = next(model.parameters()).device
    if not tokens:
        return {name: samples[name][:1].to(device)}
    drawn = torch.randint(0, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    return {name: drawn.to(device)}


def _seconds(layers: Layers, chosen: dict[int, Inputs], batch: SampleSet) -> list[float]:
    more: dict[str, Any] = {"use_cache": False, "logits_to_keep": 1} if layers.is_causal else {}
    found = []
    for inputs in ({}, chosen):
        with layers.having(inputs):
            timed = time_in_turns({"pass": lambda: layers.model(**batch, **more)}, repeats=REPEATS)
            found.append(timed["pass"].seconds)
    return found


def _carried(layers: Layers, chosen: dict[int, Inputs]) -> list[tuple[float, float]]:
    """Return (fixed bytes, bytes per token) of the cache of both models."""
    if not layers.is_causal:
        return []
    found = []
    for inputs in ({}, chosen):
        with layers.having(inputs):
            short, long = (_cache_size(layers.model, tokens) for tokens in (PROBE, 2 * PROBE))
        each = (long - short) / PROBE
        found.append((short - each * PROBE, each))
    return found


def _cache_size(model: nn.Module, tokens: int) -> int:
    """Return the bytes of the cache after so many tokens."""
    device = next(model.parameters()).device
    cache = model(torch.ones(1, tokens, dtype=torch.int64, device=device), use_cache=True).past_key_values
    return sum(
        layer.nbytes if hasattr(layer, "nbytes") else layer.keys.nbytes + layer.values.nbytes for layer in cache.layers
    )
