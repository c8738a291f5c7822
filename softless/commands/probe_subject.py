"""The model and the data of `softless probe`.

A model is one of ours, a trained run, one of timm's, or one of Hugging Face's. Reading weights (safetensors, or a file
of torch.save) never executes code. Only `--pretrained` and a name on the hub may download files.

The data are images, drawn by the seed, or pieces of a text, from its beginning.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from softless.commands.common import refuse
from softless.data import Images, open_images
from softless.data.augment import IMAGENET_MEAN, IMAGENET_STD, PLAIN, Augment, as_timm_tests, transform
from softless.data.device_augment import finish
from softless.data.images import Split
from softless.data.reading import Damage, Draw, Reader, read_all
from softless.data.sampler import ResumableSampler
from softless.errors import ArgumentError, FileError, UnsupportedError, did_you_mean, needs_extra
from softless.io.weights import load_weights
from softless.models import create_model, list_models
from softless.models.table import CONFIGS

TIMM, HUGGING_FACE = "timm:", "hf:"
RANDOM, TRAINED, PRETRAINED = "random", "trained", "pretrained"
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")  # a model on the hub: name, or owner/name
FAILURES = (OSError, ValueError, ImportError, LookupError, RuntimeError, TypeError)
DEFAULT_COUNT = 100  # samples
CHARACTERS = 16  # per token at most, with room to spare


@dataclass(frozen=True)
class ImageInput:
    """How images are prepared for a model, and the path of a run's own images."""

    side: int
    augment: Augment
    source: str | None = None


@dataclass(frozen=True)
class TextInput:
    """How text is prepared for a model: pieces of at most `longest` tokens."""

    tokenizer: Any
    longest: int


@dataclass(frozen=True)
class Subject:
    """A model, the origin of its weights, and the input that it takes."""

    name: str
    model: nn.Module
    weights: str
    takes: ImageInput | TextInput

    @property
    def is_random(self) -> bool:
        return self.weights == RANDOM


@dataclass(frozen=True)
class Samples:
    """Batches of `count` samples of one kind, such as "images of 224 x 224 pixels"."""

    count: int
    kind: str
    source: str
    batches: Iterator[Any]


def load_subject(name: str, weights: Path | None, size: int | None, seed: int, *, pretrained: bool = False) -> Subject:
    """Load the model that MODEL stands for; random weights follow from the seed."""
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
        subject = _run(name)
    else:
        close = did_you_mean(name, [*CONFIGS, *list_models(pretrained=True)])
        raise ArgumentError(
            f"{name!r} is neither a model of ours (softless list --models), nor the folder of a run, nor timm:NAME, "
            f"nor hf:FOLDER or hf:NAME{f': {close}' if close else ''}"
        )
    if weights is not None:
        load_weights(subject.model, weights)
        subject = replace(subject, weights=str(weights))
    if size is None:
        return subject
    if not isinstance(subject.takes, ImageInput):
        raise ArgumentError(f"--size is in pixels, and {name} reads text")
    return replace(subject, takes=replace(subject.takes, side=size))


def _ours(name: str, *, trained: bool) -> Subject:
    model = create_model(name, pretrained=trained)
    images = ImageInput(model.config.img_size[0], as_timm_tests(model.pretrained_cfg))
    return Subject(name, model, TRAINED if trained else RANDOM, images)


def _run(name: str) -> Subject:
    from softless.train.recipe import from_document
    from softless.train.tasks.classify import trained

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
        _silence_hub()
    try:
        model = timm.create_model(architecture, pretrained=pretrained)
    except FAILURES as error:
        if not pretrained:
            raise
        raise FileError(
            f"{name}: its pretrained weights are not in timm's cache and could not be downloaded ({_sentence(error)})"
        ) from error
    config = resolve_data_config({}, model=model)
    images = ImageInput(config["input_size"][-1], as_timm_tests(config))
    return Subject(name, model, PRETRAINED if pretrained else RANDOM, images)


