"""A causal language model: a Llama with any causal mechanism as its attention, the loss of the next token, metrics.

    loss             mean of -ln p(next token), from float32 logits
    loss per byte    sum of -ln p / bytes of the predicted tokens; divided by ln 2, bits per byte
    perplexity       exp(loss), per token

Models with other tokens can be compared per byte, and only models with the same tokens per token.
"""

import base64
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from softless.data.sampler import ResumableSampler, share_of
from softless.data.sequences import IGNORED, SequenceBatch, SequenceLoader, TokenizedText
from softless.data.text import Text
from softless.data.tokens import ByteTokenizer, Tokenizer, learn_pairs, read_pairs
from softless.errors import ArgumentError, FileError, needs_extra
from softless.train.devices import Devices
from softless.train.language_recipe import SOFTMAX, LanguageRecipe
from softless.train.recipe import recipe_of
from softless.train.run import Run, best_of, load_best
from softless.train.tasks import Batches, Evaluation, Loss, Tensors

LARGEST_EXPONENT = 700.0  # the exponential function of more is no float


class Language:
    """A `Task`: predict the next token of a text.

    model      nn.Module: tokens [B, L] -> an output with logits [B, L, tokens]
    texts      (train, test): the tokenized texts
    recipe     LanguageRecipe
    sizes      int64 [tokens]: the bytes of each token
    devices    Devices: the ranks that share the sequences
    seed       int: of the order of the sequences
    """

    unit, metric, higher_is_better = "sequences", "loss_per_byte", False

    def __init__(
        self, model: nn.Module, texts: tuple[TokenizedText, TokenizedText], recipe: LanguageRecipe, sizes: Tensor,
        devices: Devices, seed: int,
    ):  # fmt: skip
        self.model, self.texts, self.sizes, self.device = model, texts, sizes, devices.device
        self.speed_unit = "tokens", recipe.length
        self.loss: Loss = NextTokenLoss()
        self.train: Batches = sequence_loader(texts[0], recipe.batch, devices, seed=seed, train=True)
        self.test: Batches = sequence_loader(texts[1], recipe.batch, devices, seed=seed, train=False)

    def metrics(self) -> "TokenCounts":
        return TokenCounts(self.texts[1].count, self.sizes, self.device)

    def names(self, ids: list[int]) -> list[str]:
        return [self.texts[0].named(sequence) for sequence in ids]


class NextTokenLoss:
    """The mean cross-entropy of the next token."""

    def parts(self, batch: SequenceBatch, count: int) -> list[Tensors]:
        return list(zip(batch.inputs.chunk(count), batch.targets.chunk(count), strict=True))

    def __call__(self, model: nn.Module, part: Tensors) -> Tensor:
        return surprises(model, *part).mean()


def surprises(model: nn.Module, inputs: Tensor, targets: Tensor) -> Float[Tensor, "b l"]:
    """Return -ln p of every target, and 0 where there is none; the logits are float32, or float64 as the model's."""
    logits = model(input_ids=inputs).logits
    logits = logits if logits.dtype == torch.float64 else logits.float()
    flat = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED)
    return flat.view_as(targets)


