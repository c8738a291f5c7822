"""Semantic segmentation: a class for every pixel, its loss, and the mean intersection over union.

    loss    mean over all pixels of -ln p(class), 0 where the mask has no class (void); with an auxiliary head, plus its
            weight times its own loss
    IoU_c   pixels that are of class c and called so / pixels that are of class c or called so
    mIoU    mean of IoU_c over the classes that occur in the masks or in the answers

All counts are over the pixels of the masks at their own size, and pixels of void count nowhere.
"""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from softless.data.device_augment import normalize
from softless.data.joint import MaskBatch, joint_transform, mask_loader
from softless.data.masks import VOID, MaskedImages
from softless.train.dense_recipe import SegmentRecipe
from softless.train.tasks import Evaluation, Tensors
from softless.train.tasks.dense import DenseTask
from softless.train.tasks.segment_heads import SegmentNetwork, build_network, resized

if TYPE_CHECKING:
    from PIL.Image import Image


class Segmentation(DenseTask):
    """A `Task`: learn the class of every pixel. `model` is a SegmentNetwork, and `splits` are MaskedImages."""

    metric, graphs = "miou", True
    loads = staticmethod(mask_loader)

    @staticmethod
    def build(recipe: SegmentRecipe, classes: int) -> SegmentNetwork:
        return build_network(recipe.model, recipe.size, classes)

    @staticmethod
    def loss_of(recipe: SegmentRecipe) -> "PixelLoss":
        return PixelLoss(recipe)

    @staticmethod
    def counts(images: MaskedImages, device: torch.device) -> "PixelCounts":
        return PixelCounts(len(images.classes), device)


class PixelLoss:
    """The mean cross-entropy of all pixels, void ones counting 0, so that parts of equal size weigh the same."""

    def __init__(self, recipe: SegmentRecipe):
        self.channels_last, self.auxiliary = recipe.channels_last, recipe.model.auxiliary

    def parts(self, batch: MaskBatch, count: int) -> list[Tensors]:
        pixels = batch.pixels
        if self.channels_last:
            pixels = pixels.contiguous(memory_format=torch.channels_last)
        return list(zip(pixels.chunk(count), batch.masks.chunk(count), strict=True))

    def __call__(self, model: nn.Module, part: Tensors) -> Tensor:
        pixels, masks = part
        answers = model(pixels)
        losses = [surprises(answer, masks).mean() for answer in answers]
        return losses[0] + sum((self.auxiliary * loss for loss in losses[1:]), torch.zeros_like(losses[0]))


def surprises(logits: Float[Tensor, "b c h w"], masks: UInt8[Tensor, "b h w"]) -> Float[Tensor, "b h w"]:
    """Return -ln p of the class of every pixel, and 0 for void; the logits are float32, or float64 as the model's."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, masks.long(), reduction="none", ignore_index=VOID)


@dataclass(frozen=True)
class PixelScores:
    """The scores of a set. Shares are None where there is no pixel to divide by.

    pixels     with a class in the masks
    loss       mean of -ln p over these pixels
    accuracy   share of these pixels that are called right
    by_class   the IoU of each class, None for a class in no mask and no answer
    recall     share of each class's pixels that are called right
    """

    pixels: int
    loss: float
    miou: float
    accuracy: float
    by_class: tuple[float | None, ...]
    recall: tuple[float | None, ...]


class PixelCounts:
    """The `Metrics` of segmentation: a confusion matrix. Row: the class in the mask; column: the answer."""

    def __init__(self, classes: int, device: torch.device):
        self.confusion = torch.zeros(classes, classes, dtype=torch.int64, device=device)
        self.loss = torch.zeros(1, dtype=torch.float64, device=device)

    def add(self, model: nn.Module, batch: MaskBatch) -> None:
        for logits, mask, (height, width) in zip(
            model(batch.pixels)[0], batch.masks, batch.shapes.tolist(), strict=True
        ):
            self.count(resized(logits[None].float(), (height, width)), mask[None, :height, :width])

    def count(self, logits: Float[Tensor, "b c h w"], masks: UInt8[Tensor, "b h w"]) -> None:
        """Add the answers to these masks; of classes with equal logits, the first is the answer."""
        classes, known = len(self.confusion), masks != VOID
        pairs = masks[known].long() * classes + logits.argmax(1)[known]
        self.confusion += torch.bincount(pairs, minlength=classes**2).view(classes, classes)
        self.loss += surprises(logits, masks).double().sum()

    def tensors(self) -> list[Tensor]:
        return [self.confusion, self.loss]

    def scores(self) -> PixelScores:
        pixels = int(self.confusion.sum())
        right = self.confusion.diagonal()
        known, called = self.confusion.sum(1), self.confusion.sum(0)
        by_class = _shares(right, known + called - right)
        shares = [share for share in by_class if share is not None]
        return PixelScores(
            pixels=pixels,
            loss=self.loss.item() / max(pixels, 1),
            miou=sum(shares) / max(len(shares), 1),
            accuracy=int(right.sum()) / max(pixels, 1),
            by_class=by_class,
            recall=_shares(right, known),
        )

    def evaluation(self) -> Evaluation:
        scores = self.scores()
        numbers = {"miou": scores.miou, "pixel_accuracy": scores.accuracy, "test_loss": scores.loss}
        return Evaluation(scores.loss, numbers, asdict(scores))


def _shares(parts: Int[Tensor, " c"], wholes: Int[Tensor, " c"]) -> tuple[float | None, ...]:
    return tuple(part / whole if whole else None for part, whole in zip(parts.tolist(), wholes.tolist(), strict=True))


def answered(model: nn.Module, recipe: SegmentRecipe, image: "Image", device: torch.device) -> np.ndarray:
    """Return the class of every pixel of a picture, uint8 [height, width] at its own size."""
    pixels, _ = joint_transform(recipe.augment, recipe.size, train=False)(image, np.zeros((1, 1), np.uint8))
    logits = model(normalize(pixels[None].to(device), recipe.augment.mean, recipe.augment.std))[0]
    answer = resized(logits.float(), image.size[::-1]).argmax(1)[0]
    return answer.to(torch.uint8).cpu().numpy()
