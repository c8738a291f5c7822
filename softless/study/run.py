"""A study from beginning to end: train the twins, examine them, time mechanisms, write the report."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import typer

from softless.bench.scaling import cases_named
from softless.commands.ctrl_c import WATCH
from softless.commands.progress import Advance, progress
from softless.data import open_splits
from softless.errors import ArgumentError, NonFiniteError
from softless.machine import pick_device
from softless.report.page import require
from softless.study import document as study_document
from softless.study import measure as study_measure
from softless.study.decoded import decode, fetch
from softless.study.examine import Exhibit, examined
from softless.study.grid import Ran, run_grid
from softless.study.parts import Parts
from softless.study.plan import Asked, Preset
from softless.study.show import DECODING, Showing
from softless.study.twin_run import trained_twin
from softless.study.twins import Twin, side_of, twins_named, twins_of
from softless.study.writing import assemble, conclude, write
from softless.train.assemble import Runtime
from softless.train.devices import by_blas
from softless.train.recipe import Recipe, read_recipe, shipped
from softless.train.tasks.classify import build

if TYPE_CHECKING:
    from rich.console import Console

EXAMINING, TIMING = 0.3, 3.0  # of the length of a run, for the bar
TIMED_IMAGES = 32  # answered at once when the twins are timed


def study(asked: Asked, out: "Console | None") -> tuple[dict[str, Any], Path]:
    """The document, and the page that was made of it."""
    require("plotly", "jinja2", by="the page of a study")
    device, preset = pick_device(asked.device), asked.settled()
    name = asked.recipe or default_recipe(asked.data, device)
    recipe = recipe_named(name, preset, asked.epochs)
    if not recipe.cache:
        raise ArgumentError("a study keeps its images decoded, and the recipe has cache = false")
    twins = twins_named(preset.twins, recipe) if preset.twins else twins_of(preset.tables, side=side_of(recipe))
    must_build(recipe, twins)
    cases_named(preset.plan.mechanisms)
    study_measure.check_memory(preset.plan, device)
    cut = windows_of(recipe, name, preset, asked.epochs)
    runs = preset.seeds * (len(twins) + (len(cut[1]) if cut else 0))
    images = sum(map(len, open_splits(asked.data)))
    with progress(DECODING + runs + EXAMINING * len(twins) + TIMING, out is not None) as advance, goes_on():
        showing = Showing(out, advance, images)
        ends = None if asked.minutes is None else time.monotonic() + 60 * asked.minutes
        ran = train_all(asked, asked.out / "twins", recipe, twins, device, showing, ends)
        beside = Showing(out, advance)  # both grids have an inline-0
        in_windows = cut and train_all(asked, asked.out / "twins-windows", *cut, device, beside, ends)
        exhibit = exhibited(asked, recipe, device, showing)
        with by_blas():
            found = examine_all(asked, ran, preset, exhibit, advance, showing.say)
        parts = Parts(asked.out)
        plan = {**asdict(preset.plan), "seed": asked.seed, "device": device}
        third = _scaled(advance, TIMING / 2)
        speed = parts.part("speed", plan, lambda: study_measure.timed(preset.plan, asked.seed, device, third))
        curves = parts.part("curves", plan, lambda: study_measure.approximated(preset.plan, asked.seed, third))
        seconds = time_twins(asked, ran, preset, exhibit, advance)
    document = assemble(asked, recipe, Path(name).name, ran, found, exhibit)
    document["range"] = study_document.score_ranges(found, curves)
    tokens = document["data"]["tokens"]
    document["speed"] = {**speed, "own": study_document.own_speed(document["twins"], ran.records, seconds, tokens)}
    conclude(document, ran, in_windows, asked.margin)
    return document, write(asked.out, document)


@contextmanager
def goes_on() -> Iterator[None]:
    """Ctrl-C inside loses an update at most, and says so."""
    WATCH.says = "stopped: the same command goes on"
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(WATCH.says, err=True)
        raise


def default_recipe(data: str | None, device: str) -> str:
    """The embedded digits have their own; other images are looked at in 32 x 32 pixels."""
    if data is None or data == "digits":
        return "twins-digits"
    return "twins-cifar10" if device == "cuda" else "twins-images"


def recipe_named(name: str, preset: Preset, epochs: int | None = None) -> Recipe:
    """The recipe, of the epochs asked for, or no longer than the preset has it."""
    recipe = read_recipe(name)
    if epochs is not None:
        return replace(recipe, epochs=epochs)
    return recipe if preset.epochs is None else replace(recipe, epochs=min(recipe.epochs, preset.epochs))


def must_build(recipe: Recipe, twins: Sequence[Twin]) -> None:
    """A twin whose model cannot be made raises, before another is trained in vain."""
    with torch.device("meta"):
        for twin in twins:
            build(twin.recipe(recipe).model, recipe.image_size, classes=1)


def windows_of(
    recipe: Recipe, name: str, preset: Preset, epochs: int | None = None
) -> tuple[Recipe, tuple[Twin, ...]] | None:
    """The recipe and twins of table 4, where the study's own model sees no windows and NAME-windows is a recipe."""
    beside = f"{name}-windows"
    if "4" not in preset.tables or side_of(recipe) or beside not in shipped():
        return None
    found = recipe_named(beside, preset, epochs)
    return found, twins_of(["4"], side=side_of(found))