def _hub_folder(name: str) -> Path:
    """Return the folder itself, or the cached folder of a name on the hub, after missing files are downloaded.

    Only configurations, tokenizers and safetensors are downloaded: no code, and nothing pickled.
    """
    if Path(name).exists() or not HUB_NAME.fullmatch(name):
        return Path(name)
    with needs_extra(f"{HUGGING_FACE + name} is read by transformers", "hf"):
        from huggingface_hub import snapshot_download
    _silence_hub()
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.txt", "*.model", "*.safetensors"]))
    except FAILURES as error:
        raise FileError(
            f"{name}: there is no such folder here, no such model in the cache of Hugging Face, and none could be "
            f"downloaded ({_sentence(error)})"
        ) from error


def _sentence(error: Exception) -> str:
    """Return the first sentence of a library's error."""
    return (re.split(r"\n|\.\s", str(error).strip())[0] or type(error).__name__).rstrip(".")


def _silence_hub() -> None:
    """Turn off the hub's messages about retries, because our error says it in one sentence."""
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()


def hugging_face(name: str, auto: Callable[[Path], str] = lambda _: "AutoModel") -> Subject:
    """Load hf:FOLDER or hf:NAME; `auto` returns the class of transformers that loads the model in a folder."""
    folder = _hub_folder(name.removeprefix(HUGGING_FACE))
    with needs_extra(f"{name} is read by transformers", "hf"):
        import transformers
    if not (folder / "config.json").is_file():
        raise FileError(f"{folder} has no config.json, which the folder of a Hugging Face model needs")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model, report = getattr(transformers, auto(folder)).from_pretrained(
            folder, local_files_only=True, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
        takes = (_image_input if model.main_input_name == "pixel_values" else _text_input)(folder, model)
    except FAILURES as error:
        raise FileError(f"{folder} cannot be loaded ({' '.join(str(error).split())})") from error
    if missing := sorted(key for key in report["missing_keys"] if "pooler" not in key):
        raise FileError(f"the weights in {folder} lack {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}")
    model.config.use_cache = False
    return Subject(name, model, TRAINED, takes)


def _image_input(folder: Path, model: Any) -> ImageInput | TextInput:
    file = folder / "preprocessor_config.json"
    config = json.loads(file.read_bytes()) if file.is_file() else {}
    mean, std = config.get("image_mean", IMAGENET_MEAN), config.get("image_std", IMAGENET_STD)
    return ImageInput(model.config.image_size, replace(PLAIN, mean=_channels(mean), std=_channels(std)))


def _channels(values: Iterable[float]) -> tuple[float, float, float]:
    red, green, blue = map(float, values)
    return red, green, blue


def _text_input(folder: Path, model: Any) -> ImageInput | TextInput:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    longest = getattr(model.config, "max_position_embeddings", None) or tokenizer.model_max_length
    return TextInput(tokenizer, int(min(longest, tokenizer.model_max_length)))


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
            raise ArgumentError(f"{subject.name} reads text: give a text file with --data")
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
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(most * tokens * CHARACTERS)
    except OSError as error:
        raise FileError(f"{path} cannot be read as text ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    cut = text_input.tokenizer(text, truncation=True, max_length=tokens, return_overflowing_tokens=True)["input_ids"]
    pieces = [piece for piece in cut if len(piece) == tokens] or cut[:1]
    if not text.strip() or not pieces[0]:
        raise FileError(f"{path} has no text in it")
    if count is not None and count > len(pieces):
        raise ArgumentError(f"--images {count}: {path} has {len(pieces):,} pieces of {len(pieces[0])} tokens")
    return torch.tensor(pieces[:most])


def _image_batches(images: Images, takes: ImageInput, order: list[int], batch: int, device: str) -> Iterator[Tensor]:
    damage = Damage("fail", len(order))
    draws = ([Draw(index) for index in order[start : start + batch]] for start in range(0, len(order), batch))
    reader = Reader(images, transform(takes.augment, takes.side, train=False))
    for read, bad in read_all(reader, draws, workers=0):
        for problem in bad:
            damage.met(*problem)
        yield finish(read.pixels.to(device), takes.augment)
