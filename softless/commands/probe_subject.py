"""The model and the data of `softless probe`.

A model is one of ours, a trained run, one of timm's, or one of Hugging Face's. Reading weights (safetensors, or a file
of torch.save) never executes code. Only `--pretrained` and a name on the hub may download files.

The data are images, drawn by the seed, or pieces of a text, from its beginning.
"""

from collections.abc import Iterator
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Size, Tensor

from softless.commands.common import refuse, task_of_run
from softless.commands.subject import (
    FAILURES,
    HUGGING_FACE,
    PRETRAINED,
    RANDOM,
    TIMM,
    TRAINED,
    ImageInput,
    Samples,
    Subject,
    TextInput,
    first_sentence,
    silence_hub,
)
from softless.commands.subject_hugging_face import hugging_face
from softless.data import Images, open_images
from softless.data.augment import as_timm_tests, transform
from softless.data.device_augment import finish
from softless.data.images import Split
from softless.data.reading import Damage, Draw, Reader, read_all
from softless.data.sampler import ResumableSampler
from softless.data.text import open_text
from softless.errors import ArgumentError, FileError, UnsupportedError, did_you_mean, needs_extra
from softless.io.weights import load_weights
from softless.models import create_model, list_models
from softless.models.table import CONFIGS

DEFAULT_COUNT = 100  # samples
CHARACTERS = 16  # per token at most, with room to spare


def load_subject(
    name: str,
    weights: Path | None,
    size: int | None,
    seed: int,
    *,
    pretrained: bool = False,
    reader: str = "softless probe reads runs on images with labels",
) -> Subject:
    """Load the model that MODEL stands for; random weights follow from the seed. `reader` ends an error about a run."""
    torch.manual_seed(seed)
    if pretrained and not name.startswith(TIMM):
        raise ArgumentError(f"--pretrained loads the weights of a model of timm, and {name} is not timm:NAME")
    if pretrained and weights is not None:
        raise ArgumentError(f"--pretrained and --weights {weights} both give the weights of {name}: use one of them")
    if name.startswith(HUGGING_FACE):
        refuse({"--weights": weights}, f"{name} comes with its own weights")
        subject = hugging_face(name)
    elif name.startswith(TIMM):
        subject = _timm(name, name.removeprefix(TIMM), pretrained)
    elif name in (*CONFIGS, *list_models(pretrained=True)) and not Path(name).is_dir():
        subject = _ours(name, trained=name not in CONFIGS and weights is None)
    elif Path(name).is_dir():
        refuse({"--weights": weights}, f"{name} is a run, which has its own")
        subject = _run(name, reader)
    else:
        close = did_you_mean(name, [*CONFIGS, *list_models(pretrained=True)])
        raise ArgumentError(
            f"{name!r} is neither a model of ours (softless list --models), nor the folder of a run, nor timm:NAME, "
            f"nor hf:FOLDER or hf:NAME{f': {close}' if close else ''}"
        )
    if weights is not None:
        subject = replace(subject, model=_with_weights(subject, weights), weights=str(weights))
    if size is None:
        return subject
    if not isinstance(subject.takes, ImageInput):
        raise ArgumentError(f"--size is in pixels, and {name} reads text")
    return replace(subject, takes=replace(subject.takes, side=size))


def _ours(name: str, *, trained: bool) -> Subject:
    model = create_model(name, pretrained=trained)
    images = ImageInput(model.config.img_size[0], as_timm_tests(model.pretrained_cfg))
    return Subject(name, model, TRAINED if trained else RANDOM, images)


