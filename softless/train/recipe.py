"""The recipe of an image classifier, and the TOML files that hold the recipes of all tasks.

A recipe is every number that decides how a model is trained. The recipe file of a classifier has the keys of `Recipe`,
and the tables `[model]` and `[augment]`. With `task = "language"` it has the keys of `LanguageRecipe`, with `task =
"segment"` those of `SegmentRecipe`, and with `task = "detect"` those of `DetectRecipe`; see recipes/.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import softless
from softless.data.augment import Augment
from softless.data.boxes import BoxValues
from softless.data.joint import JointAugment
from softless.data.masks import MaskValues
from softless.errors import ArgumentError, FileError, did_you_mean
from softless.train.architecture import Architecture
from softless.train.dense_recipe import DetectModel, DetectRecipe, SegmentModel, SegmentRecipe
from softless.train.language_recipe import LanguageModel, LanguageRecipe
from softless.train.settings import Settings

T = TypeVar("T")

DEFAULT = "digits"
LARGEST = 2**16  # bytes
PROSE = ("command", "cost", "expected")  # keys that change nothing about a training


@dataclass(frozen=True, kw_only=True)
class Recipe(Settings):
    """How a classifier is trained. The keys of `Settings`, and:

    model, augment            Architecture and Augment
    hold_out                  share of the training images to test on, instead of the test images; 0 is none
    image_size                height and width in pixels
    mixup, cutmix             their alphas; 0 is off
    mix_prob, mix_switch      share of batches that are mixed, and share of these that CutMix mixes
    label_smoothing           share of the target that is spread over all classes
    channels_last             memory layout of images and convolutions
    cache                     decode the set once, keep it on the device and augment it there: for small images
    distill, temperature      weight of the teacher's answers in the loss; both answers are divided by the temperature
    """

    model: Architecture = field(default_factory=Architecture)
    augment: Augment = field(default_factory=Augment)
    image_size: int = 224
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_prob: float = 1.0
    mix_switch: float = 0.5
    label_smoothing: float = 0.0
    channels_last: bool = False
    cache: bool = False
    distill: float = 0.5
    temperature: float = 1.0

    least: ClassVar[Mapping[str, float]] = {**Settings.least, "image_size": 1, "temperature": 1e-3}
    most: ClassVar[Mapping[str, float]] = {
        **Settings.most,
        **dict.fromkeys(("mix_prob", "mix_switch", "label_smoothing", "distill"), 1),
        "image_size": 2**14,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, needed in (("crop_share", 1), ("crop_mode", "squash")):
            if self.cache and (value := getattr(self.augment, name)) != needed:
                raise ArgumentError(
                    f"recipe: cache keeps whole images, so augment.{name} is {needed} and cannot be {value}"
                )

    def check_ranks(self, ranks: int) -> None:
        """Raise an error if this number of ranks cannot share a batch, or cannot mix it in pairs."""
        super().check_ranks(ranks)
        part = self.batch // (ranks * self.accumulate)
        if (self.mixup or self.cutmix) and part % 2:
            raise ArgumentError(
                f"recipe: mixup and cutmix mix pairs, and a part of batch {self.batch} has {part} images"
            )


AnyRecipe = Recipe | LanguageRecipe | SegmentRecipe | DetectRecipe
IMAGES, LANGUAGE, SEGMENT, DETECT = "classify", "language", "segment", "detect"
DENSE = (SEGMENT, DETECT)
RECIPES: dict[str, type[AnyRecipe]] = {
    IMAGES: Recipe,
    LANGUAGE: LanguageRecipe,
    SEGMENT: SegmentRecipe,
    DETECT: DetectRecipe,
}
KINDS = {
    IMAGES: "a recipe",
    LANGUAGE: "a language recipe",
    SEGMENT: "a segmentation recipe",
    DETECT: "a detection recipe",
}
TABLES: dict[str, dict[str, type]] = {
    IMAGES: {"model": Architecture, "augment": Augment},
    LANGUAGE: {"model": LanguageModel},
    SEGMENT: {"model": SegmentModel, "augment": JointAugment, "masks": MaskValues},
    DETECT: {"model": DetectModel, "augment": JointAugment, "boxes": BoxValues},
}
IN_TUPLES = (Augment, JointAugment, MaskValues, BoxValues)  # their lists are tuples


def shipped() -> dict[str, Path]:
    """Return the recipes that come with softless: inside the package once installed, beside it in a checkout."""
    package = Path(str(softless.__file__)).parent
    folder = next((place for place in (package / "recipes", package.parent / "recipes") if place.is_dir()), package)
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def read_recipe(name: str = DEFAULT, changes: Iterable[tuple[str, str]] = ()) -> Recipe:
    """Read the recipe of a classifier, and change some of its keys.

    name      str, default "digits": a recipe of softless, or the path of a TOML file
    changes   (key, value) pairs of text, such as ("epochs", "3") or ("model.local", "false")

    >>> from softless.train.recipe import read_recipe
    >>> recipe = read_recipe("digits", [("epochs", "3"), ("model.mechanism", "softmax")])
    >>> recipe.epochs, recipe.model.mechanism
    (3, 'softmax')
    """
    return for_images(changed(document_of(name), changes), f"recipe {name!r}")


def parse_change(text: str) -> tuple[str, str]:
    """Split "epochs=3" into ("epochs", "3")."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ArgumentError(f"{text!r} is not name=value")
    return key, value


