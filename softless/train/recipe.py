"""A recipe: every number that decides how a model is trained, and the TOML files that hold recipes.

`batch` is the number of images per update, over all devices and all parts of an accumulated update, so a recipe means
the same on one device and on eight. Learning rates are not scaled by the batch.

    lr(n) = warmup_lr + (lr - warmup_lr) n / W               while n < W, the updates of warmup_epochs
    lr(n) = min_lr + (lr - min_lr)(1 + cos(pi n / T)) / 2    while n < T, the updates of epochs, warm-up included
    lr(n) = min_lr                                           for cooldown_epochs more

A recipe file has these keys, and the tables `[model]` and `[augment]`; see recipes/.
"""

import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import softless
from softless.data.augment import Augment
from softless.errors import ArgumentError, FileError, did_you_mean

Precision = Literal["fp32", "bf16", "fp16"]
T = TypeVar("T")

DEFAULT = "digits"
LARGEST = 2**16  # bytes
PROSE = ("command", "cost", "expected")  # keys that change nothing about a training


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The options of `softless.create_model`; None keeps the default of the named model."""

    name: str = "inline_deit_tiny"
    mechanism: str | dict[str, Any] | None = None  # a name, or {name = "linear", phi = "relu"}
    local: bool | None = None
    qk_conv: bool | None = None
    window: int | list[Any] | None = None
    pattern: str | None = None
    patch_size: int | None = None
    dims: int | list[Any] | None = None
    depths: int | list[Any] | None = None
    heads: int | list[Any] | None = None
    global_pool: str | None = None
    drop_path_rate: float = 0.0
    position_std: float | None = None
    weight_std: float | None = None

    def __post_init__(self) -> None:
        for name, kind in {
            "local": bool,
            "qk_conv": bool,
            "drop_path_rate": float,
            "position_std": float,
            "weight_std": float,
        }.items():
            if getattr(self, name) is not None:
                _check_type(f"model.{name}", getattr(self, name), kind)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is trained.

    command, cost, expected   str: how to run the recipe, how long it takes, what it reaches
    model, augment            Architecture and Augment
    hold_out                  share of the training images to test on, instead of the test images; 0 is none
    image_size                height and width in pixels
    batch                     images per update
    epochs, cooldown_epochs, warmup_epochs                 passes over the set
    lr, warmup_lr, min_lr, weight_decay, beta1, beta2      of AdamW
    clip                      largest norm of the gradient; 0 does not clip
    accumulate                parts that the batch of an update is computed in
    mixup, cutmix             their alphas; 0 is off
    mix_prob, mix_switch      share of batches that are mixed, and share of these that CutMix mixes
    label_smoothing           share of the target that is spread over all classes
    ema, ema_warmup           decay of the averaged weights, 0 is off; whether the decay grows to this value
    precision                 fp32, bf16 or fp16 (fp16 scales its gradients)
    compile, channels_last    whether to compile the model; memory layout of images and convolutions
    cache                     decode the set once, keep it on the device and augment it there: for small images
    distill, temperature      weight of the teacher's answers in the loss; both answers are divided by the temperature
    evaluate_every            epochs
    checkpoint_every          updates; 0 saves every epoch
    log_every                 updates
    """

    command: str = ""
    cost: str = ""
    expected: str = ""
    model: Architecture = field(default_factory=Architecture)
    augment: Augment = field(default_factory=Augment)
    hold_out: float = 0.0
    image_size: int = 224
    batch: int = 1024
    epochs: int = 300
    cooldown_epochs: int = 0
    warmup_epochs: int = 20
    lr: float = 1e-3
    warmup_lr: float = 1e-6
    min_lr: float = 1e-5
    weight_decay: float = 0.05
    beta1: float = 0.9
    beta2: float = 0.999
    clip: float = 0.0
    accumulate: int = 1
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_prob: float = 1.0
    mix_switch: float = 0.5
    label_smoothing: float = 0.0
    ema: float = 0.0
    ema_warmup: bool = False
    precision: Precision = "fp32"
    compile: bool = False
    channels_last: bool = False
    cache: bool = False
    distill: float = 0.5
    temperature: float = 1.0
    evaluate_every: int = 1
    checkpoint_every: int = 0
    log_every: int = 20

    def __post_init__(self) -> None:
        for key in fields(self):
            value, least, most = getattr(self, key.name), LEAST.get(key.name, 0), MOST.get(key.name)
            _check_type(key.name, value, key.type)
            if key.type in (int, float) and not (least <= value < math.inf and (most is None or value <= most)):
                bound = f"at least {least}" if most is None else f"from {least} to {most}"
                raise ArgumentError(f"recipe: {key.name} is {value} and must be {bound}")
        for name in ("beta1", "beta2", "ema"):
            if getattr(self, name) == 1:
                raise ArgumentError(f"recipe: {name} is 1 and must be below 1, or the average would never change")
        if self.hold_out == 1:
            raise ArgumentError("recipe: hold_out is 1 and must be below 1, or there would be no images to train on")
        self.check_ranks(1)
        for name, needed in (("crop_share", 1), ("crop_mode", "squash")):
            if self.cache and (value := getattr(self.augment, name)) != needed:
                raise ArgumentError(
                    f"recipe: cache keeps whole images, so augment.{name} is {needed} and cannot be {value}"
                )
        if self.warmup_epochs > self.epochs:
            raise ArgumentError(f"recipe: warmup_epochs {self.warmup_epochs} are more than epochs {self.epochs}")

    def check_ranks(self, ranks: int) -> None:
        """Raise an error if this number of ranks cannot share a batch, or cannot mix it in pairs."""
        parts, shared = ranks * self.accumulate, f" times {ranks} ranks" if ranks > 1 else ""
        if self.batch % parts:
            raise ArgumentError(f"recipe: batch {self.batch} is not a multiple of accumulate {self.accumulate}{shared}")
        if (self.mixup or self.cutmix) and (part := self.batch // parts) % 2:
            raise ArgumentError(
                f"recipe: mixup and cutmix mix pairs, and a part of batch {self.batch} has {part} images"
            )

    @property
    def all_epochs(self) -> int:
        return self.epochs + self.cooldown_epochs


LEAST = {"temperature": 1e-3}  # 0 for every other number
LEAST |= dict.fromkeys(("image_size", "batch", "epochs", "accumulate", "evaluate_every", "log_every"), 1)
MOST = dict.fromkeys(("hold_out", "beta1", "beta2", "mix_prob", "mix_switch", "label_smoothing", "ema", "distill"), 1)
MOST |= {"image_size": 2**14}


def _check_type(name: str, value: object, kind: Any) -> None:
    if kind is Precision:
        if value not in get_args(Precision):
            raise ArgumentError(f"recipe: {name} is {value!r} and must be one of {', '.join(get_args(Precision))}")
        return
    allowed = (int, float) if kind is float else kind
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        raise ArgumentError(f"recipe: {name} is {value!r} and must be {kinds.get(kind, kind.__name__)}")


TABLES: dict[str, type] = {"model": Architecture, "augment": Augment}


def shipped() -> dict[str, Path]:
    """Return the recipes that come with softless: inside the package once installed, beside it in a checkout."""
    package = Path(str(softless.__file__)).parent
    folder = next((place for place in (package / "recipes", package.parent / "recipes") if place.is_dir()), package)
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def read_recipe(name: str = DEFAULT, changes: Iterable[tuple[str, str]] = ()) -> Recipe:
    """Read a recipe, and change some of its keys.

    name      str, default "digits": a recipe of softless, or the path of a TOML file
    changes   (key, value) pairs of text, such as ("epochs", "3") or ("model.local", "false")

    >>> from softless.train.recipe import read_recipe
    >>> recipe = read_recipe("digits", [("epochs", "3"), ("model.mechanism", "softmax")])
    >>> recipe.epochs, recipe.model.mechanism
    (3, 'softmax')
    """
    return changed(document_of(name), changes)


def parse_change(text: str) -> tuple[str, str]:
    """Split "epochs=3" into ("epochs", "3")."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ArgumentError(f"{text!r} is not name=value")
    return key, value


def changed(document: Mapping[str, Any], changes: Iterable[tuple[str, str]]) -> Recipe:
    """Return the recipe of a document, after changing some keys to values that are given as text."""
    values = {**document}
    for key, text in changes:
        table, dot, inner = key.rpartition(".")
        if dot and table not in TABLES:
            raise ArgumentError(f"{key!r} is not a key of a recipe: its tables are {' and '.join(TABLES)}")
        if not dot:
            values[key] = _value(text)
        elif isinstance(keys := values.get(table, {}), dict):  # `from_document` raises an error for anything else
            values[table] = {**keys, inner: _value(text)}
    return from_document(values)


def from_document(document: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a document; an unknown key is an error."""
    tables: dict[str, Any] = {key: _build(cls, document.get(key, {}), f"[{key}]") for key, cls in TABLES.items()}
    return _build(Recipe, {**document, **tables}, "a recipe")


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


def _build(cls: type[T], table: Any, what: str) -> T:
    if not isinstance(table, dict):
        raise ArgumentError(f"{what} is {table!r} and must be a table of keys")
    known = [key.name for key in fields(cls)]  # type: ignore[arg-type]
    for key in table:
        if key not in known:
            hint = did_you_mean(key, known) or f"it has {', '.join(known)}"
            raise ArgumentError(f"{key!r} is not a key of {what}: {hint}")
    values = {
        key: tuple(value) if isinstance(value, list) and cls is Augment else value for key, value in table.items()
    }
    try:
        return cls(**values)
    except TypeError as error:
        raise ArgumentError(f"{what} has a value of the wrong kind: {error}") from None
