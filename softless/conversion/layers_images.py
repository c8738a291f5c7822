"""The attention layers of a model of images: ours, and ViT, DeiT and Swin of timm."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from softless.conversion.layers import LABELS, LayerCall, Layers
from softless.conversion.places import OWN, TIMM, Arguments, places_of
from softless.conversion.rebuilding import check_rebuilding, write_model
from softless.conversion.samples import SampleSet
from softless.conversion.stand_ins import Candidate, Replacement
from softless.errors import UnsupportedError
from softless.models.backbone import Backbone

GROWTH = 1, 1.5, 2, 3, 4  # sides of the pictures that are timed, in sides of the model's own


class ImageAnswer(NamedTuple):
    """The answer of a model of images, under the name that transformers uses."""

    logits: Tensor


class ImageLayers(Layers):
    """The layers of softmax attention of a model of images."""

    is_causal, pictures, has_residual, first = False, True, True, "pixel_values"

    def __init__(self, model: nn.Module):
        places, self.prefix = places_of(model)
        if not places:
            raise UnsupportedError(f"{type(model).__name__} has no layer of softmax attention to convert")
        self.model, self.places = model, places
        self.names = tuple(place.path for place in places)
        self.package = OWN if isinstance(model, Backbone) else TIMM
        config: Mapping[str, Any] = getattr(model, "pretrained_cfg", {})
        self.kind = str(config.get("architecture", type(model).__name__))
        self._now: list[Replacement | None] = [None] * len(places)

    def check(self, candidate: Candidate) -> None:
        mechanism = candidate.mechanism
        if mechanism.shares_keys:
            raise UnsupportedError(f"mechanism '{mechanism.name}' has k = q, and the model has a projection for each")
        if mechanism.reads_grid and mechanism.needs_grid and self.prefix:
            raise UnsupportedError(
                f"mechanism '{mechanism.name}' needs a picture, and "
                f"{self.kind} has {self.prefix} class tokens beside it"
            )
        if (lack := mechanism.lacks(False)) is not None:
            raise UnsupportedError(f"{self.kind} is not causal, and mechanism '{mechanism.name}' {lack}")

    def new(self, layer: int, candidate: Candidate) -> Replacement:
        return self.places[layer].new(candidate, next(self.model.parameters()))

    def put(self, layer: int, stand_in: Replacement | None) -> None:
        self.places[layer].put(stand_in)
        self._now[layer] = stand_in

    def run(self, batch: SampleSet, *, model: Any = None, **how: Any) -> ImageAnswer:
        return ImageAnswer((model or self.model)(batch[self.first]))

    def calls(self, batch: SampleSet) -> Iterator[LayerCall]:
        arguments: dict[int, Arguments] = {}
        with ExitStack() as stack, torch.no_grad():
            for at, place in enumerate(self.places):
                stack.callback(place.listen(partial(arguments.__setitem__, at)).remove)
            self.run(batch)
        for at, place in enumerate(self.places):
            args = arguments[at]
            with torch.no_grad():
                output = place.run(*args)
            yield LayerCall(at, output, None, partial(self._replaced, at, args))

    def _replaced(self, at: int, args: Arguments, stand_in: Replacement) -> Tensor:
        with self.having({at: stand_in}):
            return self.places[at].run(*args)

    def save(self, folder: Path) -> None:
        chosen = {self.names[at]: stand_in.candidate for at, stand_in in enumerate(self._now) if stand_in is not None}
        write_model(self.model, chosen, folder)

    def check_saving(self) -> None:
        check_rebuilding(self.model, {})

    def learned(self) -> list[nn.Module]:
        return [stand_in for stand_in in self._now if stand_in is not None]

    @property
    def has_logits(self) -> bool:
        return self.classes > 0

    @property
    def channels(self) -> int:
        model: Any = self.model
        return int(model.in_chans if isinstance(model, Backbone) else model.patch_embed.proj.in_channels)

    @property
    def classes(self) -> int:
        return int(getattr(self.model, "num_classes", 0))

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("accuracy", "cosine") if self.has_logits else ("cosine",)

    def metric(self, samples: SampleSet) -> str:
        return "accuracy" if LABELS in samples else "cosine"

    def tokens(self, samples: SampleSet) -> int:
        height, width = samples[self.first].shape[2:]
        return self._tokens(height, width)

    def _tokens(self, height: int, width: int) -> int:
        patch = patch_of(self.model)
        return max(1, (height // patch) * (width // patch))

    def lengths(self, samples: SampleSet) -> Mapping[int, Callable[[], SampleSet]]:
        """Return pictures of growing size, for models that take any; otherwise of the model's own."""
        height, width = samples[self.first].shape[2:]
        grows = isinstance(self.model, Backbone) or getattr(self.model, "dynamic_img_size", False)
        patch = patch_of(self.model)
        sides = [(patch * round(growth * height / patch), patch * round(growth * width / patch)) for growth in GROWTH]
        return {
            self._tokens(*side): partial(self._picture, samples, side)
            for side in (sides if grows else [(height, width)])
        }

    def _picture(self, samples: SampleSet, side: tuple[int, int]) -> SampleSet:
        resized = nn.functional.interpolate(samples[self.first][:1].float(), side)
        like = next(self.model.parameters())
        return {self.first: resized.to(like.device, like.dtype)}


def patch_of(model: Any) -> int:
    """Return the pixels along a side of a patch."""
    if isinstance(model, Backbone):
        return model.patch
    size = model.patch_embed.patch_size
    return int(size if isinstance(size, int) else size[0])


def knows(model: nn.Module) -> bool:
    """Return whether this is a model of images: ours, or one of timm."""
    return isinstance(model, Backbone) or type(model).__module__.startswith("timm.")
