"""The model and the samples of `softless convert`: a model of Hugging Face, a run on text, or the embedded example."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from softless.commands.probe_subject import HUGGING_FACE, Subject, TextInput, hugging_face, load_samples
from softless.conversion.samples import SampleSet
from softless.data import open_images
from softless.data.sampler import ResumableSampler
from softless.errors import ArgumentError, FileError, needs_extra

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MASKED = 0.15  # share of the tokens that a model of masked tokens predicts
IGNORED, MOST = -100, 100  # a target that no loss counts; sequences of a run by default
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
    model: "PreTrainedModel"
    samples: SampleSet
    source: str
    also: tuple[Any, ...] = ()


def load_original(
    name: str | None, data: str | None, *, count: int | None, tokens: int, seed: int,
    advance: Callable[[str, float], None],
) -> Original:  # fmt: skip
    """Load the model that MODEL stands for, with its head, and its samples; None trains the example."""
    with needs_extra("softless convert works on models of transformers", "hf"):
        from transformers.utils import logging
    logging.disable_progress_bar()  # ours is shown
    if name is None:
        if data is not None:
            raise ArgumentError(f"--data {data} is for a model, and no MODEL is given: the example has its own text")
        return _example(count, seed, advance)
    if not name.startswith(HUGGING_FACE):
        if (Path(name) / "run.json").is_file():
            return _run(name, data, count, seed)
        raise ArgumentError(
            f"{name!r} is neither hf:FOLDER nor hf:NAME, a model of Hugging Face, nor the folder of a run on text: no "
            "other model can be converted yet"
        )
    subject = hugging_face(name, _class_with_head)
    model: Any = subject.model
    if hasattr(model, "generation_config"):
        model.config.use_cache = True  # as it was saved
    samples = _samples(subject, data, count, tokens, seed)
    also = (subject.takes.tokenizer,) if isinstance(subject.takes, TextInput) else ()
    return Original(name, model, samples, data or "digits", also)


def _example(count: int | None, seed: int, advance: Callable[[str, float], None]) -> Original:
    from softless.conversion import example

    tokens = example.example_samples()
    if count is not None and count > len(tokens):
        raise ArgumentError(f"--samples {count}: the example has {len(tokens)} sequences")
    model = example.train_example(seed, advance)
    return Original(example.NAME, model, {"input_ids": tokens[:count]}, "the end of these texts")


def _run(name: str, data: str | None, count: int | None, seed: int) -> Original:
    """Load a run on text; its samples are its own test text unless `data` says otherwise."""
    from softless.data.sequences import TokenizedText
    from softless.data.text import open_test_text, open_text
    from softless.train.tasks.language import trained

    model, recipe, tokenizer, about = trained(Path(name))
    text = open_test_text(about["data"], recipe.hold_out) if data is None else open_text(data, "test")
    whole = TokenizedText(text, tokenizer, recipe.length, train=True)
    if count is not None and count > whole.count:
        raise ArgumentError(f"--samples {count}: {whole.name} has {whole.count:,} sequences")
    order = ResumableSampler(whole.count, seed=seed).order()[: count or min(whole.count, MOST)]
    found: Any = model
    return Original(name, found, {"input_ids": whole.batch(torch.as_tensor(order)).inputs}, whole.name)


def _class_with_head(folder: Path) -> str:
    """Return the class of transformers that loads a model with the head it was saved with."""
    try:
        names = json.loads((folder / "config.json").read_bytes()).get("architectures") or [""]
    except (OSError, ValueError, AttributeError) as error:
        raise FileError(f"{folder / 'config.json'} cannot be read as the configuration of a model ({error})") from None
    return next((auto for end, auto in HEADS.items() if str(names[0]).endswith(end)), "AutoModel")


def _samples(subject: Subject, data: str | None, count: int | None, tokens: int, seed: int) -> SampleSet:
    """Return all samples at once, with labels if the model is measured by them."""
    options: dict[str, Any] = {"tokens": tokens, "device": "cpu", "seed": seed, "batch": 2**30}
    samples = load_samples(subject, data, "test", count, **options)
    batch, kind = next(samples.batches), type(subject.model).__name__
    if isinstance(subject.takes, TextInput):
        return (
            _masked(batch["input_ids"], subject.takes.tokenizer, seed) if kind.endswith("ForMaskedLM") else dict(batch)
        )
    if not kind.endswith("ForImageClassification"):
        return {"pixel_values": batch}
    images, model = open_images(data, "test"), subject.model
    classes = getattr(model, "num_labels", 0)
    if classes != len(images.classes):
        raise ArgumentError(f"{subject.name} knows {classes} classes, and {data or 'digits'} has {len(images.classes)}")
    order = ResumableSampler(len(images), seed=seed).order()[: len(batch)]
    return {"pixel_values": batch, "labels": torch.as_tensor(images.labels)[order].long()}


def _masked(tokens: Tensor, tokenizer: Any, seed: int) -> SampleSet:
    """Hide some tokens of each piece of text, and ask for them."""
    hidden = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed)) < MASKED
    hidden[:, 1] |= ~hidden.any(1)  # every piece asks for one at least
    inputs = tokens.masked_fill(hidden, tokenizer.mask_token_id)
    return {"input_ids": inputs, "labels": tokens.masked_fill(~hidden, IGNORED)}
