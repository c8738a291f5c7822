"""Running the command: in this process for speed, or in a fresh one where the process matters."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from softless.cli import app
from softless.commands import study, study_plan
from softless.train import recipe_file

ROOT = Path(__file__).parents[2]

TINY = study_plan.Plan(
    tokens=(8, 16), repeats=1, heads=2, head_dim=4, score_tokens=12, sets_of_keys=4, keys=6, key_dim=4
)


@pytest.fixture
def softless(tmp_path, monkeypatch):
    """`softless(*words)` as if typed in an empty folder, 80 columns wide; a study or a training takes a moment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(study, "FULL", TINY)
    monkeypatch.setattr(study, "QUICK", TINY)
    monkeypatch.setattr(recipe_file, "DEFAULT", str(Path(__file__).parent / "quick.toml"))

    def run(*words: str) -> Result:
        return CliRunner().invoke(app, list(words), prog_name="softless")

    return run


@pytest.fixture
def fresh(tmp_path):
    """The same in a process of its own: (exit status, stdout, stderr)."""

    def run(*words: str, **options) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80", **options.pop("env", {})}
        command = [sys.executable, "-m", "softless", *words]
        options = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 120, **options}
        return subprocess.run(command, env=env, check=False, **options)

    return run
