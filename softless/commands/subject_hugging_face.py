"""Load a model of Hugging Face from a folder or the hub: safetensors only, and no code that comes with it."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from softless.commands.subject import (
    FAILURES,
    HUGGING_FACE,
    TRAINED,
    ImageInput,
    Subject,
    TextInput,
    first_sentence,
    silence_hub,
)
from softless.data.augment import IMAGENET_MEAN, IMAGENET_STD, PLAIN
from softless.errors import FileError, needs_extra

HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")  # a model on the hub: name, or owner/name
TOKENIZER_FILES = "tokenizer*", "vocab*", "merges.txt", "*.model"
SIDE = 224  # pixels, if neither the model nor its preprocessor says


class MissingTokenizerError(FileError):
    """A model of text lies in a folder without a tokenizer."""


def _hub_folder(name: str) -> Path:
    """Return the folder itself, or the cached folder of a name on the hub, after missing files are downloaded.

    Only configurations, tokenizers and safetensors are downloaded: no code, and nothing pickled.
    """
    if Path(name).exists() or not HUB_NAME.fullmatch(name):
        return Path(name)
    with needs_extra(f"{HUGGING_FACE + name} is read by transformers", "hf"):
        from huggingface_hub import snapshot_download
    silence_hub()
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.txt", "*.model", "*.safetensors"]))
    except FAILURES as error:
        raise FileError(
            f"{name}: there is no such folder here, no such model in the cache of Hugging Face, and none could be "
            f"downloaded ({first_sentence(error)})"
        ) from error


def hugging_face(name: str, auto: Callable[[Path], str] = lambda _: "AutoModel") -> Subject:
    """Load hf:FOLDER or hf:NAME; `auto` returns the class of transformers that loads the model in a folder."""
    folder = _hub_folder(name.removeprefix(HUGGING_FACE))
    with needs_extra(f"{name} is read by transformers", "hf"):
        import transformers

        import softless.transformers  # noqa: F401  from_pretrained restores the mechanisms of a converted model
    if not (folder / "config.json").is_file():
        raise FileError(f"{folder} has no config.json, which the folder of a Hugging Face model needs")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model, report = getattr(transformers, auto(folder)).from_pretrained(
            folder, local_files_only=True, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
        reads_images = model.main_input_name == "pixel_values"
        if not reads_images and not any(any(folder.glob(name)) for name in TOKENIZER_FILES):
            raise MissingTokenizerError(  # noqa: TRY301
                f"there is no tokenizer in {folder}, and a model that reads text needs one"
            )
        takes = (_image_input if reads_images else _text_input)(folder, model)
    except MissingTokenizerError:
        raise
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
    return ImageInput(_side(model.config, config), replace(PLAIN, mean=_channels(mean), std=_channels(std)))


def _side(model: Any, preprocessor: dict[str, Any]) -> int:
    """Return the side of the images in pixels: some models, such as a ResNet, take any and do not say."""
    size = getattr(model, "image_size", None) or preprocessor.get("size") or SIDE
    if isinstance(size, dict):
        size = size.get("height") or size.get("shortest_edge") or SIDE
    return int(size[-1] if isinstance(size, list | tuple) else size)


def _channels(values: Iterable[float]) -> tuple[float, float, float]:
    red, green, blue = map(float, values)
    return red, green, blue


def _text_input(folder: Path, model: Any) -> ImageInput | TextInput:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    longest = getattr(model.config, "max_position_embeddings", None) or tokenizer.model_max_length
    return TextInput(tokenizer, int(min(longest, tokenizer.model_max_length)))
