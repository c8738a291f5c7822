"""How images are augmented and prepared for a model.

    to train   crop, flip, RandAugment; then normalize, and erase random rectangles
    to test    resize to a square of size / crop_share, and take its middle

timm's transforms work on one image at a time on the CPU, and `device_augment` works on a batch on the device. An
`Augment` describes both. Their results differ by rounding, and by the random numbers they draw.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from softless.errors import ArgumentError, FileError, needs_extra

if TYPE_CHECKING:
    from PIL.Image import Image

CROPS = ("resized", "padded", "none")
CROP_MODES = ("squash", "center", "border")
LIMITS = {"flip": 1, "erase": 1, "padding": 2**10, "operations": 20, "magnitude": 10, "magnitude_std": 10}

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class Augment:
    """How to augment and normalize images. The defaults are those of the InLine paper, DeiT and Swin.

    crop           "resized": crop a share of the image between the two of `area`, and enlarge the crop to the size
                   "padded": add `padding` black pixels on each side, and crop the size; "none": squeeze the image
    area           two shares of the image, the smaller first
    padding        pixels
    flip           probability of a flip from left to right
    operations     how many operations of RandAugment (Cubuk et al. 2020) to apply, each with probability 1/2
    magnitude      strength of these operations, from 0 to 10, with a standard deviation of `magnitude_std`
    erase          probability of filling a random rectangle with noise (Zhong et al. 2020)
    crop_share     share of the square's side that a test sees
    crop_mode      how a test makes an image square: "squash" ignores its shape, "center" and "border" are timm's
    mean, std      mean and standard deviation of the pixels per channel, from 0 to 1
    """

    crop: str = "resized"
    area: tuple[float, float] = (0.08, 1.0)
    padding: int = 4
    flip: float = 0.5
    operations: int = 2
    magnitude: float = 9.0
    magnitude_std: float = 0.5
    erase: float = 0.25
    crop_share: float = 0.875
    crop_mode: str = "squash"
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD

    def __post_init__(self) -> None:
        for name, known in (("crop", CROPS), ("crop_mode", CROP_MODES)):
            if getattr(self, name) not in known:
                raise ArgumentError(f"{name} is {getattr(self, name)!r} and must be one of {', '.join(known)}")
        for name, count in (("area", 2), ("mean", 3), ("std", 3)):
            values = getattr(self, name)
            if not (isinstance(values, tuple) and len(values) == count and all(map(_is_number, values))):
                raise ArgumentError(f"{name} is {values} and must be {count} numbers")
        for name in ("padding", "operations", "magnitude"):
            value = getattr(self, name)
            if value % 1 or not (isinstance(value, int) or name == "magnitude"):
                raise ArgumentError(f"{name} is {value} and must be a whole number")
        for name, most in LIMITS.items():
            if not 0 <= getattr(self, name) <= most:
                raise ArgumentError(f"{name} is {getattr(self, name)} and must be from 0 to {most}")
        if not 0 < self.area[0] <= self.area[1] <= 1:
            raise ArgumentError(f"area is {self.area} and must be two shares of an image, the smaller first")
        if not 0 < self.crop_share <= 1:
            raise ArgumentError(f"crop_share is {self.crop_share} and must be above 0 and at most 1")
        if min(self.std) <= 0:
            raise ArgumentError(f"std is {self.std} and must be positive")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


PLAIN = Augment(crop="none", flip=0.0, operations=0, erase=0.0, crop_share=1.0)


def as_timm_tests(config: Mapping[str, Any]) -> Augment:
    """Return how timm prepares test images for a model with this `pretrained_cfg`."""
    (r, g, b), (dr, dg, db) = config["mean"], config["std"]
    return replace(
        PLAIN, crop_share=config["crop_pct"], crop_mode=config["crop_mode"], mean=(r, g, b), std=(dr, dg, db)
    )


def _not_too_thin(side: int, image: "Image") -> "Image":
    """Raise an error if an image would exceed MOST_PIXELS once its shorter side has `side` pixels."""
    from softless.io.pictures import MOST_PIXELS

    long, short = max(image.size), min(image.size)
    if long / short * side**2 > MOST_PIXELS:
        raise FileError(f"its {long} by {short} pixels are too thin: brought to {side}, they are over {MOST_PIXELS}")
    return image


def transform(augment: Augment, size: int, *, train: bool) -> Callable[["Image"], Tensor | np.ndarray]:
    """Return timm's transform from a picture to uint8 [3, size, size]."""
    with needs_extra("images are augmented by timm", "models,train"):
        from timm.data import create_transform
        from torchvision.transforms import Compose, InterpolationMode, RandomCrop, Resize
    if not train:
        steps = create_transform(
            size, use_prefetcher=True, interpolation="bicubic", crop_pct=augment.crop_share, crop_mode=augment.crop_mode
        )
        side = int(size / augment.crop_share)
        return Compose([partial(_not_too_thin, side), steps]) if augment.crop_mode == "center" else steps
    policy = None
    if augment.operations:
        policy = f"rand-m{augment.magnitude:g}-n{augment.operations}-mstd{augment.magnitude_std:f}-inc1"
    steps = create_transform(
        size, is_training=True, use_prefetcher=True, interpolation="bicubic", scale=augment.area, hflip=augment.flip,
        auto_augment=policy, color_jitter=None, mean=augment.mean, std=augment.std,
    )  # fmt: skip
    for operation in (operation for step in steps.transforms for operation in getattr(step, "ops", ())):
        if "Posterize" in operation.name:
            operation.aug_fn = _posterize
    if augment.crop == "resized":
        return steps
    first = [Resize((size, size), InterpolationMode.BICUBIC)]
    if augment.crop == "padded":
        first.append(RandomCrop(size, padding=augment.padding))
    return Compose([*first, *steps.transforms[1:]])


def squeeze(image: "Image", size: int) -> np.ndarray:
    """Resize a picture to uint8 [3, size, size], whatever its shape."""
    from PIL.Image import Resampling

    fitting = image if image.size == (size, size) else image.resize((size, size), Resampling.BICUBIC)
    return np.asarray(fitting).transpose(2, 0, 1).copy()


def _posterize(image: "Image", bits: int, **_options: object) -> "Image":
    """Posterize; 0 bits give black. timm asks for 0 bits at magnitude 10, which Pillow refuses since version 13."""
    from PIL import ImageOps

    return ImageOps.posterize(image, bits) if bits else image.point(lambda _level: 0)
