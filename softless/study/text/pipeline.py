"""A study of text from beginning to end: train the twins, test their recall, time decoding, write the report.

DIR/twins/     the trainings on the text (study/grid.py), and grid.json with the recipe and the text they share
DIR/recall/    the trainings on synthetic sequences
DIR/parts/     measurements that a rerun does not repeat
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from softless.data.sequences import TokenizedText
from softless.data.text import Text, open_texts
from softless.errors import ArgumentError, FileError
from softless.io.files import write_json
from softless.io.parts import stored
from softless.machine import pick_device
from softless.report.page import require
from softless.study.grid import NAME, GridResult, StudyWatcher, first_runs, train_all
from softless.study.text.decoding import DecodingPoint, continuation, decoding_cost
from softless.study.text.plan import EVALUATIONS, RECIPE, TextOptions, TextPreset
from softless.study.text.recall import RecallRun
from softless.study.text.run import Source, TextRun, evaluated_often, trained_text_twin
from softless.study.text.schema import TextDocument
from softless.study.text.twins import TextTwin, text_twins_named
from softless.train.assemble import Runtime, agree_on_parts, describe_texts
from softless.train.language_recipe import LanguageRecipe
from softless.train.recipe import document_of, recipe_of
from softless.train.run import must_agree
from softless.train.tasks.language import build, language_recipe, make_tokenizer

TIMING = 0.2  # share of the work per twin, where a run is 1
PROMPTED, WRITTEN = 40, 60  # bytes of the prompt, and of what a twin writes


@dataclass(frozen=True)
class TextStudy:
    """A study whose options are checked."""

    options: TextOptions
    preset: TextPreset
    device: str
    recipe: LanguageRecipe
    source: Source
    texts: tuple[Text, Text]
    twins: tuple[TextTwin, ...]
    whole: int  # bytes of the text before it was shortened

    @property
    def work(self) -> float:
        """Length of the study, in runs: the sum of all amounts that the watcher receives."""
        return len(self.twins) * (self.preset.seeds + self.preset.recall_seeds + TIMING)

    def run(self, watch: StudyWatcher) -> tuple[TextDocument, Path]:
        """Train, test, time and write; return the document and the path of the page."""
        from softless.study.text.document import assemble_text, write_text_study  # needs what training does not: timm

        minutes = self.options.minutes
        ends = None if minutes is None else time.time() + 60 * minutes
        if (read := sum(len(text.data) for text in self.texts)) < self.whole:
            watch.say(f"of the text's {self.whole:,} bytes, this study reads {read:,}; --full reads all")
        grid_result = self.train(watch, ends)
        recalled = self.recall(watch, ends)
        decoding = self.decode(watch)
        prompt = self.texts[1].data[:PROMPTED].decode(errors="ignore").strip() or " "
        document = assemble_text(
            self.options, self.device, self.recipe, self.texts, whole=self.whole, grid_result=grid_result,
            recalled=recalled, decoding=decoding, samples=self._samples(grid_result, prompt), prompt=prompt,
        )  # fmt: skip
        return document, write_text_study(self.options.out, document)

    def train(self, watch: StudyWatcher, ends: float | None) -> GridResult:
        """Train every twin on the text from every seed."""
        out, seeds = self.options.out / "twins", range(self.options.seed, self.options.seed + self.preset.seeds)
        about = describe_texts(self.recipe, self.options.text, *self.texts, self.options.seed)
        about["recall"] = json.loads(json.dumps(asdict(self.preset.recall)))
        _agree(out / NAME, about)
        runs = [
            TextRun(
                out=out, twin=twin, seed=seed, base=self.recipe, source=self.source, ends=ends,
                runtime=Runtime(device=self.device),
            )
            for seed in seeds
            for twin in self.twins
        ]  # fmt: skip

        def prepare() -> None:
            if not (out / NAME).exists():
                write_json(out / NAME, about)

        return train_all(runs, watch, prepare, ends=ends, pack=self._pack)

    def recall(self, watch: StudyWatcher, ends: float | None) -> GridResult:
        """Train every twin on the synthetic tasks, on a CPU."""
        runs = [
            RecallRun(
                out=self.options.out / "recall", twin=twin, seed=seed, plan=self.preset.recall, ends=ends,
                runtime=Runtime(device="cpu"),
            )
            for seed in range(self.options.seed, self.options.seed + self.preset.recall_seeds)
            for twin in self.twins
        ]  # fmt: skip
        return train_all(runs, watch, ends=ends, pack=self.options.pack or min(os.cpu_count() or 1, 4))

    @property
    def _pack(self) -> int:
        return self.options.pack or (min(os.cpu_count() or 1, 4) if self.device == "cpu" else 1)

    def decode(self, watch: StudyWatcher, ends: float | None = None) -> list[DecodingPoint]:
        """Time the decode steps of each twin, one after the other; begin none after the time `ends`."""
        points: list[DecodingPoint] = []
        for twin in self.twins:
            if ends is not None and time.time() > ends:
                break
            depends_on = {"twin": asdict(twin), "recipe": asdict(self.recipe), "plan": asdict(self.preset.decoding)}
            label = f"decoding with {twin.label}"

            def tick(share: float, label: str = label) -> None:
                watch.advance(label, TIMING * share)

            def measure(twin: TextTwin = twin, tick: Any = tick) -> list[DecodingPoint]:
                return decoding_cost(twin, self.recipe, self.preset.decoding, tick)

            points += stored(self.options.out / "parts" / f"decoding-{twin.id}.json", depends_on, measure)
        return points

    def _samples(self, grid_result: GridResult, prompt: str) -> dict[str, str]:
        """Return by twin how its first model continues the beginning of the test text; only models of bytes write."""
        if self.recipe.tokens != "bytes":
            return {}
        return {
            id_: continuation(
                trained_text_twin(record, self.options.out / "twins"), prompt.encode(), WRITTEN
            ).decode(errors="replace")
            for id_, record in first_runs(grid_result).items()
        }  # fmt: skip


def prepare_text(options: TextOptions) -> TextStudy:
    """Check everything that can be checked before the first training."""
    require("plotly", "jinja2", by="the page of a study")
    return plan_text(options)


def plan_text(options: TextOptions) -> TextStudy:
    """Read the text and choose what is trained, without what a page needs."""
    device, preset = pick_device(options.device), options.resolve()
    twins = text_twins_named(preset.twins)
    recipe = _recipe(options)
    source = Source(options.text, recipe.hold_out, preset.train_bytes, preset.test_bytes)
    whole = sum(len(text.data) for text in open_texts(options.text, recipe.hold_out))
    texts = source.texts()
    tokenizer = make_tokenizer(recipe, texts[0])
    train, _ = (TokenizedText(text, tokenizer, recipe.length, train=text is texts[0]) for text in texts)
    if train.count < recipe.batch:
        raise FileError(
            f"{options.text}: its {len(texts[0].data):,} bytes to train on are {train.count:,} sequences of "
            f"{recipe.length:,} tokens, and an update needs {recipe.batch:,}"
        )
    with torch.device("meta"):  # a model that cannot be built raises before any twin is trained
        for twin in twins:
            build(twin.recipe(recipe))
    return TextStudy(
        options, preset, device, evaluated_often(recipe, train.count, EVALUATIONS), source, texts, twins, whole
    )


def _recipe(options: TextOptions) -> LanguageRecipe:
    """Return the recipe of the study, or the one that was chosen, with the epochs given."""
    recipe = RECIPE
    if options.recipe is not None:
        recipe = language_recipe(asdict(recipe_of(document_of(options.recipe))), f"recipe {options.recipe!r}")
    return replace(recipe, epochs=options.epochs or recipe.epochs)


def _agree(path: Path, about: Mapping[str, Any]) -> None:
    """Raise if the folder was begun with another recipe, text or recall."""
    if not path.exists():
        return
    what = f"the study in {path.parent.parent}"
    try:
        before = json.loads(path.read_bytes())
        recall = {"recall": before["recall"]}
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise FileError(f"{path} cannot be read ({error})") from error
    if before.get("seed") != about["seed"]:
        raise ArgumentError(f"{what} was begun with seed {before.get('seed')}, and it is {about['seed']} now")
    agree_on_parts(before, about, what, "another text", "text", "bytes")
    must_agree(recall, {"recall": about["recall"]}, what)
