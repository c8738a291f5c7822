"""One run of a study of text: train a twin from one seed, and write a JSON record of it (softless.text-twin/1)."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

from torch import nn

from softless.data.text import Text, open_texts
from softless.errors import FileError
from softless.io import checkpoint
from softless.machine import Machine, circumstances
from softless.study.text.twins import TextTwin
from softless.study.workers import GridRun, RunWatcher
from softless.train.assemble import train_language
from softless.train.language_recipe import LanguageRecipe
from softless.train.run import Run
from softless.train.tasks.language import build, language_recipe

TEXT_RUN_SCHEMA = "softless.text-twin/1"


class TextRecord(TypedDict):
    """The JSON of a run. Loss, bits per byte and answers are those of the last evaluation, never of the best one."""

    schema: str
    twin: dict[str, Any]  # the fields of `TextTwin`
    seed: int
    status: str  # done | diverged | failed
    reason: str | None
    bits_per_byte: float | None
    perplexity: float | None
    seconds: float | None
    answers: dict[str, Any] | None  # the loss and the bytes of every test sequence (`SequenceAnswers`)
    curve: list[dict[str, float]]
    parameters: int
    wall_seconds: float
    together: int
    recipe: dict[str, Any]
    versions: dict[str, str]
    machine: Machine


@dataclass(frozen=True)
class Source:
    """A text, and how much of it is read: None is all of it."""

    path: str
    hold_out: float = 0.0
    train_bytes: int | None = None
    test_bytes: int | None = None

    def texts(self) -> tuple[Text, Text]:
        """Read the text to train on and the text to test on, each from its beginning."""
        train, test = open_texts(self.path, self.hold_out)
        return cut(train, self.train_bytes), cut(test, self.test_bytes)


def cut(text: Text, most: int | None) -> Text:
    """Return the first `most` bytes of a text, cut between two characters."""
    if most is None or len(text.data) <= most:
        return text
    while text.data[most] & 0xC0 == 0x80:  # the inside of a character
        most -= 1
    return Text(text.name, text.data[:most])


@dataclass(frozen=True, kw_only=True)
class TextRun(GridRun):
    """The training of a twin on a text."""

    twin: TextTwin
    base: LanguageRecipe
    source: Source

    @property
    def recipe(self) -> LanguageRecipe:
        return self.twin.recipe(self.base)

    @property
    def model(self) -> Path:
        """The folder of the trained weights."""
        return self.out / "models" / self.name

    def material(self) -> tuple[Text, Text]:
        return self.source.texts()

    def train(self, material: tuple[Text, Text], watch: RunWatcher) -> dict[str, Any]:
        run = Run(self.training)
        outcome = train_language(
            self.training, self.recipe, self.source.path, watch, runtime=self.runtime, seed=self.seed,
            resume=run.about.exists(), texts=material,
        )  # fmt: skip
        last = checkpoint.newest(run.last)
        assert last is not None
        weights = last.parts.get("ema", last.parts["model"])
        checkpoint.save(self.model, last.step, {"model": weights}, {"recipe": asdict(self.recipe)}, keep=1)
        numbers = {key: outcome.last[key] for key in ("bits_per_byte", "perplexity")}
        return {**numbers, "seconds": outcome.seconds, "answers": outcome.answers}

    def record_of(self, scores: Mapping[str, Any], parameters: int = 0, wall: float = 0.0) -> TextRecord:
        where = circumstances(self.runtime.device, "transformers")
        return {
            "schema": TEXT_RUN_SCHEMA, "twin": asdict(self.twin), "seed": self.seed, "status": scores["status"],
            "reason": scores.get("reason"), "bits_per_byte": scores.get("bits_per_byte"),
            "perplexity": scores.get("perplexity"), "seconds": scores.get("seconds"), "answers": scores.get("answers"),
            "curve": curve_of(Run(self.training)), "parameters": parameters, "wall_seconds": round(wall, 3),
            "together": self.together, "recipe": asdict(self.recipe), "versions": where["versions"],
            "machine": where["machine"],
        }  # fmt: skip


def curve_of(training: Run) -> list[dict[str, float]]:
    """Return the evaluations in the log of a training."""
    lines = [json.loads(line) for line in training.log.read_text().splitlines()] if training.log.exists() else []
    return [{key: line[key] for key in ("epoch", "bits_per_byte")} for line in lines if "bits_per_byte" in line]


def trained_text_twin(record: TextRecord, out: Path) -> nn.Module:
    """Load the model of a finished run, in evaluation mode."""
    folder = out / "models" / f"{record['twin']['id']}-{record['seed']}"
    saved = checkpoint.newest(folder)
    if saved is None:
        raise FileError(f"{folder} holds no trained model")
    model = build(language_recipe(record["recipe"], f"the recipe of {folder}"))
    model.load_state_dict(saved.parts["model"])
    return model.eval()


def evaluated_often(recipe: LanguageRecipe, train: int, times: int) -> LanguageRecipe:
    """Return a recipe that evaluates `times` times in its training on so many sequences."""
    updates = max(train // recipe.batch, 1) * recipe.all_epochs
    return replace(recipe, evaluate_updates=max(updates // times, 1))
