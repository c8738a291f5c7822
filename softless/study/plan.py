"""How much `softless study` does: the twins it trains, what it looks at in them, and how long it times calls."""

import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from softless.study.decision import MARGIN

CORE = ("softmax", "inline", "linear elu", "linear relu", "efficient", "taylor", "hydra")
PAIRS = ("softmax", "inline", "softmax-local", "inline-local")  # two fair pairs: each differs in attention alone
SEVEN = (*PAIRS, "linear-relu", "linear-elu", "taylor")
EVERY_TABLE = ("1", "3", "4", "9", "10")


@dataclass(frozen=True)
class Plan:
    """Sizes and repeats of what is timed and compared on random tensors."""

    tokens: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    repeats: int = 5
    heads: int = 4
    head_dim: int = 64
    deviations: tuple[float, ...] = (0.03, 0.1, 0.3, 0.5, 1.0, 3.0)
    score_tokens: int = 256
    score_heads: int = 2
    mechanisms: tuple[str, ...] = CORE


@dataclass(frozen=True)
class Preset:
    """A study. `epochs` shortens a recipe that has more; `tables` adds the twins of those tables, in windows too."""

    twins: tuple[str, ...] = SEVEN
    tables: tuple[str, ...] = ()
    seeds: int = 2
    epochs: int | None = None
    examined: int = 128  # images whose attention is examined
    masked: int = 360  # images that masked models answer
    shown: int = 4  # images in the attention viewer
    plan: Plan = field(default_factory=Plan)


DEFAULT = Preset()
QUICK = Preset(
    twins=PAIRS,
    seeds=1,
    epochs=12,
    examined=32,
    masked=180,
    shown=2,
    plan=Plan(tokens=(256, 1024), repeats=3, score_tokens=128, mechanisms=CORE[:4]),
)
FULL = replace(
    DEFAULT, twins=(), tables=EVERY_TABLE, seeds=3, examined=1000, masked=10_000,
    plan=Plan(tokens=(256, 1024, 4096, 16384), mechanisms=("all",)),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A study as it was asked for; None leaves a thing to the preset."""

    out: Path
    data: str | None = None
    preset: str = "default"
    recipe: str | None = None
    twins: tuple[str, ...] | None = None
    mechanisms: tuple[str, ...] | None = None
    tokens: tuple[int, ...] | None = None
    seeds: int | None = None
    seed: int = 0
    epochs: int | None = None
    margin: float = MARGIN
    minutes: float | None = None
    pack: int | None = None
    workers: int = 0
    device: str = "auto"

    def settled(self) -> Preset:
        """The preset with what was asked for otherwise."""
        preset: Preset = {"quick": QUICK, "full": FULL}.get(self.preset, DEFAULT)
        plan = replace(
            preset.plan,
            mechanisms=preset.plan.mechanisms if self.mechanisms is None else self.mechanisms,
            tokens=preset.plan.tokens if self.tokens is None else self.tokens,
        )
        chosen: dict[str, Any] = {} if self.twins is None else {"twins": self.twins, "tables": ()}
        return replace(preset, plan=plan, seeds=self.seeds or preset.seeds, **chosen)

    def command(self, device: str) -> str:
        """The command line that repeats it."""
        words = ["softless study", *([] if self.preset == "default" else [f"--{self.preset}"])]
        lists = {"twins": self.twins, "mechanisms": self.mechanisms, "tokens": self.tokens}
        words += [
            f"--{name} {shlex.quote(','.join(map(str, given)))}" for name, given in lists.items() if given is not None
        ]
        rest: dict[str, Any] = {
            "data": self.data,
            "recipe": self.recipe,
            "epochs": self.epochs,
            "seeds": self.seeds,
            "seed": self.seed,
        }
        rest |= {"margin": None if self.margin == MARGIN else f"{self.margin:g}", "out": self.out}
        words += [f"--{name} {shlex.quote(str(given))}" for name, given in rest.items() if given is not None]
        return " ".join([*words, f"--device {device}"])
