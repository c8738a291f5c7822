"""What is promised of a whole training: the embedded digits are learned, and memory stays where it is (R19)."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from softless.train.loop import Loop
from tests.train.jobs import Quiet, job

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_embedded_digits_are_learned_to_95_percent_in_two_minutes_of_processor_time(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "softless", "train", "--out", "digits", "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["best_top1"] >= 0.95
    assert after.ru_utime - before.ru_utime <= 2 * 120  # two cores, two minutes


class Scales(Quiet):
    """Resident memory after each update."""

    def __init__(self):
        super().__init__()
        self.bytes = []

    def tick(self, step):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.bytes.append(pages * resource.getpagesize())

    def logged(self, step, numbers):
        pass


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="looks into /proc")
@pytest.mark.parametrize("cache", [True, False], ids=["cached", "read as it goes"])
def test_memory_stays_put_over_500_updates(tmp_path, cache):
    """Saves, evaluations and logs included; the slope over 500 updates after 100 to warm up is at most 1 %."""
    scales = Scales()
    loop = Loop(
        job(tmp_path, watch=scales, epochs=120, warmup_epochs=1, cache=cache, checkpoint_every=20, log_every=10)
    )
    with loop.ledger:
        loop.run_on()
    used = np.array(scales.bytes[100:600], dtype=float)
    slope = np.polyfit(np.arange(500), used, 1)[0]
    assert len(used) == 500
    assert 500 * slope <= 0.01 * used.mean(), f"{500 * slope / used.mean():.2%}"
