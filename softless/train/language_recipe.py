"""The recipe of a language model: what it reads, how large it is, and how it is trained.

A recipe file of a language model has `task = "language"`, these keys, and the table `[model]`; see recipes/text-*.toml.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from softless.errors import ArgumentError
from softless.train.settings import Settings, check_type, check_values

TokenKind = Literal["bytes", "bpe"]
BYTES = 256
SOFTMAX = "softmax"


@dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """The sizes of a Llama: RMSNorm, rotary positions, SwiGLU.

    dim         int, default 128: channels
    depth       int, default 5: blocks
    heads       int, default 4
    key_heads   int, default None: heads of k and v; None is as many as `heads`
    mlp_ratio   float, default 2.6875: channels inside a block's SwiGLU, as a multiple of `dim`
    tied        bool, default True: whether the embedding of tokens also gives the logits
    mechanism   default "softmax": the name of a mechanism, or {name = "linear", phi = "relu"}
    """

    dim: int = 128
    depth: int = 5
    heads: int = 4
    key_heads: int | None = None
    mlp_ratio: float = 2.6875
    tied: bool = True
    mechanism: str | dict[str, Any] = SOFTMAX

    name: ClassVar[str] = "llama"
    least: ClassVar[Mapping[str, float]] = dict.fromkeys(("dim", "depth", "heads", "key_heads"), 1)
    most: ClassVar[Mapping[str, float]] = {"dim": 2**16, "depth": 2**10, "heads": 2**12, "mlp_ratio": 2**6}

    def __post_init__(self) -> None:
        if not isinstance(self.mechanism, dict):
            check_type("model.mechanism", self.mechanism, str)
        elif not isinstance(self.mechanism.get("name"), str):
            raise ArgumentError(f"recipe: model.mechanism is {self.mechanism!r} and must have a name")
        check_values(self, self.least, self.most, "model.")
        if self.dim % (2 * self.heads):
            raise ArgumentError(
                f"recipe: model.dim {self.dim} is not a multiple of twice model.heads {self.heads}: rotary positions "
                "need heads with an even number of channels"
            )
        if self.heads % self.shared_heads:
            raise ArgumentError(
                f"recipe: model.heads {self.heads} is not a multiple of model.key_heads {self.key_heads}"
            )
        if self.inner < 1:
            raise ArgumentError(f"recipe: model.mlp_ratio {self.mlp_ratio} of model.dim {self.dim} leaves no channel")

    @property
    def shared_heads(self) -> int:
        """Return the heads of k and v."""
        return self.heads if self.key_heads is None else self.key_heads

    @property
    def inner(self) -> int:
        """Return the channels inside a block's SwiGLU."""
        return int(self.dim * self.mlp_ratio)

    @property
    def attention(self) -> tuple[str, dict[str, Any]]:
        """Return the name of the mechanism, and its options."""
        if isinstance(self.mechanism, str):
            return self.mechanism, {}
        return self.mechanism["name"], {key: value for key, value in self.mechanism.items() if key != "name"}


@dataclass(frozen=True, kw_only=True)
class LanguageRecipe(Settings):
    """How a language model is trained. The keys of `Settings`, and:

    task         "language"
    model        LanguageModel
    tokens       "bytes" (default) or "bpe": whole bytes, or pieces of words that are learned from the training text
    vocabulary   int, default 4096: how many pieces there are with "bpe", the 256 bytes included
    length       int, default 256: tokens per sequence
    """

    task: Literal["language"] = "language"
    model: LanguageModel = field(default_factory=LanguageModel)
    tokens: TokenKind = "bytes"
    vocabulary: int = 4096
    length: int = 256
    batch: int = 16
    epochs: int = 2
    warmup_epochs: int = 0

    least: ClassVar[Mapping[str, float]] = {**Settings.least, "vocabulary": BYTES + 1, "length": 2}
    most: ClassVar[Mapping[str, float]] = {**Settings.most, "vocabulary": 2**20, "length": 2**20}

    @property
    def token_count(self) -> int:
        """Return how many different tokens there are."""
        return BYTES if self.tokens == "bytes" else self.vocabulary
