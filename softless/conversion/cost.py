"""What a converted model costs, beside the original, as its input grows: seconds of a pass, and bytes that it carries.

The original runs as it was given, without a cache. The bytes are those of the cache after that many tokens: keys and
values in layers of softmax, a state of constant size in the others. Encoders carry nothing.
"""

from typing import Any, TypedDict

import torch

from softless.conversion.fitting import Advance
from softless.conversion.layers import Layers
from softless.conversion.samples import SampleSet
from softless.conversion.stand_ins import Replacement
from softless.stopwatch import time_in_turns

PATIENCE, REPEATS = 2.0, 2  # seconds: no longer input is timed after a pass that took as long
PROBE = 80  # tokens after which the size of a state no longer grows


class CostRow(TypedDict):
    """Both models at one length."""

    tokens: int
    seconds: list[float] | None  # original, converted; None where it was not timed
    bytes: list[int] | None  # the same; None for encoders


@torch.no_grad()
def measure_cost(layers: Layers, chosen: dict[int, Replacement], samples: SampleSet, advance: Advance) -> list[CostRow]:
    """Measure both models at every length, until a pass takes too long."""
    rows: list[CostRow] = []
    patient = True
    carried = _carried(layers, chosen)
    for tokens, sample in layers.lengths(samples).items():
        seconds = _seconds(layers, chosen, sample()) if patient else None
        patient = seconds is not None and max(seconds) < PATIENCE
        size = [int(fixed + per_token * tokens) for fixed, per_token in carried] if carried else None
        rows.append({"tokens": tokens, "seconds": seconds, "bytes": size})
        advance("timing", tokens)
    return rows


def _seconds(layers: Layers, chosen: dict[int, Replacement], batch: SampleSet) -> list[float]:
    options: dict[str, Any] = {"use_cache": False, "logits_to_keep": 1} if layers.is_causal else {}
    seconds = []
    for stand_ins in ({}, chosen):
        with layers.having(stand_ins):
            timed = time_in_turns({"pass": lambda: layers.run(batch, **options)}, repeats=REPEATS)
            seconds.append(timed["pass"].seconds)
    return seconds


def _carried(layers: Layers, chosen: dict[int, Replacement]) -> list[tuple[float, float]]:
    """Return (fixed bytes, bytes per token) of the cache of both models."""
    if not layers.is_causal:
        return []
    sizes = []
    for stand_ins in ({}, chosen):
        with layers.having(stand_ins):
            short, long = (_cache_size(layers, tokens) for tokens in (PROBE, 2 * PROBE))
        per_token = (long - short) / PROBE
        sizes.append((short - per_token * PROBE, per_token))
    return sizes


def _cache_size(layers: Layers, tokens: int) -> int:
    """Return the bytes of the cache after so many tokens."""
    ones = torch.ones(1, tokens, dtype=torch.int64, device=layers.device)
    cache = layers.run({layers.first: ones}, use_cache=True).past_key_values
    return sum(
        layer.nbytes if hasattr(layer, "nbytes") else layer.keys.nbytes + layer.values.nbytes for layer in cache.layers
    )
