"""The MODEL of `softless probe`: ours by name, a run's, timm's, or Hugging Face's, from a folder or the hub.

Files are read as everywhere here: safetensors, or what torch.save wrote, and nothing in them is executed. Only
`--pretrained` and a name on the hub may download, if the files are not in the cache of timm or Hugging Face.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from softless.commands.common import refuse
from softless.data.augment import IMAGENET_MEAN, IMAGENET_STD, PLAIN, Augment, as_timm_tests
from softless.errors import ArgumentError, FileError, MissingExtraError, did_you_mean
from softless.io.weights import load_weights
from softless.models import create_model
from softless.models.table import CONFIGS, settings

TIMM, HUGGING_FACE = "timm:", "hf:"
RANDOM, TRAINED, PRETRAINED = "random", "trained", "pretrained"
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")  # a model on the hub: name, or owner/name
FAILURES = (OSError, ValueError, ImportError, LookupError, RuntimeError, TypeError)


@dataclass(frozen=True)
class Pictures:
    """How images are made ready, and where a run's own lie."""

    side: int
    augment: Augment
    source: str | None = None


@dataclass(frozen=True)
class Texts:
    """How text is made ready: pieces of so many tokens at most."""

    tokenizer: Any
    longest: int


@dataclass(frozen=True)
class Subject:
    """A model, where its weights are from, and what it reads."""

    name: str
    model: nn.Module
    weights: str
    reads: Pictures | Texts


def subject(name: str, weights: Path | None, size: int | None, seed: int, *, pretrained: bool = False) -> Subject:
    """What MODEL stands for; random weights follow from the seed."""
    torch.manual_seed(seed)
    if pretrained and not name.startswith(TIMM):
        raise ArgumentError(f"--pretrained loads the weights of a model of timm, and {name} is not timm:NAME")
    if pretrained and weights is not None:
        raise ArgumentError(f"--pretrained and --weights {weights} both give the weights of {name}: use one of them")
    if name.startswith(HUGGING_FACE):
        refuse({"--weights": weights}, f"{name} comes with its own weights")
        found = _hugging_face(name, _hub_folder(name.removeprefix(HUGGING_FACE)))
    elif name.startswith(TIMM):
        found = _timm(name, name.removeprefix(TIMM), weights, pretrained)
    elif name in CONFIGS and not Path(name).is_dir():
        pictures = Pictures(CONFIGS[name].img_size[0], as_timm_tests(settings(name, CONFIGS[name])))
        found = Subject(name, _loaded(create_model(name), weights), str(weights or RANDOM), pictures)
    elif Path(name).is_dir():
        refuse({"--weights": weights}, f"{name} is a run, which has its own")
        found = _run(name)
    else:
        close = did_you_mean(name, CONFIGS)
        raise ArgumentError(
            f"{name!r} is neither a model of ours (softless list --models), nor the folder of a run, nor timm:NAME, "
            f"nor hf:FOLDER or hf:NAME{f': {close}' if close else ''}"
        )
    if size is None:
        return found
    if not isinstance(found.reads, Pictures):
        raise ArgumentError(f"--size is in pixels, and {name} reads text")
    return replace(found, reads=replace(found.reads, side=size))


def _loaded(model: nn.Module, weights: Path | None) -> nn.Module:
    if weights is not None:
        load_weights(model, weights)
    return model


def _run(name: str) -> Subject:
    from softless.train.assemble import trained
    from softless.train.recipe_file import from_document

    model, about = trained(Path(name))
    recipe = from_document(about["recipe"])
    return Subject(name, model, TRAINED, Pictures(recipe.image_size, recipe.augment, source=about["data"]))


def _timm(name: str, architecture: str, weights: Path | None, pretrained: bool) -> Subject:
    try:
        import timm
        from timm.data import resolve_data_config
    except ModuleNotFoundError:
        raise MissingExtraError(f"{name} is timm's, and it is not installed: pip install 'softless[models]'") from None
    if not timm.is_model(architecture):
        near = ", ".join(get_close_matches(architecture, timm.list_models()))
        raise ArgumentError(f"timm has no model {architecture!r}{near and f', but {near}'}")
    if pretrained:
        _hush()
    try:
        model = timm.create_model(architecture, pretrained=pretrained)
    except FAILURES as error:
        if not pretrained:
            raise
        raise FileError(
            f"{name}: its pretrained weights are not in timm's cache and could not be downloaded ({_sentence(error)})"
        ) from error
    _loaded(model, weights)
    config = resolve_data_config({}, model=model)
    pictures = Pictures(config["input_size"][-1], as_timm_tests(config))
    return Subject(name, model, PRETRAINED if pretrained else str(weights or RANDOM), pictures)


def _hub_folder(given: str) -> Path:
    """The folder itself, or that of a name on the hub in the local cache, where missing files are downloaded to.

    Only configurations, tokenizers and safetensors are asked for: no code, and nothing pickled.
    """
    if Path(given).exists() or not HUB_NAME.fullmatch(given):
        return Path(given)
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError:
        raise _no_transformers(HUGGING_FACE + given) from None
    _hush()
    try:
        return Path(snapshot_download(given, allow_patterns=["*.json", "*.txt", "*.model", "*.safetensors"]))
    except FAILURES as error:
        raise FileError(
            f"{given}: there is no such folder here, no such model in the cache of Hugging Face, and none could be "
            f"downloaded ({_sentence(error)})"
        ) from error


def _no_transformers(name: str) -> MissingExtraError:
    return MissingExtraError(f"{name} is read by transformers, and it is not installed: pip install 'softless[hf]'")


def _sentence(error: Exception) -> str:
    """The first sentence of what a library says."""
    return (re.split(r"\n|\.\s", str(error).strip())[0] or type(error).__name__).rstrip(".")


def _hush() -> None:
    """Libraries that retry a download say so on their own; what follows is said in one sentence."""
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()


def _hugging_face(name: str, folder: Path) -> Subject:
    try:
        import transformers
    except ModuleNotFoundError:
        raise _no_transformers(name) from None
    if not (folder / "config.json").is_file():
        raise FileError(f"{folder}: there is no config.json, as a folder of a Hugging Face model has")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model, report = transformers.AutoModel.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
        reads = _pictures(folder, model) if model.main_input_name == "pixel_values" else _texts(folder, model)
    except FAILURES as error:
        raise FileError(f"{folder}: it cannot be loaded ({' '.join(str(error).split())})") from error
    if missing := sorted(key for key in report["missing_keys"] if "pooler" not in key):
        raise FileError(f"{folder}: its weights lack {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}")
    model.config.use_cache = False
    return Subject(name, model, TRAINED, reads)


def _pictures(folder: Path, model: Any) -> Pictures:
    file, about = folder / "preprocessor_config.json", {}
    if file.is_file():
        about = json.loads(file.read_bytes())
    mean, std = about.get("image_mean", IMAGENET_MEAN), about.get("image_std", IMAGENET_STD)
    return Pictures(model.config.image_size, replace(PLAIN, mean=_channels(mean), std=_channels(std)))


def _channels(values: Iterable[float]) -> tuple[float, float, float]:
    red, green, blue = map(float, values)
    return red, green, blue


def _texts(folder: Path, model: Any) -> Texts:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    longest = getattr(model.config, "max_position_embeddings", None) or tokenizer.model_max_length
    return Texts(tokenizer, int(min(longest, tokenizer.model_max_length)))
