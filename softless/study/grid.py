"""A grid of twins and seeds: every run an ordinary training, one JSON for each that is finished.

    OUT/
      grid.json            recipe, images: a grid goes on as it began, or not at all
      runs/TWIN-SEED.json  what a run left (`twin_run`)
      models/TWIN-SEED/    its weights
      images/              the set, decoded once
      trainings/           runs that were stopped, to go on from

A call skips what is finished, and can be killed at any moment. Seed 0 of every twin comes first, so that a grid cut
short is still a table. With `minutes`, no run is started that would not end in time, by the length of those before it;
one that is running then is saved, and goes on in the next call. `pack` runs share one device, each in a process of its
own.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import torch

from softless.data import open_splits
from softless.data.images import Summary, summary, what_changed
from softless.errors import ArgumentError, FileError
from softless.io.files import write_json
from softless.study.decoded import decode
from softless.study.twin_run import Task, decoded_set, execute
from softless.study.twins import Twin
from softless.study.workers import Pack
from softless.train.assemble import Runtime, meaning
from softless.train.recipe import Recipe, to_document
from softless.train.run import must_agree

SCHEMA, NAME = "softless.grid/1", "grid.json"
MARGIN = 1.15  # a run may take longer than those before it by this much

Record = dict[str, Any]


class GridWatcher(Protocol):
    """Who looks on."""

    def begin(self, runs: int, finished: int) -> None:
        """So many runs are asked for, and so many of them were finished before."""

    def decoding(self, images: int) -> None:
        """So many more images are decoded."""

    def tick(self, name: str, share: float) -> None:
        """A run is this far, from 0 to 1."""

    def ran(self, record: Record) -> None:
        """A run is over: done, diverged or failed."""


class Silent:
    """Looks on and says nothing."""

    def begin(self, runs: int, finished: int) -> None: ...
    def decoding(self, images: int) -> None: ...
    def tick(self, name: str, share: float) -> None: ...
    def ran(self, record: Record) -> None: ...


@dataclass(frozen=True)
class Ran:
    """All records of the runs asked for, in order, and how many are left for another call."""

    records: tuple[Record, ...]
    left: int


def run_grid(
    out: Path,
    recipe: Recipe,
    twins: Sequence[Twin],
    *,
    data: str | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    runtime: Runtime | None = None,
    minutes: float | None = None,
    pack: int = 1,
    watch: GridWatcher | None = None,
) -> Ran:
    """Train every twin from every seed in this folder, as far as the minutes go.

    On a CPU each run has one thread, whatever `pack` is, so that its numbers do not depend on it.
    """
    ends = None if minutes is None else time.time() + 60 * minutes
    runtime, watch = runtime or Runtime(), watch or Silent()
    if pack < 1 or not seeds or not twins:
        raise ArgumentError(f"a grid needs a twin, a seed and a pack of at least 1, got {len(twins)}, {seeds}, {pack}")
    parts = open_splits(data)
    about = _agree(out, recipe, summary(data, *parts))
    tasks = [
        Task(out=out, twin=twin, seed=seed, base=recipe, data=data, runtime=runtime, ends=ends)
        for seed in seeds
        for twin in twins
    ]
    waiting = [task for task in tasks if not finished(task)]
    watch.begin(len(tasks), len(tasks) - len(waiting))
    if waiting:
        if recipe.cache:
            decode(out / "images", parts, recipe.image_size, runtime, watch.decoding)
        if not (out / NAME).exists():  # not before: images that cannot be decoded leave no folder
            write_json(out / NAME, about)
        together = min(pack, len(waiting))
        before = [read_record(task.record) for task in tasks if task not in waiting]
        schedule = Schedule([replace(task, together=together) for task in waiting], before, ends)
        (_alone if pack == 1 else _packed)(schedule, together, watch)
    records = tuple(record for task in tasks if (record := left_by(task)) is not None)
    return Ran(records, sum(not finished(task) for task in tasks))


class Schedule:
    """Which run comes next, if there is time for it."""

    def __init__(self, waiting: Sequence[Task], before: Sequence[Record], ends: float | None):
        self.waiting, self.ends = list(waiting), ends
        self.took: dict[str, list[float]] = {}
        for record in before:
            self.note(record)

    def note(self, record: Record) -> None:
        """How long a run took."""
        if record["status"] == "done":
            self.took.setdefault(record["twin"]["id"], []).append(record["wall_seconds"])

    def next(self) -> Task | None:
        """The next run that will end in time; without a run to judge by, the next one."""
        for task in self.waiting:
            if self.ends is None or time.time() + MARGIN * self.expected(task) < self.ends:
                self.waiting.remove(task)
                return task
        return None

    def expected(self, task: Task) -> float:
        """Seconds: as its twin took from other seeds, or as twins take on average."""
        same = self.took.get(task.twin.id)
        every = [seconds for each in self.took.values() for seconds in each]
        return max(same) if same else fmean(every) if every else 0.0


def finished(task: Task) -> bool:
    """Done or diverged; what failed is tried again, and so is a record that cannot be read."""
    record = left_by(task)
    return record is not None and record["status"] in ("done", "diverged")


def left_by(task: Task) -> Record | None:
    """What a run left; None if that is nothing, or cannot be read."""
    try:
        return read_record(task.record)
    except FileError:
        return None


def read_record(path: Path) -> Record:
    """What a run left."""
    try:
        found: Record = json.loads(path.read_bytes())
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is damaged ({error})") from error
    if not isinstance(found, dict) or not {"status", "twin", "seed"} <= found.keys():
        raise FileError(f"{path} is no record of a run")
    return found


def _alone(schedule: Schedule, _pack: int, watch: GridWatcher) -> None:
    """One run after the other, in this process."""
    before = torch.get_num_threads()
    decoded = decoded_set(schedule.waiting[0])
    try:
        torch.set_num_threads(1)
        while (task := schedule.next()) is not None:
            record = execute(task, decoded, watch.tick)
            if record is None:
                return
            schedule.note(record)
            watch.ran(record)
    finally:
        torch.set_num_threads(before)


def _packed(schedule: Schedule, count: int, watch: GridWatcher) -> None:
    """Several at once, in worker processes that take one run after the other."""
    with Pack(count) as workers:
        _supply(workers, schedule)
        while workers.busy:
            for record in workers.wait(watch.tick):
                schedule.note(record)
                watch.ran(record)
            _supply(workers, schedule)


def _supply(workers: Pack, schedule: Schedule) -> None:
    while workers.free and (task := schedule.next()) is not None:
        workers.start(task)


def _agree(out: Path, recipe: Recipe, images: Summary) -> dict[str, Any]:
    """What grid.json holds: a grid is of one recipe and one set of images, and another of either raises."""
    path, what = out / NAME, f"the grid in {out}"
    about = {"schema": SCHEMA, "recipe": meaning(to_document(recipe)), "set": images}
    if not path.exists():
        return about
    try:
        before = json.loads(path.read_bytes())
        begun = {"schema": before["schema"], "recipe": meaning(before["recipe"])}
        old = before.get("set")
        same = before["fingerprints"] if old is None else [old[part]["fingerprint"] for part in ("train", "test")]
        changed = None if old is None else what_changed(old, images)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FileError(f"{path} cannot be read ({error})") from error
    if same != [images[part]["fingerprint"] for part in ("train", "test")]:
        why = changed or "names, sizes or labels have changed"
        raise ArgumentError(f"{what} was begun with other images: {why}; give it those, or another folder with --out")
    must_agree(begun, {key: about[key] for key in begun}, what)
    return about
