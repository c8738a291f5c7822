"""Augment an image and its mask together, with the same random numbers, and load batches of both.

    to train   change colors, scale by a random factor, crop, flip; what the crop adds is black, and `VOID` in the mask
    to test    resize the image to the size of the recipe; its mask keeps its own size

The transforms are torchvision's, and `moved_together` moves boxes and masks of objects too (`joint_boxes`). As for
classification, (seed, epoch, index) seed the augmentation of an image.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from softless.data.augment import IMAGENET_MEAN, IMAGENET_STD
from softless.data.device_augment import normalize
from softless.data.loading import WorkerLoader, check_workers
from softless.data.masks import VOID, MaskedImages
from softless.data.reading import Damage, Draw, SafeReader, augmented_by
from softless.data.sampler import ResumableSampler
from softless.errors import ArgumentError, needs_extra

if TYPE_CHECKING:
    from PIL.Image import Image

Change = Callable[["Image", np.ndarray], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class JointAugment:
    """How to augment and normalize images with masks or boxes.

    scale        the smallest and the largest random factor of an image's size, relative to the size of the recipe
    flip         probability of a flip from left to right
    brightness, contrast, saturation, hue   how far each may change, as torchvision's ColorJitter takes them
    mean, std    mean and standard deviation of the pixels per channel, from 0 to 1
    """

    scale: tuple[float, float] = (0.5, 2.0)
    flip: float = 0.5
    brightness: float = 0.3
    contrast: float = 0.3
    saturation: float = 0.3
    hue: float = 0.05
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD

    def __post_init__(self) -> None:
        for name, count in (("scale", 2), ("mean", 3), ("std", 3)):
            values = getattr(self, name)
            if not (isinstance(values, tuple) and len(values) == count and all(map(_is_share, values))):
                raise ArgumentError(f"augment.{name} is {values!r} and must be {count} numbers")
        for name, most in {"flip": 1, "brightness": 1, "contrast": 1, "saturation": 1, "hue": 0.5}.items():
            value = getattr(self, name)
            if not (_is_share(value) and value <= most):
                raise ArgumentError(f"augment.{name} is {value!r} and must be from 0 to {most}")
        if not 0.05 <= self.scale[0] <= self.scale[1] <= 20:
            raise ArgumentError(f"augment.scale is {self.scale} and must be two factors from 0.05 to 20, in order")
        if min(self.std) <= 0:
            raise ArgumentError(f"augment.std is {self.std} and must be positive")


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 100


class MaskBatch(NamedTuple):
    """Some images of a set, with masks.

    pixels   [B, 3, H, W]: uint8 as they were read, float32 once a loader has normalized them
    masks    uint8 [B, h, w]: classes, and `VOID` where there is none; smaller masks are filled up with it
    shapes   int64 [B, 2]: height and width of each mask; in training, these are H and W
    ids      int64 [B]: the index of each image in its set
    """

    pixels: Tensor
    masks: Tensor
    shapes: Tensor
    ids: Tensor


def moved_together(
    augment: JointAugment, size: tuple[int, int], added: int = 0
) -> Callable[["Image", Iterable[Any]], tuple[Tensor, ...]]:
    """Return a random change of a picture and its annotations, each a `Mask` or `BoundingBoxes` of torchvision.

    added   int: the number in a mask where the picture is filled up with black
    """
    with needs_extra("images with masks or boxes are augmented by torchvision", "models,train"):
        from torchvision.transforms import v2
    to_image = v2.ToImage()
    color = v2.ColorJitter(augment.brightness, augment.contrast, augment.saturation, augment.hue)
    crop = v2.Compose([v2.RandomCrop(list(size)), v2.RandomHorizontalFlip(augment.flip)])

    def change(image: "Image", annotations: Iterable[Any]) -> tuple[Tensor, ...]:
        pixels = color(to_image(image))
        # not v2.ScaleJitter, which confuses height and width where the size is no square
        scaled = fitted(image.size[::-1], size, torch.empty(1).uniform_(*augment.scale).item())
        missing = [max(wanted - side, 0) for wanted, side in zip(size, scaled, strict=True)]

        def filled(x: Any, fill: int) -> Any:
            return v2.functional.pad(v2.functional.resize(x, scaled, antialias=True), [0, 0, *missing[::-1]], fill)

        moved = crop(filled(pixels, 0), *(filled(annotation, added) for annotation in annotations))
        return tuple(x.as_subclass(Tensor) for x in moved)

    return change


def fitted(shape: tuple[int, int], size: tuple[int, int], factor: float = 1.0) -> list[int]:
    """Return the height and width of an image of this shape, scaled by a factor where 1 just fits into the size."""
    ratio = factor * min(wanted / side for wanted, side in zip(size, shape, strict=True))
    return [max(1, round(side * ratio)) for side in shape]


def joint_transform(augment: JointAugment, size: tuple[int, int], *, train: bool) -> Change:
    """Return a function from a picture and its mask to uint8 [3, H, W] and uint8 [h, w]."""
    move = moved_together(augment, size, VOID)
    from torchvision.transforms import v2
    from torchvision.tv_tensors import Mask

    if not train:
        to_image, resize = v2.ToImage(), v2.Resize(list(size), antialias=True)
        return lambda image, mask: (resize(to_image(image)).as_subclass(Tensor), torch.from_numpy(mask))

    def change(image: "Image", mask: np.ndarray) -> tuple[Tensor, Tensor]:
        pixels, classes = move(image, [Mask(torch.from_numpy(mask))])
        return pixels, classes

    return change


class MaskReader(SafeReader):
    """A dataset of (pixels, mask, index)."""

    def __init__(self, images: MaskedImages, change: Change) -> None:
        super().__init__(images)
        self.images, self.change = images, change

    def read(self, draw: Draw) -> tuple[Tensor, Tensor, int]:
        image, mask, _ = self.images[draw.image]
        with augmented_by(draw):
            return *self.change(image, mask), draw.image

    def stacked(self, sound: Sequence[tuple[Tensor, Tensor, int]]) -> MaskBatch:
        if not sound:
            empty = torch.empty(0, 1, 1, dtype=torch.uint8)
            return MaskBatch(empty[:, None], empty, torch.empty(0, 2, dtype=torch.int64), torch.empty(0).long())
        pixels, masks, ids = zip(*sound, strict=True)
        shapes = torch.tensor([mask.shape for mask in masks])
        height, width = shapes.amax(0).tolist()
        filled = torch.full((len(masks), height, width), VOID, dtype=torch.uint8)
        for place, mask in zip(filled, masks, strict=True):
            place[: mask.shape[0], : mask.shape[1]] = mask
        return MaskBatch(torch.stack(pixels), filled, shapes, torch.tensor(ids))


class MaskLoader(WorkerLoader):
    """A loader of images with masks; `mask_loader` builds it."""

    def __init__(self, *args: Any, augment: JointAugment, size: tuple[int, int], **options: Any) -> None:
        super().__init__(*args, **options)
        self.augment, self.size = augment, size

    def blank(self) -> MaskBatch:
        """Return a batch of one image without a class."""
        pixels, mask = torch.zeros(1, 3, *self.size, dtype=torch.uint8), torch.full((1, *self.size), VOID)
        return self._finished(MaskBatch(pixels, mask.byte(), torch.tensor([self.size]), torch.zeros(1).long()), 0)

    def _finished(self, batch: MaskBatch, update: int) -> MaskBatch:
        pixels, *rest = (part.to(self.device, non_blocking=True) for part in batch)
        return MaskBatch(normalize(pixels, self.augment.mean, self.augment.std), *rest)


def mask_loader(
    images: MaskedImages,
    *,
    size: tuple[int, int],
    batch: int,
    sampler: ResumableSampler,
    train: bool,
    augment: JointAugment,
    workers: int,
    damage: Damage,
    device: torch.device,
) -> MaskLoader:
    """Return a loader whose worker processes read and augment images with masks.

    images    MaskedImages: the set
    size      (height, width) in pixels
    batch     int: images per batch on this rank
    sampler   ResumableSampler: the order
    train     bool: True augments, and gives complete batches only; False resizes, and gives every image once
    augment   JointAugment: how images are augmented and normalized
    workers   int: processes that read images; 0 reads them in this one
    damage    Damage: what to do about an image or a mask that is bad
    device    torch.device: where the batches go
    """
    check_workers(workers)
    reader = MaskReader(images, joint_transform(augment, size, train=train))
    return MaskLoader(reader, damage, workers, sampler, device, augment=augment, size=size, batch=batch, train=train)
