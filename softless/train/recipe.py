"""A recipe: everything that decides how a model is trained, in plain numbers.

`batch` is the number of images of one update, over all devices and all parts of an accumulated one, so a recipe
means the same on one device and on eight. Rates are what the optimizer is given, and are not scaled by anything.

    lr(n) = warmup_lr + (lr - warmup_lr) n / W               while n < W, the updates of warmup_epochs
    lr(n) = min_lr + (lr - min_lr)(1 + cos(pi n / T)) / 2    until T, those of epochs: warm-up is not subtracted
    lr(n) = min_lr                                           for cooldown_epochs more

A recipe file is TOML with these keys, `[model]` and `[augment]` as tables; see recipes/.
"""

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from softless.data.augment import Augment
from softless.errors import ArgumentError

Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What `softless.create_model` is asked for; None leaves a thing as the name has it."""

    name: str = "inline_deit_tiny"
    mechanism: str | dict[str, Any] | None = None  # a name, or {name = "linear", phi = "relu"}
    local: bool | None = None
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
        if not (self.local is None or isinstance(self.local, bool)):
            raise ArgumentError(f"recipe: model.local is {self.local!r} and must be true or false")
        for name in ("drop_path_rate", "position_std", "weight_std"):
            if getattr(self, name) is not None:
                _check_type(f"model.{name}", getattr(self, name), float)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is trained.

    batch, epochs, cooldown_epochs, warmup_epochs        images an update; passes over the set
    lr, warmup_lr, min_lr, weight_decay, beta1, beta2    of AdamW
    clip              largest norm of the gradient; 0 leaves it as it is
    accumulate        an update's batch is computed in this many parts
    mixup, cutmix     their alphas; 0 is off. mix_prob of the batches are mixed, mix_switch of those by CutMix
    label_smoothing   share of the target spread over all classes
    ema, ema_warmup   decay of the averaged weights, 0 is off; a decay that grows to it
    precision         fp32, bf16 or fp16 (fp16 scales its gradients)
    cache             decode the set once and keep it on the device, augmented there: for small images
    distill, temperature                                 weight of the teacher's answers in the loss
    evaluate_every    epochs      checkpoint_every  updates, 0 for every epoch      log_every  updates
    """

    command: str = ""
    cost: str = ""
    expected: str = ""
    model: Architecture = field(default_factory=Architecture)
    augment: Augment = field(default_factory=Augment)
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
        for each in fields(self):
            _check_type(each.name, getattr(self, each.name), each.type)
        for name, least, most in LIMITS:
            value = getattr(self, name)
            if not (least <= value < math.inf and (most is None or value <= most)):
                bound = f"at least {least}" if most is None else f"from {least} to {most}"
                raise ArgumentError(f"recipe: {name} is {value} and must be {bound}")
        for name in ("beta1", "beta2", "ema"):
            if getattr(self, name) == 1:
                raise ArgumentError(f"recipe: {name} is 1 and must be below: an average of nothing but the past")
        if self.batch % self.accumulate:
            raise ArgumentError(f"recipe: batch {self.batch} is not a multiple of accumulate {self.accumulate}")
        if (self.mixup or self.cutmix) and (self.batch // self.accumulate) % 2:
            raise ArgumentError(f"recipe: mixup and cutmix mix pairs, and batch {self.batch} has an odd part")
        for name, whole in (("crop_share", 1), ("crop_mode", "squash")):
            if self.cache and (given := getattr(self.augment, name)) != whole:
                raise ArgumentError(
                    f"recipe: cache keeps whole images, so augment.{name} is {whole} and cannot be {given}"
                )
        if self.warmup_epochs > self.epochs:
            raise ArgumentError(f"recipe: warmup_epochs {self.warmup_epochs} are more than epochs {self.epochs}")

    @property
    def all_epochs(self) -> int:
        return self.epochs + self.cooldown_epochs


LIMITS: tuple[tuple[str, float, float | None], ...] = (
    ("image_size", 1, 2**14), ("batch", 1, None), ("epochs", 1, None), ("cooldown_epochs", 0, None),
    ("warmup_epochs", 0, None), ("lr", 0, None), ("warmup_lr", 0, None), ("min_lr", 0, None),
    ("weight_decay", 0, None), ("beta1", 0, 1), ("beta2", 0, 1), ("clip", 0, None), ("accumulate", 1, None),
    ("mixup", 0, None), ("cutmix", 0, None), ("mix_prob", 0, 1), ("mix_switch", 0, 1), ("label_smoothing", 0, 1),
    ("ema", 0, 1), ("distill", 0, 1), ("temperature", 1e-3, None), ("evaluate_every", 1, None),
    ("checkpoint_every", 0, None), ("log_every", 1, None),
)  # fmt: skip


def _check_type(name: str, value: object, kind: Any) -> None:
    if kind is Precision:
        if value not in get_args(Precision):
            raise ArgumentError(f"recipe: {name} is {value!r} and must be one of {', '.join(get_args(Precision))}")
        return
    right = (int, float) if kind is float else kind
    if not isinstance(value, right) or (isinstance(value, bool) and kind is not bool):
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        raise ArgumentError(f"recipe: {name} is {value!r} and must be {words.get(kind, kind.__name__)}")
