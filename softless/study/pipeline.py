"""A study from beginning to end: train the twins, examine them, time mechanisms, write the report.

Every part of the measurements is stored, so that the same command continues where it stopped:

    DIR/parts/NAME.json    {"asked": everything that the part depends on, "found": its numbers}
"""

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from softless.bench.scaling import cases_named
from softless.data import open_splits
from softless.errors import ArgumentError, NonFiniteError
from softless.io.parts import stored
from softless.machine import pick_device
from softless.report.page import require
from softless.study import examine
from softless.study.document import assemble, write
from softless.study.examine import Advance, SampleImages, TwinExamination
from softless.study.grid import GridResult, GridWatcher, StudyWatcher, first_runs, run_grid
from softless.study.plan import Preset, StudyOptions
from softless.study.schema import StudyDocument
from softless.study.twin_run import RunRecord, decode, fetch, trained_twin
from softless.study.twins import Twin, side_of, twins_named, twins_of
from softless.train.assemble import Runtime
from softless.train.devices import by_blas
from softless.train.recipe import Recipe, read_recipe, shipped
from softless.train.tasks.classify import build

DECODING, EXAMINING, TIMING = 0.3, 0.3, 3.0  # share of the work, where a run is 1; examining is per twin
TIMED_IMAGES = 32  # images per batch when the twins are timed


@dataclass(frozen=True)
class Study:
    """A study whose options are checked. `windows`: recipe and twins of table 4, if it needs another model."""

    options: StudyOptions
    preset: Preset
    device: str
    recipe_name: str
    recipe: Recipe
    twins: tuple[Twin, ...]
    windows: tuple[Recipe, tuple[Twin, ...]] | None

    @property
    def images(self) -> int:
        """Number of images to decode."""
        return sum(map(len, open_splits(self.options.data, self.recipe.hold_out)))

    @property
    def work(self) -> float:
        """Length of the study, in runs: the sum of all amounts that `StudyWatcher.advance` receives."""
        runs = self.preset.seeds * (len(self.twins) + (len(self.windows[1]) if self.windows else 0))
        return DECODING + runs + EXAMINING * len(self.twins) + TIMING

    def run(self, watch: StudyWatcher) -> tuple[StudyDocument, Path]:
        """Train, examine, time and write; return the document and the path of the page."""
        minutes = self.options.minutes
        ends = None if minutes is None else time.monotonic() + 60 * minutes
        grid_result = self._train("twins", self.recipe, self.twins, watch, ends)
        in_windows = self._train("twins-windows", *self.windows, watch, ends) if self.windows else None
        sample = self._sample(watch)
        with by_blas():
            examined = self._examine(grid_result, sample, watch)
        timing, seed = self.preset.timing, self.options.seed
        plan = {**asdict(timing), "seed": seed, "device": self.device}
        half: Advance = lambda label, share: watch.advance(label, TIMING / 2 * share)  # noqa: E731
        speed = self._part("speed", plan, lambda: examine.time_mechanisms(timing, seed, self.device, half))
        curves = self._part("curves", plan, lambda: examine.compare_with_softmax(timing, seed, half))
        seconds = self._time_twins(grid_result, sample, watch)
        document = assemble(
            self.options, self.preset, self.recipe, self.recipe_name, sample,
            grid_result=grid_result, in_windows=in_windows, examined=examined, speed=speed, curves=curves,
            seconds=seconds,
        )  # fmt: skip
        return document, write(self.options.out, document)

    def _part(self, name: str, depends_on: dict[str, Any], measure: Callable[[], Any]) -> Any:
        return stored(self.options.out / "parts" / f"{name}.json", depends_on, measure)

    def _train(
        self, folder: str, recipe: Recipe, twins: tuple[Twin, ...], watch: GridWatcher, ends: float | None
    ) -> GridResult:
        """Train every twin from every seed, until time.monotonic() is `ends`."""
        options = self.options
        return run_grid(
            options.out / folder, recipe, twins, data=options.data,
            seeds=range(options.seed, options.seed + self.preset.seeds),
            runtime=Runtime(device=self.device, workers=options.workers, graph=self.device == "cuda"),
            minutes=None if ends is None else max(ends - time.monotonic(), 0.0) / 60,
            pack=options.pack or (min(os.cpu_count() or 1, 4) if self.device == "cpu" else 1), watch=watch,
        )  # fmt: skip

    def _sample(self, watch: GridWatcher) -> SampleImages:
        """Load the test images that the grid decoded; decode them again if they were lost since."""
        folder, splits = self.options.out / "twins" / "images", open_splits(self.options.data, self.recipe.hold_out)
        decode(folder, splits, self.recipe.image_size, Runtime(workers=self.options.workers), watch.decoding)
        stored = fetch(folder, splits, self.recipe.image_size)
        assert stored is not None, "they are decoded"
        return SampleImages(stored.test, self.recipe.augment, self.device)

    def _examine(
        self, grid_result: GridResult, sample: SampleImages, watch: StudyWatcher
    ) -> dict[str, TwinExamination]:
        """Examine each twin, in the model of its first finished seed; a twin with infinities is left out."""
        preset = self.preset
        sizes = {"images": preset.examined, "masked": preset.masked, "shown": preset.shown, "seed": self.options.seed}
        step = EXAMINING / max(min(preset.examined, len(sample.images.labels)), 1)
        examined: dict[str, TwinExamination] = {}
        for id_, record in first_runs(grid_result).items():

            def measure(id_: str = id_, record: RunRecord = record) -> TwinExamination:
                tick: Callable[[int], None] = lambda images: watch.advance(f"examining {id_}", step * images)  # noqa: E731
                model = trained_twin(record, self.options.out / "twins")
                return examine.examine_twin(model, sample, **sizes, advance=tick)

            trained: dict[str, Any] = {"recipe": record["recipe"], "fingerprint": record["fingerprint"]}
            depends_on = {**sizes, "run": record["seed"], **trained}
            try:
                examined[id_] = self._part(f"examined-{id_}", depends_on, measure)
            except NonFiniteError as error:
                watch.say(f"{record['twin']['label']} cannot be examined: {error}")
        return examined

    def _time_twins(self, grid_result: GridResult, sample: SampleImages, watch: StudyWatcher) -> dict[str, float]:
        """Return the seconds per image that each trained twin takes to answer, at its own number of tokens."""
        first = first_runs(grid_result)
        if not first:
            return {}
        runs = {id_: [record["seed"], record["recipe"], record["fingerprint"]] for id_, record in first.items()}

        def measure() -> dict[str, float]:
            models = {id_: trained_twin(record, self.options.out / "twins") for id_, record in first.items()}
            models = {id_: model.to(sample.device) for id_, model in models.items()}
            pictures, _ = next(sample.batches(TIMED_IMAGES))
            return examine.time_twins(models, pictures, self.preset.timing.repeats, watch.advance)

        seconds: dict[str, float] = self._part("own-speed", {"runs": runs, "device": sample.device}, measure)
        return seconds


