"""The data of a conversion: one set of samples, cut into three parts that share none.

    fit      learn what the mechanisms learn
    choose   measure the damage of each layer, and add layers
    prove    measure the model that came out, once

A set is a dictionary of tensors: the arguments of the model's forward, with samples in the first dimension.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from softless.errors import ArgumentError, shown

SampleSet = dict[str, Tensor]
FIT, CHOOSE = 0.5, 0.25  # shares; the rest proves
LEAST = 16  # samples: 8, 4 and 4


class ThreeParts(NamedTuple):
    """The parts of a set, each a set."""

    fit: SampleSet
    choose: SampleSet
    prove: SampleSet

    @property
    def sizes(self) -> dict[str, int]:
        return {name: count(part) for name, part in zip(self._fields, self, strict=True)}


def as_set(data: object, first_name: str) -> SampleSet:
    """Return samples as a dictionary; a single tensor gets the name of the model's first argument."""
    if not isinstance(data, Tensor | Mapping):
        texts = isinstance(data, str) or (isinstance(data, list | tuple) and any(isinstance(x, str) for x in data))
        hint = ": tokenize texts first, with tokenizer(texts, padding=True, return_tensors='pt')" if texts else ""
        raise ArgumentError(
            f"data is {'text' if texts else f'a {type(data).__name__}'} and must be a tensor of samples, or a "
            f"dictionary of such tensors for the model's forward{hint}"
        )
    samples = {first_name: data} if isinstance(data, Tensor) else dict(data)
    if not samples:
        raise ArgumentError(f"data is empty, and must hold a tensor named {first_name}")
    for name, x in samples.items():
        if not isinstance(x, Tensor) or x.ndim == 0:
            raise ArgumentError(f"{shown(name)} in data is {shown(x)} and must be a tensor [samples, ...]")
    sizes = {name: len(x) for name, x in samples.items()}
    if len(set(sizes.values())) > 1:
        text = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
        raise ArgumentError(f"all tensors in data must have the same number of samples, and they have {text}")
    return samples


def split(samples: SampleSet, seed: int) -> ThreeParts:
    """Cut samples into three parts at random; the same seed gives the same parts."""
    total = count(samples)
    if total < LEAST:
        raise ArgumentError(
            f"data has {total} samples, and at least {LEAST} are needed: fitting, choosing and proving share none"
        )
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    ends = round(FIT * total), round((FIT + CHOOSE) * total)
    cuts = order[: ends[0]], order[ends[0] : ends[1]], order[ends[1] :]
    return ThreeParts(*({name: x[cut.to(x.device)] for name, x in samples.items()} for cut in cuts))


def count(samples: SampleSet) -> int:
    """Return the number of samples."""
    return len(next(iter(samples.values())))


def batches(samples: SampleSet, size: int, device: torch.device) -> Iterator[SampleSet]:
    """Cut samples into batches; the last one may be smaller."""
    for start in range(0, count(samples), size):
        yield {name: x[start : start + size].to(device) for name, x in samples.items()}