def changed(document: Mapping[str, Any], changes: Iterable[tuple[str, str]]) -> AnyRecipe:
    """Return the recipe of a document, after changing some keys to values that are given as text."""
    values = {**document}
    changes = [*changes]
    values |= {key: _value(text) for key, text in changes if key == "task"}
    tables, kind = TABLES[task_of(values)], KINDS[task_of(values)]
    for key, text in changes:
        table, dot, inner = key.rpartition(".")
        if dot and table not in tables:
            named = "its tables are" if len(tables) > 1 else "its table is"
            raise ArgumentError(f"{key!r} is not a key of {kind}: {named} {' and '.join(tables)}")
        if not dot:
            values[key] = _value(text)
        elif isinstance(keys := values.get(table, {}), dict):  # `recipe_of` raises an error for anything else
            values[table] = {**keys, inner: _value(text)}
    return recipe_of(values)


def recipe_of(document: Mapping[str, Any]) -> AnyRecipe:
    """Return the recipe of a document, for the task that it names; an unknown key is an error."""
    task = task_of(document)
    values = {key: value for key, value in document.items() if key != "task"}
    for key, cls in TABLES[task].items():
        values[key] = _build(cls, document.get(key, {}), f"[{key}]", task)
    return _build(RECIPES[task], values, KINDS[task], task)


def from_document(document: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a document that trains a classifier."""
    return for_images(recipe_of(document), "the recipe")


def for_images(recipe: AnyRecipe, what: str) -> Recipe:
    """Return the recipe if it trains a classifier of images, and raise an error otherwise."""
    if not isinstance(recipe, Recipe):
        raise ArgumentError(
            f"{what} trains a model of task {recipe.task!r}, and a recipe for images with labels is needed"
        )
    return recipe


def task_of(document: Mapping[str, Any]) -> str:
    """Return the task of a recipe's document; without the key it is the classification of images."""
    task = document.get("task", IMAGES)
    if not isinstance(task, str) or task not in RECIPES:
        raise ArgumentError(f"recipe: task is {task!r} and must be one of {', '.join(RECIPES)}")
    return task


def document_of(name: str) -> dict[str, Any]:
    """Read the keys of a recipe file."""
    path, known = Path(name), shipped()
    if path.suffix != ".toml" and name in known:
        path = known[name]
    try:
        if not path.is_file():
            hint = did_you_mean(name, known)
            named = f"a recipe of softless: {hint}" if hint else f"one of {', '.join(known)}"
            raise FileError(f"recipe {name!r} is neither a file nor {named}")
        if path.stat().st_size > LARGEST:
            raise FileError(f"{path}: it has more than {LARGEST} bytes, which is too large for a recipe")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"{path}: it cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(f"{path}: it is not TOML ({error})") from error


def _value(text: str) -> Any:
    """Parse a number, true or false, a list or a table as TOML does; anything else is text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def _build(cls: type[T], table: Any, what: str, task: str) -> T:
    if not isinstance(table, dict):
        raise ArgumentError(f"{what} is {table!r} and must be a table of keys")
    known = _keys(cls)
    for key in table:
        if key not in known:
            raise ArgumentError(f"{key!r} is not a key of {what}: {_hint(key, known, what, task)}")
    values = {
        key: tuple(value) if isinstance(value, list) and cls in IN_TUPLES else value for key, value in table.items()
    }
    try:
        return cls(**values)
    except TypeError as error:
        raise ArgumentError(f"{what} has a value of the wrong kind: {error}") from None


def _hint(key: str, known: list[str], what: str, task: str) -> str:
    """Say which key may be meant: one of a similar name, or one that the recipes of another task have."""
    if hint := did_you_mean(key, known):
        return hint
    for other, cls in RECIPES.items():
        theirs = TABLES[other].get(what.strip("[]")) if what.startswith("[") else cls
        if other != task and theirs is not None and key in _keys(theirs):
            return f"only recipes of task {other!r} have it, and this one is of task {task!r}"
    return f"it has {', '.join(known)}"


def _keys(cls: type) -> list[str]:
    return [key.name for key in fields(cls) if key.name != "task"]
