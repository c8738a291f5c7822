"""Counts of counts, in bins that double: 0, 1, 2 to 3, 4 to 7, ... as InLine's Figure 2 has them."""

from dataclasses import dataclass
from itertools import zip_longest

import torch
from jaxtyping import Shaped
from torch import Tensor


@dataclass(frozen=True)
class Histogram:
    """counts[i] samples lie in edges[i] <= x < edges[i + 1]; those of two lots add up."""

    edges: tuple[int, ...] = (0,)
    counts: tuple[int, ...] = ()

    def __add__(self, other: "Histogram") -> "Histogram":
        edges = max(self.edges, other.edges, key=len)
        return Histogram(edges, tuple(a + b for a, b in zip_longest(self.counts, other.counts, fillvalue=0)))


def histogram(counts: Shaped[Tensor, "*shape"]) -> Histogram:
    """Of whole numbers, at least 0.

    >>> histogram(torch.tensor([0, 0, 1, 3, 5]))
    Histogram(edges=(0, 1, 2, 4, 8), counts=(2, 1, 1, 1))
    """
    bins = torch.frexp(counts.double().flatten()).exponent  # 0 -> 0, 1 -> 1, 2 and 3 -> 2, 4 to 7 -> 3
    found = torch.bincount(bins.long()).tolist()
    return Histogram((0, *(2**power for power in range(len(found)))), tuple(found))
