"""Ranks that are forked from one process, which has imported everything and computed nothing: one import pays for all.

A test calls `run`, and the program that it runs calls `fork` before it computes anything.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Ended(NamedTuple):
    """How a rank ended: its status or minus the signal, at how many seconds, and what it wrote to stderr."""

    status: int
    seconds: float
    said: str


def run(module: str, folder: Path, ranks: int, *words: str, **env: str) -> list[Ended]:
    """Run `python -m module FOLDER RANKS WORDS` to the end of its last rank."""
    shared = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **env}
    command = [sys.executable, "-m", module, str(folder), str(ranks), *words]
    process = subprocess.Popen(command, cwd=ROOT, env=shared, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        said = process.communicate(timeout=500)[1]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, said
    ends = json.loads((folder / "ended.json").read_text())
    return [Ended(*each, (folder / f"said-{rank}.txt").read_text()) for rank, each in enumerate(ends)]


def fork(folder: Path, ranks: int) -> int:
    """The rank, in each child; this process waits for all of them and exits."""
    running, ended = {}, {}
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            with (folder / f"said-{rank}.txt").open("w") as said:
                os.dup2(said.fileno(), sys.stderr.fileno())
            return rank
        running[child] = rank
    while running:
        child, status = os.wait()
        ended[running.pop(child)] = os.waitstatus_to_exitcode(status), time.monotonic()
    (folder / "ended.json").write_text(json.dumps([ended[rank] for rank in range(ranks)]))
    sys.exit()
