"""A grid of twins and seeds: every run is an ordinary training, and leaves one JSON record.

    OUT/
      grid.json            the recipe and the images, which all runs share
      runs/TWIN-SEED.json  the record of a run (`twin_run`)
      models/TWIN-SEED/    its weights
      images/              the data set, decoded once
      trainings/           runs that were stopped, to be continued

A call skips finished runs, and can be killed at any moment. Seed 0 of every twin comes first, so that a grid that is
stopped early still has one run of each twin. With `minutes`, a run is started only if it will end in time, judged by
the length of the runs before it. A run that is still training at the end is saved, and the next call continues it.
`pack` runs share one device, each in a process of its own.
"""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import torch

from softless.data import open_splits
from softless.data.images import Summary, summary, what_changed
from softless.errors import ArgumentError, FileError
from softless.io.files import write_json
from softless.study.twin_run import TwinRun, decode
from softless.study.twins import Twin
from softless.study.workers import GridRun, Workers, execute
from softless.train.assemble import Runtime, meaning
from softless.train.recipe import Recipe
from softless.train.run import must_agree

SCHEMA, NAME = "softless.grid/1", "grid.json"
MARGIN = 1.15  # a run may take longer than the runs before it by this factor


class GridWatcher(Protocol):
    """Receives the progress of a grid."""

    def begin(self, runs: int, finished: int) -> None:
        """Note that the grid has `runs` runs, and that `finished` of them are finished."""

    def decoding(self, images: int) -> None:
        """Note that `images` more images are decoded."""

    def tick(self, name: str, share: float) -> None:
        """Note the share of a run that is done, from 0 to 1."""

    def ran(self, record: Any) -> None:
        """Note that a run ended: done, diverged or failed."""


class StudyWatcher(GridWatcher, Protocol):
    """Receives the progress of a study."""

    def advance(self, label: str, amount: float) -> None:
        """Note that `amount` more of the work is done; `label` says what is being done."""

    def say(self, sentence: str) -> None:
        """Show a sentence that the user should know."""


class Silent:
    """A `GridWatcher` that shows nothing."""

    def begin(self, runs: int, finished: int) -> None: ...
    def decoding(self, images: int) -> None: ...
    def tick(self, name: str, share: float) -> None: ...
    def ran(self, record: Any) -> None: ...


@dataclass(frozen=True)
class GridResult:
    """The records of the runs that ended, in order, and the number of runs that are left for another call."""

    records: tuple[Any, ...]  # a `RunRecord` each, or the record of another kind of run
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
) -> GridResult:
    """Train every twin from every seed, and return the records of all runs that ended.

    On a CPU each run has one thread, whatever `pack` is, so that its numbers do not depend on `pack`.

    Args:
        out: folder of the grid. Calling again with the same folder continues it.
        recipe: the recipe that all twins share.
        twins: models to train, for example `twins_named(["softmax", "inline"])`.
        data: folder or parquet file of images. Default: the embedded digits.
        seeds: seeds to train each twin from. Default: 0, 1, 2.
        runtime: device, decoding processes and CUDA graphs. Default: `Runtime()`.
        minutes: start no run that would end later. Default: no limit.
        pack: number of runs that share the device. Default: 1.
        watch: receives the progress. Default: nothing is shown.
    """
    ends = None if minutes is None else time.time() + 60 * minutes
    runtime, watch = runtime or Runtime(), watch or Silent()
    if pack < 1 or not seeds or not twins:
        raise ArgumentError(f"a grid needs a twin, a seed and a pack of at least 1, got {len(twins)}, {seeds}, {pack}")
    runs, prepare = plan_grid(out, recipe, twins, data=data, seeds=seeds, runtime=runtime, ends=ends)
    return train_all(runs, watch, lambda: prepare(watch), ends=ends, pack=pack)


def plan_grid(
    out: Path, recipe: Recipe, twins: Sequence[Twin], *, data: str | None, seeds: Sequence[int], runtime: Runtime,
    ends: float | None,
) -> tuple[list[TwinRun], Callable[[GridWatcher], None]]:  # fmt: skip
    """Return the runs of a grid, and the function that prepares them: it decodes the images and writes grid.json."""
    splits = open_splits(data, recipe.hold_out)
    about = _agree(out, recipe, summary(data, *splits))
    runs = [
        TwinRun(out=out, twin=twin, seed=seed, base=recipe, data=data, runtime=runtime, ends=ends)
        for seed in seeds
        for twin in twins
    ]

    def prepare(watch: GridWatcher) -> None:
        if recipe.cache:
            decode(out / "images", splits, recipe.image_size, runtime, watch.decoding)
        if not (out / NAME).exists():  # not before: images that cannot be decoded leave no folder
            write_json(out / NAME, about)

    return runs, prepare


