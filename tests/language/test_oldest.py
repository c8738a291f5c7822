"""The oldest transformers that softless supports passes the same tests as the newest."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLDEST = re.search(r"transformers>=([0-9.]+)", (ROOT / "pyproject.toml").read_text()).group(1)


@pytest.mark.slow
def test_the_oldest_transformers_passes_these_tests(tmp_path):
    wanted = f"transformers=={OLDEST}.0"
    install = [sys.executable, "-m", "pip", "install", "-q", "--target", tmp_path, wanted]
    fetched = subprocess.run(install, check=False, capture_output=True, text=True)
    if fetched.returncode:
        pytest.skip(f"{wanted} could not be installed: {fetched.stderr.strip().splitlines()[-1]}")
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", Path(__file__).parent]
    paths = os.pathsep.join((str(tmp_path), str(ROOT)))
    env = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(tests, check=False, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
