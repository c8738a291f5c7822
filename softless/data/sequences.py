"""Batches of sequences of tokens, cut from one long text.

    sequence i   reads the tokens  i L, ..., i L + L - 1, and predicts the tokens  i L + 1, ..., i L + L

So every token but the first is predicted once. In training, a last sequence that is shorter is left out. In testing it
is filled up, and what fills it is not predicted (`IGNORED`).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from softless.data.sampler import Loader, ResumableSampler
from softless.data.text import Text
from softless.data.tokens import Tokenizer
from softless.errors import FileError

IGNORED = -100  # the target that cross-entropy leaves out


class SequenceBatch(NamedTuple):
    """Some sequences of a text.

    inputs    int64 [B, L]
    targets   int64 [B, L]: the next tokens, or `IGNORED`
    ids       int64 [B]: the number of each sequence
    """

    inputs: Tensor
    targets: Tensor
    ids: Tensor


class TokenizedText:
    """The tokens of a text, and its sequences of `length` tokens.

    name       str: where the text lies
    tokens     [T]
    count      int: how many sequences
    size       int: bytes of the text
    """

    def __init__(self, text: Text, tokenizer: Tokenizer, length: int, *, train: bool) -> None:
        self.name, self.size, self.length = text.name, len(text.data), length
        self.tokens = tokenizer.encode(text.data)
        if len(self.tokens) <= length:
            part = "train" if train else "test"
            raise FileError(
                f"{text.name}: its text to {part} on has {len(self.tokens):,} tokens ({self.size:,} bytes), and one "
                f"sequence needs {length + 1:,}: the length {length:,} and a token after it"
            )
        predicted = len(self.tokens) - 1
        self.count = predicted // length if train else -(-predicted // length)

    def named(self, sequence: int) -> str:
        """Return where a sequence lies."""
        start = sequence * self.length
        return f"{self.name}[tokens {start} to {start + self.length}]"

    def batch(self, ids: Int[Tensor, " b"]) -> SequenceBatch:
        """Return these sequences."""
        places = ids[:, None] * self.length + torch.arange(self.length + 1)  # [B, L + 1]
        beyond = places >= len(self.tokens)
        tokens = self.tokens[places.masked_fill(beyond, 0)].long()
        return SequenceBatch(tokens[:, :-1], tokens.masked_fill(beyond, IGNORED)[:, 1:], ids)


class SequenceLoader(Loader):
    """A loader of sequences.

    text      TokenizedText: all of them
    sampler   ResumableSampler: the order
    device    torch.device: where the batches go
    batch     int: sequences per batch on this rank
    train     bool: True gives complete batches only, as many to every rank; False gives every sequence once
    """

    unit = "sequences"

    def __init__(
        self, text: TokenizedText, sampler: ResumableSampler, device: torch.device, *, batch: int, train: bool
    ) -> None:
        super().__init__(text.count, sampler, device, batch=batch, train=train)
        self.text = text

    def __iter__(self) -> Iterator[SequenceBatch]:
        order = torch.tensor([*self.sampler][: len(self) * self.batch], dtype=torch.int64)
        for start in range(0, len(order), self.batch):
            ids = order[start : start + self.batch]
            self.sampler.advance(len(ids))
            yield self._sent(self.text.batch(ids))

    def blank(self) -> SequenceBatch:
        """Return a batch of the first sequence."""
        return self._sent(self.text.batch(torch.zeros(1, dtype=torch.int64)))

    def _sent(self, batch: SequenceBatch) -> SequenceBatch:
        return SequenceBatch(*(part.to(self.device, non_blocking=True) for part in batch))
