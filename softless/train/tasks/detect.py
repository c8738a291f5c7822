"""Object detection: boxes with classes and scores, the losses of the head, and the average precision.

    loss   the sum of the head's losses: whether there is an object, of which class, how far its box is off, and with
           masks, which pixels it has
    AP     as COCO defines it (`average_precision`)

Boxes and masks are counted in pixels of the images at their own size.
"""

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from softless.data.boxes import BoxedImages
from softless.data.device_augment import normalize
from softless.data.joint_boxes import NOTHING, BoxBatch, box_loader, scaled_into, unpacked
from softless.data.object_masks import Code, encode
from softless.train.dense_recipe import DetectRecipe
from softless.train.tasks import Evaluation, Tensors
from softless.train.tasks.average_precision import BoxScores, box_scores
from softless.train.tasks.dense import DenseTask
from softless.train.tasks.detect_heads import MOST, Detections, DetectNetwork, Targets, build_detector

if TYPE_CHECKING:
    from PIL.Image import Image


class Detection(DenseTask):
    """A `Task`: learn to find objects. `model` is a DetectNetwork, and `splits` are BoxedImages."""

    metric, graphs = "ap", False
    loads = staticmethod(box_loader)

    @staticmethod
    def build(recipe: DetectRecipe, classes: int) -> DetectNetwork:
        return build_detector(recipe.model, recipe.size, classes)

    @staticmethod
    def loss_of(recipe: DetectRecipe) -> "BoxLoss":
        return BoxLoss(recipe)

    @staticmethod
    def counts(images: BoxedImages, device: torch.device) -> "BoxCounts":
        return BoxCounts(images, device)


class BoxLoss:
    """The sum of the losses of the head, each a mean over the images of a part."""

    def __init__(self, recipe: DetectRecipe):
        self.channels_last = recipe.channels_last

    def parts(self, batch: BoxBatch, count: int) -> list[Tensors]:
        pixels = batch.pixels
        if self.channels_last:
            pixels = pixels.contiguous(memory_format=torch.channels_last)
        columns = (pixels, batch.boxes, batch.labels, batch.masks, batch.shown)
        return list(zip(*(column.chunk(count) for column in columns), strict=True))

    def __call__(self, model: nn.Module, part: Tensors) -> Tensor:
        pixels, boxes, labels, masks, shown = part
        losses, _ = model(pixels, shown, targets_of(boxes, labels, masks))
        return torch.stack([*losses.values()]).sum()


def targets_of(boxes: Tensor, labels: Tensor, masks: Tensor) -> Targets:
    """Return what to find in each image, as torchvision takes it."""
    counts = (labels != NOTHING).sum(1).tolist()
    return [
        {"boxes": own[:count], "labels": names[:count], "masks": unpacked(bits)[:count]}
        for own, names, bits, count in zip(boxes, labels, masks, counts, strict=True)
    ]


class BoxCounts:
    """The `Metrics` of detection: what was found in each image of the set, and the loss.

    Each rank fills in the images that it has seen, and the others are 0, so the sum over ranks has all of them. Masks
    are kept apart (`KeepsApart`), because their codes have different lengths.
    """

    def __init__(self, images: BoxedImages, device: torch.device):
        self.images = images
        self.detections = torch.zeros(len(images), MOST, 6, device=device)  # left, top, right, bottom, score, label
        self.seen = torch.zeros(len(images), 3, dtype=torch.int64, device=device)  # boxes found + 1, height, width
        self.loss = torch.zeros(1, dtype=torch.float64, device=device)
        self.kept: dict[int, list[Code]] = {}  # index of an image -> the masks that were found

    def add(self, model: nn.Module, batch: BoxBatch) -> None:
        losses, per_image = model(batch.pixels, batch.shown, targets_of(batch.boxes, batch.labels, batch.masks))
        self.loss += torch.stack([*losses.values()]).sum().double() * len(batch.ids)
        for detections, index, shown, shape in zip(per_image, batch.ids, batch.shown, batch.shapes, strict=True):
            self.count(int(index), at_own_size(detections, shown, shape), shown, shape)

    def count(self, index: int, detections: Detections, shown: Tensor, shape: Tensor) -> None:
        """Add what was found in an image of height and width `shape`, which was seen as `shown`."""
        number = len(detections.scores)
        columns = detections.corners, detections.scores[:, None], detections.labels[:, None]
        self.detections[index, :number] = torch.cat([column.float() for column in columns], 1)
        self.seen[index] = torch.tensor([number + 1, *shape.tolist()])
        if detections.masks is not None:
            self.kept[index] = in_image(detections, shown, shape)

    def tensors(self) -> list[Tensor]:
        return [self.detections, self.seen, self.loss]

    def scores(self) -> BoxScores:
        seen = self.seen.tolist()
        searched = [index for index, (number, _, _) in enumerate(seen) if number]
        truth = [self.images.boxes(index, (seen[index][2], seen[index][1])) for index in searched]
        table = self.detections.cpu().numpy()
        detections = [table[index, : seen[index][0] - 1] for index in searched]
        masks = [self.kept[index] for index in searched] if self.images.values.masked else None
        return box_scores(truth, detections, len(self.images.classes), self.loss.item() / max(len(searched), 1), masks)

    def evaluation(self) -> Evaluation:
        scores = self.scores()
        numbers = {"ap": scores.ap, "ap50": scores.ap50, "ap75": scores.ap75, "test_loss": scores.loss}
        if scores.masks is not None:
            numbers |= {f"mask_{name}": getattr(scores.masks, name) for name in ("ap", "ap50", "ap75")}
        return Evaluation(scores.loss, {name: number or 0.0 for name, number in numbers.items()}, asdict(scores))


