"""The keys that the recipes of all tasks share, and the checks of their values.

`batch` is the number of examples per update, over all devices and all parts of an accumulated update, so a recipe means
the same on one device and on eight. Learning rates are not scaled by the batch.

    lr(n) = warmup_lr + (lr - warmup_lr) n / W               while n < W, the updates of warmup_epochs
    lr(n) = min_lr + (lr - min_lr)(1 + cos(pi n / T)) / 2    while n < T, the updates of epochs, warm-up included
    lr(n) = min_lr                                           for cooldown_epochs more
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, get_args, get_origin

from softless.errors import ArgumentError

Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a model of any task is trained.

    command, cost, expected   str: how to run the recipe, how long it takes, what it reaches
    hold_out                  share of what there is to train on that is tested on instead; 0 is none
    batch                     examples per update
    epochs, cooldown_epochs, warmup_epochs                 passes over the set
    lr, warmup_lr, min_lr, weight_decay, beta1, beta2      of AdamW
    clip                      largest norm of the gradient; 0 does not clip
    accumulate                parts that the batch of an update is computed in
    ema, ema_warmup           decay of the averaged weights, 0 is off; whether the decay grows to this value
    precision                 fp32, bf16 or fp16 (fp16 scales its gradients)
    compile                   whether to compile the model
    evaluate_every            epochs
    evaluate_updates          updates; 0 evaluates by epochs
    checkpoint_every          updates; 0 saves every epoch
    log_every                 updates
    """

    command: str = ""
    cost: str = ""
    expected: str = ""
    hold_out: float = 0.0
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
    ema: float = 0.0
    ema_warmup: bool = False
    precision: Precision = "fp32"
    compile: bool = False
    evaluate_every: int = 1
    evaluate_updates: int = 0
    checkpoint_every: int = 0
    log_every: int = 20

    least: ClassVar[Mapping[str, float]] = dict.fromkeys(
        ("batch", "epochs", "accumulate", "evaluate_every", "log_every"), 1
    )  # 0 for every other number
    most: ClassVar[Mapping[str, float]] = dict.fromkeys(("hold_out", "beta1", "beta2", "ema"), 1)

    def __post_init__(self) -> None:
        check_values(self, self.least, self.most)
        for name in ("beta1", "beta2", "ema"):
            if getattr(self, name) == 1:
                raise ArgumentError(f"recipe: {name} is 1 and must be below 1, or the average would never change")
        if self.hold_out == 1:
            raise ArgumentError("recipe: hold_out is 1 and must be below 1, or nothing would be left to train on")
        self.check_ranks(1)
        if self.warmup_epochs > self.epochs:
            raise ArgumentError(f"recipe: warmup_epochs {self.warmup_epochs} are more than epochs {self.epochs}")

    def check_ranks(self, ranks: int) -> None:
        """Raise an error if this number of ranks cannot share a batch."""
        shared = f" times {ranks} ranks" if ranks > 1 else ""
        if self.batch % (ranks * self.accumulate):
            raise ArgumentError(f"recipe: batch {self.batch} is not a multiple of accumulate {self.accumulate}{shared}")

    @property
    def all_epochs(self) -> int:
        return self.epochs + self.cooldown_epochs


def check_values(keys: Any, least: Mapping[str, float], most: Mapping[str, float], table: str = "") -> None:
    """Raise an error for a value of the wrong kind, or for a number out of bounds. Keys of two kinds are left out."""
    for key in fields(keys):
        name, value, kind = key.name, getattr(keys, key.name), key.type
        if isinstance(kind, UnionType):
            kinds = [other for other in get_args(kind) if other is not NoneType]
            if value is None or len(kinds) > 1:
                continue
            (kind,) = kinds
        low, high = least.get(name, 0), most.get(name)
        check_type(f"{table}{name}", value, kind)
        if kind in (int, float) and not (low <= value < math.inf and (high is None or value <= high)):
            bound = f"at least {low}" if high is None else f"from {low} to {high}"
            raise ArgumentError(f"recipe: {table}{name} is {value} and must be {bound}")


def check_type(name: str, value: object, kind: Any) -> None:
    """Raise an error if the value of a key is not of this kind."""
    if get_origin(kind) is Literal:
        if not isinstance(value, str) or value not in get_args(kind):
            raise ArgumentError(f"recipe: {name} is {value!r} and must be one of {', '.join(get_args(kind))}")
        return
    allowed = (int, float) if kind is float else kind
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        raise ArgumentError(f"recipe: {name} is {value!r} and must be {kinds.get(kind, kind.__name__)}")
