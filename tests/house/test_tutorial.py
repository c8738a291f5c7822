"""The tutorial's commands are commands, its pictures are there, and read from top to bottom they work."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from softless.cli import app

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/tutorial.md").read_text()
BLOCKS = re.findall(r"^```console\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
RUN = [line[2:] for block in BLOCKS for line in block.splitlines() if line.startswith("$ softless")]
SHOWN = re.findall(r"^    (softless .*)$", TEXT, re.MULTILINE)


def words(line: str) -> list[str]:
    return shlex.split(line, comments=True)[1:]


@pytest.mark.parametrize("line", [*RUN, *SHOWN])
def test_every_command_is_understood(line):
    group = typer.main.get_command(app)
    if words(line) == ["--version"]:
        return
    verb, rest = words(line)[0], words(line)[1:]
    command = group.commands[verb]
    if hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    command.make_context(verb, rest)


def test_every_picture_is_there_and_has_a_description():
    pictures = re.findall(r"!\[(.*?)\]\((.*?)\)", TEXT)
    assert len(pictures) >= 5
    for description, name in pictures:
        assert description
        assert (ROOT / "docs" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_read_from_top_to_bottom_it_works(fresh_folder_run):
    assert len(RUN) >= 5
    for line in RUN:
        result = fresh_folder_run(*words(line))
        assert result.returncode == 0, f"{line}\n{result.stderr}"
    assert (fresh_folder_run.folder / "report/index.html").stat().st_size > 1e6
    assert (fresh_folder_run.folder / "probed/probe.json").exists()


@pytest.fixture
def fresh_folder_run(tmp_path):
    """A command in an empty folder, in a process of its own."""
    import os
    import subprocess
    import sys

    def run(*typed: str):
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "softless", *typed]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    run.folder = tmp_path
    return run
