"""The runs of benchmarks/dense_results.py: processes that share a device, can be stopped, and leave records.

    OUT/PART/NAME/              a run of softless train; PART is pretrain, camvid or bccd
    OUT/records/PART-NAME.json  what is kept of it
    OUT/logs/PART-NAME.txt      what it printed

A run is finished when it has a record. When the time is over, SIGTERM lets the other runs save themselves, and the next
call continues them. A run that fails is reported and does not stop the others.
"""

import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dense_page import METRICS, PAIRS

from softless.io.files import write_json
from softless.report.units import counted, listed
from softless.train.run import Run

ROOT = Path(__file__).parents[1]
SEEDS = 0, 1, 2
NOT_FINITE = 1  # exit status of softless train; a crash of Python has the same
LAST, GRACE, PAUSE = 30.0, 40.0, 0.2  # seconds: in which nothing begins, to save a run, between two looks

Process = subprocess.Popen[bytes]


@dataclass(frozen=True, kw_only=True)
class Training:
    """A run of softless train and, unless it is a classifier's, the test of its best weights."""

    out: Path
    part: str
    backbone: str
    head: str
    seed: int

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.backbone, self.head, str(self.seed))))

    @property
    def run(self) -> Run:
        return Run(self.out / self.part / self.name)

    @property
    def tested(self) -> Path:
        return self.run.folder / "test.json"

    @property
    def record(self) -> Path:
        return self.out / "records" / f"{self.part}-{self.name}.json"

    @property
    def log(self) -> Path:
        return self.out / "logs" / f"{self.part}-{self.name}.txt"

    @property
    def classifier(self) -> Run | None:
        """The run whose backbone this one begins with."""
        return None if self.part == "pretrain" else Run(self.out / "pretrain" / f"{self.backbone}-0")

    @property
    def waits(self) -> bool:
        """Whether the classifier is not trained yet."""
        return self.classifier is not None and not self.classifier.result.exists()


def trainings(out: Path, part: str, seeds: Sequence[int] = SEEDS) -> list[Training]:
    """Return the runs of a part, seed by seed, so that a call that is stopped leaves whole seeds."""
    return [
        Training(out=out, part=part, backbone=backbone, head=head, seed=seed)
        for seed in seeds
        for backbone, head in PAIRS[part]
    ]


def run_packed(
    wanted: Sequence[Training], words: Callable[[Training], list[str]], *, pack: int, minutes: float | None = None
) -> int:
    """Work on the runs that have no record, several at once, and return how many are left when the time is over.

    words   the next command of a run: to train, or to test its weights
    """
    todo = [training for training in wanted if not training.record.exists()]
    waiting, busy = [training for training in todo if not training.waits], dict[Training, Process]()
    together, ends = min(pack, len(waiting)), time.monotonic() + (60 * minutes if minutes else math.inf)
    print(f"{counted(len(todo), 'run')} without a record", flush=True)
    if early := [training.backbone for training in todo if training.waits]:
        names = listed([*dict.fromkeys(early)])
        print(f"{counted(len(early), 'run')} need classifiers of {names}: run pretrain", flush=True)
    try:
        while (time.monotonic() < ends and busy) or (time.monotonic() < ends - LAST and waiting):
            while waiting and len(busy) < together and time.monotonic() < ends - LAST:
                training = waiting.pop(0)
                busy[training] = begin(training, words(training))
            time.sleep(PAUSE)
            for training in [each for each, process in busy.items() if process.poll() is not None]:
                if ended(training, busy.pop(training).returncode, together):
                    waiting.insert(0, training)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    finally:
        stop(busy)
    return sum(not training.record.exists() for training in todo)


def begin(training: Training, words: Sequence[str]) -> Process:
    """Start a process that prints to the log of the run, with one thread, and with this checkout on its path."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    training.log.parent.mkdir(parents=True, exist_ok=True)
    with training.log.open("ab") as file:
        file.write(f"\n$ {' '.join(words)}\n".encode())
        file.flush()
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment)


def ended(training: Training, status: int, together: int) -> bool:
    """Note how a process ended; return whether the run needs another one, the test of its weights."""
    label = f"{training.part} {training.name:24}"
    if status:
        line = last_line(training.log)
        if status == NOT_FINITE and line.startswith("error: ") and not training.run.result.exists():
            write(training.record, {**about(training), "status": "diverged", "reason": line})
        print(f"{label} failed with status {status}: {line}", flush=True)
    elif training.classifier is not None and not training.tested.exists():
        return True
    else:
        record = finished(training, together)
        write(training.record, record)
        shutil.rmtree(training.run.last, ignore_errors=True)  # a gigabyte that nothing needs any more
        test = f", test {record['test']['numbers'][METRICS[training.part][0]]:.2%}" if "test" in record else ""
        print(f"{label} best {record['best']:.2%}{test}, {record['seconds']:.0f} s", flush=True)
    return False


def about(training: Training) -> dict[str, Any]:
    return {"name": training.name, "backbone": training.backbone, "head": training.head, "seed": training.seed}


def finished(training: Training, together: int) -> dict[str, Any]:
    """Return the record of a finished run."""
    result, begun = json.loads(training.run.result.read_bytes()), training.run.read()
    best = next(value for key, value in result.items() if key.startswith("best_") and key != "best_step")
    record = {
        **about(training), "status": "done", "best": best, "together": together, "images": begun["images"],
        "recipe": {key: begun["recipe"][key] for key in ("epochs", "batch", "precision")},
        **{key: result[key] for key in ("steps", "best_step", "seconds", "versions", "machine")},
    }  # fmt: skip
    if training.classifier is None:
        return record
    taught = json.loads(training.classifier.result.read_bytes())
    return record | {"classifier": taught["best_top1"], "test": json.loads(training.tested.read_bytes())}


def stop(busy: dict[Training, Process]) -> None:
    """Ask the processes to save their runs, and end those that take too long."""
    for process in busy.values():
        process.terminate()
    ends = time.monotonic() + GRACE
    for training, process in busy.items():
        try:
            process.wait(max(ends - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        print(f"{training.part} {training.name:24} stopped", flush=True)


def write(path: Path, document: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, document)


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