def prepare(options: StudyOptions) -> Study:
    """Check everything that can be checked before the first training."""
    require("plotly", "jinja2", by="the page of a study")
    device, preset = pick_device(options.device), options.resolve()
    name = options.recipe or default_recipe(options.data, device)
    recipe = recipe_named(name, preset, options.epochs)
    if not recipe.cache:
        raise ArgumentError("a study keeps its images decoded, and the recipe has cache = false")
    twins = twins_named(preset.twins, recipe) if preset.twins else twins_of(preset.tables, side=side_of(recipe))
    with torch.device("meta"):  # a model that cannot be built raises before any twin is trained
        for twin in twins:
            build(twin.recipe(recipe).model, recipe.image_size, classes=1)
    cases_named(preset.timing.mechanisms)
    examine.check_memory(preset.timing, device)
    windows = windows_of(recipe, name, preset, options.epochs)
    return Study(options, preset, device, Path(name).name, recipe, twins, windows)


def default_recipe(data: str | None, device: str) -> str:
    """Return the recipe for the embedded digits, or for other images, which are resized to 32 x 32 pixels."""
    if data is None or data == "digits":
        return "twins-digits"
    return "twins-cifar10" if device == "cuda" else "twins-images"


def recipe_named(name: str, preset: Preset, epochs: int | None = None) -> Recipe:
    """Read the recipe, with the epochs given, or with no more epochs than the preset allows."""
    recipe = read_recipe(name)
    return replace(recipe, epochs=epochs or min(recipe.epochs, preset.epochs or recipe.epochs))


def windows_of(
    recipe: Recipe, name: str, preset: Preset, epochs: int | None = None
) -> tuple[Recipe, tuple[Twin, ...]] | None:
    """Return recipe and twins of table 4 if the study's own model has no windows and NAME-windows is a recipe."""
    beside = f"{name}-windows"
    if "4" not in preset.tables or side_of(recipe) or beside not in shipped():
        return None
    chosen = recipe_named(beside, preset, epochs)
    return chosen, twins_of(["4"], side=side_of(chosen))
