"""kill -9 loses nothing but time (R14): killed anywhere and resumed, a run ends bitwise as the uninterrupted one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INTERVAL = 3  # updates between two saves, in tests/train/jobs.py


def crash(folder, *words):
    """The uninterrupted run, and a line for each interruption."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, ROOT / "tests/train/crash.py", folder, *words]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    first, *lines = map(json.loads, result.stdout.splitlines())
    return first, lines


def assert_nothing_lost(expected, lines):
    assert {line["status"] for line in lines} == {0}
    assert [line for line in lines if line["digest"] != expected["digest"]] == []
    assert max(line["lost"] for line in lines) <= INTERVAL


def test_killed_at_five_calls_of_the_file_system(tmp_path):
    expected, lines = crash(tmp_path, "points", "sample")
    assert {line["killed"] for line in lines} == {-signal.SIGKILL}
    assert len(lines) == 5
    assert_nothing_lost(expected, lines)


@pytest.mark.slow
def test_killed_at_every_call_of_the_file_system(tmp_path):
    """Four saves, an evaluation's best weights twice, the log and the result; writes are torn."""
    expected, lines = crash(tmp_path, "points", "all")
    assert len(lines) == len(expected["calls"]) >= 40
    assert {line["killed"] for line in lines} == {-signal.SIGKILL}
    assert_nothing_lost(expected, lines)


@pytest.mark.slow
def test_killed_at_ten_random_moments(tmp_path):
    assert_nothing_lost(*crash(tmp_path, "kills", "10", "1410"))
