"""Turn a text into tokens and back: its bytes, or pieces of words that are learned from it.

Byte-pair encoding (Sennrich et al. 2016) begins with the 256 bytes, and makes the most frequent pair of neighbors a new
token until there are enough. Words and the spaces before them stay apart, as in GPT-2. Every text has tokens, and its
tokens give back the same bytes. Learning is deterministic, so every rank learns the same tokens.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from softless.data.text import Text
from softless.errors import ArgumentError, FileError, needs_extra

AT_ONCE = 2**16  # characters that are encoded together, up to the next line end
LARGEST_FILE = 2**27  # bytes of a file of tokens

# How the library tokenizers writes a byte: as itself where it can be printed, and as a letter after U+0100 otherwise.
_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(256) if byte not in _PRINTED]
BYTE_OF = {chr(byte): byte for byte in _PRINTED} | {chr(256 + place): byte for place, byte in enumerate(_HIDDEN)}


class Tokenizer(Protocol):
    """Tokens from 0 to `count` - 1.

    count   int: how many different tokens there are
    sizes   int64 [count]: the bytes of each token
    file    str: the content of a file that `read_pairs` reads; None for bytes, which need no file
    """

    count: int
    sizes: Tensor
    file: str | None

    def encode(self, data: bytes) -> Int[Tensor, " n"]:
        """Return the tokens of UTF-8 text."""

    def decode(self, tokens: Int[Tensor, " n"]) -> bytes:
        """Return the bytes of tokens."""


class ByteTokenizer:
    """A `Tokenizer`: every byte is a token."""

    def __init__(self) -> None:
        self.count, self.sizes = 256, torch.ones(256, dtype=torch.int64)
        self.file: str | None = None

    def encode(self, data: bytes) -> Int[Tensor, " n"]:
        return torch.from_numpy(np.frombuffer(data, np.uint8).copy())

    def decode(self, tokens: Int[Tensor, " n"]) -> bytes:
        return tokens.to(torch.uint8).numpy().tobytes()


class PairTokenizer:
    """A `Tokenizer` of byte-pair encoding.

    file   str: JSON as the library tokenizers writes it
    what   str: the name of the file, for an error
    """

    def __init__(self, file: str, what: str) -> None:
        with needs_extra("byte-pair encoding uses tokenizers", "hf"):
            import tokenizers
        try:
            self.inner = tokenizers.Tokenizer.from_str(file)
            names = sorted(self.inner.get_vocab().items(), key=lambda item: item[1])
            self.pieces = [bytes(BYTE_OF[letter] for letter in name) for name, _ in names]
        except Exception as error:  # noqa: BLE001  tokenizers raises nothing narrower
            raise FileError(f"{what}: it is no file of byte-pair tokens ({error})") from None
        if [number for _, number in names] != list(range(len(names))) or not {*self.pieces} >= {*_single()}:
            raise FileError(f"{what}: its tokens are not numbered from 0, or do not hold every byte")
        self.count = len(self.pieces)
        self.file: str | None = file
        self.sizes = torch.tensor([len(piece) for piece in self.pieces])

    def encode(self, data: bytes) -> Int[Tensor, " n"]:
        parts = self.inner.encode_batch([*_parts(data.decode())], add_special_tokens=False)
        return torch.from_numpy(np.concatenate([np.array(part.ids, np.int32) for part in parts]))

    def decode(self, tokens: Int[Tensor, " n"]) -> bytes:
        return b"".join(self.pieces[token] for token in tokens.tolist())


def learn_pairs(text: Text, vocabulary: int) -> PairTokenizer:
    """Learn tokens from a text; the text must be long enough for so many.

    text         Text: the training text
    vocabulary   int: how many tokens, the 256 bytes included
    """
    with needs_extra("byte-pair encoding uses tokenizers", "hf"):
        from tokenizers import Tokenizer as Pairs
        from tokenizers import decoders, models, pre_tokenizers, trainers
    pairs = Pairs(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, min_frequency=2, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    pairs.train_from_iterator(_parts(text.data.decode()), trainer)
    if (count := pairs.get_vocab_size()) != vocabulary:
        raise ArgumentError(
            f"{text.name}: its {len(text.data):,} bytes to train on give {count} tokens, and vocabulary is "
            f"{vocabulary}: set it to at most {count}"
        )
    return PairTokenizer(pairs.to_str(), text.name)


def read_pairs(path: Path, digest: str) -> PairTokenizer:
    """Read the tokens of a run, whose run.json has the sha256 of the file."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise FileError(f"{path}: it has more than {LARGEST_FILE:,} bytes, which is too large for a file of tokens")
        file = path.read_bytes()
    except OSError as error:
        raise FileError(f"{path}: the tokens of the run cannot be read ({error.strerror})") from error
    if hashlib.sha256(file).hexdigest() != digest:
        raise FileError(f"{path}: it is damaged: its sha256 is not the one in run.json")
    return PairTokenizer(file.decode(), str(path))


def digest_of(tokens: Tokenizer) -> str | None:
    """Return the sha256 of the file of tokens; None for bytes."""
    return None if tokens.file is None else hashlib.sha256(tokens.file.encode()).hexdigest()


def _parts(text: str) -> Iterator[str]:
    """Cut a text after line ends; a pair never crosses a cut."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + AT_ONCE) + 1 or len(text)
        yield text[start:end]
        start = end


def _single() -> Iterator[bytes]:
    return (bytes([byte]) for byte in range(256))
