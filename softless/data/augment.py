"""What happens to an image before a model sees it: the paper's recipe, and small ones.

    to train   crop, flip, RandAugment; then, normalized, random erasing
    to test    made a square of size / crop_share, and the middle of that

On the CPU an image at a time, by timm's transforms; on a GPU a batch at a time (`device_augment`). One `Augment` says
the same to both; they differ in rounding, and in the random numbers they draw.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from softless.errors import ArgumentError, FileError, MissingExtraError

if TYPE_CHECKING:
    from PIL.Image import Image

CROPS = ("resized", "padded", "none")
CROP_MODES = ("squash", "center", "border")

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class Augment:
    """The default is the recipe of the InLine paper, that of DeiT and Swin.

    crop           resized: a part of the image of a share `area` of it, enlarged to the size
                   padded: `padding` pixels of black around it, and a crop of the size; none: the image, squeezed
    flip           probability of a flip from left to right
    operations     how many operations of RandAugment (Cubuk et al. 2020), each with probability 1/2
    magnitude      of those, from 0 to 10, with a standard deviation of `magnitude_std`
    erase          probability of filling a random rectangle with noise (Zhong et al. 2020)
    crop_share     of the square's side that a test sees
    crop_mode      how a test makes an image a square: squash, whatever its shape, or cut or padded as timm does
    mean, std      of the pixels, by channel, 0 to 1
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
        self._check_counts()
        if not 0 < self.area[0] <= self.area[1] <= 1:
            raise ArgumentError(f"area is {self.area} and must be two shares of an image, the smaller first")
        for name in ("flip", "erase"):
            if not 0 <= getattr(self, name) <= 1:
                raise ArgumentError(f"{name} is {getattr(self, name)} and must be a probability")
        if not 0 < self.crop_share <= 1:
            raise ArgumentError(f"crop_share is {self.crop_share} and must be above 0 and at most 1")
        for name, most in (("padding", 2**10), ("operations", 20), ("magnitude", 10), ("magnitude_std", 10)):
            if not 0 <= getattr(self, name) <= most:
                raise ArgumentError(f"{name} is {getattr(self, name)} and must be from 0 to {most}")
        if min(self.std) <= 0:
            raise ArgumentError(f"std is {self.std} and must be positive")

    def _check_counts(self) -> None:
        for name, count in (("area", 2), ("mean", 3), ("std", 3)):
            given = getattr(self, name)
            if not (isinstance(given, tuple) and len(given) == count and all(map(_is_number, given))):
                raise ArgumentError(f"{name} is {given} and must be {count} numbers")
        for name in ("padding", "operations", "magnitude"):
            given = getattr(self, name)
            if given % 1 or not (isinstance(given, int) or name == "magnitude"):
                raise ArgumentError(f"{name} is {given} and must be a whole number")


def _is_number(given: object) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given)


PAPER = Augment()
PLAIN = Augment(crop="none", flip=0.0, operations=0, erase=0.0, crop_share=1.0)


def as_timm_tests(config: Mapping[str, Any]) -> Augment:
    """What a test does for a model of this `pretrained_cfg`."""
    (r, g, b), (dr, dg, db) = config["mean"], config["std"]
    return replace(
        PLAIN, crop_share=config["crop_pct"], crop_mode=config["crop_mode"], mean=(r, g, b), std=(dr, dg, db)
    )


def _not_too_thin(side: int, image: "Image") -> "Image":
    """Where the shorter side is brought to `side` pixels, the longer one must stay within what is decoded."""
    from softless.io.pictures import MOST_PIXELS

    long, short = max(image.size), min(image.size)
    if long / short * side**2 > MOST_PIXELS:
        raise FileError(f"its {long} by {short} pixels are too thin: brought to {side}, they are over {MOST_PIXELS}")
    return image


def transform(augment: Augment, size: int, *, train: bool) -> Callable[["Image"], Tensor | np.ndarray]:
    """From a picture to uint8 [3, size, size], as timm does it."""
    try:
        from timm.data import create_transform
        from torchvision.transforms import Compose, InterpolationMode, RandomCrop, Resize
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"images are augmented by timm, and {error.name} is not installed: pip install 'softless[models,train]'"
        ) from None
    if not train:
        made = create_transform(
            size,
            use_prefetcher=True,
            interpolation="bicubic",
            crop_pct=augment.crop_share,
            crop_mode=augment.crop_mode,
        )
        side = int(size / augment.crop_share)
        return Compose([partial(_not_too_thin, side), made]) if augment.crop_mode == "center" else made
    policy = None
    if augment.operations:
        policy = f"rand-m{augment.magnitude:g}-n{augment.operations}-mstd{augment.magnitude_std:f}-inc1"
    made = create_transform(
        size,
        is_training=True,
        use_prefetcher=True,
        interpolation="bicubic",
        scale=augment.area,
        hflip=augment.flip,
        auto_augment=policy,
        color_jitter=None,
        mean=augment.mean,
        std=augment.std,
    )
    for operation in (each for step in made.transforms for each in getattr(step, "ops", ())):
        if "Posterize" in operation.name:
            operation.aug_fn = _posterize
    if augment.crop == "resized":
        return made
    first = [Resize((size, size), InterpolationMode.BICUBIC)]
    if augment.crop == "padded":
        first.append(RandomCrop(size, padding=augment.padding))
    return Compose([*first, *made.transforms[1:]])


def squeeze(image: "Image", size: int) -> np.ndarray:
    """The whole picture as uint8 [3, size, size], whatever its shape was."""
    from PIL.Image import Resampling

    fitting = image if image.size == (size, size) else image.resize((size, size), Resampling.BICUBIC)
    return np.asarray(fitting).transpose(2, 0, 1).copy()


def _posterize(image: "Image", bits: int, **_options: object) -> "Image":
    """timm asks for 0 bits at magnitude 10, which Pillow refuses since version 13: none is black."""
    from PIL import ImageOps

    return ImageOps.posterize(image, bits) if bits else image.point(lambda _level: 0)
