"""Converted models on the disk: how to build a model of images again, its weights, and nothing that is executed.

model.json          the builder and its options, and the candidate of every converted layer
model.safetensors   the weights, those of the stand-ins included
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from softless.conversion.places import OWN, TIMM, places_of
from softless.conversion.stand_ins import Candidate
from softless.errors import FileError, UnsupportedError, needs_extra
from softless.io.files import write, write_json
from softless.io.weights import load_weights
from softless.mechanisms import resolve
from softless.models import CLASSES
from softless.models.backbone import Backbone
from softless.models.table import Config

SCHEMA = "softless.converted/1"
MODEL, WEIGHTS = "model.json", "model.safetensors"
PICTURES = "architecture", "input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode"  # how they are read


def write_model(model: Any, chosen: Mapping[str, Candidate], folder: Path) -> None:
    """Write a converted model into an existing folder."""
    from safetensors.torch import save

    document = check_rebuilding(model, chosen)
    weights = {key: x.detach().cpu().contiguous() for key, x in model.state_dict().items()}
    write(folder / WEIGHTS, save(weights))
    write_json(folder / MODEL, document)


def check_rebuilding(model: Any, chosen: Mapping[str, Candidate]) -> dict[str, Any]:
    """Return the document from which a model with these layers can be built, or raise."""
    own, config = isinstance(model, Backbone), getattr(model, "pretrained_cfg", None) or {}
    document = {
        "schema": SCHEMA, "source": OWN if own else TIMM,
        "options": _own_options(model) if own else _timm_options(model, config.get("architecture")),
        "pictures": {key: config[key] for key in PICTURES if key in config},
        "layers": {path: candidate.entry() for path, candidate in chosen.items()},
    }  # fmt: skip
    try:
        with torch.device("meta"):
            same = {key: x.shape for key, x in _build(document, Path(MODEL)).state_dict().items()}
    except FileError:
        same = {}
    if same != {key: x.shape for key, x in model.state_dict().items()}:
        raise UnsupportedError(
            f"{type(model).__name__} was built with options that its name {config.get('architecture')!r} does not "
            "tell, so it could not be loaded again: keep conversion.model, or write its weights yourself with "
            "torch.save(model.state_dict(), path)"
        )
    return document


def load_converted(folder: str | Path) -> nn.Module:
    """Load a model that a conversion saved, ready to be used: ours, of timm, or of transformers.

    >>> import softless
    >>> softless.load_converted("nothing")
    Traceback (most recent call last):
    softless.errors.FileError: nothing does not exist: give the folder of a converted model

    Args:
        folder: What `Conversion.save` wrote, such as DIR/model of softless convert.
    """
    place = Path(folder)
    if (place / MODEL).is_file():
        return read_model(place)
    if not (place / "config.json").is_file():
        raise FileError(_why_none(place))
    with needs_extra(f"{place} holds a model of transformers", "hf"):
        import transformers

        import softless.transformers  # noqa: F401  it registers our attention
    try:
        names = json.loads((place / "config.json").read_bytes()).get("architectures") or ["AutoModel"]
        kind: Any = getattr(transformers, names[0])
        return kind.from_pretrained(place, local_files_only=True, use_safetensors=True).eval()
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RuntimeError) as error:
        raise FileError(f"{place} cannot be loaded ({' '.join(str(error).split())})") from error


def _why_none(place: Path) -> str:
    """Say why a path is no folder of a converted model."""
    if not place.exists():
        return f"{place} does not exist: give the folder of a converted model"
    if not place.is_dir():
        return f"{place} is a file, and the folder of a converted model is needed"
    below = place / "model"
    inside = (below / MODEL).is_file() or (below / "config.json").is_file()
    hint = f": did you mean {below}?" if inside else ""
    return f"{place} holds no converted model, because there is neither {MODEL} nor config.json in it{hint}"


def read_model(folder: Path) -> nn.Module:
    """Build the model of a folder and load its weights."""
    path = folder / MODEL
    try:
        document = json.loads(path.read_bytes())
        schema = document["schema"]
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise FileError(f"{path} is damaged ({error})") from error
    if schema != SCHEMA:
        raise FileError(f"{path} has schema {schema!r}, and {SCHEMA!r} is needed")
    model = _build(document, path)
    load_weights(model, folder / WEIGHTS)
    return model.eval()


def _build(document: Mapping[str, Any], path: Path) -> nn.Module:
    """Build the original, and put the stand-ins into it."""
    try:
        model = BUILDERS[document["source"]](dict(document["options"]))
        model.pretrained_cfg = {**model.pretrained_cfg, **document["pictures"]}
        places = {place.path: place for place in places_of(model)[0]}
        for path_in_model, entry in document["layers"].items():
            place = places[path_in_model]
            place.put(place.new(Candidate.of(entry), next(model.parameters())))
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise FileError(f"{path} does not describe a model that can be built ({error})") from error
    return model


def _own_options(model: Backbone) -> dict[str, Any]:
    config = replace(model.config, mechanism="softmax")
    mechanism = Candidate(resolve(model.config.mechanism)).entry()
    return {
        "config": asdict(config), "mechanism": mechanism, "num_classes": model.num_classes, "in_chans": model.in_chans,
        "global_pool": model.global_pool,
    }  # fmt: skip


def _own_model(options: dict[str, Any]) -> Any:
    from importlib import import_module

    values: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in options.pop("config").items()}
    config = replace(Config(**values), mechanism=Candidate.of(options.pop("mechanism")).mechanism)
    if config.family not in CLASSES:
        raise FileError(f"family {config.family!r} is none of {', '.join(CLASSES)}")
    model = getattr(import_module(f"softless.models.{config.family}"), CLASSES[config.family])(config, **options)
    model.pretrained_cfg = {}
    return model


def _timm_options(model: Any, name: str | None) -> dict[str, Any]:
    size = model.patch_embed.img_size
    options = {
        "model_name": name, "num_classes": model.num_classes,
        "in_chans": model.patch_embed.proj.in_channels, "img_size": None if size is None else list(size),
        "global_pool": model.global_pool if hasattr(model, "global_pool") else model.head.global_pool.pool_type,
    }  # fmt: skip
    return {key: value for key, value in options.items() if value is not None}


def _timm_model(options: dict[str, Any]) -> Any:
    import timm

    if not timm.is_model(options["model_name"]):
        raise FileError(f"timm has no model {options['model_name']!r}")
    return timm.create_model(pretrained=False, **options)


BUILDERS = {OWN: _own_model, TIMM: _timm_model}
