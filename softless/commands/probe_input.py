"""What `softless probe` shows a model: a batch of images or of pieces of text at a time, drawn by the seed."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from softless.commands.probe_subject import Pictures, Subject, Texts
from softless.data import Images, open_images
from softless.data.augment import transform
from softless.data.device_augment import finish
from softless.data.images import Split
from softless.data.reading import Damage, Draw, Reader, read_all
from softless.data.sampler import ResumableSampler
from softless.errors import ArgumentError, FileError, UnsupportedError

FEW = 100  # samples, if no number is asked for
CHARACTERS = 16  # a token at most, with room to spare


@dataclass(frozen=True)
class Samples:
    """So many of them, of one kind: `what` is "images of 224 x 224 pixels", `source` where they lie."""

    count: int
    what: str
    source: str
    batches: Iterator[Any]


def samples(
    found: Subject,
    data: str | None,
    *,
    split: Split,
    count: int | None,
    tokens: int,
    batch: int,
    device: str,
    seed: int,
) -> Samples:
    """Batches for the model's forward, the last one smaller."""
    if isinstance(found.reads, Texts):
        if data is None:
            raise ArgumentError(f"{found.name} reads text: give a text file with --data")
        rows = pieces(Path(data), found.reads, count, tokens)
        return Samples(len(rows), f"pieces of {rows.shape[1]} tokens", data, _text_batches(rows, batch, device))
    source = found.reads.source if data is None else data
    images = open_images(source, split)
    if count is not None and count > len(images):
        raise ArgumentError(
            f"--images {count}: {source or 'digits'} has {len(images):,} images to {split} on"
            f"{'; --split train may have more' if split == 'test' else ''}"
        )
    count = min(FEW, len(images)) if count is None else count
    side = found.reads.side
    return Samples(
        count,
        f"images of {side} x {side} pixels",
        source or "digits",
        _image_batches(images, found.reads, _order(len(images), seed, count), batch, device),
    )


def pieces(path: Path, texts: Texts, count: int | None, tokens: int) -> Tensor:
    """Tokens [pieces, tokens] from the beginning of a text, each piece whole; a shorter text is one piece."""
    if tokens > texts.longest:
        raise ArgumentError(f"--tokens {tokens}: the model reads {texts.longest} at most")
    if not getattr(texts.tokenizer, "is_fast", False):
        raise UnsupportedError("the model's tokenizer cannot cut a text into pieces: it needs a tokenizer.json")
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read((FEW if count is None else count) * tokens * CHARACTERS)
    except OSError as error:
        raise FileError(f"{path}: it cannot be read as text ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: it is no UTF-8 text ({error.reason} at byte {error.start})") from None
    cut = texts.tokenizer(text, truncation=True, max_length=tokens, return_overflowing_tokens=True)["input_ids"]
    whole = [row for row in cut if len(row) == tokens] or cut[:1]
    if not text.strip() or not whole[0]:
        raise FileError(f"{path}: there is no text in it")
    if count is not None and count > len(whole):
        raise ArgumentError(f"--images {count}: {path} has {len(whole):,} pieces of {len(whole[0])} tokens")
    return torch.tensor(whole[: FEW if count is None else count])


def _text_batches(rows: Tensor, batch: int, device: str) -> Iterator[dict[str, Tensor]]:
    for part in rows.split(batch):
        yield {"input_ids": part.to(device)}


def _order(images: int, seed: int, count: int) -> list[int]:
    return ResumableSampler(images, seed=seed).order()[:count].tolist()


def _image_batches(images: Images, pictures: Pictures, order: list[int], batch: int, device: str) -> Iterator[Tensor]:
    damage = Damage("fail", len(order))
    draws = ([Draw(index) for index in order[start : start + batch]] for start in range(0, len(order), batch))
    ready = transform(pictures.augment, pictures.side, train=False)
    for found, bad in read_all(Reader(images, ready), draws, workers=0):
        for each in bad:
            damage.met(*each)
        yield finish(found.pixels.to(device), pictures.augment)
