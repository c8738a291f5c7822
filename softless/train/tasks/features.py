"""The features of a backbone at four scales, or as many as it has stages: for heads that give every place an answer.

    [B, 3, H, W] -> [B, C1, H/4, W/4], [B, C2, H/8, W/8], [B, C3, H/16, W/16], [B, C4, H/32, W/32]

Pyramids (PVT, Swin, CSwin, and most of timm's models) have these stages. A plain transformer such as DeiT has one
scale, so `SimplePyramid` makes four of its last features (Li et al. 2022, ViTDet).
"""

from pathlib import Path
from typing import Any

from timm.layers import Format
from torch import Tensor, nn

from softless.errors import ArgumentError, FileError
from softless.io.weights import load_weights, mismatches
from softless.models.table import CONFIGS
from softless.timm import fit_tables
from softless.train.dense_recipe import DenseModel
from softless.train.run import best_of
from softless.train.tasks.classify import model_options


class Features(nn.Module):
    """A backbone whose features come as [B, C, h, w], the finest first; `coarse` leaves out the finest.

    channels   of each scale
    strides    pixels of the image from one feature to the next, of each scale
    """

    def __init__(self, backbone: Any, *, coarse: bool = False):
        super().__init__()
        self.backbone, self.first = backbone, int(coarse)
        self.channels: list[int] = backbone.feature_info.channels()
        self.strides: list[float] = backbone.feature_info.reduction()
        self.turn = getattr(backbone, "output_fmt", Format.NCHW) == Format.NHWC
        self.neck: nn.Module | None = None
        if len({*self.strides}) == 1:
            self.neck, self.channels = SimplePyramid(self.channels[-1], coarse=coarse), 4 * self.channels[-1:]
            self.strides = [self.strides[-1] * factor for factor in (0.25, 0.5, 1, 2)]
        self.channels, self.strides = self.channels[self.first :], self.strides[self.first :]

    def forward(self, images: Tensor) -> list[Tensor]:
        features = list(self.backbone(images))
        if self.turn:
            features = [x.permute(0, 3, 1, 2).contiguous() for x in features]
        return features[self.first :] if self.neck is None else self.neck(features[-1])

    def no_weight_decay(self) -> set[str]:
        """Return the parameters that the backbone does not decay."""
        owners = {name: module for name, module in self.backbone.named_modules() if hasattr(module, "no_weight_decay")}
        return {f"backbone.{name}.{own}" for name, module in owners.items() for own in module.no_weight_decay()}


class SimplePyramid(nn.Module):
    """Four scales of one: two transposed convolutions (not if `coarse`), one, none, and a maximum over 2 x 2."""

    def __init__(self, channels: int, *, coarse: bool):
        super().__init__()
        twice = _doubled(channels), nn.GroupNorm(1, channels), nn.GELU(), _doubled(channels)
        self.finest = None if coarse else nn.Sequential(*twice)
        self.fine = _doubled(channels)
        self.coarse = nn.MaxPool2d(2, ceil_mode=True)

    def forward(self, x: Tensor) -> list[Tensor]:
        finest = [] if self.finest is None else [self.finest(x)]
        return [*finest, self.fine(x), x, self.coarse(x)]


def _doubled(channels: int) -> nn.Module:
    return nn.ConvTranspose2d(channels, channels, 2, 2)


def build_features(model: DenseModel, size: tuple[int, int], *, coarse: bool = False) -> Features:
    """Build the backbone of a recipe for images of this size: a model of softless, or one of timm by its name."""
    import timm

    options = model_options(model)
    for key in model.own:
        options.pop(key, None)
    if model.name in CONFIGS:
        if CONFIGS[model.name].family == "deit":
            options["out_indices"] = (-1,)
        return Features(timm.create_model(model.name, features_only=True, img_size=size, **options), coarse=coarse)
    if model.name not in timm.list_models():
        raise ArgumentError(
            f"recipe: model.name {model.name!r} is no model of softless and none of timm: softless list --models names "
            "those of softless"
        )
    if getattr(timm.get_pretrained_cfg(model.name), "fixed_input_size", False):
        options["img_size"] = size
    try:
        return Features(timm.create_model(model.name, features_only=True, **options), coarse=coarse)
    except (TypeError, RuntimeError, AttributeError) as error:
        raise ArgumentError(f"timm's model {model.name!r} gives no features with {options}: {error}") from error


def start_backbone(features: Features, place: Path) -> None:
    """Load the weights of a file, or of the backbone of a run, and resample position tables to this image size.

    The head of a classifier is left out, and so is the norm before it, which the features do not pass.
    """
    inner = getattr(features.backbone, "model", features.backbone)
    own = inner.state_dict()

    def fit(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        without_head = {
            name: tensor for name, tensor in weights.items() if name in own or not name.startswith(("head.", "norm."))
        }
        return fit_tables(without_head, inner) if hasattr(inner, "own_names") else without_head

    if not place.is_dir():
        load_weights(inner, place, fit=fit)
        return
    saved, about = best_of(place)
    weights = dict(saved.parts["model"])
    if about["recipe"].get("task", "classify") != "classify":
        prefix = f"features.backbone.{'model.' if inner is not features.backbone else ''}"
        weights = {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}
    fitted = fit(weights)
    if problems := mismatches(fitted, own):
        raise FileError(f"the model of {place} does not fit the backbone {type(inner).__name__}: {'; '.join(problems)}")
    inner.load_state_dict(fitted)
