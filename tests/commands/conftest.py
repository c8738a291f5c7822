"""Running the command: in this process for speed, or in a fresh one where the process matters."""

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from timm.layers import weight_init
from typer.testing import CliRunner, Result

from softless.cli import app
from softless.study import pipeline
from softless.study import plan as study_plan
from softless.study.plan import Preset, TimingPlan
from softless.train import recipe
from tests.commands.tiny import FOUR_UPDATES
from tests.data.pictures import folder

ROOT = Path(__file__).parents[2]
RECIPE = str(Path(__file__).parent / "quick.toml")

# A background job starts with Ctrl-C ignored: this program heeds it as a terminal's job does.
HEEDS_CTRL_C = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from softless.__main__ import main
main()
"""

MECHANISMS = ("softmax", "inline", "linear relu")
TINY = Preset(
    twins=("softmax", "inline-local", "linear-relu"), seeds=1, examined=6, masked=6, shown=2,
    timing=TimingPlan(tokens=(8, 16), repeats=1, heads=2, head_dim=4, score_tokens=12, mechanisms=MECHANISMS),
)  # fmt: skip


def small_studies(patch: pytest.MonkeyPatch) -> None:
    """A study of seconds, in this process."""
    for name in ("QUICK", "DEFAULT", "FULL"):
        patch.setattr(study_plan, name, TINY)
    patch.setattr(pipeline, "default_recipe", lambda _data, _device: RECIPE)
    patch.setattr(pipeline.os, "cpu_count", lambda: 1)


@pytest.fixture(scope="module", autouse=True)
def weights_drawn_fast() -> Iterator[None]:
    """Initial weights are normal numbers, clamped: timm's inverse error function takes half the time of a command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            weight_init, "_trunc_normal_", lambda x, mean, std, low, high: x.normal_(mean, std).clamp_(low, high)
        )
        yield


@pytest.fixture
def softless(tmp_path, monkeypatch):
    """`softless(*words)` as if typed in an empty folder, 80 columns wide; a study or a training takes a moment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(recipe, "DEFAULT", RECIPE)
    small_studies(monkeypatch)

    def run(*words: str) -> Result:
        return CliRunner().invoke(app, list(words), prog_name="softless")

    return run


def run_fresh(folder: Path, *words: str, **options) -> subprocess.CompletedProcess[str]:
    """`softless *words` in a process of its own: (exit status, stdout, stderr)."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80", **options.pop("env", {})}
    command = [sys.executable, "-m", "softless", *words]
    options = {"cwd": folder, "capture_output": True, "text": True, "timeout": 120, **options}
    return subprocess.run(command, env=env, check=False, **options)


@pytest.fixture
def fresh(tmp_path):
    return partial(run_fresh, tmp_path)


@pytest.fixture
def flowers(tmp_path):
    """Two classes, ten images to train on and four to test on; and a recipe of four updates."""
    (tmp_path / "tiny.toml").write_text(FOUR_UPDATES)
    return folder(tmp_path / "flowers", {"train": {"rose": 5, "lily": 5}, "val": {"rose": 2, "lily": 2}})