def at_own_size(detections: Detections, shown: Tensor, shape: Tensor) -> Detections:
    """Return what was found in an image that was scaled from `shape` to `shown`, (height, width), at its own size."""
    sides = shape.flip(0).repeat(2)  # width, height, width, height
    corners = detections.corners * (sides / shown.flip(0).repeat(2))
    return detections._replace(corners=corners.clamp(min=0).minimum(sides.to(corners.dtype)))


def in_image(detections: Detections, shown: Tensor, shape: Tensor) -> list[Code]:
    """Return the masks that were found in an image of height and width `shape`, which was seen as `shown`.

    A pixel whose center is in the box belongs to the object if its probability is at least one half. Between the
    centers of the cells, the probability is interpolated: with hat(x) = max(1 - |x|, 0), in cells,

        p(v, u) = sum_ij hat(v - i) mask_ij hat(u - j)
    """
    assert detections.masks is not None
    sides, lost = shape.tolist(), (0.5 * shape / shown).tolist()
    codes = []
    for mask, (left, top, right, bottom) in zip(
        detections.masks.cpu().double().numpy(), detections.corners.tolist(), strict=True
    ):
        rows, down = _hats(top, bottom, sides[0], lost[0], len(mask))
        columns, across = _hats(left, right, sides[1], lost[1], len(mask))
        pixels = np.zeros(sides, bool)
        pixels[rows, columns] = down @ mask @ across.T >= 0.5
        codes.append(encode(pixels))
    return codes


def _hats(start: float, end: float, side: int, lost: float, cells: int) -> tuple[slice, np.ndarray]:
    """Return the pixels of a box along one side of an image, and the weight of each cell in each pixel.

    torchvision cuts the masks to learn half a pixel too far to the top left, and what is lost so is added here.
    """
    low, high = (min(max(math.ceil(edge - 0.5), 0), side) for edge in (start, end))
    places = (np.arange(low, high) + 0.5 - lost - start) / (end - start or 1) * cells - 0.5
    return slice(low, high), np.maximum(1 - np.abs(places.clip(0, cells - 1)[:, None] - np.arange(cells)), 0)


def answered(model: nn.Module, recipe: DetectRecipe, image: "Image", device: torch.device) -> tuple[Any, ...]:
    """Return what is found in a picture, in its own pixels: corners [N, 4], labels [N], scores [N], and masks.

    The masks are N codes (`object_masks.Code`), or none if the head finds boxes alone.
    """
    pixels, size = scaled_into(image, recipe.size)
    shown, shape = (torch.tensor(sides, device=device) for sides in ([size], [image.height, image.width]))
    _, (detections,) = model(normalize(pixels[None].to(device), recipe.augment.mean, recipe.augment.std), shown)
    own = at_own_size(detections, shown[0], shape)
    masks = [] if own.masks is None else in_image(own, shown[0], shape)
    return *(part.cpu().numpy() for part in own[:3]), masks
