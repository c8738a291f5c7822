"""The model and the samples of `softless convert`: a model of Hugging Face or timm, a run, or the embedded example."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from softless.commands.common import task_of_run
from softless.commands.probe_subject import load_samples, load_subject
from softless.commands.subject import HUGGING_FACE, TIMM, ImageInput, Subject, TextInput
from softless.commands.subject_hugging_face import hugging_face
from softless.conversion.metrics import IGNORED
from softless.conversion.samples import LEAST, SampleSet
from softless.data import open_images
from softless.data.images import counted_classes
from softless.data.sampler import ResumableSampler
from softless.errors import ArgumentError, FileError, needs_extra
from softless.report.units import counted

MASKED = 0.15  # share of the tokens that a model of masked tokens predicts
TOKENS = 128  # per piece of text
MOST, MOST_IMAGES = 100, 1000  # sequences and images by default
HEADS = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForImageClassification": "AutoModelForImageClassification",
}


@dataclass(frozen=True)
class Original:
    """A model to convert, its samples, and what is saved beside it."""

    name: str
    model: nn.Module
    samples: SampleSet
    source: str
    also: tuple[Any, ...] = ()
    decode: Callable[[list[int]], str] = str


def load_original(
    name: str | None, data: str | None, *, weights: Path | None, pretrained: bool, count: int | None,
    tokens: int | None, seed: int, advance: Callable[[str, float], None],
) -> Original:  # fmt: skip
    """Load the model that MODEL stands for, with its head, and its samples; None trains the example."""
    if count is not None and count < LEAST:
        raise ArgumentError(f"--samples {count}: a conversion needs at least {LEAST} samples")
    if name is None:
        _refuse_without_model({"--data": data, "--tokens": tokens, "--weights": weights, "--pretrained": pretrained})
    if name is None or name.startswith(HUGGING_FACE):
        with needs_extra("this model is one of transformers", "hf"):
            from transformers.utils import logging
        logging.disable_progress_bar()  # ours is shown
    if name is None:
        return _example(count, seed, advance)
    if not name.startswith(HUGGING_FACE):
        return _other(name, data, weights, count, seed, pretrained=pretrained)
    if weights is not None or pretrained:
        raise ArgumentError(f"{name} comes with its own weights: --weights and --pretrained are for other models")
    subject = hugging_face(name, _class_with_head)
    model: Any = subject.model
    _check_architecture(model)
    if hasattr(model, "generation_config"):
        model.config.use_cache = True  # as it was saved
    samples = _samples(subject, data, count, TOKENS if tokens is None else tokens, seed)
    if not isinstance(subject.takes, TextInput):
        return Original(name, model, samples, data or "digits")
    tokenizer = subject.takes.tokenizer
    return Original(name, model, samples, data or "digits", (tokenizer,), tokenizer.decode)


def _refuse_without_model(options: dict[str, Any]) -> None:
    """Refuse options that say something about a model or its data."""
    for option, value in options.items():
        if value not in (None, False):
            given = option if value is True else f"{option} {value}"
            raise ArgumentError(
                f"{given} is for a model, and no MODEL is given: the example has its own text and model"
            )


def _check_architecture(model: Any) -> None:
    """Refuse a model that has no softmax to replace, before any data is read."""
    from softless import transformers as ours
    from softless.mechanisms import mechanism

    ours.check(model, mechanism("softmax"))


def _example(count: int | None, seed: int, advance: Callable[[str, float], None]) -> Original:
    from softless.conversion import example

    tokens = example.example_samples()
    if count is not None and count > len(tokens):
        raise ArgumentError(f"--samples {count}: the example has {len(tokens)} sequences")
    model = example.train_example(seed, advance)
    samples = {"input_ids": tokens[:count]}
    return Original(example.NAME, model, samples, "the end of these texts", decode=example.decode)


def _other(
    name: str, data: str | None, weights: Path | None, count: int | None, seed: int, *, pretrained: bool
) -> Original:
    """Load a run, a model of ours with the weights of a file, or one of timm."""
    if Path(name).is_dir() and task_of_run(name) == "language":
        if weights is not None or pretrained:
            raise ArgumentError(f"{name} is a run, which has its own weights")
        return _text_run(name, data, count, seed)
    subject = load_subject(
        name, weights, None, seed, pretrained=pretrained,
        reader="softless convert reads runs on text and runs on images with labels",
    )  # fmt: skip
    if subject.is_random:
        needed = "--weights FILE or --pretrained" if name.startswith(TIMM) else "--weights FILE"
        raise ArgumentError(f"{name} has random weights, and there is nothing to keep: give {needed}")
    assert isinstance(subject.takes, ImageInput)
    source = subject.takes.source if data is None else data
    model: Any = subject.model
    augment = subject.takes.augment
    model.pretrained_cfg = {
        **model.pretrained_cfg, "input_size": (3, subject.takes.side, subject.takes.side),
        "mean": tuple(augment.mean), "std": tuple(augment.std),
    }  # fmt: skip
    return Original(name, model, _pictures(subject, source, model.num_classes, count, seed), source or "digits")


def _text_run(name: str, data: str | None, count: int | None, seed: int) -> Original:
    """Load a run on text; its samples are its own test text unless `data` says otherwise."""
    from softless.data.sequences import TokenizedText
    from softless.data.text import open_test_text, open_text
    from softless.train.tasks.language import trained

    model, recipe, tokenizer, about = trained(Path(name))
    text = open_test_text(about["data"], recipe.hold_out) if data is None else open_text(data, "test")
    whole = TokenizedText(text, tokenizer, recipe.length, train=True)
    if count is not None and count > whole.count:
        raise ArgumentError(f"--samples {count}: {whole.name} has {whole.count:,} sequences")
    _check_pieces(whole.name, whole.count, recipe.length, "give more text with --data")
    order = ResumableSampler(whole.count, seed=seed).order()[: count or min(whole.count, MOST)]
    language_model: Any = model
    samples = {"input_ids": whole.batch(torch.as_tensor(order)).inputs}
    return Original(
        name, language_model, samples, whole.name,
        decode=lambda tokens: tokenizer.decode(torch.tensor(tokens)).decode(errors="replace"),
    )  # fmt: skip


def _class_with_head(folder: Path) -> str:
    """Return the class of transformers that loads a model with the head it was saved with."""
    try:
        names = json.loads((folder / "config.json").read_bytes()).get("architectures") or [""]
    except (OSError, ValueError, AttributeError) as error:
        raise FileError(f"{folder / 'config.json'} cannot be read as the configuration of a model ({error})") from None
    return next((auto for end, auto in HEADS.items() if str(names[0]).endswith(end)), "AutoModel")


def _samples(subject: Subject, data: str | None, count: int | None, tokens: int, seed: int) -> SampleSet:
    """Return all samples at once, with labels if the model is measured by them."""
    kind = type(subject.model).__name__
    if isinstance(subject.takes, TextInput):
        options: dict[str, Any] = {"tokens": tokens, "device": "cpu", "seed": seed, "batch": 2**30}
        batch = next(load_samples(subject, data, "test", count, **options).batches)
        pieces, length = batch["input_ids"].shape
        _check_pieces(str(data), pieces, length, f"give more text, or less than --tokens {tokens}")
        masked = kind.endswith("ForMaskedLM")
        return _masked(batch["input_ids"], subject.takes.tokenizer, seed) if masked else dict(batch)
    if not kind.endswith("ForImageClassification"):
        return _pictures(subject, data, 0, count, seed)
    return _pictures(subject, data, getattr(subject.model, "num_labels", 0), count, seed)


def _check_pieces(source: str, pieces: int, tokens: int, remedy: str) -> None:
    if pieces < LEAST:
        raise ArgumentError(
            f"{source} gives {counted(pieces, 'piece')} of {counted(tokens, 'token')}, and a conversion needs at least "
            f"{LEAST} pieces: {remedy}"
        )


def _pictures(subject: Subject, source: str | None, classes: int, count: int | None, seed: int) -> SampleSet:
    """Return test images, with labels if the model has classes."""
    images = open_images(source, "test")
    if classes not in (0, len(images.classes)):
        raise ArgumentError(
            f"{subject.name} knows {classes} classes, and {source or 'digits'} has {len(images.classes)}"
        )
    names = getattr(subject.model, "pretrained_cfg", {}).get("label_names") or images.classes  # few models say
    if tuple(names) != images.classes:
        theirs, ours = (counted_classes(part) for part in (names, images.classes))
        raise ArgumentError(
            f"{subject.name} knows {theirs}, and {source or 'digits'} has {ours}: give images of the model's classes "
            "with --data"
        )
    count = min(MOST_IMAGES, len(images)) if count is None else count
    options: dict[str, Any] = {"tokens": 0, "device": "cpu", "seed": seed, "batch": 2**30}
    batch = next(load_samples(subject, source, "test", count, **options).batches)
    if not classes:
        return {"pixel_values": batch}
    order = ResumableSampler(len(images), seed=seed).order()[: len(batch)]
    return {"pixel_values": batch, "labels": torch.as_tensor(images.labels)[order].long()}


def _masked(tokens: Tensor, tokenizer: Any, seed: int) -> SampleSet:
    """Hide some tokens of each piece of text, and ask for them."""
    hidden = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed)) < MASKED
    hidden[:, 1] |= ~hidden.any(1)  # every piece asks for one at least
    inputs = tokens.masked_fill(hidden, tokenizer.mask_token_id)
    return {"input_ids": inputs, "labels": tokens.masked_fill(~hidden, IGNORED)}
