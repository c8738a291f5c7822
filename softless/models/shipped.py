"""Trained weights that ship with softless: one safetensors file per model, which describes itself.

softless/weights/NAME.safetensors holds the weights of model NAME in float16, and one JSON document in its metadata:

    schema             softless.shipped/1
    model              the arguments of `create_model` that build the model: a name from the table, and options
    classes            names of the classes
    images             how images are prepared: mean, std, crop_pct and crop_mode of `pretrained_cfg`
    parameters         their number
    top1, test_images  the accuracy of the weights as they are here, from 0 to 1, and the number of images it is over
    data, recipe, seed, step, teacher, init, date, versions      how the model was trained

To ship another model is to add a file: benchmarks/shipped.py writes it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from softless.errors import ArgumentError, FileError, shown
from softless.io.weights import load_weights
from softless.mechanisms import mechanism

if TYPE_CHECKING:
    from softless.models.backbone import Backbone

FOLDER, SUFFIX = Path(__file__).parents[1] / "weights", ".safetensors"
SCHEMA, METADATA = "softless.shipped/1", "softless"  # and the key of the document in the metadata
FREE = ("num_classes", "drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate")  # what weights do not fix


def shipped_names() -> list[str]:
    """Return the names of the models whose weights ship with softless."""
    return sorted(path.stem for path in FOLDER.glob(f"*{SUFFIX}"))


def no_weights(name: object) -> str:
    """Return the sentence for a model that has no weights here: with the names of those that have some."""
    others = f"only for {', '.join(names)}" if (names := shipped_names()) else "and none for any other"
    return (
        f"pretrained=True: softless ships no trained weights for model {shown(name)}, {others}; "
        f"softless.load_weights(model, path) reads a file of yours"
    )


def find_shipped(name: object) -> "ShippedModel | None":
    """Return the model whose weights ship under this name, or None."""
    return ShippedModel(name) if isinstance(name, str) and name in shipped_names() else None


class ShippedModel:
    """A model whose weights ship with softless, as its file describes it."""

    def __init__(self, name: str):
        self.name, self.path = name, FOLDER / f"{name}{SUFFIX}"
        self.document = read_document(self.path)
        self.options: dict[str, Any] = dict(self.document["model"])
        self.base: str = self.options.pop("name")  # in the table of models
        if isinstance(chosen := self.options.get("mechanism"), dict):
            self.options["mechanism"] = mechanism(**chosen)

    def check(self, overrides: Mapping[str, object]) -> None:
        """Raise an error if an option would change what the weights were trained for."""
        if fixed := [f"{option}={shown(value)}" for option, value in overrides.items() if option not in FREE]:
            raise ArgumentError(
                f"pretrained=True: {' and '.join(fixed)} cannot be given with the trained weights of model "
                f"{self.name!r}; {', '.join(FREE)}, device and dtype can"
            )

    def pretrained_cfg(self, num_classes: int) -> dict[str, Any]:
        """Return what timm's `pretrained_cfg` has to say about the images and classes of this model."""
        images = {key: tuple(x) if isinstance(x, list) else x for key, x in self.document["images"].items()}
        names = tuple(self.document["classes"])
        return {"architecture": self.name, **images} | ({"label_names": names} if num_classes == len(names) else {})

    def load(self, model: "Backbone") -> None:
        """Load the weights; a head for another number of classes stays as it is."""
        own = {name: tensor for name, tensor in model.state_dict().items() if name.startswith("head.")}

        def keep_head(weights: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: tensor for name, tensor in weights.items() if not name.startswith("head.")} | own

        fits = model.num_classes == len(self.document["classes"])
        load_weights(model, self.path, fit=None if fits else keep_head)


def read_document(path: Path) -> dict[str, Any]:
    """Read the document of a file, and none of its weights."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            document = json.loads(file.metadata()[METADATA])
        schema = document["schema"]
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}") from error
    except (SafetensorError, ValueError, LookupError, TypeError) as error:
        raise FileError(f"{path} does not describe a model of softless ({error})") from error
    if schema != SCHEMA:
        raise FileError(f"{path} has schema {schema!r}, and {SCHEMA!r} is needed")
    return document
