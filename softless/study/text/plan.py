"""The options of a study of text, and its presets: models, text, recall and decoding, sized for two CPU cores."""

import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path

from softless.study.text.twins import TEXT_TWINS
from softless.train.language_recipe import LanguageModel, LanguageRecipe

MARGIN = 0.05  # bits per byte
EVERY, SLOW = tuple(twin.id for twin in TEXT_TWINS), "regress"  # which solves equations for every token
EVALUATIONS = 10  # of a training


@dataclass(frozen=True)
class RecallPlan:
    """Sizes of the synthetic tasks; `inside` and `beyond` are numbers of pairs, as in training and more of them."""

    updates: int = 300
    batch: int = 32
    dim: int = 64
    inside: tuple[int, ...] = (2, 4, 8)
    beyond: tuple[int, ...] = (12, 16)
    tested: int = 128  # sequences of each length
    lr: float = 3e-3


@dataclass(frozen=True)
class DecodingPlan:
    """Tokens seen before a decode step is timed, and how many steps are timed."""

    tokens: tuple[int, ...] = (64, 256, 1024, 4096, 16384)
    steps: int = 12


@dataclass(frozen=True)
class TextPreset:
    """The size of a study. A longer text is read up to `train_bytes`, and `test_bytes` of the text to test on."""

    twins: tuple[str, ...] = tuple(id_ for id_ in EVERY if id_ != SLOW)
    seeds: int = 2
    train_bytes: int | None = 600_000
    test_bytes: int | None = 50_000
    recall: RecallPlan = field(default_factory=RecallPlan)
    recall_seeds: int = 1
    decoding: DecodingPlan = field(default_factory=DecodingPlan)


RECIPE = LanguageRecipe(
    model=LanguageModel(dim=64, depth=2, heads=2), length=128, batch=8, epochs=1, lr=4e-3, warmup_lr=4e-3, min_lr=2e-4,
    weight_decay=0.1, beta2=0.95, clip=1.0, checkpoint_every=100,
)  # fmt: skip
STANDARD = TextPreset()
LITTLE = TextPreset(
    twins=("softmax", "linear", "inline", "delta"), seeds=1, train_bytes=200_000, test_bytes=20_000,
    decoding=DecodingPlan(tokens=(64, 1024, 4096), steps=6),
)  # fmt: skip
WHOLE = replace(STANDARD, twins=EVERY, seeds=3, recall_seeds=3, train_bytes=None, test_bytes=None)
PRESETS = {"default": STANDARD, "quick": LITTLE, "full": WHOLE}


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """The options of `softless study --text`; None means that the preset decides."""

    out: Path
    text: str
    preset: str = "default"
    recipe: str | None = None
    twins: tuple[str, ...] | None = None
    tokens: tuple[int, ...] | None = None
    seeds: int | None = None
    seed: int = 0
    epochs: int | None = None
    margin: float = MARGIN
    minutes: float | None = None
    pack: int | None = None
    device: str = "auto"

    def resolve(self) -> TextPreset:
        """Return the preset with these options applied."""
        preset = PRESETS[self.preset]
        decoding = replace(preset.decoding, tokens=self.tokens or preset.decoding.tokens)
        return replace(preset, decoding=decoding, seeds=self.seeds or preset.seeds, twins=self.twins or preset.twins)

    def command(self, device: str) -> str:
        """Return the command line that repeats the study."""
        lists = {"twins": self.twins, "tokens": self.tokens}
        options: dict[str, object] = {
            "text": self.text, **{name: values and ",".join(map(str, values)) for name, values in lists.items()},
            "recipe": self.recipe, "epochs": self.epochs, "seeds": self.seeds, "seed": self.seed,
            "margin": None if self.margin == MARGIN else f"{self.margin:g}", "out": self.out, "device": device,
        }  # fmt: skip
        words = ["softless study", *([] if self.preset == "default" else [f"--{self.preset}"])]
        words += [f"--{name} {shlex.quote(str(value))}" for name, value in options.items() if value is not None]
        return " ".join(words)
