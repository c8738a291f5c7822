"""A training killed on purpose, over and over, each time in a process of its own (R14).

    python tests/train/crash.py FOLDER points all|sample
    python tests/train/crash.py FOLDER kills COUNT SEED

Prints a line of JSON for each interruption. Processes are forked from this one, which has imported everything and
computed nothing: a kill costs no more than the training it interrupts.
"""

import json
import mmap
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from softless.io import checkpoint
from softless.train.loop import fit
from softless.train.run import Run
from tests.io.faults import calls
from tests.train import jobs

for late in jobs.IMPORTED_LATE:
    import_module(late)

PROGRESS = mmap.mmap(-1, 8)  # updates made, seen by both processes


class Counting(jobs.Quiet):
    def tick(self, step: int) -> None:
        PROGRESS[:8] = step.to_bytes(8)


def train(folder: Path, at: int | None = None, resume: bool = False) -> None:
    """To the end, or to the kill at call number `at`; then write down the digest and the number of calls."""
    work = jobs.job(folder, resume=resume, watch=Counting())
    with calls(at, torn=True) as counted:
        fit(work)
    (folder / "digest").write_text(jobs.digest(folder))
    (folder / "calls").write_text(json.dumps(counted.names))


def tell(document: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def forked(act: Callable[[], None]) -> int:
    """The child's process number."""
    PROGRESS[:8] = bytes(8)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    return child


def ended(child: int) -> int:
    """0, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def finish(folder: Path) -> dict[str, object]:
    """Resume what was killed, and say what it lost and what came out."""
    made = int.from_bytes(PROGRESS[:8])
    with warnings.catch_warnings(record=True):
        found = checkpoint.newest(Run(folder).last)
    lost = made - (0 if found is None else found.step)
    status = ended(forked(lambda: train(folder, resume=True)))
    return {"status": status, "lost": lost, "digest": (folder / "digest").read_text() if status == 0 else ""}


def reference(folder: Path) -> tuple[str, list[str]]:
    folder.mkdir()
    assert ended(forked(lambda: train(folder))) == 0
    return (folder / "digest").read_text(), json.loads((folder / "calls").read_text())


def sample(names: list[str]) -> list[int]:
    """Five calls: a torn file, before and after a checkpoint is in place, half of an old one removed, a log."""
    at = {name: [index for index, each in enumerate(names) if each == name] for name in set(names)}
    replaced, removed = at["replace"][1], at["unlink"][-3]
    torn = max(index for index in at["write"] if index < replaced)
    return [torn, replaced, replaced + 1, removed, at["write"][-1]]


def points(folder: Path, wanted: str) -> None:
    """Killed at five calls, or at every one."""
    expected, names = reference(folder / "reference")
    tell({"digest": expected, "calls": names})
    for at in range(len(names)) if wanted == "all" else sample(names):
        place = folder / str(at)
        place.mkdir()
        killed = ended(forked(lambda at=at, place=place: train(place, at)))
        tell({"at": at, "call": names[at], "killed": killed, **finish(place)})


def kills(folder: Path, count: int, seed: int) -> None:
    """Killed at random moments, some before the first save and some while resuming."""
    expected, _ = reference(folder / "reference")
    tell({"digest": expected})
    rng, place, landed, turn = random.Random(seed), folder / "0", 0, 0
    place.mkdir()
    while landed < count:
        child = forked(lambda place=place, resume=turn > 0: train(place, resume=resume))
        time.sleep(rng.uniform(0, 0.6))
        os.kill(child, signal.SIGKILL)
        if ended(child) == -signal.SIGKILL:
            landed, turn = landed + 1, turn + 1
        else:  # it was faster: another one
            place, turn = folder / f"{landed}-{time.monotonic_ns()}", 0
            place.mkdir()
            continue
        if turn == 3 or landed == count:
            tell({"kills": turn, **finish(place)})
            place, turn = folder / f"{landed}-next", 0
            place.mkdir()


if __name__ == "__main__":
    where, mode, *rest = sys.argv[1:]
    if mode == "points":
        points(Path(where), rest[0])
    else:
        kills(Path(where), int(rest[0]), int(rest[1]))
