"""The MODEL of `softless probe`: ours by name, a run's, timm's, or one in a Hugging Face folder.

Files are read as everywhere here: safetensors, or what torch.save wrote, and nothing in them is executed. Nothing is
downloaded.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from softless.commands.manners import refuse
from softless.data.augment import IMAGENET_MEAN, IMAGENET_STD, PLAIN, Augment, as_timm_tests
from softless.errors import ArgumentError, FileError, MissingExtraError, did_you_mean
from softless.io import load_weights
from softless.models import create_model
from softless.models.settings import settings
from softless.models.table import CONFIGS

TIMM, HUGGING_FACE = "timm:", "hf:"


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


def subject(name: str, weights: Path | None, size: int | None, seed: int) -> Subject:
    """What MODEL stands for; random weights follow from the seed."""
    torch.manual_seed(seed)
    if name.startswith(HUGGING_FACE):
        refuse({"--weights": weights}, f"{name} is a folder, which has its own")
        found = _hugging_face(name, Path(name.removeprefix(HUGGING_FACE)))
    elif name.startswith(TIMM):
        found = _timm(name, name.removeprefix(TIMM), weights)
    elif name in CONFIGS and not Path(name).is_dir():
        pictures = Pictures(CONFIGS[name].img_size[0], as_timm_tests(settings(name, CONFIGS[name])))
        found = Subject(name, _loaded(create_model(name), weights), str(weights or "random"), pictures)
    elif Path(name).is_dir():
        refuse({"--weights": weights}, f"{name} is a run, which has its own")
        found = _run(name)
    else:
        close = did_you_mean(name, CONFIGS)
        raise ArgumentError(
            f"{name!r} is neither a model of ours (softless list --models), nor the folder of a run, nor timm:NAME, "
            f"nor hf:FOLDER{f': {close}' if close else ''}"
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
    return Subject(name, model, "trained", Pictures(recipe.image_size, recipe.augment, source=about["data"]))


def _timm(name: str, architecture: str, weights: Path | None) -> Subject:
    try:
        import timm
        from timm.data import resolve_data_config
    except ModuleNotFoundError:
        raise MissingExtraError(f"{name} is timm's, and it is not installed: pip install 'softless[models]'") from None
    if not timm.is_model(architecture):
        near = ", ".join(get_close_matches(architecture, timm.list_models()))
        raise ArgumentError(f"timm has no model {architecture!r}{near and f', but {near}'}")
    model = _loaded(timm.create_model(architecture, pretrained=False), weights)
    config = resolve_data_config({}, model=model)
    pictures = Pictures(config["input_size"][-1], as_timm_tests(config))
    return Subject(name, model, str(weights or "random"), pictures)


def _hugging_face(name: str, folder: Path) -> Subject:
    try:
        import transformers
    except ModuleNotFoundError:
        raise MissingExtraError(
            f"{name} is read by transformers, and it is not installed: pip install 'softless[hf]'"
        ) from None
    if not (folder / "config.json").is_file():
        raise FileError(f"{folder}: there is no config.json, as a folder of a Hugging Face model has")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model, report = transformers.AutoModel.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
        reads = _pictures(folder, model) if model.main_input_name == "pixel_values" else _texts(folder, model)
    except (OSError, ValueError, ImportError, LookupError, RuntimeError, TypeError) as error:
        raise FileError(f"{folder}: it cannot be loaded ({' '.join(str(error).split())})") from error
    if missing := sorted(key for key in report["missing_keys"] if "pooler" not in key):
        raise FileError(f"{folder}: its weights lack {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}")
    model.config.use_cache = False
    return Subject(name, model, "trained", reads)


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

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    longest = getattr(model.config, "max_position_embeddings", None) or tokenizer.model_max_length
    return Texts(tokenizer, int(min(longest, tokenizer.model_max_length)))
