"""Refactors change nothing (R21): a committed curve of a hundred losses."""

import json

import pytest

from tests.train.curve import KEPT, UPDATES, alone, machine


def test_a_hundred_losses_match_the_committed_curve_bitwise():
    """Bit by bit where torch and the processor's instructions are the same, to 1e-4 elsewhere."""
    kept = json.loads(KEPT.read_text())
    expected = [float.fromhex(text) for text in kept.pop("losses")]
    found = alone()
    assert len(found) == len(expected) == UPDATES
    assert found[-1] < 0.95 * found[0]
    if machine() == kept:
        assert [a.hex() for a in found] == [b.hex() for b in expected]
    else:
        assert found == pytest.approx(expected, rel=1e-4)
