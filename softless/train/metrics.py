"""Metrics of a classifier: top-1, top-5, accuracy per class, and how far its confidence is from its accuracy.

    ECE = sum_b (n_b / n) |accuracy_b - confidence_b|        15 equal bins of the largest probability (Guo et al. 2017)

Counts are sums that stay on the device until the end, and the sums of several ranks add up. The answer to each image,
right or wrong, is kept too, so that two models can be compared image by image.
"""

import base64
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from softless.data.reading import Batch
from softless.train.tasks import Evaluation

BINS = 15


@dataclass(frozen=True)
class Scores:
    """The scores of a set of images. `by_class` has the accuracy of each class, None for a class without images."""

    images: int
    loss: float
    top1: float
    top5: float
    ece: float
    by_class: tuple[float | None, ...]


@dataclass(frozen=True)
class Answers:
    """The images that a model classified correctly, in the order of the set, without images that cannot be decoded.

    right   one bit per image, eight to a byte, the first image in the highest bit, as base64
    """

    images: int
    right: str

    @classmethod
    def of(cls, right: np.ndarray) -> "Answers":
        """Pack one bool per image."""
        return cls(len(right), base64.b64encode(np.packbits(right).tobytes()).decode())

    def bits(self) -> np.ndarray:
        """Unpack one bool per image."""
        packed = np.frombuffer(base64.b64decode(self.right, validate=True), np.uint8)
        return np.unpackbits(packed, count=self.images).astype(bool)


class ClassCounts:
    """The `Metrics` of a classifier: sums over batches, and the answers to the `images` of a set."""

    def __init__(self, classes: int, images: int, device: torch.device):
        self.loss = torch.zeros(3, dtype=torch.float64, device=device)  # loss, in the top 1, in the top 5
        self.classes = torch.zeros(2, classes, dtype=torch.float64, device=device)  # images, right
        self.bins = torch.zeros(2, BINS, dtype=torch.float64, device=device)  # right, confidence
        self.images = torch.zeros(2, images, dtype=torch.int32, device=device)  # seen, right

    def add(self, model: nn.Module, batch: Batch) -> None:
        self.count(model(batch.pixels), batch.labels, batch.ids)

    def count(self, logits: Float[Tensor, "b c"], labels: Int[Tensor, " b"], ids: Int[Tensor, " b"]) -> None:
        """Add the answers to these images of the set."""
        logits = logits.float()
        best = logits.topk(min(5, logits.shape[1]), 1).indices == labels[:, None]  # [B, 5]
        right, confidence = best[:, 0].double(), logits.softmax(1).amax(1).double()
        total = F.cross_entropy(logits, labels, reduction="sum").double()
        self.loss += torch.stack([total, right.sum(), best.any(1).double().sum()])
        place = (confidence * BINS).long().clamp(0, BINS - 1)
        self.classes.index_add_(1, labels, torch.stack([torch.ones_like(right), right]))
        self.bins.index_add_(1, place, torch.stack([right, confidence]))
        self.images[0].index_fill_(0, ids, 1)
        self.images[1].index_copy_(0, ids, best[:, 0].int())

    def tensors(self) -> list[Tensor]:
        return [self.loss, self.classes, self.bins, self.images]

    def answers(self) -> Answers:
        """Return the answers to the images that were seen."""
        seen, right = self.images.cpu().numpy().astype(bool)
        return Answers.of(right[seen])

    def scores(self) -> Scores:
        count, right = self.classes.tolist()
        images = int(sum(count))
        loss, top1, top5 = (self.loss / max(images, 1)).tolist()
        right_sums, confidence_sums = self.bins.cpu()
        gap = (right_sums - confidence_sums).abs().sum().item() / max(images, 1)
        by_class = tuple(r / n if n else None for n, r in zip(count, right, strict=True))
        return Scores(images, loss, top1, top5, gap, by_class)

    def evaluation(self) -> Evaluation:
        scores = self.scores()
        numbers = {"top1": scores.top1, "top5": scores.top5, "ece": scores.ece, "test_loss": scores.loss}
        return Evaluation(scores.loss, numbers, asdict(scores), asdict(self.answers()))
