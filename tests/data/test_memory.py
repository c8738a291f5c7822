"""Ten thousand bad images leave no trace in memory (R19)."""

import os
from pathlib import Path

import pytest

from softless.data.reading import Damage
from softless.io.pictures import BadImage, decode
from tests.data.pictures import mutants


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="looks into /proc for the size of the process")
def test_10000_bad_images_take_at_most_10_megabytes():
    bad, damage = [], Damage("skip", 10**8)
    for form, data in mutants(20_000, seed=19):
        try:
            decode(data, form)
        except BadImage:
            bad.append(data)
    bad = (bad * 2)[:11_000]
    for number, data in enumerate(bad):
        if number == 1_000:
            before = resident()
        try:
            decode(data, f"a/rather/long/name/of/a/file/number-{number:06}.jpg")
        except BadImage as error:
            damage.met(error.name, error.why)
    assert len(damage.skipped) == 11_000
    assert resident() - before <= 10e6
