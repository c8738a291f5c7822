"""Histograms with bins that double, added up in any portions."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from softless.probes.histogram import Histogram, histogram

counts = st.lists(st.integers(0, 10_000), max_size=40)


@given(counts.filter(bool))
def test_every_count_lies_between_the_edges_of_its_bin(values):
    found = histogram(torch.tensor(values))
    expected = [
        sum(low <= value < high for value in values) for low, high in zip(found.edges, found.edges[1:], strict=False)
    ]
    assert list(found.counts) == expected
    assert sum(found.counts) == len(values)
    assert found.edges[:4] == (0, 1, 2, 4)[: len(found.edges)]


@given(counts, counts)
def test_two_lots_add_up_to_the_histogram_of_both(a, b):
    both = histogram(torch.tensor(a + b, dtype=torch.long))
    assert histogram(torch.tensor(a, dtype=torch.long)) + histogram(torch.tensor(b, dtype=torch.long)) == both


def test_nothing_is_an_empty_histogram():
    assert histogram(torch.tensor([], dtype=torch.long)) == Histogram()
    assert Histogram() + Histogram() == Histogram()
