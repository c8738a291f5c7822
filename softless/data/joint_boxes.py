"""Augment an image and its boxes together, with the same random numbers, and load batches of both.

to train   change colors, scale by a random factor, crop, flip; what the crop adds is black; of each box, the part
           in the crop is kept
to test    scale the image until it just fits into the size of the recipe, and fill up with black on the right or at
           the bottom

Masks of objects, if the images have them, move with their boxes. One mask at a time is decoded at the size of its
image. In a batch, each takes a bit per pixel.
"""

from collections.abc import Callable, Sequence
from itertools import chain, compress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from softless.data.boxes import BoxedImages, Boxes, to_learn
from softless.data.device_augment import normalize
from softless.data.joint import JointAugment, fitted, moved_together
from softless.data.loading import WorkerLoader, check_workers
from softless.data.object_masks import decode
from softless.data.reading import Damage, Draw, SafeReader, augmented_by
from softless.data.sampler import ResumableSampler

if TYPE_CHECKING:
    from PIL.Image import Image

NOTHING = -1  # the label of a place in a batch that has no box
LEAST = 1.0  # pixels: a box of which the crop leaves less, in width or height, is left out


class BoxBatch(NamedTuple):
    """Some images of a set, with as many places for boxes as the image with the most boxes needs.

    pixels   [B, 3, H, W]: uint8 as they were read, float32 once a loader has normalized them
    boxes    float32 [B, M, 4]: left, top, right, bottom, in these pixels
    labels   int64 [B, M]: classes, and `NOTHING` where there is no box to learn
    masks    uint8 [B, P, H, W]: the masks of the boxes in these pixels, eight in each byte (`unpacked`); P is 0 if the
             images have no masks
    shown    int64 [B, 2]: height and width of the part of the pixels, from the top left, that shows the image
    shapes   int64 [B, 2]: height and width of the image before it was scaled
    ids      int64 [B]: the index of each image in its set
    """

    pixels: Tensor
    boxes: Tensor
    labels: Tensor
    masks: Tensor
    shown: Tensor
    shapes: Tensor
    ids: Tensor


Moved = tuple[Tensor, Tensor, Tensor, Tensor, list[int]]  # as in a `BoxBatch`: pixels, boxes, labels, masks, shown
BoxChange = Callable[["Image", Boxes], Moved]


def box_transform(augment: JointAugment, size: tuple[int, int], *, train: bool) -> BoxChange:
    """Return a function from a picture and its boxes to what a batch has of both. Crowds are left out."""
    move = moved_together(augment, size)
    from torchvision.transforms import v2
    from torchvision.tv_tensors import BoundingBoxes, Mask

    def change(image: "Image", boxes: Boxes) -> Moved:
        corners, labels, codes = to_learn(boxes)
        unmoved = BoundingBoxes(corners, format="XYXY", canvas_size=image.size[::-1])
        pixels, moved, *masks = move(image, chain([unmoved], map(Mask, map(decode, codes))))
        kept = (moved[:, 2:] - moved[:, :2] >= LEAST).all(1)
        if masks:
            kept &= torch.tensor([bool(mask.any()) for mask in masks])
        return pixels, moved[kept], labels[kept], packed([*compress(masks, kept)], size), [*size]

    def fit(image: "Image", boxes: Boxes) -> Moved:
        corners, labels, codes = to_learn(boxes)
        pixels, shown = scaled_into(image, size)
        ratios = torch.tensor([shown[1] / image.width, shown[0] / image.height]).repeat(2)
        masks = [placed(v2.functional.resize(Mask(decode(code)), shown), size) for code in codes]
        return pixels, corners * ratios, labels, packed(masks, size), shown

    return change if train else fit


def scaled_into(image: "Image", size: tuple[int, int]) -> tuple[Tensor, list[int]]:
    """Return a picture scaled until it just fits, uint8 [3, H, W], and its height and width in these pixels."""
    from torchvision.transforms import v2

    shown = fitted(image.size[::-1], size)
    return placed(v2.functional.resize(v2.ToImage()(image), shown, antialias=True), size), shown