@dataclass(frozen=True)
class SequenceAnswers:
    """The loss of each test sequence, to compare two models with the same tokens sequence by sequence.

    losses   sum of -ln p over the sequence, little-endian float32, as base64
    bytes    bytes that were predicted, little-endian int32, as base64
    """

    sequences: int
    losses: str
    bytes: str

    @classmethod
    def of(cls, losses: np.ndarray, sizes: np.ndarray) -> "SequenceAnswers":
        packed = (base64.b64encode(array.tobytes()).decode() for array in (losses.astype("<f4"), sizes.astype("<i4")))
        return cls(len(losses), *packed)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Unpack the losses and the bytes."""
        losses, sizes = (base64.b64decode(packed, validate=True) for packed in (self.losses, self.bytes))
        return np.frombuffer(losses, "<f4"), np.frombuffer(sizes, "<i4")


@dataclass(frozen=True)
class TextScores:
    """The scores of a text. Losses are in nats."""

    tokens: int
    bytes: int
    loss: float  # per token
    loss_per_byte: float
    bits_per_byte: float
    perplexity: float  # per token


class TokenCounts:
    """The `Metrics` of a language model: the loss, the tokens and the bytes of each sequence."""

    def __init__(self, sequences: int, sizes: Tensor, device: torch.device):
        self.sizes = sizes.to(device)
        self.losses = torch.zeros(sequences, dtype=torch.float64, device=device)
        self.counts = torch.zeros(2, sequences, dtype=torch.int64, device=device)  # tokens, bytes

    def add(self, model: nn.Module, batch: SequenceBatch) -> None:
        real = batch.targets != IGNORED
        losses = surprises(model, batch.inputs, batch.targets).double().sum(1)
        sizes = self.sizes[batch.targets.masked_fill(~real, 0)].masked_fill(~real, 0).sum(1)
        self.losses.index_copy_(0, batch.ids, losses)
        self.counts.index_copy_(1, batch.ids, torch.stack([real.sum(1), sizes]))

    def tensors(self) -> list[Tensor]:
        return [self.losses, self.counts]

    def answers(self) -> SequenceAnswers:
        return SequenceAnswers.of(self.losses.cpu().numpy(), self.counts[1].cpu().numpy())

    def scores(self) -> TextScores:
        (tokens, size), total = self.counts.sum(1).tolist(), self.losses.sum().item()
        loss, per_byte = total / tokens, total / size
        perplexity = math.exp(min(loss, LARGEST_EXPONENT))
        return TextScores(tokens, size, loss, per_byte, per_byte / math.log(2), perplexity)

    def evaluation(self) -> Evaluation:
        scores = self.scores()
        numbers = {key: getattr(scores, key) for key in ("loss_per_byte", "bits_per_byte", "perplexity")}
        return Evaluation(scores.loss, {**numbers, "test_loss": scores.loss}, asdict(scores), asdict(self.answers()))


def sequence_loader(text: TokenizedText, batch: int, devices: Devices, *, seed: int, train: bool) -> SequenceLoader:
    """Return a loader of a text; `batch` is over all ranks."""
    shared = share_of(batch, devices.ranks, "sequences")
    sampler = ResumableSampler(text.count, seed=seed, shuffle=train, rank=devices.rank, ranks=devices.ranks)
    return SequenceLoader(text, sampler, devices.device, batch=shared, train=train)


def build(recipe: LanguageRecipe) -> nn.Module:
    """Build the model of a recipe with random weights."""
    with needs_extra("language models come from transformers", "hf"):
        from transformers import LlamaConfig, LlamaForCausalLM

    sizes, (name, options) = recipe.model, recipe.model.attention
    config = LlamaConfig(
        vocab_size=recipe.token_count, hidden_size=sizes.dim, intermediate_size=sizes.inner,
        num_hidden_layers=sizes.depth, num_attention_heads=sizes.heads, num_key_value_heads=sizes.shared_heads,
        max_position_embeddings=recipe.length, tie_word_embeddings=sizes.tied, use_cache=False,
        bos_token_id=None, eos_token_id=None, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if name != SOFTMAX or options:
        from softless.transformers import set_mechanism

        set_mechanism(model, name, **options)
    if sizes.tied:
        model.lm_head = TiedHead(model.model.embed_tokens)
    return model


class TiedHead(nn.Module):
    """Logits from the embedding of tokens.

    The table has one name, that of the embedding. transformers gives it two, and averaged weights would move twice.
    """

    def __init__(self, embedding: nn.Embedding):
        super().__init__()
        self.embedding = (embedding,)  # in a tuple, so that it is no part of this module

    def forward(self, x: Float[Tensor, "b l c"]) -> Float[Tensor, "b l n"]:
        return F.linear(x, self.embedding[0].weight)


def make_tokenizer(recipe: LanguageRecipe, text: Text) -> Tokenizer:
    """Return the tokens of a recipe, learned from the training text where they are learned."""
    return ByteTokenizer() if recipe.tokens == "bytes" else learn_pairs(text, recipe.vocabulary)


def tokenizer_of(run: Run, recipe: LanguageRecipe, about: Mapping[str, Any]) -> Tokenizer:
    """Return the tokens that a run was begun with."""
    if recipe.tokens == "bytes":
        return ByteTokenizer()
    tokenizer = read_pairs(run.tokenizer, str(about.get("tokenizer")))
    if tokenizer.count != recipe.vocabulary:
        raise FileError(f"{run.tokenizer}: it has {tokenizer.count} tokens, and the run has {recipe.vocabulary}")
    return tokenizer


def language_recipe(document: Mapping[str, Any], what: str) -> LanguageRecipe:
    """Return the recipe of a document that trains a language model."""
    recipe = recipe_of(document)
    if not isinstance(recipe, LanguageRecipe):
        raise ArgumentError(f"{what} is a recipe for images, and a language model needs task = 'language'")
    return recipe


def trained(folder: Path) -> tuple[nn.Module, LanguageRecipe, Tokenizer, dict[str, Any]]:
    """Return the best model of a run, its recipe, its tokens, and the run's document with the update of the weights."""
    saved, about = best_of(folder)
    recipe = language_recipe(about["recipe"], f"the recipe of {folder}")
    model = build(recipe)
    load_best(model, saved)
    return model, recipe, tokenizer_of(Run(folder), recipe, about), about