def train_all(
    asked: Asked,
    folder: Path,
    recipe: Recipe,
    twins: Sequence[Twin],
    device: str,
    showing: Showing,
    ends: float | None,
) -> Ran:
    """Every twin from every seed, until time.monotonic() is `ends`."""
    cores = os.cpu_count() or 1
    return run_grid(
        folder,
        recipe,
        twins,
        data=asked.data,
        seeds=range(asked.seed, asked.seed + asked.settled().seeds),
        runtime=Runtime(device=device, workers=asked.workers, graph=device == "cuda"),
        minutes=None if ends is None else max(ends - time.monotonic(), 0.0) / 60,
        pack=asked.pack or (min(cores, 4) if device == "cpu" else 1),
        watch=showing,
    )


def examine_all(
    asked: Asked, ran: Ran, preset: Preset, exhibit: Exhibit, advance: Advance, say: Callable[[str], None]
) -> dict[str, Any]:
    """By twin: what the probes find in the model of its first seed that was trained; one with infinities is passed."""
    parts, first = Parts(asked.out), first_runs(ran)
    sizes = {"images": preset.examined, "masked": preset.masked, "shown": preset.shown, "seed": asked.seed}
    found = {}
    for id_, record in first.items():
        step = EXAMINING / max(min(preset.examined, len(exhibit.images.labels)), 1)
        tell = lambda images, id_=id_, step=step: advance(f"examining {id_}", step * images)  # noqa: E731
        make = lambda record=record, tell=tell: examined(  # noqa: E731
            trained_twin(record, asked.out / "twins"), exhibit, **sizes, advance=tell
        )
        about = {**sizes, "run": record["seed"], "recipe": record["recipe"], "fingerprint": record["fingerprint"]}
        try:
            found[id_] = parts.part(f"examined-{id_}", about, make)
        except NonFiniteError as error:
            say(f"{record['twin']['label']} cannot be examined: {error}")
    return found


def first_runs(ran: Ran) -> dict[str, Any]:
    """By twin: the record of its first seed that was trained to the end."""
    first: dict[str, Any] = {}
    for record in ran.records:
        if record["status"] == "done":
            first.setdefault(record["twin"]["id"], record)
    return first


def time_twins(asked: Asked, ran: Ran, preset: Preset, exhibit: Exhibit, advance: Advance) -> dict[str, float]:
    """Seconds per image that the trained twins take to answer, at their own number of tokens."""
    first, shelf = first_runs(ran), asked.out / "twins"
    if not first:
        return {}
    about = {
        "runs": {id_: [record["seed"], record["recipe"], record["fingerprint"]] for id_, record in first.items()},
        "device": exhibit.device,
    }

    def make() -> dict[str, float]:
        models = {id_: trained_twin(record, shelf).to(exhibit.device) for id_, record in first.items()}
        return study_measure.own_speed(models, exhibit.first(TIMED_IMAGES), preset.plan.repeats, _scaled(advance, 0.0))

    return Parts(asked.out).part("own-speed", about, make)


def exhibited(asked: Asked, recipe: Recipe, device: str, showing: Showing) -> Exhibit:
    """The test images as the grid decoded them; decoded again where they were lost since."""
    shelf, parts, size = asked.out / "twins" / "images", open_splits(asked.data), recipe.image_size
    decode(shelf, parts, size, Runtime(workers=asked.workers), showing.decoding)
    kept = fetch(shelf, parts, size)
    assert kept is not None, "they are decoded"
    return Exhibit(kept[1], recipe.augment, device)


def _scaled(advance: Advance, by: float) -> Advance:
    return lambda label, share: advance(label, by * share)
