"""How much `softless study` does: the twins it trains, what it looks at in them, and how long it times calls."""

from dataclasses import dataclass, field, replace

CORE = ("softmax", "inline", "linear elu", "linear relu", "efficient", "taylor", "hydra")
SIX = ("softmax", "inline-local", "inline", "linear-relu", "linear-elu", "taylor")
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

    twins: tuple[str, ...] = SIX
    tables: tuple[str, ...] = ()
    seeds: int = 2
    epochs: int | None = None
    examined: int = 128  # images whose attention is examined
    masked: int = 360  # images that masked models answer
    shown: int = 4  # images in the attention viewer
    plan: Plan = field(default_factory=Plan)


DEFAULT = Preset()
QUICK = Preset(
    twins=SIX[:4],
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
