"""The options of a study, and its presets: which twins are trained, what is examined, and which calls are timed."""

import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path

from softless.study.decision import MARGIN

CORE = ("softmax", "inline", "linear elu", "linear relu", "efficient", "taylor", "hydra")
PAIRS = ("softmax", "inline", "softmax-local", "inline-local")  # two fair pairs: each differs in attention alone
SEVEN = (*PAIRS, "linear-relu", "linear-elu", "taylor")
EVERY_TABLE = ("1", "3", "4", "9", "10")


@dataclass(frozen=True)
class TimingPlan:
    """Sizes and repeats of the calls that are timed, and compared with softmax, on random tensors."""

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
    """The size of a study. `epochs` shortens longer recipes; `tables` adds the twins of those tables of the paper."""

    twins: tuple[str, ...] = SEVEN
    tables: tuple[str, ...] = ()
    seeds: int = 2
    epochs: int | None = None
    examined: int = 128  # images whose attention is examined
    masked: int = 360  # images that are answered with masked keys
    shown: int = 4  # images in the attention viewer
    timing: TimingPlan = field(default_factory=TimingPlan)


DEFAULT = Preset()
QUICK = Preset(
    twins=PAIRS, seeds=1, epochs=12, examined=32, masked=180, shown=2,
    timing=TimingPlan(tokens=(256, 1024), repeats=3, score_tokens=128, mechanisms=CORE[:4]),
)  # fmt: skip
FULL = replace(
    DEFAULT, twins=(), tables=EVERY_TABLE, seeds=3, examined=1000, masked=10_000,
    timing=TimingPlan(tokens=(256, 1024, 4096, 16384), mechanisms=("all",)),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """The options of `softless study`; None means that the preset decides."""

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

    def resolve(self) -> Preset:
        """Return the preset with these options applied."""
        preset = {"quick": QUICK, "full": FULL}.get(self.preset, DEFAULT)
        timing = replace(
            preset.timing,
            mechanisms=self.mechanisms or preset.timing.mechanisms,
            tokens=self.tokens or preset.timing.tokens,
        )
        preset = replace(preset, timing=timing, seeds=self.seeds or preset.seeds)
        return preset if self.twins is None else replace(preset, twins=self.twins, tables=())

    def command(self, device: str) -> str:
        """Return the command line that repeats the study."""
        lists = {"twins": self.twins, "mechanisms": self.mechanisms, "tokens": self.tokens}
        options = {name: values and ",".join(map(str, values)) for name, values in lists.items()} | {
            "data": self.data,
            "recipe": self.recipe,
            "epochs": self.epochs,
            "seeds": self.seeds,
            "seed": self.seed,
            "margin": None if self.margin == MARGIN else f"{self.margin:g}",
            "out": self.out,
            "device": device,
        }
        words = ["softless study", *([] if self.preset == "default" else [f"--{self.preset}"])]
        words += [f"--{name} {shlex.quote(str(value))}" for name, value in options.items() if value is not None]
        return " ".join(words)