def train_all(
    runs: Sequence[GridRun],
    watch: GridWatcher,
    prepare: Callable[[], None] = lambda: None,
    *,
    ends: float | None = None,
    pack: int = 1,
) -> GridResult:
    """Train the runs that are not finished, `pack` at once, after preparing them; return the records of all runs."""
    waiting = [run for run in runs if not finished(run)]
    watch.begin(len(runs), len(runs) - len(waiting))
    if waiting:
        prepare()
        together = min(pack, len(waiting))
        before = [read_record(run.record) for run in runs if run not in waiting]
        schedule = Schedule([replace(run, together=together) for run in waiting], before, ends)
        if pack == 1:
            _train_alone(schedule, watch)
        else:
            _train_packed(schedule, together, watch)
    records = tuple(record for run in runs if (record := stored_record(run)) is not None)
    return GridResult(records, sum(not finished(run) for run in runs))


def first_runs(grid_result: GridResult) -> dict[str, Any]:
    """Return by twin the record of its first seed that was trained to the end."""
    first: dict[str, Any] = {}
    for record in grid_result.records:
        if record["status"] == "done":
            first.setdefault(record["twin"]["id"], record)
    return first


class Schedule:
    """Chooses the next run that will end in time."""

    def __init__(self, waiting: Sequence[GridRun], before: Sequence[Any], ends: float | None):
        self.waiting, self.ends = list(waiting), ends
        self.seconds: dict[str, list[float]] = {}
        for record in before:
            self.note(record)

    def note(self, record: Any) -> None:
        """Remember how long a run took."""
        if record["status"] == "done":
            self.seconds.setdefault(record["twin"]["id"], []).append(record["wall_seconds"])

    def next(self) -> GridRun | None:
        """Take the next run that will end in time; without a finished run to judge by, take the next one."""
        for run in self.waiting:
            if self.ends is None or time.time() + MARGIN * self.expected(run) < self.ends:
                self.waiting.remove(run)
                return run
        return None

    def expected(self, run: GridRun) -> float:
        """Return the seconds that its twin took at most from other seeds, or else that twins take on average."""
        same = self.seconds.get(run.twin.id)
        every = [value for values in self.seconds.values() for value in values]
        return max(same) if same else fmean(every) if every else 0.0


def finished(run: GridRun) -> bool:
    """Tell whether a run is done or diverged; a run that failed or whose record is damaged is tried again."""
    record = stored_record(run)
    return record is not None and record["status"] in ("done", "diverged")


def stored_record(run: GridRun) -> Any | None:
    """Read the record of a run; None if there is none, or if it cannot be read."""
    try:
        return read_record(run.record)
    except FileError:
        return None


def read_record(path: Path) -> Any:
    """Read the record of a run."""
    try:
        record = json.loads(path.read_bytes())
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is damaged ({error})") from error
    if not isinstance(record, dict) or not {"status", "twin", "seed"} <= record.keys():
        raise FileError(f"{path} is no record of a run")
    return record


def _train_alone(schedule: Schedule, watch: GridWatcher) -> None:
    """Train one run after the other, in this process."""
    before = torch.get_num_threads()
    material = schedule.waiting[0].material()
    try:
        torch.set_num_threads(1)
        while (run := schedule.next()) is not None:
            record = execute(run, material, watch.tick)
            if record is None:
                return
            schedule.note(record)
            watch.ran(record)
    finally:
        torch.set_num_threads(before)


def _train_packed(schedule: Schedule, count: int, watch: GridWatcher) -> None:
    """Train several runs at once, in worker processes."""
    with closing(Workers(count)) as workers:
        while True:
            while workers.free and (run := schedule.next()) is not None:
                workers.start(run)
            if not workers.busy:
                return
            for record in workers.wait(watch.tick):
                schedule.note(record)
                watch.ran(record)


def _agree(out: Path, recipe: Recipe, images: Summary) -> dict[str, Any]:
    """Return the content of grid.json; a folder that was begun with another recipe or other images raises."""
    path, what = out / NAME, f"the grid in {out}"
    about = {"schema": SCHEMA, "recipe": meaning(asdict(recipe)), "set": images}
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