def placed(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Return zeros of this size with these pixels at the top left."""
    whole = torch.zeros(*pixels.shape[:-2], *size, dtype=pixels.dtype)
    whole[..., : pixels.shape[-2], : pixels.shape[-1]] = pixels
    return whole


def packed(masks: Sequence[Tensor], size: tuple[int, int]) -> Tensor:
    """Return masks of this size, each uint8 [H, W], with eight in each byte: uint8 [P, H, W]."""
    stack = np.stack(masks) if masks else np.zeros((0, *size), np.uint8)
    return torch.from_numpy(np.packbits(stack, axis=0))


def unpacked(masks: Tensor) -> Tensor:
    """Return packed masks as bool [8 P, H, W]; after the last mask, there is nothing."""
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=masks.device)
    return (masks[:, None] >> shifts[:, None, None] & 1).flatten(0, 1).bool()


class BoxReader(SafeReader):
    """A dataset of (pixels, boxes, labels, masks, what is shown, shape, index)."""

    def __init__(self, images: BoxedImages, change: BoxChange) -> None:
        super().__init__(images)
        self.images, self.change = images, change

    def read(self, draw: Draw) -> tuple[Any, ...]:
        image, boxes, _ = self.images[draw.image]
        with augmented_by(draw):
            return *self.change(image, boxes), (image.height, image.width), draw.image

    def stacked(self, sound: Sequence[Any]) -> BoxBatch:
        if not sound:
            none = torch.empty(0, 0, dtype=torch.int64)
            pixels, boxes = torch.empty(0, 3, 1, 1, dtype=torch.uint8), torch.empty(0, 0, 4)
            return BoxBatch(pixels, boxes, none, pixels[:, :0], none.reshape(0, 2), none.reshape(0, 2), none.flatten())
        images, corners, numbers, bits, shown, shapes, ids = map(list, zip(*sound, strict=True))
        boxes, masks = (pad_sequence(parts, batch_first=True) for parts in (corners, bits))
        labels = pad_sequence(numbers, batch_first=True, padding_value=NOTHING)
        return BoxBatch(torch.stack(images), boxes, labels, masks, *map(torch.tensor, (shown, shapes, ids)))


class BoxLoader(WorkerLoader):
    """A loader of images with boxes; `box_loader` builds it."""

    def __init__(self, *args: Any, augment: JointAugment, size: tuple[int, int], **options: Any) -> None:
        super().__init__(*args, **options)
        self.augment, self.size = augment, size

    def blank(self) -> BoxBatch:
        """Return a batch of one image without a box."""
        pixels, size = torch.zeros(1, 3, *self.size, dtype=torch.uint8), torch.tensor([self.size])
        none = torch.zeros(1, 0, dtype=torch.int64)
        batch = BoxBatch(pixels, torch.zeros(1, 0, 4), none, pixels[:, :0], size, size, torch.zeros(1).long())
        return self._finished(batch, 0)

    def _finished(self, batch: BoxBatch, update: int) -> BoxBatch:
        pixels, *rest = (part.to(self.device, non_blocking=True) for part in batch)
        return BoxBatch(normalize(pixels, self.augment.mean, self.augment.std), *rest)


def box_loader(
    images: BoxedImages,
    *,
    size: tuple[int, int],
    batch: int,
    sampler: ResumableSampler,
    train: bool,
    augment: JointAugment,
    workers: int,
    damage: Damage,
    device: torch.device,
) -> BoxLoader:
    """Return a loader whose worker processes read and augment images with boxes; arguments as of `mask_loader`."""
    check_workers(workers)
    reader = BoxReader(images, box_transform(augment, size, train=train))
    return BoxLoader(reader, damage, workers, sampler, device, augment=augment, size=size, batch=batch, train=train)