def _with_weights(subject: Subject, path: Path) -> Any:
    """Return the model with the weights of a file, and as many classes as the file has."""
    model: Any = subject.model
    shapes: dict[str, Size] = {}

    def look(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        shapes.update({name: tensor.shape for name, tensor in tensors.items()})
        return tensors

    try:
        load_weights(model, path, fit=look)
    except FileError:
        own = {name: tensor.shape for name, tensor in model.state_dict().items()}
        head = f"{_classifier(model)}.weight"
        if head not in own or len(shapes.get(head, ())) != len(own[head]) or shapes[head][0] in (0, own[head][0]):
            raise
        model.reset_classifier(shapes[head][0])
        load_weights(model, path)
        model.pretrained_cfg = {**model.pretrained_cfg, "num_classes": model.num_classes}
    return model


def _classifier(model: Any) -> str:
    """Return the path of a model's last layer; a model with two of them names both."""
    name = model.pretrained_cfg.get("classifier", "head")
    return name if isinstance(name, str) else str(name[0])


def _run(name: str, reader: str) -> Subject:
    from softless.train.recipe import IMAGES, from_document
    from softless.train.tasks.classify import trained

    task = task_of_run(name)
    if task is None and (Path(name) / "config.json").is_file():
        raise ArgumentError(
            f"{name} is no run of softless train: it has a config.json, and a model of Hugging Face is given as "
            f"{HUGGING_FACE}{name}"
        )
    if task not in (None, IMAGES):
        raise ArgumentError(f"{name} is a run of task {task!r}, and {reader}")
    model, run = trained(Path(name))
    recipe = from_document(run["recipe"])
    return Subject(name, model, TRAINED, ImageInput(recipe.image_size, recipe.augment, source=run["data"]))


def _timm(name: str, architecture: str, pretrained: bool) -> Subject:
    with needs_extra(f"{name} is a model of timm", "models"):
        import timm
        from timm.data import resolve_data_config
    if not timm.is_model(architecture):
        near = ", ".join(get_close_matches(architecture, timm.list_models()))
        raise ArgumentError(f"timm has no model {architecture!r}{near and f', but {near}'}")
    if pretrained:
        silence_hub()
    try:
        model = timm.create_model(architecture, pretrained=pretrained)
    except FAILURES as error:
        if not pretrained:
            raise
        raise FileError(
            f"{name}: its pretrained weights are not in timm's cache and could not be downloaded "
            f"({first_sentence(error)})"
        ) from error
    config = resolve_data_config({}, model=model)
    images = ImageInput(config["input_size"][-1], as_timm_tests(config))
    return Subject(name, model, PRETRAINED if pretrained else RANDOM, images)


def load_samples(
    subject: Subject,
    data: str | None,
    split: Split,
    count: int | None,
    *,
    tokens: int,
    batch: int,
    device: str,
    seed: int,
) -> Samples:
    """Return batches for the model's forward; the last one may be smaller."""
    takes = subject.takes
    if isinstance(takes, TextInput):
        if data is None:
            raise ArgumentError(f"{subject.name} reads text: give a text file or a folder of .txt files with --data")
        pieces = _pieces(Path(data), takes, count, tokens)
        batches = ({"input_ids": part.to(device)} for part in pieces.split(batch))
        return Samples(len(pieces), f"pieces of {pieces.shape[1]} tokens", data, batches)
    source = takes.source if data is None else data
    images = open_images(source, split)
    if count is not None and count > len(images):
        raise ArgumentError(
            f"--images {count}: {source or 'digits'} has {len(images):,} images to {split} on"
            f"{'; --split train may have more' if split == 'test' else ''}"
        )
    count = min(DEFAULT_COUNT, len(images)) if count is None else count
    order = ResumableSampler(len(images), seed=seed).order()[:count].tolist()
    kind = f"images of {takes.side} x {takes.side} pixels"
    return Samples(count, kind, source or "digits", _image_batches(images, takes, order, batch, device))


def _pieces(path: Path, text_input: TextInput, count: int | None, tokens: int) -> Tensor:
    """Return tokens [pieces, tokens] from the beginning of a text; a text shorter than that is one piece."""
    if tokens > text_input.longest:
        raise ArgumentError(f"--tokens {tokens}: the model reads {text_input.longest} at most")
    if not getattr(text_input.tokenizer, "is_fast", False):
        raise UnsupportedError("the model's tokenizer cannot cut a text into pieces: it needs a tokenizer.json")
    most = DEFAULT_COUNT if count is None else count
    text = _beginning(path, most * tokens * CHARACTERS)
    cut = text_input.tokenizer(text, truncation=True, max_length=tokens, return_overflowing_tokens=True)["input_ids"]
    pieces = [piece for piece in cut if len(piece) == tokens] or cut[:1]
    if not text.strip() or not pieces[0]:
        raise FileError(f"{path} has no text in it")
    if count is not None and count > len(pieces):
        raise ArgumentError(f"--images {count}: {path} has {len(pieces):,} pieces of {len(pieces[0])} tokens")
    return torch.tensor(pieces[:most])


def _beginning(path: Path, characters: int) -> str:
    """Return the beginning of a text file, or of all .txt files of a folder."""
    if path.is_dir():
        return open_text(path, "test").data.decode()[:characters]
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(characters)
    except OSError as error:
        raise FileError(f"{path} cannot be read as text ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from None


def _image_batches(images: Images, takes: ImageInput, order: list[int], batch: int, device: str) -> Iterator[Tensor]:
    damage = Damage("fail", len(order))
    draws = ([Draw(index) for index in order[start : start + batch]] for start in range(0, len(order), batch))
    reader = Reader(images, transform(takes.augment, takes.side, train=False))
    for read, bad in read_all(reader, draws, workers=0):
        for problem in bad:
            damage.met(*problem)
        yield finish(read.pixels.to(device), takes.augment)
